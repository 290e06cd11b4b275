//! Batches, groups of ranks, credits in bytes and streams against what is known without the simulator.

use stagewire_core::{ByteCount, Classify};
use stagewire_sim::{Experiment, Report};

use crate::simulate::{example, parse, run, shortened};

/// Seconds that each job takes, the fastest first.
fn took(report: &Report) -> Vec<f64> {
    let times = report.job_records().iter().filter_map(|job| job.latency());
    let mut times: Vec<f64> = times.map(|took| took.as_secs_f64()).collect();
    times.sort_by(f64::total_cmp);
    times
}

#[test]
fn what_waits_when_a_worker_is_free_is_its_next_batch() {
    let text = "arrivals = { trace = 'a.csv' }\nnetwork = { latency-us = 0 }\n\
                stage = [{ name = 'only', workers = 1, time-s = 1.0, max-batch = 4, batch-cost = 0.25 }]";
    let trace = |lines: &str| {
        let experiment = Experiment::parse(text, |_| Ok(format!("at_s,class,scale\n{lines}")));
        took(&run(&experiment.expect("a good experiment")))
    };
    // The first comes alone; of the others four take 1.75 s together, and three 1.5 s.
    let alike = trace(&"0,standard,1\n".repeat(8));
    assert_eq!(alike, [1.0, 2.75, 2.75, 2.75, 2.75, 4.25, 4.25, 4.25]);
    // Those that take another time are of another shape.
    let unlike = trace("0,standard,1\n0,standard,1\n0,standard,2\n0,standard,1\n0,standard,2\n");
    assert_eq!(unlike, [1.0, 2.25, 2.25, 4.75, 4.75]);
}

#[test]
fn ranks_of_a_group_run_an_attempt_together_and_fall_together() {
    let text = |workers: u32, world: u32, deaths: &str| {
        format!(
            "arrivals = {{ jobs = 200, rate-per-s = 1.0 }}\nnetwork = {{ latency-us = 0 }}\n{deaths}\
             stage = [{{ name = 'denoise', workers = {workers}, world = {world}, time-s = 10.0 }},\n\
             {{ name = 'decode', workers = 2, time-s = 1.0 }}]"
        )
    };
    let [groups, alone] = [4, 1].map(|world| run(&parse(&text(2, world, ""))));
    assert_eq!((groups.gpus, alone.gpus), (10, 4));
    assert_eq!(took(&groups), took(&alone));
    assert_eq!(groups.stages[0].attempts, 200);
    let deaths = "deaths = { mean-s = 400, restart-s = 20 }\n";
    let [groups, alone] = [4, 1].map(|world| run(&parse(&text(2, world, deaths))));
    assert_eq!((groups.succeeded, alone.succeeded), (200, 200));
    // Any of four takes the others' time along.
    assert!(
        groups.span_s > 1.05 * alone.span_s,
        "{} {}",
        groups.span_s,
        alone.span_s
    );
}

/// What is stuck without credits goes on with them, and nothing waits for room.
#[test]
fn credits_in_bytes_keep_the_store_from_filling_up() {
    let small = Experiment {
        store_capacity: Some(ByteCount(48_000_000)),
        spot: None,
        deaths: None,
        ..shortened(example("spot"), 100)
    };
    let error = stagewire_sim::simulate(&small, stagewire_sim::Layout::Disaggregated).expect_err("nothing moves");
    assert_eq!(error.reason(), "sim.stuck", "{error}");
    let report = run(&Experiment {
        byte_credits: small.store_capacity,
        ..small
    });
    assert_eq!((report.succeeded, report.puts_that_waited), (100, 0));
    assert!(
        report.peak_resident_bytes <= 48_000_000,
        "{}",
        report.peak_resident_bytes
    );
    assert!(
        report.peak_resident_bytes > 24_000_000,
        "{}",
        report.peak_resident_bytes
    );
}

#[test]
fn a_stream_is_read_while_it_is_made() {
    let text = |streams: bool, decode: f64, nbytes: u32| {
        format!(
            "arrivals = {{ jobs = 1, rate-per-s = 1.0 }}\nnetwork = {{ latency-us = 0, nic-bytes-per-s = 1_000_000 }}\n\
             stage = [{{ name = 'denoise', workers = 1, time-s = 8.0, output-bytes = {nbytes}, chunks = 8, \
             streams = {streams} }},\n{{ name = 'decode', workers = 1, time-s = {decode}, chunks = 8 }}]"
        )
    };
    let times = |streams, decode, nbytes| {
        let report = run(&parse(&text(streams, decode, nbytes)));
        (report.first_s.p50, report.latency_s.p50)
    };
    let near = |(first, all): (f64, f64), expected: (f64, f64)| {
        let off = (first - expected.0).abs().max((all - expected.1).abs());
        assert!(off < 0.01, "{first} s and {all} s, not {expected:?}");
    };
    // The first chunk is made after 1 s, the last one after 8 s, and then its part of the work is left.
    near(times(false, 4.0, 0), (8.5, 12.0));
    near(times(true, 4.0, 0), (1.5, 8.5));
    // Who is slower than the producer is not held up by it.
    near(times(true, 16.0, 0), (3.0, 17.0));
    // A chunk of 1 MB needs a second.
    near(times(true, 4.0, 8_000_000), (2.5, 9.5));
    near(times(true, 16.0, 8_000_000), (4.0, 18.0));
}

#[test]
fn streams_and_batches_end_well_whoever_dies() {
    let mut experiment = shortened(example("causal"), 200);
    experiment.deaths = Some(stagewire_sim::Deaths {
        mean: std::time::Duration::from_secs(300),
        noticed: std::time::Duration::from_secs(1),
        restart: std::time::Duration::from_secs(10),
    });
    let report = run(&experiment);
    assert_eq!(report.succeeded, 200);
    assert!(report.deaths > 5, "{} deaths", report.deaths);
}
