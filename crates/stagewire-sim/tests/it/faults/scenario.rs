//! What a seed decides: the pipeline, its limits, and how often what goes wrong.

use std::time::Duration;

use stagewire_core::{StageName, TransferMode};
use stagewire_sched::{EdgeSpec, Flow, Limits, StageKind, StageSpec, Topology};
use stagewire_sim::Random;

/// How long things go wrong.
pub(super) const TROUBLE: Duration = Duration::from_secs(120);

#[derive(Debug, Clone)]
pub(super) struct Scenario {
    pub(super) seed: u64,
    pub(super) topology: Topology,
    pub(super) limits: Limits,
    pub(super) jobs: u64,
    /// Batches above which a journal is summed up when a server starts.
    pub(super) long: u64,
    /// The journal's disk fails after so many operations of the first server.
    pub(super) first_crash: Option<usize>,
    /// Later servers get a disk that fails some time, too.
    pub(super) more_crashes: bool,
    /// Between two faults, on average; `None` for none but crashes.
    pub(super) pause: Option<Duration>,
    /// Probability that a message is lost, comes twice, is held up.
    pub(super) lost: f64,
    pub(super) twice: f64,
    pub(super) held_up: f64,
    /// One way, shortest and longest.
    pub(super) latency: (Duration, Duration),
    /// What is wrong with the server or its disk, for the harness to find.
    pub(super) mutant: Option<Mutant>,
}

/// Ways to break promises on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mutant {
    /// Acknowledges before the disk has it: the disk says that it has synced and has not.
    EarlyAck,
    /// Takes what comes with a superseded token for the attempt that took its place.
    StaleToken,
    /// Never takes anybody for dead.
    NoLoss,
    /// Tells holders to drop payloads that are still being read.
    EagerRelease,
}

impl Scenario {
    pub(super) fn of(seed: u64) -> Self {
        let mut random = Random::branch(seed, "scenario");
        let mut rate = |most| {
            if random.chance(0.6) {
                random.fraction() * most
            } else {
                0.0
            }
        };
        let (lost, twice, held_up) = (rate(0.03), rate(0.05), rate(0.1));
        let longest = if random.chance(0.3) { 400 } else { 20 };
        Self {
            seed,
            topology: pipelines().swap_remove(random.index(5)),
            limits: if random.chance(0.5) {
                Limits::default()
            } else {
                patient()
            },
            jobs: 4 + random.below(8),
            long: if random.chance(0.5) { 20 } else { 1024 },
            first_crash: Some(random.index(300)),
            more_crashes: random.chance(0.5),
            pause: Some(Duration::from_secs(2 + random.below(12))),
            lost,
            twice,
            held_up,
            latency: (Duration::from_micros(100), Duration::from_millis(longest)),
            mutant: None,
        }
    }

    /// The same pipeline, where nothing goes wrong but that the disk fails after so many operations.
    pub(super) fn crashing_once(seed: u64, after: Option<usize>) -> Self {
        Self {
            jobs: 5,
            first_crash: after,
            more_crashes: false,
            pause: None,
            lost: 0.0,
            twice: 0.0,
            held_up: 0.0,
            long: 20,
            ..Self::of(seed)
        }
    }
}

/// Bounds that end jobs would hide what goes wrong in those that go on.
fn patient() -> Limits {
    Limits {
        max_killed_workers: 1_000,
        max_expired: 1_000,
        max_lost_inputs: 1_000,
        ..Limits::default()
    }
}

fn name(name: &str) -> StageName {
    StageName::new(name).expect("an allowed name")
}

/// Pipelines that differ in what may go wrong.
fn pipelines() -> Vec<Topology> {
    let edge = |(from, to): (&str, &str), flow, mode| EdgeSpec {
        from: name(from),
        to: name(to),
        flow,
        mode,
    };
    let stream = Flow::Stream {
        chunks: 3,
        chunk_dim: 2,
    };
    let (p2p, store) = (TransferMode::P2p, TransferMode::Store);
    let whole = |pair, mode| edge(pair, Flow::Whole, mode);
    let streamed = |pair, mode| edge(pair, stream, mode);
    let pipeline = |stages: &[&str], edges| {
        let spec = |stage: &&str| StageSpec {
            max_held: 2,
            max_attempts: 3,
            kind: if *stage == "denoise" {
                StageKind::Admission
            } else {
                StageKind::WorkQueue
            },
            checkpoint: *stage == "denoise",
            ..StageSpec::new(name(stage))
        };
        Topology::new(stages.iter().map(spec).collect(), edges).expect("an allowed pipeline")
    };
    let (ed, dv) = (("encode", "denoise"), ("denoise", "decode"));
    vec![
        pipeline(&["fused"], vec![]),
        pipeline(
            &["encode", "denoise", "decode"],
            vec![whole(ed, p2p), streamed(dv, p2p)],
        ),
        pipeline(
            &["encode", "denoise", "decode"],
            vec![whole(ed, store), streamed(dv, store)],
        ),
        pipeline(
            &["encode", "denoise", "video", "audio", "mux"],
            vec![
                whole(ed, store),
                streamed(("denoise", "video"), p2p),
                whole(("denoise", "audio"), p2p),
                whole(("video", "mux"), p2p),
                whole(("audio", "mux"), store),
            ],
        ),
        pipeline(
            &["split", "left", "prepare", "right", "join"],
            vec![
                whole(("split", "left"), p2p),
                streamed(("split", "prepare"), p2p),
                streamed(("prepare", "right"), p2p),
                streamed(("left", "join"), p2p),
                whole(("right", "join"), p2p),
            ],
        ),
    ]
}
