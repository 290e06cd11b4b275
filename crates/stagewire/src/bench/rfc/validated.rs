//! The simulator against what was measured: the same jobs, at the times at which they came, with the service times that
//! the server noted for them.

use std::fmt::Write;
use std::time::Duration;

use anyhow::Context;
use stagewire_core::Timestamp;
use stagewire_sim::{Experiment, Layout, simulate};

use super::Bench;
use super::measured::Point;
use super::served::{Attempt, Served};
use crate::bench::report::{Goal, Target};
use crate::bench::stats::{Pairs, quantile_of};

pub(super) const NAMES: [&str; 3] = [
    "1 denoiser and 1 decoder, median to the result: measured",
    "1 denoiser and 1 decoder, P99 to the result: measured",
    "1 denoiser and 1 decoder, within twice their time: measured",
];

const NEAR: Target = Target {
    text: "0.8 to 1.25",
    goal: Goal::RatioBetween(0.8, 1.25),
};

/// What the simulator is told.
struct Model {
    /// Mean of each stage.
    denoise: f64,
    decode: f64,
    /// Coefficient of variation of both.
    spread: f64,
    /// One way, of a message.
    latency: Duration,
}

pub(super) fn run(bench: &mut Bench<'_>, point: Option<Point>) -> anyhow::Result<()> {
    let Some(rounds) = point.filter(|_| NAMES.iter().any(|name| bench.is_named(name))) else {
        return Ok(());
    };
    let jobs: Vec<&Served> = rounds.iter().flatten().collect();
    let model = Model::of(&jobs).context("the server did not note when the stages ran")?;
    let simulated = rounds.iter().map(|round| model.simulate(round));
    let simulated = simulated.collect::<anyhow::Result<Vec<_>>>()?;
    let measured: Vec<Vec<Duration>> = rounds
        .iter()
        .map(|round| round.iter().map(Served::to_result).collect())
        .collect();
    let [all, all_simulated] = [measured.concat(), simulated.concat()];
    for (name, quantile) in NAMES.into_iter().zip([0.5, 0.99]) {
        let mut pairs = Pairs::default();
        for (measured, simulated) in measured.iter().zip(&simulated) {
            pairs.push(quantile_of(measured, quantile), quantile_of(simulated, quantile));
        }
        let all = [&all, &all_simulated].map(|times| quantile_of(times, quantile));
        bench.pool(name, "validation", "simulated", Some(NEAR), all, &pairs);
    }
    if bench.is_named(NAMES[2]) {
        let bound = Duration::from_secs_f64(2.0 * (model.denoise + model.decode));
        let within = |times: &[Duration]| {
            let met = times.iter().filter(|time| **time <= bound).count();
            100.0 * share(met, times.len())
        };
        let figure = (within(&all), "simulated", within(&all_simulated));
        bench
            .report
            .figure(NAMES[2].to_owned(), "validation", "% of jobs", figure);
    }
    Ok(())
}

impl Model {
    fn of(jobs: &[&Served]) -> Option<Self> {
        let attempts =
            |stage: &str| -> Option<Vec<Attempt>> { jobs.iter().map(|job| job.attempts.get(stage).copied()).collect() };
        let (denoise, decode) = (attempts("denoise")?, attempts("decode")?);
        // There and back, with what the server writes down in between.
        let answers = denoise.iter().chain(&decode);
        let answers: Vec<Duration> = answers.map(|attempt| attempt.running.since(attempt.offered)).collect();
        let latency = quantile_of(&answers, 0.5) / 2;
        let [denoise, decode] = [denoise, decode].map(|attempts| {
            let times = attempts.iter().map(|attempt| attempt.done.since(attempt.running));
            // The simulator adds the way of the grant.
            let times: Vec<f64> = times.map(|time| time.saturating_sub(latency).as_secs_f64()).collect();
            moments(&times)
        });
        let spread = ((denoise.1.powi(2) + decode.1.powi(2)) / 2.0).sqrt();
        Some(Self {
            denoise: denoise.0,
            decode: decode.0,
            spread,
            latency,
        })
    }

    /// How long each of these jobs takes in the simulator.
    fn simulate(&self, jobs: &[Served]) -> anyhow::Result<Vec<Duration>> {
        let begin = jobs.iter().map(|job| job.submitted).min().unwrap_or(Timestamp(0));
        let mut times: Vec<Duration> = jobs.iter().map(|job| job.submitted.since(begin)).collect();
        times.sort_unstable();
        let mut trace = "at_s,class,scale\n".to_owned();
        for time in times {
            // Writing to a string does not fail.
            let _ = writeln!(trace, "{:.9},standard,1", time.as_secs_f64());
        }
        let Self {
            denoise,
            decode,
            spread,
            latency,
        } = self;
        let text = format!(
            "spread = {spread:.6}\narrivals = {{ trace = 'jobs.csv' }}\nnetwork = {{ latency-us = {} }}\n\
             stage = [{{ name = 'denoise', workers = 1, time-s = {denoise:.9} }}, \
             {{ name = 'decode', workers = 1, time-s = {decode:.9} }}]",
            latency.as_micros()
        );
        let experiment = Experiment::parse(&text, |_| Ok(trace.clone()))?;
        let report = simulate(&experiment, Layout::Disaggregated)?;
        let jobs = report.job_records().iter();
        jobs.map(|job| job.latency().context("a simulated job has failed"))
            .collect()
    }
}

/// Mean, and coefficient of variation.
fn moments(times: &[f64]) -> (f64, f64) {
    let each = share(1, times.len());
    let mean = times.iter().sum::<f64>() * each;
    let variance = times.iter().map(|time| (time - mean).powi(2)).sum::<f64>() * each;
    (mean, variance.sqrt() / mean)
}

#[expect(clippy::cast_precision_loss, reason = "far fewer jobs than 2^52")]
fn share(part: usize, of: usize) -> f64 {
    part as f64 / of as f64
}
