use std::collections::BTreeSet;

use stagewire_core::{ByteCount, ErrorClass, Failure, PayloadId};
use stagewire_sched::{
    DrainScope, EdgeSpec, Flow, Holder, Limits, PayloadInfo, ResultInfo, StageKind, StageSpec, Topology, WorkerInfo,
};
use uuid::Uuid;

use super::*;

const NOW: Timestamp = Timestamp(1);

fn name(name: &str) -> StageName {
    StageName::new(name).unwrap()
}

fn edge(from: &str, to: &str) -> EdgeSpec {
    EdgeSpec {
        from: name(from),
        to: name(to),
        flow: Flow::Whole,
        mode: TransferMode::P2p,
    }
}

/// A scheduler with what it would let out.
struct Rig {
    sched: Sched,
    batch: Batch,
    histories: Histories,
    job: JobId,
}

impl Rig {
    /// With one job.
    fn new(stages: &[&str], edges: Vec<EdgeSpec>) -> Self {
        let stages = stages.iter().map(|stage| StageSpec::new(name(stage))).collect();
        Self::of(stages, edges)
    }

    fn of(stages: Vec<StageSpec>, edges: Vec<EdgeSpec>) -> Self {
        let mut rig = Self {
            sched: Sched::new(Topology::new(stages, edges).unwrap(), Limits::default()),
            batch: Batch::new(Epoch(1)),
            histories: Histories::default(),
            job: JobId(Uuid::from_u128(1)),
        };
        let stored = BTreeSet::new();
        rig.does(Input::Restarted {
            epoch: Epoch(1),
            stored,
        });
        rig.does(Input::Submit {
            job: rig.job,
            params: "{}".into(),
            key: None,
            urgency: stagewire_sched::Urgency::default(),
        });
        rig
    }

    /// What the input and all that follows at once lets out.
    fn does(&mut self, input: Input) -> Vec<Out> {
        let mut decision = self.sched.decide(NOW, input).unwrap();
        while !decision.events.is_empty() {
            self.batch.take(&mut self.sched, &self.histories, NOW, decision);
            decision = self.sched.decide(NOW, Input::Poll).unwrap();
        }
        self.batch.release().collect()
    }

    /// A new worker of the stage, which runs the job.
    fn run(&mut self, stage: &str) -> (Incarnation, Token) {
        let worker = Incarnation(Uuid::new_v4());
        self.attach(worker, stage, vec![]);
        let phase = self.sched.job(self.job).unwrap().stage(&name(stage)).unwrap().phase();
        let token = phase.token().unwrap();
        self.does(Input::Accept { worker, token });
        (worker, token)
    }

    fn attach(&mut self, worker: Incarnation, stage: &str, holding: Vec<PayloadId>) {
        self.does(Input::WorkerAttached {
            worker: WorkerInfo {
                incarnation: worker,
                name: stage.to_owned(),
                stage: name(stage),
                slots: 1,
                max_batch: 1,
                member: None,
                place: stagewire_sched::Place::default(),
            },
            running: vec![],
            holding,
        });
    }

    fn complete(&mut self, worker: Incarnation, token: Token, result: Option<ResultInfo>) -> Vec<Out> {
        self.does(Input::Completed {
            worker,
            token,
            result,
            handovers: vec![],
        })
    }

    /// The attempt has put a checkpoint into the store.
    fn checkpoint(&mut self, worker: Incarnation, token: Token, id: u128) {
        let payload = PayloadInfo {
            id: PayloadId(Uuid::from_u128(id)),
            nbytes: ByteCount(1),
            chunks: 1,
            stored: true,
            handle: vec![].into(),
        };
        self.does(Input::Checkpointed {
            worker,
            token,
            payload,
            progress: stagewire_core::Progress::default(),
        });
    }

    fn drain(&mut self, worker: Incarnation) {
        let scope = DrainScope::Worker(worker);
        self.does(Input::Drain { scope, within: None });
    }

    fn publish(&mut self, worker: Incarnation, token: Token, stored: bool) -> Vec<Out> {
        let payload = PayloadInfo {
            id: PayloadId(Uuid::from_u128(7)),
            nbytes: ByteCount(1),
            chunks: 1,
            stored,
            handle: vec![].into(),
        };
        self.does(Input::Published { worker, token, payload })
    }
}

/// A stage with checkpoints.
fn denoise() -> StageSpec {
    StageSpec {
        kind: StageKind::Admission,
        checkpoint: true,
        ..StageSpec::new(name("denoise"))
    }
}

/// Which payloads alone are kept of what the attempt has put into the store; `None` where it may put more.
fn kept(out: &[Out], token: Token) -> Option<Vec<u128>> {
    let mut kept: Option<Vec<u128>> = None;
    for out in out {
        if let Out::Discard(other, payloads) = out
            && *other == token
        {
            let payloads = payloads.iter().map(|payload| payload.0.as_u128());
            // What was dropped once is gone.
            kept = Some(
                payloads
                    .filter(|id| kept.as_ref().is_none_or(|kept| kept.contains(id)))
                    .collect(),
            );
        }
    }
    kept
}

/// The store goes on to take what a worker that leaves has made, until it is moved or released. Where there is nothing to
/// take, nothing would ever end that.
#[test]
fn an_attempt_puts_no_more_once_nothing_of_it_can_go_to_the_store() {
    let mut rig = Rig::new(&["paint"], vec![]);
    let (worker, token) = rig.run("paint");
    rig.drain(worker);
    let out = rig.complete(worker, token, None);
    assert_eq!(kept(&out, token), Some(vec![]), "a last stage has no output");

    for stored in [false, true] {
        let mut rig = Rig::new(&["encode", "decode"], vec![edge("encode", "decode")]);
        let (worker, token) = rig.run("encode");
        rig.drain(worker);
        rig.publish(worker, token, stored);
        let out = rig.complete(worker, token, None);
        let ended = stored.then(|| vec![7]);
        assert_eq!(kept(&out, token), ended, "the worker holds it, or the store does");
        if !stored {
            let out = rig.publish(worker, token, true);
            assert_eq!(kept(&out, token), Some(vec![7]), "it has moved");
        }
    }
}

/// A worker that left had put it into the store, and the server ended before it heard of that. The worker has yet to say
/// to the next one that it leaves.
#[test]
fn what_was_put_under_the_server_before_goes_with_its_payload() {
    let mut rig = Rig::new(&["encode", "decode"], vec![edge("encode", "decode")]);
    let (worker, token) = rig.run("encode");
    rig.drain(worker);
    rig.publish(worker, token, false);
    rig.complete(worker, token, None);
    let payload = PayloadId(Uuid::from_u128(7));
    rig.does(Input::Restarted {
        epoch: Epoch(2),
        stored: BTreeSet::from([payload]),
    });
    rig.attach(worker, "encode", vec![payload]);
    let (consumer, decode) = rig.run("decode");
    let out = rig.complete(consumer, decode, None);
    let releases = |out: &Out| {
        matches!(
            out,
            Out::Effect(Effect::Release {
                holder: Holder::Worker(_),
                ..
            })
        )
    };
    assert!(out.iter().any(releases), "{out:?}");
    assert_eq!(kept(&out, token), Some(vec![]), "{out:?}");
}

/// The files of the life before are nobody's.
#[test]
fn a_redrive_discards_the_results_of_the_life_before() {
    let edges = ["paint", "sing"].map(|last| edge("encode", last));
    let mut rig = Rig::new(&["encode", "paint", "sing"], edges.to_vec());
    let (worker, token) = rig.run("encode");
    rig.publish(worker, token, false);
    rig.complete(worker, token, None);
    let (worker, token) = rig.run("paint");
    let artefact = ArtefactInfo {
        id: "1".to_owned(),
        name: "picture".to_owned(),
        media_type: "image/png".to_owned(),
        nbytes: ByteCount(1),
    };
    let result = ResultInfo {
        artefacts: vec![artefact.clone()],
        info: String::new(),
    };
    rig.complete(worker, token, Some(result));
    let (worker, token) = rig.run("sing");
    let out = rig.does(Input::Failed {
        worker,
        token,
        failure: Failure::new(ErrorClass::Invalid, "test.failure", "it cannot sing"),
        lost: None,
    });
    let discards = |out: &Out| matches!(out, Out::DiscardResults(..));
    assert!(!out.iter().any(discards), "a dead letter keeps what it made");
    let out = rig.does(Input::Redrive { job: rig.job });
    let discarded = out.iter().find(|out| discards(out));
    assert!(
        matches!(discarded, Some(Out::DiscardResults(job, files)) if *job == rig.job && *files == [artefact]),
        "{out:?}"
    );
}

/// A checkpoint that was on its way to the store when the attempt was done is nobody's.
#[test]
fn all_that_a_completed_attempt_has_put_and_not_said_is_discarded() {
    for stored in [false, true] {
        let mut rig = Rig::of(
            vec![denoise(), StageSpec::new(name("decode"))],
            vec![edge("denoise", "decode")],
        );
        let (worker, token) = rig.run("denoise");
        rig.checkpoint(worker, token, 8);
        rig.publish(worker, token, stored);
        let out = rig.complete(worker, token, None);
        assert_eq!(kept(&out, token), Some(vec![7, 8]), "{out:?}");
        let releases =
            |out: &Out| matches!(out, Out::Effect(Effect::Release { payload, .. }) if payload.0.as_u128() == 8);
        assert!(out.iter().any(releases), "the checkpoint that was said: {out:?}");
    }
}

/// What it had put into the store besides, it had not said yet.
#[test]
fn all_that_an_attempt_has_put_is_discarded_with_it_but_for_its_checkpoint() {
    let mut rig = Rig::of(vec![denoise()], vec![]);
    let (worker, token) = rig.run("denoise");
    rig.checkpoint(worker, token, 7);
    let out = rig.does(Input::WorkerLost { worker });
    assert_eq!(kept(&out, token), Some(vec![7]), "{out:?}");
    // The one that another attempt has made is not this one's to keep.
    let (worker, second) = rig.run("denoise");
    let out = rig.does(Input::WorkerLost { worker });
    assert_eq!(kept(&out, second), Some(vec![]), "{out:?}");
}

/// Where a stream breaks off, its producer is stopped, and goes on from its checkpoint.
#[test]
fn a_checkpoint_outlives_the_output_of_a_worker_that_leaves() {
    let stages = vec![denoise(), StageSpec::new(name("decode"))];
    let stream = EdgeSpec {
        flow: Flow::Stream {
            chunks: 1,
            chunk_dim: 0,
        },
        ..edge("denoise", "decode")
    };
    let mut rig = Rig::of(stages, vec![stream]);
    let (worker, token) = rig.run("denoise");
    rig.publish(worker, token, false);
    let (consumer, decode) = rig.run("decode");
    rig.checkpoint(worker, token, 8);
    rig.drain(worker);
    let out = rig.does(Input::Failed {
        worker: consumer,
        token: decode,
        failure: Failure::new(ErrorClass::Unavailable, "payload.lost", "the producer is not heard"),
        lost: Some(PayloadId(Uuid::from_u128(7))),
    });
    assert_eq!(kept(&out, token), Some(vec![8]), "{out:?}");
}

/// The checkpoint of a stage that is done is released, and the output of the same attempt has yet to go to the store.
#[test]
fn what_a_worker_that_leaves_has_made_outlives_its_checkpoint() {
    let stages = vec![denoise(), StageSpec::new(name("decode"))];
    let mut rig = Rig::of(stages, vec![edge("denoise", "decode")]);
    let (worker, token) = rig.run("denoise");
    rig.checkpoint(worker, token, 8);
    rig.drain(worker);
    rig.publish(worker, token, false);
    let out = rig.complete(worker, token, None);
    let releases = |out: &Out| matches!(out, Out::Effect(Effect::Release { payload, .. }) if payload.0.as_u128() == 8);
    assert!(out.iter().any(releases), "{out:?}");
    assert_eq!(kept(&out, token), None, "the store may yet take the output: {out:?}");
}
