//! Checkpoints: kept one at a time, gone on from whatever ended the attempt before, let go of in the end.

use std::collections::BTreeSet;
use std::time::Duration;

use stagewire_core::{ByteCount, ErrorClass, Incarnation, JobId, PayloadId, Token};
use stagewire_sched::{
    DrainScope, Holder, Input, Limits, Losses, Refusal, Sched, StageKind, StageSpec, Topology, TopologyError,
};

use crate::world::{World, name, payload_info, steps, whole};

pub(crate) fn topology() -> Topology {
    let denoise = StageSpec {
        kind: StageKind::Admission,
        checkpoint: true,
        max_attempts: 3,
        ..StageSpec::new(name("denoise"))
    };
    let stages = vec![denoise, StageSpec::new(name("decode"))];
    Topology::new(stages, vec![whole("denoise", "decode")]).expect("an allowed pipeline")
}

/// A job that runs.
fn started(world: &mut World) -> (Incarnation, JobId, Token) {
    let worker = world.attach("denoise", 1);
    let job = world.submit();
    let token = world.accept(worker);
    (worker, job, token)
}

/// The next attempt, on a worker of its own, and where it goes on.
fn resumed(world: &mut World) -> (Incarnation, Token, Option<(PayloadId, u64)>) {
    let worker = world.attach("denoise", 1);
    // A failed stage waits before it is tried again.
    for _ in 0..50 {
        if world.offer(worker).is_none() {
            world.wait(Duration::from_millis(100));
        }
    }
    let offer = world.offer(worker).expect("it is offered again");
    let kept = offer
        .checkpoint
        .as_ref()
        .map(|kept| (kept.payload.id, kept.progress.done));
    let token = world.accept(worker);
    (worker, token, kept)
}

impl World {
    /// Yields of its own accord, having come further than where it began.
    fn yield_unasked(&mut self, worker: Incarnation, token: Token) {
        self.does(Input::Yielded {
            worker,
            token,
            payload: None,
            progress: steps(0),
        });
    }
}

fn losses(world: &World, job: JobId) -> Losses {
    world.sched.job(job).expect("it is remembered").losses()
}

#[test]
fn the_newest_checkpoint_is_gone_on_from_whatever_ended_the_attempt() {
    let ends: [fn(&mut World, Incarnation, Token); 4] = [
        |world, worker, _| world.lose(worker),
        |world, worker, token| {
            world.wait(Duration::from_secs(16));
            world.stop(worker, token);
            world.lose(worker);
        },
        |world, worker, token| {
            world.fail(worker, token, ErrorClass::Internal);
            world.lose(worker);
        },
        |world, worker, token| {
            world.stop(worker, token);
            world.lose(worker);
        },
    ];
    for end in ends {
        let mut world = World::new(topology());
        let (worker, job, token) = started(&mut world);
        let first = world.checkpoint(worker, token, 10, true);
        world.take();
        let second = world.checkpoint(worker, token, 20, true);
        assert_eq!(world.releases(), [(Holder::Store, first)], "the older is of no use");
        assert_eq!(world.heard(job), ["denoise checkpointed"]);
        end(&mut world, worker, token);
        let (worker, token, kept) = resumed(&mut world);
        assert_eq!(kept, Some((second, 20)));
        assert_eq!(
            (
                world.sched.counters().attempts_resumed,
                world.sched.counters().steps_saved
            ),
            (1, 20)
        );
        world.publish(worker, token);
        world.take();
        world.complete(worker, token);
        assert_eq!(world.releases(), [(Holder::Store, second)], "the stage is done");
        let decoder = world.attach("decode", 1);
        world.run(decoder);
        assert_eq!((world.state(job), world.sched.live_payloads()), ("succeeded", 0));
    }
}

#[test]
fn one_that_has_come_no_further_or_comes_twice_changes_nothing() {
    let mut world = World::new(topology());
    let (worker, job, token) = started(&mut world);
    let kept = world.checkpoint(worker, token, 10, true);
    let before = world.sched.snapshot();
    for done in [9, 10] {
        world.take();
        let other = world.checkpoint(worker, token, done, true);
        assert_eq!(world.releases(), [(Holder::Store, other)]);
    }
    world.take();
    world.does(Input::Checkpointed {
        worker,
        token,
        payload: payload_info(kept, true),
        progress: steps(10),
    });
    assert_eq!(world.releases(), [], "said twice, and kept");
    assert_eq!(world.sched.snapshot(), before);
    assert_eq!(
        world.stage(job, "denoise").checkpoint().map(|kept| kept.payload.id),
        Some(kept)
    );
}

#[test]
fn one_of_an_attempt_that_was_superseded_is_let_go_of() {
    let mut world = World::new(topology());
    let (worker, job, token) = started(&mut world);
    world.wait(Duration::from_secs(16));
    let (other, second, kept) = resumed(&mut world);
    assert_eq!(kept, None);
    world.take();
    let late = world.checkpoint(worker, token, 50, true);
    assert_eq!(world.releases(), [(Holder::Store, late)]);
    assert!(world.stage(job, "denoise").checkpoint().is_none());
    // Nor does it yield for the one that runs.
    let late = world.yield_at(worker, token, 60);
    assert!(world.releases().contains(&(Holder::Store, late)));
    assert_eq!(world.stage(job, "denoise").phase().token(), Some(second));
    let refused = world.refused(Input::Checkpointed {
        worker,
        token,
        payload: payload_info(late, true),
        progress: steps(70),
    });
    assert!(matches!(refused, Refusal::Stale { .. }), "{refused:?}");
    world.publish(other, second);
    world.complete(other, second);
    assert_eq!(world.phase(job, "denoise"), "done");
}

#[test]
fn one_that_is_lost_costs_what_it_would_have_saved_and_nobody_is_to_blame() {
    // With its worker, before it is offered.
    let mut world = World::new(topology());
    let (worker, job, token) = started(&mut world);
    world.checkpoint(worker, token, 10, false);
    world.yield_unasked(worker, token);
    world.lose(worker);
    let (worker, token, kept) = resumed(&mut world);
    assert_eq!((kept, losses(&world, job)), (None, Losses::default()));
    // While it is offered: the offer is withdrawn, and made again without it.
    let id = world.checkpoint(worker, token, 10, true);
    world.yield_unasked(worker, token);
    let offered = world.offer(worker).expect("at once").clone();
    assert_eq!(offered.checkpoint.map(|kept| kept.payload.id), Some(id));
    world.does(Input::PayloadLost { payload: id });
    assert!(world.was_cancelled(offered.token));
    assert_eq!(world.offer(worker).map(|offer| offer.checkpoint.clone()), Some(None));
    // While it is read: the attempt says so.
    let token = world.accept(worker);
    let id = world.checkpoint(worker, token, 10, true);
    world.yield_unasked(worker, token);
    let token = world.accept(worker);
    world.fail_for_lost(worker, token, id);
    assert_eq!(world.offer(worker).map(|offer| offer.checkpoint.clone()), Some(None));
    assert_eq!(world.stage(job, "denoise").failures(), 0);
    assert_eq!(losses(&world, job).killed_workers + losses(&world, job).expired, 0);
}

#[test]
fn one_from_which_an_attempt_failed_at_once_is_not_tried_again() {
    let mut world = World::new(topology());
    let (worker, job, token) = started(&mut world);
    let poisoned = world.checkpoint(worker, token, 10, true);
    world.fail(worker, token, ErrorClass::Internal);
    world.lose(worker);
    let (worker, token, kept) = resumed(&mut world);
    assert_eq!(kept, Some((poisoned, 10)), "it was not this one that it failed from");
    world.take();
    world.fail(worker, token, ErrorClass::Internal);
    assert_eq!(world.releases(), [(Holder::Store, poisoned)]);
    world.lose(worker);
    let (.., kept) = resumed(&mut world);
    assert_eq!(kept, None);
    assert_eq!(world.stage(job, "denoise").failures(), 2);
}

#[test]
fn they_end_with_their_job_and_a_redrive_begins_without() {
    let mut world = World::new(topology());
    let (worker, job, token) = started(&mut world);
    let kept = world.checkpoint(worker, token, 10, true);
    world.take();
    world.fail(worker, token, ErrorClass::Invalid);
    assert_eq!(world.state(job), "failed");
    assert!(world.releases().contains(&(Holder::Store, kept)));
    world.redrive(job);
    let offer = world.offer(worker).expect("it begins again");
    assert_eq!(offer.checkpoint, None);
    let token = world.accept(worker);
    let kept = world.checkpoint(worker, token, 10, true);
    world.take();
    world.cancel(job);
    assert_eq!(world.releases(), [(Holder::Store, kept)]);
    world.stop(worker, token);
    assert_eq!((world.state(job), world.sched.live_payloads()), ("cancelled", 0));
}

#[test]
fn they_count_as_bytes_that_are_held() {
    let limits = Limits {
        payload_bytes: Some(ByteCount(8 << 20)),
        ..Limits::default()
    };
    let mut world = World::with_limits(topology(), limits);
    let (worker, _, token) = started(&mut world);
    let held = |world: &World| world.sched.byte_credit().expect("there is a bound").held;
    assert_eq!(held(&world), ByteCount(0));
    world.checkpoint(worker, token, 10, true);
    world.checkpoint(worker, token, 20, true);
    assert_eq!(held(&world), ByteCount(1 << 20), "one at a time");
    world.publish(worker, token);
    world.complete(worker, token);
    assert_eq!(held(&world), ByteCount(1 << 20), "its output alone");
}

#[test]
fn a_restart_between_a_checkpoint_and_a_yield_loses_neither() {
    let mut world = World::new(topology());
    let (worker, job, token) = started(&mut world);
    let scope = DrainScope::Worker(worker);
    world.does(Input::Drain { scope, within: None });
    assert_eq!(world.asked(), [token]);
    let kept = world.checkpoint(worker, token, 10, true);
    world.restart_with(BTreeSet::from([kept]));
    world.attach_as(worker, "denoise", 1, vec![token], vec![]);
    // It has heard before the server died, and says now that it has yielded.
    let second = world.yield_at(worker, token, 12);
    world.lose(worker);
    let (other, _, from) = resumed(&mut world);
    assert_eq!(from, Some((second, 12)));
    assert_eq!(losses(&world, job), Losses::default());
    // What the store has lost meanwhile is begun again.
    world.restart();
    world.lose(other);
    let (.., from) = resumed(&mut world);
    assert_eq!(from, None);
}

#[test]
fn a_yield_that_nobody_asked_for_and_that_has_come_no_further_counts_as_a_stop() {
    let mut world = World::new(topology());
    let (worker, job, token) = started(&mut world);
    world.does(Input::Yielded {
        worker,
        token,
        payload: None,
        progress: steps(0),
    });
    assert_eq!(losses(&world, job).expired, 1);
    assert_eq!(world.sched.counters().attempts_yielded, 0);
}

#[test]
fn stages_without_checkpoints_keep_none() {
    let mut world = World::new(topology());
    let (worker, job, token) = started(&mut world);
    world.publish(worker, token);
    world.complete(worker, token);
    let decoder = world.attach("decode", 1);
    assert!(!world.offer(decoder).expect("it waits").checkpoints);
    let token = world.accept(decoder);
    world.take();
    let other = world.checkpoint(decoder, token, 10, true);
    assert_eq!(world.releases(), [(Holder::Store, other)]);
    world.complete(decoder, token);
    assert_eq!(world.state(job), "succeeded");
    let queue = StageSpec {
        checkpoint: true,
        ..StageSpec::new(name("encode"))
    };
    let refused = Topology::new(vec![queue], vec![]);
    assert!(matches!(refused, Err(TopologyError::Checkpoint { .. })), "{refused:?}");
}

#[test]
fn a_pipeline_that_takes_no_checkpoints_any_more_lets_go_of_them() {
    let mut world = World::new(topology());
    let (worker, job, token) = started(&mut world);
    let kept = world.checkpoint(worker, token, 10, true);
    let stages = topology().stages().to_vec();
    let stages = stages.into_iter().map(|spec| StageSpec {
        checkpoint: false,
        ..spec
    });
    let other = Topology::new(stages.collect(), topology().edges().to_vec()).expect("an allowed pipeline");
    let mut sched: Sched = world.replayed_with(other);
    let epoch = stagewire_core::Epoch(2);
    let stored = BTreeSet::from([kept]);
    let decision = sched
        .decide(world.now, Input::Restarted { epoch, stored })
        .expect("a later epoch");
    for event in &decision.events {
        sched.apply(world.now, event);
    }
    assert_eq!(sched.check(), Ok(()));
    let run = sched.job(job).and_then(|job| job.stage(&name("denoise")));
    assert!(run.is_some_and(|run| run.checkpoint().is_none()));
}
