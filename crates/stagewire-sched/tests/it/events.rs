use std::time::Duration;

use stagewire_core::{Attempt, Epoch, ErrorClass, Incarnation, JobId, PayloadId, Timestamp, Token};
use stagewire_sched::{CacheKey, Discard, Event, Loss, OfferEnd, Outcome, Preemptor, Sched, Terms};

use crate::world::{World, failure, name, payload_info, steps, video, worker_info};

/// One event of each kind, about things that need not exist.
fn events(world: &mut World) -> Vec<Event> {
    let job = JobId(world.id());
    let token = Token {
        epoch: Epoch(1),
        job,
        attempt: Attempt(1),
    };
    let worker = Incarnation(world.id());
    let payload = PayloadId(world.id());
    let stage = name("encode");
    let failure = failure(ErrorClass::Internal);
    let yielded = failure.clone();
    vec![
        Event::Restarted { epoch: Epoch(2) },
        Event::JobSubmitted {
            job,
            params: "{}".into(),
            key: None,
            terms: Terms {
                class: name("batch"),
                queue_deadline: Some(Duration::from_secs(1)),
                shape: 7,
                skip: vec![name("encode")],
                cache: vec![(name("encode"), CacheKey(1))],
            },
        },
        Event::JobCancelling { job },
        Event::JobEnded {
            job,
            outcome: Outcome::Cancelled,
        },
        Event::JobForgotten { job },
        Event::AttemptGranted {
            token,
            stage: stage.clone(),
            worker,
            batch: 1,
            nbytes: 1,
            ranks: vec![Incarnation(world.id())],
            name: "encode-0".into(),
            saved: 0,
        },
        Event::Published {
            token,
            payload: payload_info(payload, false),
        },
        Event::AttemptCompleted {
            token,
            result: None,
            handovers: vec![],
        },
        Event::AttemptFailed {
            token,
            failure: failure.clone(),
            retry: Some(Timestamp(5)),
        },
        Event::AttemptLost {
            token,
            worker,
            loss: Loss::WorkerLost,
            failure: failure.clone(),
        },
        Event::AttemptFenced { token, failure },
        Event::PayloadLost {
            job,
            stage: stage.clone(),
            payload,
        },
        Event::PayloadReleased {
            job,
            stage: stage.clone(),
            payload,
        },
        Event::StageReopened {
            job,
            stage: stage.clone(),
        },
        Event::StageSkipped {
            job,
            stage: stage.clone(),
        },
        Event::RetryDue {
            job,
            stage: stage.clone(),
        },
        Event::PayloadMoved {
            token,
            payload: payload_info(payload, true),
        },
        Event::Paused,
        Event::Resumed,
        Event::JobRedriven { job },
        Event::DeadLetterDiscarded {
            job,
            why: Discard::Asked,
        },
        Event::Checkpointed {
            token,
            payload: payload_info(payload, true),
            progress: steps(3),
        },
        Event::AttemptYielded {
            token,
            by: Some(Preemptor {
                job,
                class: name("interactive"),
            }),
            failure: yielded.clone(),
        },
        Event::OutputShared { token },
        Event::StageCached {
            job,
            stage: stage.clone(),
            payload: payload_info(payload, true),
            token,
        },
        Event::SharedLeft {
            job,
            stage: stage.clone(),
            payload,
        },
        Event::CacheDropped { payload },
        Event::WorkerAttached {
            worker: worker_info(worker, "encode", 1),
            claimed: vec![token],
            stale: vec![],
            unclaimed: vec![payload],
        },
        Event::WorkerAway { worker },
        Event::WorkerLost { worker },
        Event::WorkerResumed { worker },
        Event::HoldingsSettled { worker },
        Event::WorkerDraining { worker, until: None },
        Event::Draining,
        Event::Offered {
            token,
            stage: stage.clone(),
            worker,
            nbytes: 1,
            price: Duration::from_secs(1),
            batch: 2,
            steps: Some(1),
        },
        Event::OfferEnded {
            token,
            end: OfferEnd::Unanswered,
        },
        Event::Renewed {
            token,
            sequence: 1,
            progress: None,
        },
        Event::Yielding {
            token,
            by: None,
            failure: yielded,
        },
        Event::Awaits {
            job,
            stage: stage.clone(),
            by: job,
        },
        Event::AwaitEnded { job, stage },
        Event::AttemptStopped { worker, token },
    ]
}

#[test]
fn events_survive_the_journal() {
    let mut world = World::new(video());
    for event in events(&mut world) {
        let bytes = postcard::to_stdvec(&event).expect("events encode");
        assert_eq!(postcard::from_bytes::<Event>(&bytes), Ok(event));
    }
}

#[test]
fn journals_keep_their_meaning() {
    // The first byte is the position of the variant, which is what old journals hold.
    let mut world = World::new(video());
    let first = |event: &Event| postcard::to_stdvec(event).expect("events encode")[0];
    let positions: Vec<u8> = events(&mut world).iter().map(first).collect();
    let all: Vec<u8> = (0..u8::try_from(positions.len()).expect("few")).collect();
    assert_eq!(positions, all, "new variants go to the end");
}

#[test]
fn an_event_that_does_not_fit_does_nothing() {
    let mut world = World::new(video());
    let mut sched = Sched::new(video(), world.sched.limits().to_owned());
    let events = events(&mut world);
    let creates = |event: &&Event| {
        matches!(
            event,
            Event::Restarted { .. }
                | Event::JobSubmitted { .. }
                | Event::WorkerAttached { .. }
                | Event::Draining
                | Event::Paused
        )
    };
    let before = format!("{sched:?}");
    for event in events.iter().filter(|event| !creates(event)) {
        sched.apply(Timestamp(1), event);
        assert_eq!(format!("{sched:?}"), before, "{event:?} did something");
    }
}

#[test]
fn only_what_must_outlive_the_server_is_durable() {
    let mut world = World::new(video());
    let durable: Vec<bool> = events(&mut world).iter().map(Event::is_durable).collect();
    assert!(durable.is_sorted_by(|a, b| a >= b), "durable variants come first");
    assert_eq!(durable.iter().filter(|durable| **durable).count(), 27);
}
