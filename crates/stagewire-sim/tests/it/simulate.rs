//! The simulator against what is known without it.

use std::time::Duration;

use stagewire_core::{ByteCount, Classify};
use stagewire_sim::{Experiment, Layout, Report, fewest, simulate};

pub(crate) fn parse(text: &str) -> Experiment {
    Experiment::parse(text, |file| Err(format!("there is no {file}"))).unwrap_or_else(|error| panic!("{error}"))
}

pub(crate) fn run(experiment: &Experiment) -> Report {
    simulate(experiment, Layout::Disaggregated).unwrap_or_else(|error| panic!("{error}"))
}

pub(crate) fn example(name: &str) -> Experiment {
    let path = format!("{}/../../examples/sim/{name}.toml", env!("CARGO_MANIFEST_DIR"));
    parse(&std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}")))
}

/// So many jobs only, for a debug build.
pub(crate) fn shortened(mut experiment: Experiment, most: u64) -> Experiment {
    if let stagewire_sim::Arrivals::Model { jobs, .. } = &mut experiment.arrivals {
        *jobs = most;
    }
    experiment
}

#[test]
fn a_seed_decides_every_event() {
    let experiment = shortened(example("spot"), 150);
    let (first, second) = (run(&experiment), run(&experiment));
    assert_eq!(first, second);
    assert_eq!(first.jobs_csv(), second.jobs_csv());
    let other = run(&Experiment { seed: 2, ..experiment });
    assert_ne!(first.event_hash, other.event_hash);
}

/// One worker, Poisson arrivals, equal times: the mean wait is S * load / (2 * (1 - load)) (Pollaczek and Khinchine).
#[test]
fn the_mean_wait_at_one_worker_is_that_of_the_theory() {
    for load in [0.5, 0.8] {
        let text = format!(
            "arrivals = {{ jobs = 30000, rate-per-s = {load} }}\nnetwork = {{ latency-us = 0 }}\n\
             stage = [{{ name = 'only', workers = 1, time-s = 1.0 }}]"
        );
        let report = run(&parse(&text));
        let waits = report
            .job_records()
            .iter()
            .filter_map(|job| job.latency())
            .map(|took| took.as_secs_f64() - 1.0);
        let mean = waits.sum::<f64>() / report.jobs as f64;
        let expected = load / (2.0 * (1.0 - load));
        assert!(
            (0.9..1.1).contains(&(mean / expected)),
            "at {load} the mean wait is {mean} s, not {expected} s"
        );
        let used = report.stages[0].utilisation;
        assert!((load - 0.02..load + 0.02).contains(&used), "{used} at {load}");
    }
}

/// Six denoisers of 20.35 s against eight GPUs of 24.20 s: the arithmetic of docs/simulator.md.
#[test]
fn at_equal_speeds_stages_apart_do_no_more_jobs() {
    let experiment = shortened(example("equal-gpus"), 400);
    let apart = run(&experiment);
    let together = simulate(&experiment, Layout::Colocated).expect("the example compares them");
    assert_eq!((apart.gpus, together.gpus), (8, 8));
    let ratio = apart.throughput_per_s / together.throughput_per_s;
    assert!((0.87..0.91).contains(&ratio), "{ratio}");
    // What offloading costs is a parameter, and turns that around.
    let offload = shortened(example("offload"), 400);
    let ratio = run(&offload).throughput_per_s
        / simulate(&offload, Layout::Colocated)
            .expect("the example compares them")
            .throughput_per_s;
    assert!((1.1..1.3).contains(&ratio), "{ratio}");
}

#[test]
fn a_slow_link_is_the_bottleneck_and_chunks_hide_a_part_of_it() {
    let text = |chunks, decode: f64| {
        format!(
            "arrivals = {{ jobs = 1, rate-per-s = 1.0 }}\nnetwork = {{ latency-us = 0, nic-bytes-per-s = '1MB' }}\n\
             stage = [{{ name = 'denoise', workers = 1, time-s = 1.0, output-bytes = '8MB', chunks = {chunks} }},\n\
             {{ name = 'decode', workers = 1, time-s = {decode}, chunks = 8 }}]"
        )
    };
    let took = |chunks, decode| run(&parse(&text(chunks, decode))).latency_s.p50;
    let megabytes =
        "8MB".parse::<ByteCount>().expect("a number").0 as f64 / "1MB".parse::<ByteCount>().expect("a number").0 as f64;
    let whole = took(1, 8.0);
    assert!((whole - (1.0 + megabytes + 8.0)).abs() < 0.01, "{whole}");
    // Decoding begins with the first chunk, and ends no earlier than its part for the last one.
    for decode in [12.0, 8.0, 7.2, 4.0] {
        let cut = took(8, decode);
        let expected = 1.0 + (megabytes / 8.0 + decode).max(megabytes + decode / 8.0);
        assert!(
            (cut - expected).abs() < 0.01,
            "{cut} s, not {expected} s, at {decode} s"
        );
    }
}

#[test]
fn whoever_dies_no_job_is_lost() {
    let mut experiment = shortened(example("spot"), 300);
    experiment.deaths.as_mut().expect("the example has them").mean = Duration::from_secs(600);
    let report = run(&experiment);
    assert_eq!(report.succeeded, 300);
    assert!(report.deaths > 5, "{} deaths", report.deaths);
}

#[test]
fn a_full_store_makes_producers_wait_and_is_never_too_full() {
    let text = "store-capacity = 25_000_000\narrivals = { jobs = 50, rate-per-s = 10.0 }\n\
                stage = [{ name = 'denoise', workers = 4, time-s = 1.0, output-bytes = 10_000_000, mode = 'store' },\n\
                { name = 'decode', workers = 1, time-s = 1.0 }]";
    let report = run(&parse(text));
    assert_eq!(report.succeeded, 50);
    assert!(report.puts_that_waited > 10, "{}", report.puts_that_waited);
    assert_eq!(report.peak_resident_bytes, 20_000_000);
}

/// Embeddings fill it, and they are needed until the latents that have no room are in it.
#[test]
fn a_store_that_is_too_small_is_said_to_be_the_reason() {
    let experiment = Experiment {
        store_capacity: Some(ByteCount(20_000_000)),
        ..shortened(example("spot"), 100)
    };
    let error = simulate(&experiment, Layout::Disaggregated).expect_err("nothing moves");
    assert_eq!(error.reason(), "sim.stuck", "{error}");
}

#[test]
fn interactive_jobs_do_not_wait_for_a_backlog() {
    let report = run(&shortened(example("wan"), 600));
    let [interactive, batch] = &report.classes[..] else {
        panic!("two classes")
    };
    assert!(interactive.latency_s.p99 < batch.latency_s.p99 / 2.0, "{report:?}");
    assert_eq!(report.succeeded, 600, "and the backlog is done all the same");
}

#[test]
fn the_fewest_workers_are_enough_and_one_less_is_not() {
    let experiment = shortened(example("sharing"), 800);
    let trials = fewest(&experiment, "decode", 0.99, 64).expect("the example has a bound");
    let answer = trials
        .iter()
        .filter(|trial| trial.enough)
        .map(|trial| trial.workers)
        .min()
        .expect("64 are enough");
    let met = |workers| {
        let mut experiment = experiment.clone();
        experiment.stages[2].workers = workers;
        run(&experiment).worst_attainment().expect("a bound")
    };
    // 0.9 jobs/s of 2.4 s each: two of them could not even keep up.
    assert!((3..=5).contains(&answer), "{answer}");
    assert!(met(answer) >= 0.99 && met(answer - 1) < 0.99);
    assert!(
        fewest(&experiment, "decode", 0.99, 1)
            .expect("a bound")
            .iter()
            .all(|trial| !trial.enough)
    );
}

#[test]
fn a_recorded_trace_is_played_back() {
    let text = "arrivals = { trace = 'a.csv' }\nnetwork = { latency-us = 0 }\n\
                stage = [{ name = 'only', workers = 1, time-s = 2.0 }]";
    let trace = "at_s,class,scale\n1,standard,1\n1.5,batch,0.5\n10,standard,1\n";
    let experiment = Experiment::parse(text, |file| {
        assert_eq!(file, "a.csv");
        Ok(trace.to_owned())
    });
    let report = run(&experiment.expect("a good experiment"));
    let took: Vec<_> = report
        .job_records()
        .iter()
        .map(|job| job.latency().map(|took| took.as_secs_f64()))
        .collect();
    assert_eq!(took, [Some(2.0), Some(2.5), Some(2.0)]);
}

#[test]
fn what_is_wrong_with_an_experiment_is_said() {
    let good = "arrivals = { jobs = 10, rate-per-s = 1.0 }\nstage = [{ name = 'a', workers = 1, time-s = 1.0 }]";
    parse(good);
    for (from, to, reason, words) in [
        ("jobs = 10", "jobs = 0", "sim.experiment", "jobs is 0"),
        (
            "rate-per-s = 1.0",
            "rate-per-s = nan",
            "sim.experiment",
            "arrivals.rate-per-s is NaN",
        ),
        (", rate-per-s = 1.0", "", "sim.experiment", "either a trace"),
        (
            "stage =",
            "class = [{ name = 'standard', share = 0 }]\nstage =",
            "sim.experiment",
            "share of every class is 0",
        ),
        (
            "workers = 1",
            "workers = 0",
            "sim.experiment",
            "workers of stage a is 0",
        ),
        (
            "time-s = 1.0",
            "time-s = -1.0",
            "sim.experiment",
            "time-s of stage a is -1",
        ),
        (", time-s = 1.0", "", "sim.experiment", "time-s of stage a"),
        ("name = 'a'", "name = 'a', size = 3", "sim.experiment", "size"),
        ("name = 'a'", "name = '../a'", "sim.experiment", "../a"),
        (
            "workers = 1",
            "workers = 1, after = ['b']",
            "sim.experiment",
            "after of stage a is b",
        ),
        (
            "}]",
            "}, { name = 'a', workers = 1, time-s = 1.0 }]",
            "topology.duplicate",
            "a",
        ),
        ("arrivals", "workload = 'x'\narrivals", "sim.experiment", "wan-dfx"),
        (
            "workers = 1",
            "workers = 1, max-batch = 0",
            "sim.experiment",
            "max-batch of stage a is 0",
        ),
        (
            "workers = 1",
            "workers = 1, max-batch = 2, kind = 'admission'",
            "sim.experiment",
            "max-batch of stage a is 2",
        ),
        (
            "workers = 1",
            "workers = 1, world = 2",
            "sim.experiment",
            "world of stage a is 2",
        ),
        (
            "workers = 1",
            "workers = 1, batch-cost = 1.5",
            "sim.experiment",
            "batch-cost of stage a is 1.5",
        ),
        (
            "workers = 1",
            "workers = 1, streams = true",
            "sim.experiment",
            "streams of stage a",
        ),
        (
            "arrivals",
            "service-file = 'x.toml'\narrivals",
            "sim.experiment",
            "x.toml",
        ),
    ] {
        assert!(good.contains(from), "{from}");
        let text = good.replacen(from, to, 1);
        let error = Experiment::parse(&text, |_| Err("it is not there".to_owned())).expect_err(&text);
        assert_eq!(error.reason(), reason, "{error}");
        assert!(error.to_string().contains(words), "{words:?} is not in {error}");
    }
}
