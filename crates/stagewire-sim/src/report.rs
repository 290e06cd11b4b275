//! What a simulation says, in numbers.

mod csv;
mod plot;

use std::time::Duration;

use serde::Serialize;

use crate::experiment::{Experiment, Layout, SimError};
use crate::record::{JobRecord, Run};

/// One simulation and what it says. Times are in seconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// `disaggregated` or `colocated`.
    pub layout: &'static str,
    /// Workers, one GPU each.
    pub gpus: u32,
    /// Jobs that came.
    pub jobs: usize,
    /// Those that ended with a result.
    pub succeeded: usize,
    /// From the start to the last end.
    pub span_s: f64,
    /// Results per second, from the first submission to the last end.
    pub throughput_per_s: f64,
    /// From submission to result.
    pub latency_s: Percentiles,
    /// From submission to the first piece of the result.
    pub first_s: Percentiles,
    /// By class, those that had jobs.
    pub classes: Vec<ClassReport>,
    /// By stage.
    pub stages: Vec<StageReport>,
    /// Most bytes of payloads that were held at once.
    pub peak_resident_bytes: u64,
    /// Bytes that went over the network.
    pub moved_bytes: u64,
    /// Outputs that had to wait for room in the store.
    pub puts_that_waited: u64,
    /// Workers that were lost.
    pub deaths: u64,
    /// Attempts that have yielded, to a job of another class or as their machine was taken away.
    pub yields: u64,
    /// Steps that were not done again, as an attempt went on from a checkpoint.
    pub steps_saved: u64,
    /// Events of the scheduler.
    pub events: u64,
    /// All of them and their times in one number, in hexadecimal.
    pub event_hash: String,
    #[serde(skip)]
    run: Run,
    #[serde(skip)]
    names: Vec<String>,
    #[serde(skip)]
    class_names: Vec<String>,
}

/// Seconds that a part of all takes at most; 0 where there is nothing.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Percentiles {
    /// Half.
    pub p50: f64,
    /// 99 of 100.
    pub p99: f64,
}

/// One class of jobs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ClassReport {
    /// Its name.
    pub class: String,
    /// Jobs that came.
    pub jobs: usize,
    /// From submission to result.
    pub latency_s: Percentiles,
    /// From submission to the first piece of the result.
    pub first_s: Percentiles,
    /// The bound for that, where there is one.
    pub slo_s: Option<f64>,
    /// Part of its jobs that had a result within the bound.
    pub attainment: Option<f64>,
}

/// One stage and its workers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StageReport {
    /// Its name.
    pub stage: String,
    /// Its workers.
    pub workers: u32,
    /// Attempts that were completed.
    pub attempts: u64,
    /// Part of the time that its workers had an attempt.
    pub utilisation: f64,
}

/// Simulates an experiment.
///
/// # Errors
/// [`SimError::Stuck`]; [`SimError::Value`] for [`Layout::Colocated`] without a word on what that costs.
pub fn simulate(experiment: &Experiment, layout: Layout) -> Result<Report, SimError> {
    let laid_out = experiment.laid_out(layout).ok_or_else(|| SimError::Value {
        key: "colocated".to_owned(),
        value: "missing".to_owned(),
        must: "there for colocated serving; an empty table says that it costs nothing".to_owned(),
    })?;
    let run = crate::cluster::run(&laid_out)?;
    Ok(Report::new(&laid_out, layout, run))
}

impl Report {
    fn new(experiment: &Experiment, layout: Layout, run: Run) -> Self {
        let classes = experiment.classes.iter().enumerate();
        let classes = classes.filter_map(|(position, class)| {
            let jobs: Vec<_> = run.jobs.iter().filter(|job| job.class == position).collect();
            let within = |slo: Duration| {
                jobs.iter()
                    .filter(|job| job.latency().is_some_and(|took| took <= slo))
                    .count()
            };
            (!jobs.is_empty()).then(|| ClassReport {
                class: class.spec.name.to_string(),
                jobs: jobs.len(),
                latency_s: percentiles(jobs.iter().filter_map(|job| job.latency())),
                first_s: percentiles(jobs.iter().filter_map(|job| job.to_first())),
                slo_s: class.slo.map(|slo| slo.as_secs_f64()),
                attainment: class.slo.map(|slo| within(slo) as f64 / jobs.len() as f64),
            })
        });
        let classes = classes.collect();
        let stages = experiment.stages.iter().zip(run.busy.iter().zip(&run.attempts));
        let stages = stages.map(|(stage, (busy, attempts))| StageReport {
            stage: stage.spec.name.to_string(),
            workers: stage.workers,
            attempts: *attempts,
            utilisation: busy.as_secs_f64()
                / (run.span.as_secs_f64() * f64::from(stage.workers)).max(f64::MIN_POSITIVE),
        });
        let stages = stages.collect();
        let succeeded = run.jobs.iter().filter(|job| job.succeeded).count();
        let begin = run.jobs.first().map_or(0.0, |job| job.submitted.0 as f64 / 1e9);
        let span_s = run.span.as_secs_f64();
        Self {
            layout: match layout {
                Layout::Disaggregated => "disaggregated",
                Layout::Colocated => "colocated",
            },
            gpus: experiment.gpus(),
            jobs: run.jobs.len(),
            succeeded,
            span_s,
            throughput_per_s: succeeded as f64 / (span_s - begin).max(f64::MIN_POSITIVE),
            latency_s: percentiles(run.jobs.iter().filter_map(JobRecord::latency)),
            first_s: percentiles(run.jobs.iter().filter_map(JobRecord::to_first)),
            classes,
            stages,
            peak_resident_bytes: run.peak_resident,
            moved_bytes: run.moved,
            puts_that_waited: run.puts_that_waited,
            deaths: run.deaths,
            yields: run.yields,
            steps_saved: run.steps_saved,
            events: run.events,
            event_hash: format!("{:016x}", run.hash),
            names: experiment
                .stages
                .iter()
                .map(|stage| stage.spec.name.to_string())
                .collect(),
            class_names: experiment
                .classes
                .iter()
                .map(|class| class.spec.name.to_string())
                .collect(),
            run,
        }
    }

    /// The smallest part of the jobs of a class that met its bound; `None` where no class has one.
    pub fn worst_attainment(&self) -> Option<f64> {
        let attainments = self.classes.iter().filter_map(|class| class.attainment);
        attainments.reduce(f64::min)
    }

    /// What became of each job, in the order in which they came.
    pub fn job_records(&self) -> &[JobRecord] {
        &self.run.jobs
    }

    /// One line for each job, as CSV with a header.
    pub fn jobs_csv(&self) -> String {
        csv::jobs(&self.run.jobs, &self.class_names)
    }

    /// Levels over time, as CSV with a header.
    pub fn samples_csv(&self) -> String {
        csv::samples(&self.run.samples, &self.names)
    }

    /// Which part of the jobs took how long, as an SVG picture.
    pub fn latency_svg(&self) -> String {
        plot::latencies(&self.run.jobs)
    }

    /// Jobs that wait, by stage and over time, as an SVG picture.
    pub fn queues_svg(&self) -> String {
        plot::queues(&self.run.samples, &self.names)
    }
}

/// Nearest rank.
fn percentiles(times: impl Iterator<Item = Duration>) -> Percentiles {
    let mut times: Vec<Duration> = times.collect();
    times.sort_unstable();
    let at = |percent: usize| {
        let rank = (times.len() * percent).div_ceil(100).max(1);
        times.get(rank - 1).map_or(0.0, Duration::as_secs_f64)
    };
    Percentiles {
        p50: at(50),
        p99: at(99),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_nearest_rank() {
        let of = |most: u64| percentiles((1..=most).rev().map(Duration::from_secs));
        assert_eq!(of(100), Percentiles { p50: 50.0, p99: 99.0 });
        assert_eq!(of(1), Percentiles { p50: 1.0, p99: 1.0 });
        assert_eq!(of(0), Percentiles::default());
    }
}
