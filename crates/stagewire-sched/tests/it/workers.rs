use stagewire_core::{Classify, ErrorClass, Incarnation, PayloadId};
use stagewire_sched::{DrainScope, Effect, Holder, Input, Limits, LinkState, Refusal, Slot};

use crate::world::{World, completed, name, topology, video, worker_info};

#[test]
fn a_worker_that_comes_back_in_time_goes_on() {
    let mut world = World::new(topology(&["paint"], vec![]));
    let painter = world.attach("paint", 1);
    let job = world.submit();
    let token = world.accept(painter);
    world.away(painter);
    assert!(matches!(
        world.sched.worker(painter).map(|worker| worker.link()),
        Some(LinkState::Away { .. })
    ));
    world.wait(Limits::default().linger / 2);
    assert_eq!(
        world.phase(job, "paint"),
        "running",
        "longer than a grant, as nobody can renew it"
    );
    world.attach_as(painter, "paint", 1, vec![token], vec![]);
    world.complete(painter, token);
    assert_eq!(world.state(job), "succeeded");
    assert_eq!(world.sched.counters().attempts_granted, 1);
}

#[test]
fn a_worker_that_stays_away_is_lost() {
    let mut world = World::new(topology(&["paint"], vec![]));
    let painter = world.attach("paint", 1);
    let job = world.submit();
    let token = world.accept(painter);
    world.away(painter);
    assert_eq!(world.jump(), "worker.away");
    assert_eq!(world.phase(job, "paint"), "queued");
    assert!(world.sched.worker(painter).is_none());
    assert_eq!(world.refused(completed(painter, token)).reason(), "worker.unknown");
    world.attach_as(painter, "paint", 1, vec![token], vec![]);
    assert!(world.was_cancelled(token), "judged when it reconnects");
    assert_eq!(world.phase(job, "paint"), "queued", "its slot is not free");
    world.stop(painter, token);
    world.run(painter);
    assert_eq!(world.state(job), "succeeded");
}

#[test]
fn a_grant_that_never_arrived_is_not_waited_for() {
    let mut world = World::new(topology(&["paint"], vec![]));
    let painter = world.attach("paint", 1);
    let job = world.submit();
    let token = world.accept(painter);
    world.away(painter);
    world.attach_as(painter, "paint", 1, vec![], vec![]);
    assert_eq!(world.sched.counters().attempts_not_running, 1);
    assert_ne!(world.offer(painter).expect("an offer").token, token);
    assert_eq!(world.sched.job(job).map(|job| job.losses()), Some(Default::default()));
}

#[test]
fn payloads_that_a_worker_lost_or_brings_back_are_judged() {
    let mut world = World::new(video());
    let [encoder, decoder] = ["encode", "decode"].map(|stage| world.attach(stage, 1));
    let job = world.submit();
    let token = world.accept(encoder);
    let kept = world.publish(encoder, token);
    world.complete(encoder, token);
    world.away(encoder);
    let junk = PayloadId(world.id());
    world.attach_as(encoder, "encode", 1, vec![], vec![kept, junk]);
    assert_eq!(world.releases(), [(Holder::Worker(encoder), junk)]);
    assert_eq!(world.phase(job, "denoise"), "queued");
    world.away(encoder);
    world.attach_as(encoder, "encode", 1, vec![], vec![]);
    assert_eq!(world.phases(job), ["offered", "blocked", "blocked"]);
    assert_eq!(world.sched.counters().payloads_lost, 1);
    assert!(world.sched.worker(decoder).is_some());
}

#[test]
fn a_payload_whose_publication_was_on_its_way_is_kept() {
    let mut world = World::new(video());
    let encoder = world.attach("encode", 1);
    let job = world.submit();
    let token = world.accept(encoder);
    world.away(encoder);
    let [published, junk] = [(); 2].map(|()| PayloadId(world.id()));
    world.attach_as(encoder, "encode", 1, vec![token], vec![published, junk]);
    assert_eq!(world.releases(), [], "the attempt may publish either");
    let payload = crate::world::payload_info(published, false);
    world.does(Input::Published {
        worker: encoder,
        token,
        payload,
    });
    assert_eq!(world.releases(), [(Holder::Worker(encoder), junk)]);
    world.complete(encoder, token);
    assert_eq!(world.phase(job, "encode"), "done");
}

#[test]
fn a_completion_whose_answer_was_lost_is_answered_on_return() {
    let mut world = World::new(topology(&["paint"], vec![]));
    let painter = world.attach("paint", 1);
    world.submit();
    let token = world.run(painter);
    world.away(painter);
    world.take();
    world.attach_as(painter, "paint", 1, vec![token], vec![]);
    assert_eq!(world.take(), [Effect::Accepted { worker: painter, token }]);
}

#[test]
fn attaching_twice_takes_back_the_offers_and_doubles_nothing() {
    let mut world = World::new(topology(&["paint"], vec![]));
    let painter = world.attach("paint", 2);
    let job = world.submit();
    let token = world.accept(painter);
    world.submit();
    let offered = world.offer(painter).expect("an offer").token;
    world.attach_as(painter, "paint", 2, vec![token], vec![]);
    assert_ne!(world.offer(painter).expect("a new offer").token, offered);
    let worker = world.sched.worker(painter).expect("it is known");
    let mut slots: Vec<_> = worker.slots().values().copied().collect();
    slots.sort_by_key(|slot| *slot == Slot::Reserved);
    assert_eq!((worker.advertised(), slots), (2, vec![Slot::Running, Slot::Reserved]));
    world.complete(painter, token);
    assert_eq!(world.state(job), "succeeded");
}

#[test]
fn what_a_worker_says_of_itself_is_checked() {
    let mut world = World::new(topology(&["paint"], vec![]));
    let mut attach = |slots, stage: &str, running: usize| {
        let incarnation = Incarnation(world.id());
        let mut worker = worker_info(incarnation, "paint", slots);
        worker.stage = name(stage);
        let job = stagewire_core::JobId(world.id());
        let token = |attempt| stagewire_core::Token {
            epoch: stagewire_core::Epoch(0),
            job,
            attempt: stagewire_core::Attempt(attempt),
        };
        let running = (0..u32::try_from(running).expect("few")).map(token).collect();
        let holding = vec![];
        world.refused(Input::WorkerAttached {
            worker,
            running,
            holding,
        })
    };
    assert_eq!(attach(0, "paint", 0).reason(), "worker.slots");
    assert_eq!(attach(2000, "paint", 0).reason(), "worker.slots");
    assert_eq!(attach(1, "paint", 2).reason(), "worker.slots");
    assert_eq!(attach(1, "pant", 0).class(), ErrorClass::NotFound);
    let painter = world.attach("paint", 1);
    let worker = worker_info(painter, "paint", 2);
    let (running, holding) = (vec![], vec![]);
    let refusal = world.refused(Input::WorkerAttached {
        worker,
        running,
        holding,
    });
    assert_eq!(refusal.reason(), "worker.changed");
}

#[test]
fn a_draining_worker_finishes_and_gets_no_more() {
    let mut world = World::new(topology(&["paint"], vec![]));
    let painter = world.attach("paint", 1);
    let job = world.submit();
    let token = world.accept(painter);
    let scope = DrainScope::Worker(painter);
    let within = None;
    world.does(Input::Drain { scope, within });
    assert!(world.effects.contains(&Effect::Drain {
        worker: painter,
        within
    }));
    let next = world.submit();
    world.complete(painter, token);
    assert_eq!((world.state(job), world.phase(next, "paint")), ("succeeded", "queued"));
    let other = world.attach("paint", 1);
    world.run(other);
    assert_eq!(world.state(next), "succeeded");
    let nobody = Incarnation(world.id());
    let scope = DrainScope::Worker(nobody);
    assert_eq!(
        world.refused(Input::Drain { scope, within }),
        Refusal::UnknownWorker { worker: nobody }
    );
}

#[test]
fn an_unknown_worker_is_not_listened_to() {
    let mut world = World::new(topology(&["paint"], vec![]));
    let painter = world.attach("paint", 1);
    world.submit();
    let token = world.accept(painter);
    let nobody = Incarnation(world.id());
    assert_eq!(
        world.refused(completed(nobody, token)),
        Refusal::UnknownWorker { worker: nobody }
    );
    world.lose(nobody);
    world.away(nobody);
    world.complete(painter, token);
}
