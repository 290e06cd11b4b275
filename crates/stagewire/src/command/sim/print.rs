//! Reports for people.

use stagewire_sim::{Report, Trial};

use crate::exit::Fault;
use crate::output::{Output, bytes};

pub(super) fn reports(reports: &[Report], output: &Output) -> Result<(), Fault> {
    for report in reports {
        output.data(format_args!(
            "{}: {} of {} jobs on {} GPUs in {:.0} s: {:.4} jobs/s",
            report.layout, report.succeeded, report.jobs, report.gpus, report.span_s, report.throughput_per_s
        ))?;
        let rows: Vec<_> = report.classes.iter().map(class_row).collect();
        output.table(
            [
                "CLASS",
                "JOBS",
                "P50 s",
                "P99 s",
                "FIRST P50 s",
                "FIRST P99 s",
                "SLO s",
                "MET",
            ],
            &rows,
        )?;
        let rows: Vec<_> = report.stages.iter().map(stage_row).collect();
        output.table(["STAGE", "WORKERS", "DONE", "USED"], &rows)?;
        output.data(format_args!(
            "held at most {}, moved {}, {} puts waited for room, {} workers lost, {}{} events, hash {}\n",
            bytes(report.peak_resident_bytes),
            bytes(report.moved_bytes),
            report.puts_that_waited,
            report.deaths,
            yields(report),
            report.events,
            report.event_hash
        ))?;
    }
    if let [disaggregated, colocated] = reports {
        compare(disaggregated, colocated, output)?;
    }
    Ok(())
}

/// Said where any attempt has yielded.
fn yields(report: &Report) -> String {
    match report.yields {
        0 => String::new(),
        yields => format!("{yields} attempts yielded and {} steps saved, ", report.steps_saved),
    }
}

fn compare(disaggregated: &Report, colocated: &Report, output: &Output) -> Result<(), Fault> {
    let ratio = disaggregated.throughput_per_s / colocated.throughput_per_s;
    let first = disaggregated.first_s.p99 / colocated.first_s.p99;
    output.data(format_args!(
        "disaggregated to colocated on {} GPUs: {ratio:.2} x jobs/s, {first:.2} x the P99 until the first piece.\n\
         At equal speeds of the stages, stages apart cannot do more jobs than all together (0.89 to 1.0 x where denoising is \
         most of the work): what is gained comes from what the file says of [colocated], from cheaper GPUs for a stage, from \
         batches and cache hits, or from waiting less.",
        disaggregated.gpus
    ))
}

pub(super) fn trials(stage: &str, trials: &[Trial], output: &Output) -> Result<(), Fault> {
    let mut trials: Vec<_> = trials.iter().collect();
    trials.sort_by_key(|trial| trial.workers);
    let rows: Vec<_> = trials.into_iter().map(|trial| trial_row(stage, trial)).collect();
    output.table(["WORKERS", "MET", "ENOUGH", "P99 s", "FIRST P99 s", "USED"], &rows)
}

fn trial_row(stage: &str, trial: &Trial) -> [String; 6] {
    let report = &trial.report;
    let used = report.stages.iter().find(|found| found.stage == stage);
    [
        trial.workers.to_string(),
        percent(trial.attainment),
        if trial.enough { "yes" } else { "no" }.to_owned(),
        seconds(report.latency_s.p99),
        seconds(report.first_s.p99),
        used.map_or_else(String::new, |stage| percent(stage.utilisation)),
    ]
}

fn class_row(class: &stagewire_sim::ClassReport) -> [String; 8] {
    [
        class.class.clone(),
        class.jobs.to_string(),
        seconds(class.latency_s.p50),
        seconds(class.latency_s.p99),
        seconds(class.first_s.p50),
        seconds(class.first_s.p99),
        class.slo_s.map_or_else(|| "-".to_owned(), seconds),
        class.attainment.map_or_else(|| "-".to_owned(), percent),
    ]
}

fn stage_row(stage: &stagewire_sim::StageReport) -> [String; 4] {
    [
        stage.stage.clone(),
        stage.workers.to_string(),
        stage.attempts.to_string(),
        percent(stage.utilisation),
    ]
}

fn seconds(seconds: f64) -> String {
    format!("{seconds:.2}")
}

fn percent(part: f64) -> String {
    format!("{:.1} %", part * 100.0)
}
