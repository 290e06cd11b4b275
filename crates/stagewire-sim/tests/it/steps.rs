//! Attempts that stop at a step boundary, and go on from there.

use std::time::Duration;

use stagewire_core::Classify;
use stagewire_sim::{Arrival, Arrivals, Experiment};

use crate::simulate::{parse, run};

/// One denoiser. A batch job takes 100 s, an interactive one 10 s.
const ONE: &str = "arrivals = { jobs = 2, rate-per-s = 1.0 }\n\
    class = [{ name = 'interactive', weight = 8, scale = 0.1, preempts = ['batch'] }, { name = 'batch' }]\n";

fn one_denoiser(steps: &str) -> Experiment {
    let stage = format!("stage = [{{ name = 'denoise', workers = 1, time-s = 100.0, {steps} }}]\n");
    let arrival = |at, class, scale| Arrival {
        at: Duration::from_millis(at),
        class,
        scale,
    };
    Experiment {
        arrivals: Arrivals::Trace(vec![arrival(0, 1, 1.0), arrival(10_500, 0, 1.0)]),
        ..parse(&(ONE.to_owned() + &stage))
    }
}

/// Latency of the interactive job and of the batch job.
fn latencies(experiment: &Experiment) -> [f64; 2] {
    let report = run(experiment);
    assert_eq!(report.succeeded, 2);
    let [interactive, batch] = &report.classes[..] else {
        panic!("two classes")
    };
    [interactive.latency_s.p99, batch.latency_s.p99]
}

fn assert_near(found: f64, expected: f64) {
    assert!((found - expected).abs() < 0.1, "{found} s, not {expected} s");
}

#[test]
fn who_is_preempted_stops_at_its_next_step_and_no_step_is_done_twice() {
    // Steps of a second: the eleventh is the last before the other job. 125 MB take 0.1 s over the link, there and back.
    let steps = one_denoiser("checkpoint-steps = 100, checkpoint-bytes = 125_000_000");
    let report = run(&steps);
    assert_eq!((report.yields, report.steps_saved), (1, 11));
    let [interactive, batch] = latencies(&steps);
    assert_near(interactive, 0.5 + 0.1 + 10.0);
    assert_near(batch, 100.0 + 0.1 + 10.0 + 0.1);
    let [interactive, batch] = latencies(&one_denoiser(""));
    assert_near(interactive, 89.5 + 10.0);
    assert_near(batch, 100.0);
}

#[test]
fn a_group_yields_as_one() {
    let steps = "checkpoint-steps = 100, checkpoint-bytes = 125_000_000, world = 4";
    let [interactive, batch] = latencies(&one_denoiser(steps));
    assert_near(interactive, 0.5 + 0.1 + 10.0);
    assert_near(batch, 100.0 + 0.1 + 10.0 + 0.1);
}

/// Denoisers on machines that are taken away every five minutes on average.
fn spot(steps: &str) -> Experiment {
    parse(&format!(
        "arrivals = {{ jobs = 60, rate-per-s = 0.02 }}\n\
         stage = [{{ name = 'denoise', workers = 4, time-s = 100.0, output-bytes = 10_000_000, mode = 'store', {steps} }},\n\
         {{ name = 'decode', workers = 1, time-s = 1.0 }}]\n\
         spot = {{ stage = 'denoise', mean-s = 300.0, notice-s = 5.0, away-s = 30.0 }}"
    ))
}

#[test]
fn what_ran_on_a_machine_that_is_taken_away_goes_on_elsewhere() {
    let (with, without) = (run(&spot("checkpoint-steps = 100")), run(&spot("")));
    assert_eq!((with.succeeded, without.succeeded), (60, 60));
    assert!(with.yields > 10 && with.steps_saved > 10 * with.yields, "{with:?}");
    assert_eq!((without.yields, without.steps_saved), (0, 0));
    // Nothing but what a step boundary costs is done again.
    let work = |report: &stagewire_sim::Report| report.stages[0].utilisation * report.span_s * 4.0;
    let [with_work, without_work] = [work(&with), work(&without)];
    assert!(
        (6_000.0..6_200.0).contains(&with_work),
        "{with_work} s for 60 jobs of 100 s"
    );
    assert!(without_work > 6_500.0, "{without_work} s");
    assert_eq!(with.event_hash, run(&spot("checkpoint-steps = 100")).event_hash);
}

#[test]
fn who_finds_no_room_for_a_checkpoint_goes_on() {
    let experiment = |checkpoint: u64| {
        let stages = format!(
            "store-capacity = 10_000_000\n{ONE}\
             stage = [{{ name = 'encode', workers = 1, time-s = 0.001, output-bytes = 3_000_000, mode = 'store' }},\n\
             {{ name = 'denoise', workers = 1, time-s = 100.0, checkpoint-steps = 100, checkpoint-bytes = {checkpoint} }}]"
        );
        Experiment {
            arrivals: one_denoiser("").arrivals,
            ..parse(&stages)
        }
    };
    // The embeddings of both jobs are there.
    let reports = [4_000_000, 4_000_001].map(|checkpoint| run(&experiment(checkpoint)));
    assert_eq!(
        reports.each_ref().map(|report| (report.succeeded, report.yields)),
        [(2, 1), (2, 0)]
    );
    assert_eq!(reports[0].peak_resident_bytes, 10_000_000);
}

#[test]
fn what_is_wrong_with_checkpoints_is_said() {
    for (stage, complaint) in [
        (
            "name = 'denoise', checkpoint-steps = 1, output-bytes = 1",
            "checkpoint-steps of stage denoise is 1",
        ),
        (
            "name = 'denoise', checkpoint-steps = 10",
            "checkpoint-bytes of stage denoise is 0",
        ),
        ("name = 'denoise', checkpoint-bytes = 10", "without checkpoint-steps"),
        ("name = 'decode', checkpoint-steps = 10, output-bytes = 1", "work-queue"),
        (
            "name = 'denoise', checkpoint-steps = 10, output-bytes = 8, chunks = 2, streams = true",
            "output streams",
        ),
    ] {
        let text =
            format!("arrivals = {{ jobs = 1, rate-per-s = 1.0 }}\nstage = [{{ workers = 1, time-s = 1.0, {stage} }}]");
        let error = Experiment::parse(&text, |file| Err(file.to_owned())).expect_err(stage);
        assert!(error.to_string().contains(complaint), "{error}");
        assert_eq!(error.reason(), "sim.experiment");
    }
}
