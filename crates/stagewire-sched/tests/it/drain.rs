//! Drains lose nothing: what runs ends or is queued again, what is held moves to the store.

use std::time::Duration;

use stagewire_core::{Classify, ErrorClass, Incarnation, PayloadId, Token};
use stagewire_sched::{DrainScope, Effect, Holder, Input, WaitCause, Waiting};

use crate::world::{World, name, payload_info, topology, video, whole};

const MINUTE: Duration = Duration::from_secs(60);

fn drain(world: &mut World, worker: Incarnation, within: Option<Duration>) {
    let scope = DrainScope::Worker(worker);
    world.does(Input::Drain { scope, within });
}

/// The worker has put a payload that it held into the store.
fn put_away(world: &mut World, worker: Incarnation, token: Token, id: PayloadId) {
    let payload = payload_info(id, true);
    world.does(Input::Published { worker, token, payload });
}

#[test]
fn what_runs_at_the_deadline_is_queued_again_free_of_charge() {
    let mut world = World::new(topology(&["paint"], vec![]));
    let painter = world.attach("paint", 2);
    let jobs = [world.submit(), world.submit()];
    let running = world.accept(painter);
    let offered = world.offer(painter).expect("two slots").token;
    drain(&mut world, painter, Some(MINUTE));
    world.does(Input::Accept {
        worker: painter,
        token: offered,
    });
    assert_eq!(
        world.phase(jobs[1], "paint"),
        "running",
        "it had the offer before the drain"
    );
    for _ in 0..5 {
        world.wait(MINUTE / 6);
        world.renew(painter, running, 1);
        world.renew(painter, offered, 1);
    }
    assert!(!world.was_cancelled(running), "the time is not over");
    assert_eq!(world.jump(), "worker.drain");
    assert!(world.was_cancelled(running) && world.was_cancelled(offered));
    let other = world.attach("paint", 2);
    for token in [running, offered] {
        world.stop(painter, token);
        world.run(other);
    }
    for job in jobs {
        assert_eq!(world.state(job), "succeeded");
        let job = world.sched.job(job).expect("it is remembered");
        assert_eq!(
            (job.losses(), job.stages()[0].failures()),
            Default::default(),
            "nobody is to blame"
        );
    }
    assert_eq!(world.sched.counters().attempts_fenced, 2);
}

#[test]
fn without_a_deadline_what_runs_goes_on_to_its_end() {
    let mut world = World::new(topology(&["paint"], vec![]));
    let painter = world.attach("paint", 1);
    let job = world.submit();
    let token = world.accept(painter);
    drain(&mut world, painter, None);
    for sequence in 1..100 {
        world.wait(Duration::from_secs(10));
        world.renew(painter, token, sequence);
    }
    world.complete(painter, token);
    assert_eq!(world.state(job), "succeeded");
}

#[test]
fn a_payload_that_moves_to_the_store_outlives_its_worker() {
    let mut world = World::new(topology(&["encode", "denoise"], vec![whole("encode", "denoise")]));
    let encoder = world.attach("encode", 1);
    let job = world.submit();
    let token = world.accept(encoder);
    let payload = world.publish(encoder, token);
    world.complete(encoder, token);
    drain(&mut world, encoder, None);
    assert_eq!(world.sched.held_by(encoder).count(), 1);
    world.take();
    put_away(&mut world, encoder, token, payload);
    assert_eq!(world.sched.held_by(encoder).count(), 0);
    assert_eq!(
        world.releases(),
        [(Holder::Worker(encoder), payload)],
        "so it knows that it is known"
    );
    put_away(&mut world, encoder, token, payload);
    world.lose(encoder);
    assert_eq!(world.sched.counters().payloads_lost, 0);
    let denoiser = world.attach("denoise", 1);
    let inputs = &world.offer(denoiser).expect("its input is there").inputs;
    assert!(inputs[0].payload.stored);
    world.run(denoiser);
    assert_eq!(world.state(job), "succeeded");
    assert_eq!(world.sched.counters().attempts_granted, 2, "nothing ran twice");
    assert!(world.releases().contains(&(Holder::Store, payload)));
}

#[test]
fn a_move_survives_a_restart() {
    let mut world = World::new(topology(&["encode", "denoise"], vec![whole("encode", "denoise")]));
    let encoder = world.attach("encode", 1);
    let job = world.submit();
    let token = world.accept(encoder);
    let payload = world.publish(encoder, token);
    world.complete(encoder, token);
    put_away(&mut world, encoder, token, payload);
    world.restart_with([payload].into());
    assert!(world.sched.worker(encoder).is_none(), "nobody waits for it");
    assert_eq!(world.phases(job), ["done", "queued"]);
}

#[test]
fn nobody_moves_what_is_not_his_or_not_there() {
    let mut world = World::new(topology(&["encode", "denoise"], vec![whole("encode", "denoise")]));
    let [encoder, other] = [(); 2].map(|()| world.attach("encode", 1));
    world.submit();
    let maker = [encoder, other]
        .into_iter()
        .find(|worker| world.offer(*worker).is_some());
    let maker = maker.expect("one of them");
    let thief = if maker == encoder { other } else { encoder };
    let token = world.accept(maker);
    let payload = world.publish(maker, token);
    put_away(&mut world, maker, token, payload);
    assert_eq!(world.sched.held_by(maker).count(), 1, "it is not complete");
    world.complete(maker, token);
    put_away(&mut world, thief, token, payload);
    assert_eq!(world.sched.held_by(maker).count(), 1, "another one's");
    world.take();
    let elsewhere = PayloadId(world.id());
    put_away(&mut world, maker, token, elsewhere);
    assert_eq!(world.releases(), [(Holder::Store, elsewhere)], "nobody asked for that");
    assert_eq!(world.sched.held_by(maker).count(), 1);
}

#[test]
fn a_pool_drains_and_says_so() {
    let mut world = World::new(video());
    let pool = [(); 3].map(|()| world.attach("encode", 1));
    let denoiser = world.attach("denoise", 1);
    let scope = DrainScope::Stage(name("encode"));
    let within = Some(MINUTE);
    world.does(Input::Drain { scope, within });
    for worker in pool {
        assert!(world.effects.contains(&Effect::Drain { worker, within }));
        let known = world.sched.worker(worker).expect("it is attached");
        assert_eq!(
            (known.is_draining(), known.drain_by()),
            (true, Some(world.now + MINUTE))
        );
    }
    assert!(!world.sched.worker(denoiser).expect("it is attached").is_draining());
    let job = world.submit();
    let waits = |world: &World| -> Vec<Waiting> { world.sched.explain(world.now, job) };
    assert_eq!(waits(&world)[0].cause, WaitCause::NoWorker { away: 0, draining: 3 });
    let fresh = world.attach("encode", 1);
    world.run(fresh);
    assert_eq!(world.phase(job, "encode"), "done", "who comes later takes work");
    let scope = DrainScope::Stage(name("encoder"));
    let refusal = world.refused(Input::Drain { scope, within });
    assert_eq!(
        (refusal.class(), refusal.reason()),
        (ErrorClass::NotFound, "stage.unknown")
    );
}

/// Whoever of the pool is away at that moment comes back to a drain, with the same deadline.
#[test]
fn a_pool_drains_with_those_who_are_away() {
    let mut world = World::new(topology(&["encode", "decode"], vec![whole("encode", "decode")]));
    let mut pool = [(); 3].map(|()| world.attach("encode", 1)).to_vec();
    let job = world.submit();
    let place = pool.iter().position(|worker| world.offer(*worker).is_some());
    let maker = pool.swap_remove(place.expect("one of them"));
    let idle = pool[0];
    let token = world.accept(maker);
    world.away(idle);
    world.away(maker);
    world.take();
    let (scope, within) = (DrainScope::Stage(name("encode")), Some(MINUTE));
    world.does(Input::Drain { scope, within });
    let told = |world: &World| -> Vec<Incarnation> {
        let told = world.effects.iter().filter_map(|effect| match effect {
            Effect::Drain { worker, .. } => Some(*worker),
            _ => None,
        });
        told.collect()
    };
    let away = [idle, maker];
    assert!(
        told(&world).iter().all(|worker| !away.contains(worker)),
        "nobody hears what is said now"
    );
    world.take();
    world.wait(MINUTE / 4);
    world.attach_as(idle, "encode", 1, vec![], vec![]);
    world.attach_as(maker, "encode", 1, vec![token], vec![]);
    for worker in away {
        let left = Effect::Drain {
            worker,
            within: Some(MINUTE / 4 * 3),
        };
        assert!(world.effects.contains(&left), "it was drained while it was away");
        assert!(world.sched.worker(worker).expect("it is back").is_draining());
    }
    let other = world.submit();
    assert_eq!(world.phase(other, "encode"), "queued", "nobody takes it");
    world.publish(maker, token);
    world.complete(maker, token);
    assert_eq!(world.phase(job, "encode"), "done", "what ran goes on to its end");
    assert_eq!(world.phase(other, "encode"), "queued", "nobody takes it");
}

/// The deadline of a drain passes for one that is away, too: it is told to stop once it is back.
#[test]
fn what_runs_on_one_that_is_away_is_queued_again_at_the_deadline() {
    let mut world = World::new(topology(&["paint"], vec![]));
    let painter = world.attach("paint", 1);
    let job = world.submit();
    let token = world.accept(painter);
    world.away(painter);
    drain(&mut world, painter, Some(MINUTE / 4));
    assert_eq!((world.jump(), world.phase(job, "paint")), ("worker.drain", "queued"));
    world.attach_as(painter, "paint", 1, vec![token], vec![]);
    assert!(world.was_cancelled(token));
    world.stop(painter, token);
    assert_eq!(world.phase(job, "paint"), "queued", "it drains still");
    let other = world.attach("paint", 1);
    world.run(other);
    assert_eq!(world.state(job), "succeeded");
}

/// After a restart a worker is known only from what it runs: the drain finds it all the same.
#[test]
fn a_pool_drains_with_those_who_are_expected_back_after_a_restart() {
    let mut world = World::new(topology(&["paint"], vec![]));
    let painter = world.attach("paint", 1);
    let job = world.submit();
    let token = world.accept(painter);
    world.restart();
    let (scope, within) = (DrainScope::Stage(name("paint")), None);
    world.does(Input::Drain { scope, within });
    world.attach_as(painter, "paint", 1, vec![token], vec![]);
    assert!(world.sched.worker(painter).expect("it is back").is_draining());
    world.complete(painter, token);
    assert_eq!(world.state(job), "succeeded");
    let next = world.submit();
    assert_eq!(world.phase(next, "paint"), "queued");
}

#[test]
fn a_drain_is_told_again_and_keeps_its_deadline() {
    let mut world = World::new(topology(&["paint"], vec![]));
    let painter = world.attach("paint", 1);
    drain(&mut world, painter, Some(MINUTE));
    world.wait(MINUTE / 2);
    world.take();
    drain(&mut world, painter, None);
    let half = Effect::Drain {
        worker: painter,
        within: Some(MINUTE / 2),
    };
    assert_eq!(world.take(), std::slice::from_ref(&half));
    world.away(painter);
    world.attach_as(painter, "paint", 1, vec![], vec![]);
    assert_eq!(world.take(), [half], "it may not have heard");
    drain(&mut world, painter, Some(MINUTE * 10));
    world.wait(MINUTE);
    let known = world.sched.worker(painter).expect("it is attached");
    assert_eq!(known.drain_by(), Some(world.now + MINUTE * 9), "the last word counts");
}
