//! The defects of credits and lifetimes that other systems are known for, one test for each. After every one the ledger
//! adds up: no slot is used, no payload is held, and nothing is counted wrongly.

use std::time::Duration;

use stagewire_core::{Classify, ErrorClass, Incarnation, JobId};
use stagewire_sched::{Effect, Event, Input, Limits, LinkState, OfferEnd, Sched, Urgency};

use crate::world::{World, completed, topology, video};

/// `free + reserved + held = advertised` for every worker, which [`Sched::check`] proves after each step as well; and here,
/// where nothing runs any more, all of it is free, and nothing is held or waited for.
fn adds_up(world: &World) {
    let sched: &Sched = &world.sched;
    assert_eq!(sched.check(), Ok(()));
    for worker in sched.workers().filter(|worker| worker.link() == LinkState::Attached) {
        assert_eq!(worker.free(), worker.advertised(), "{worker:?}");
    }
    assert_eq!((sched.live_payloads(), sched.active_jobs()), (0, 0));
    for stage in sched.topology().stages() {
        assert_eq!(
            (sched.held(&stage.name), sched.queued(&stage.name)),
            (0, 0),
            "{}",
            stage.name
        );
    }
    assert_eq!(sched.poll_timeout(), None, "nothing is waited for");
}

fn painter() -> (World, Incarnation) {
    let mut world = World::new(topology(&["paint"], vec![]));
    let painter = world.attach("paint", 1);
    (world, painter)
}

fn urgent(world: &mut World, deadline: Duration) -> JobId {
    let urgency = Urgency {
        queue_deadline: Some(deadline),
        ..Urgency::default()
    };
    world.submit_as(urgency).expect("a deadline that is possible")
}

#[test]
fn time_out_while_waiting() {
    let (mut world, painter) = painter();
    let running = world.submit();
    let token = world.accept(painter);
    let queued = urgent(&mut world, Duration::from_secs(5));
    world.wait(Duration::from_secs(5));
    assert_eq!((world.state(queued), world.state(running)), ("failed", "active"));
    world.complete(painter, token);
    assert_eq!(world.offer(painter), None, "what was dropped is not offered");
    adds_up(&world);

    // The deadline passes while a worker has the offer in hand: it comes too late with its answer.
    let offered = urgent(&mut world, Duration::from_millis(500));
    let token = world.offer(painter).expect("an offer").token;
    world.wait(Duration::from_millis(500));
    assert_eq!(world.state(offered), "failed");
    assert!(world.was_cancelled(token));
    let accept = Input::Accept { worker: painter, token };
    assert_eq!(world.refused(accept).class(), ErrorClass::Fenced);
    adds_up(&world);
}

#[test]
fn time_out_while_running() {
    let (mut world, painter) = painter();
    let job = world.submit();
    let silent = world.accept(painter);
    world.wait(Limits::default().grant);
    assert_eq!(world.phase(job, "paint"), "queued");
    assert_eq!(
        world.offer(painter),
        None,
        "who knows what it does: its slot is not free"
    );
    world.stop(painter, silent);
    world.run(painter);
    assert_eq!(world.state(job), "succeeded");
    adds_up(&world);
}

#[test]
fn late_completion_after_time_out() {
    let (mut world, slow) = painter();
    let job = world.submit();
    let late = world.accept(slow);
    world.wait(Limits::default().grant);
    let other = world.attach("paint", 1);
    let token = world.accept(other);
    let before = world.sched.snapshot();
    let decision = world.does(completed(slow, late));
    assert!(matches!(decision.effects[..], [Effect::Refused { .. }]), "{decision:?}");
    assert_eq!(world.sched.snapshot(), before, "it changes no job");
    world.complete(other, token);
    assert_eq!(world.state(job), "succeeded");
    assert_eq!(world.sched.counters().jobs_succeeded, 1);
    adds_up(&world);
}

#[test]
fn restart_without_reset() {
    // The server restarts, and the worker does not: what it runs is counted once, and what it has finished not at all.
    let mut world = World::new(topology(&["paint"], vec![]));
    let painter = world.attach("paint", 2);
    let jobs = [world.submit(), world.submit()];
    let [first, second] = [world.accept(painter), world.accept(painter)];
    world.restart();
    world.attach_as(painter, "paint", 2, vec![first], vec![]);
    let known = world.sched.worker(painter).expect("it has attached");
    assert_eq!(
        (known.free(), known.advertised()),
        (0, 2),
        "one runs, and one is offered again"
    );
    world.complete(painter, first);
    assert_eq!(world.refused(completed(painter, second)).class(), ErrorClass::Fenced);
    world.run(painter);
    assert_eq!(jobs.map(|job| world.state(job)), ["succeeded"; 2]);
    adds_up(&world);

    // The worker restarts, and the server does not: its next life has all its slots, and owes nothing.
    let job = world.submit();
    world.accept(painter);
    let reborn = world.attach("paint", 2);
    assert_eq!(
        world.offer(reborn),
        None,
        "the attempt of the life before is not over yet"
    );
    world.lose(painter);
    world.run(reborn);
    assert_eq!(world.state(job), "succeeded");
    adds_up(&world);
}

#[test]
fn death_between_offer_and_accept() {
    let (mut world, painter) = painter();
    let job = world.submit();
    let token = world.offer(painter).expect("an offer").token;
    world.lose(painter);
    let withdrawn = Event::OfferEnded {
        token,
        end: OfferEnd::Withdrawn,
    };
    assert!(world.history.iter().any(|(_, event)| *event == withdrawn));
    let accept = Input::Accept { worker: painter, token };
    assert_eq!(
        world.refused(accept).reason(),
        "worker.unknown",
        "its answer was on its way"
    );
    assert_eq!(world.phase(job, "paint"), "queued");
    let losses = world.sched.job(job).expect("the job").losses();
    assert_eq!(losses, Default::default(), "that cost the job nothing");
    let other = world.attach("paint", 1);
    world.run(other);
    assert_eq!(world.state(job), "succeeded");
    adds_up(&world);
}

#[test]
fn a_stream_producer_that_dies_at_chunk_3() {
    let mut world = World::new(video());
    let [encoder, denoiser, decoder] = ["encode", "denoise", "decode"].map(|stage| world.attach(stage, 1));
    let job = world.submit();
    world.run(encoder);
    let producing = world.accept(denoiser);
    world.publish(denoiser, producing);
    let consuming = world.accept(decoder);
    // Two of three chunks are with the consumer, and the third is on its way.
    for chunk in 1..=3 {
        world.renew(denoiser, producing, chunk);
        world.renew(decoder, consuming, chunk.min(2));
    }
    world.lose(denoiser);
    assert_eq!(world.phases(job), ["done", "queued", "blocked"]);
    assert!(world.was_cancelled(consuming), "what it has read is no whole");
    assert_eq!(world.stage(job, "decode").failures(), 0, "and it is not to blame");
    let decision = world.does(completed(decoder, consuming));
    assert!(matches!(decision.effects[..], [Effect::Refused { .. }]), "{decision:?}");
    let denoiser = world.attach("denoise", 1);
    world.run(denoiser);
    world.run(decoder);
    assert_eq!(world.state(job), "succeeded");
    adds_up(&world);
}

#[test]
fn a_p2p_producer_that_dies_after_sealing() {
    let mut world = World::new(video());
    let [encoder, denoiser, decoder] = ["encode", "denoise", "decode"].map(|stage| world.attach(stage, 1));
    let job = world.submit();
    world.run(encoder);
    let token = world.accept(denoiser);
    let sealed = world.publish(denoiser, token);
    let decoding = world.accept(decoder);
    world.complete(denoiser, token);
    world.lose(denoiser);
    assert_eq!(
        world.phases(job),
        ["done", "done", "running"],
        "it may have all the bytes"
    );
    world.fail_for_lost(decoder, decoding, sealed);
    assert_eq!(world.phases(job), ["done", "queued", "blocked"], "it had not");
    let losses = world.sched.job(job).expect("the job").losses();
    assert_eq!((losses.lost_inputs, losses.killed_workers), (1, 0));
    let denoiser = world.attach("denoise", 1);
    world.run(denoiser);
    world.run(decoder);
    assert_eq!(
        (world.state(job), world.stage(job, "decode").failures()),
        ("succeeded", 0)
    );
    adds_up(&world);
}

#[test]
fn a_worker_that_advertises_twice() {
    let (mut world, painter) = painter();
    world.submit();
    let token = world.accept(painter);
    world.attach_as(painter, "paint", 1, vec![token], vec![]);
    world.attach_as(painter, "paint", 1, vec![token], vec![]);
    let known = world.sched.worker(painter).expect("it is attached");
    assert_eq!(
        (known.advertised(), known.free()),
        (1, 0),
        "its slots do not add up to more"
    );
    let more = Input::WorkerAttached {
        worker: crate::world::worker_info(painter, "paint", 2),
        running: vec![token],
        holding: vec![],
    };
    assert_eq!(world.refused(more).reason(), "worker.changed");
    world.complete(painter, token);
    adds_up(&world);
}

#[test]
fn a_worker_that_completes_twice_or_what_is_not_its_own() {
    let (mut world, painter) = painter();
    let other = world.attach("paint", 1);
    let jobs = [world.submit(), world.submit()];
    let [mine, theirs] = [world.accept(painter), world.accept(other)];
    assert_eq!(world.refused(completed(painter, theirs)).class(), ErrorClass::Fenced);
    world.complete(painter, mine);
    let before = world.sched.snapshot();
    let again = world.does(completed(painter, mine));
    assert!(
        again.events.is_empty() && matches!(again.effects[..], [Effect::Accepted { .. }]),
        "{again:?}"
    );
    assert_eq!(world.sched.snapshot(), before);
    world.complete(other, theirs);
    assert_eq!(jobs.map(|job| world.state(job)), ["succeeded"; 2]);
    assert_eq!(world.sched.counters().attempts_completed, 2);
    adds_up(&world);
}

#[test]
fn a_worker_that_renews_after_expiry() {
    let (mut world, painter) = painter();
    let job = world.submit();
    let expired = world.accept(painter);
    world.wait(Limits::default().grant);
    world.take();
    let before = world.sched.snapshot();
    world.renew(painter, expired, 1);
    assert!(world.was_cancelled(expired), "it is told again to stop");
    assert_eq!(
        world.sched.snapshot(),
        before,
        "a renewal gives nothing back that was taken"
    );
    world.stop(painter, expired);
    let renew = Input::Renew {
        worker: painter,
        token: expired,
        sequence: 2,
        progress: None,
    };
    assert_eq!(world.refused(renew).class(), ErrorClass::Fenced);
    world.run(painter);
    assert_eq!(world.state(job), "succeeded");
    adds_up(&world);
}

#[test]
fn a_key_lives_as_long_as_its_job() {
    let mut world = World::with_limits(
        topology(&["paint"], vec![]),
        Limits {
            max_ended: 1,
            ..Limits::default()
        },
    );
    let painter = world.attach("paint", 1);
    let job = world.submit_with_key("key", 1).expect("a job");
    world.run(painter);
    world.restart();
    world.attach_as(painter, "paint", 1, vec![], vec![]);
    assert_eq!(world.submit_with_key("key", 1), Ok(job), "also when it has ended");
    let conflict = world.submit_with_key("key", 2).expect_err("another request");
    assert_eq!(
        (conflict.class(), conflict.reason()),
        (ErrorClass::Conflict, "job.key_conflict")
    );
    world.submit();
    world.run(painter);
    assert!(world.sched.job(job).is_none(), "it is forgotten");
    let next = world.submit_with_key("key", 2).expect("the key is free again");
    assert_ne!(next, job);
    world.run(painter);
    adds_up(&world);
}
