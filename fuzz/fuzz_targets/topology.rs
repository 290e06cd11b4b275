//! From the text of a pipeline file to a topology: what is accepted can be served to the end.
#![no_main]

use std::collections::BTreeSet;

use stagewire_core::{ByteCount, Classify, Epoch, ErrorClass, Incarnation, JobId, PayloadId, Timestamp};
use stagewire_sched::{
    Decision, Effect, Input, JobState, Limits, Offer, Outcome, PayloadInfo, Place, Sched, Topology, Urgency, WorkerInfo,
};
use stagewire_server::Config;
use uuid::Uuid;

/// An order of magnitude more than a job of the largest pipeline takes.
const STEPS: usize = 10_000;

libfuzzer_sys::fuzz_target!(|text: &str| {
    match Config::parse(text, "stagewire.toml") {
        Ok(config) => serve(config.topology),
        Err(error) => {
            assert_eq!(error.class(), ErrorClass::Invalid, "{error}");
            assert!(error.to_string().starts_with("stagewire.toml:"), "{error} names no line");
        }
    }
});

/// Runs one job, with one worker at each stage.
fn serve(topology: Topology) {
    let job = JobId(Uuid::from_u128(1));
    let mut world = World {
        sched: Sched::new(topology.clone(), Limits::default()),
        offers: Vec::new(),
    };
    world.does(Input::Restarted { epoch: Epoch(1), stored: BTreeSet::new() });
    for (number, stage) in topology.stages().iter().enumerate() {
        let worker = WorkerInfo {
            incarnation: Incarnation(Uuid::from_u128(2 + number as u128)),
            stage: stage.name.clone(),
            slots: 1,
            max_batch: 1,
            name: stage.name.to_string(),
            member: None,
            place: Place::default(),
        };
        world.does(Input::WorkerAttached { worker, running: vec![], holding: vec![] });
    }
    let (params, urgency) = ("{}".into(), Urgency::default());
    world.does(Input::Submit { job, params, key: None, urgency });
    let mut attempts = 0;
    while let Some(Offer { worker, token, output, .. }) = world.offers.pop() {
        attempts += 1;
        world.does(Input::Accept { worker, token });
        if output.publish {
            let payload = PayloadInfo {
                id: PayloadId(Uuid::from_u128(1000 + attempts)),
                nbytes: ByteCount(1),
                chunks: output.chunks.max(1),
                stored: output.stored,
                handle: vec![].into(),
            };
            world.does(Input::Published { worker, token, payload });
        }
        world.does(Input::Completed { worker, token, result: None, handovers: vec![] });
    }
    let ended = world.sched.job(job).map(|job| job.state());
    assert!(
        matches!(ended, Some(JobState::Ended { outcome: Outcome::Succeeded, .. })),
        "a job of {topology:?} ends as {ended:?}"
    );
    assert_eq!((attempts, world.sched.live_payloads()), (topology.stages().len() as u128, 0));
}

struct World {
    sched: Sched,
    offers: Vec<Offer>,
}

impl World {
    fn does(&mut self, input: Input) {
        let now = Timestamp(1_000_000_000);
        let mut next = self.sched.decide(now, input).expect("nothing here is refused");
        for _ in 0..STEPS {
            let Decision { events, effects, .. } = next;
            if events.is_empty() && effects.is_empty() {
                return;
            }
            for event in &events {
                self.sched.apply(now, event);
            }
            self.offers.extend(effects.into_iter().filter_map(|effect| match effect {
                Effect::Offer(offer) => Some(*offer),
                _ => None,
            }));
            next = self.sched.decide(now, Input::Poll).expect("a poll is never refused");
        }
        panic!("polling never ends");
    }
}
