use std::time::Duration;

use stagewire_core::{Attempt, Classify, ErrorClass};
use stagewire_sched::{Effect, Input, Limits, Outcome, WaitCause};

use crate::world::{World, failure, topology};

fn painters() -> World {
    World::new(topology(&["paint"], vec![]))
}

#[test]
fn an_offer_that_is_not_answered_costs_nothing() {
    let mut world = painters();
    let deaf = world.attach("paint", 1);
    let job = world.submit();
    let offer = world.offer(deaf).expect("an offer").clone();
    assert_eq!(offer.answer_within, Limits::default().offer);
    assert_eq!(world.jump(), "offer.answer");
    assert_eq!(world.phase(job, "paint"), "queued");
    assert_eq!(world.sched.counters().offers_unanswered, 1);
    assert_eq!(world.stage(job, "paint").failures(), 0);
    let refusal = world.refused(Input::Accept {
        worker: deaf,
        token: offer.token,
    });
    assert_eq!(
        (refusal.class(), refusal.reason()),
        (ErrorClass::Fenced, "attempt.superseded")
    );
    let other = world.attach("paint", 1);
    world.run(other);
    assert_eq!(world.state(job), "succeeded");
}

#[test]
fn a_worker_that_declines_pauses_longer_each_time() {
    let mut world = painters();
    let busy = world.attach("paint", 1);
    world.submit();
    let mut pauses = Vec::new();
    for _ in 0..8 {
        let token = world.offer(busy).expect("an offer").token;
        let failure = failure(ErrorClass::Exhausted);
        world.does(Input::Decline {
            worker: busy,
            token,
            failure,
        });
        assert!(world.offer(busy).is_none());
        let start = world.now;
        assert_eq!(world.jump(), "worker.resume");
        pauses.push(world.now.since(start).as_secs());
    }
    assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 64, 64]);
    let token = world.accept(busy);
    world.complete(busy, token);
    world.submit();
    let token = world.offer(busy).expect("an offer at once").token;
    let failure = failure(ErrorClass::Exhausted);
    world.does(Input::Decline {
        worker: busy,
        token,
        failure,
    });
    let start = world.now;
    world.jump();
    assert_eq!(
        world.now.since(start),
        Duration::from_secs(1),
        "an accepted offer makes good"
    );
}

#[test]
fn an_offer_ends_with_its_worker() {
    let mut world = painters();
    let first = world.attach("paint", 1);
    let job = world.submit();
    let token = world.offer(first).expect("an offer").token;
    world.lose(first);
    assert_eq!(world.phase(job, "paint"), "queued");
    assert_eq!(
        world.sched.job(job).map(|job| job.losses()),
        Some(Default::default()),
        "death between offer and accept"
    );
    let second = world.attach("paint", 1);
    assert_ne!(world.offer(second).expect("an offer").token, token);
    world.away(second);
    assert_eq!(
        world.phase(job, "paint"),
        "queued",
        "a broken stream takes back offers at once"
    );
    let third = world.attach("paint", 1);
    world.run(third);
    assert_eq!(world.state(job), "succeeded");
}

#[test]
fn nobody_accepts_for_somebody_else() {
    let mut world = painters();
    let [first, second] = [(); 2].map(|()| world.attach("paint", 1));
    let job = world.submit();
    let (owner, other) = if world.offer(first).is_some() {
        (first, second)
    } else {
        (second, first)
    };
    let token = world.offer(owner).expect("an offer").token;
    for input in [
        Input::Accept { worker: other, token },
        Input::Decline {
            worker: other,
            token,
            failure: failure(ErrorClass::Exhausted),
        },
    ] {
        assert_eq!(world.refused(input).class(), ErrorClass::Fenced);
    }
    world.run(owner);
    assert_eq!(world.state(job), "succeeded");
}

#[test]
fn the_least_busy_worker_is_asked_first() {
    let mut world = painters();
    let workers = [(); 3].map(|()| world.attach("paint", 2));
    for _ in 0..3 {
        world.submit();
    }
    for worker in workers {
        world.accept(worker);
    }
}

#[test]
fn the_offer_says_what_to_read_and_how_to_hand_over() {
    let mut world = World::new(crate::world::video());
    let [encoder, denoiser] = ["encode", "denoise"].map(|stage| world.attach(stage, 1));
    let job = world.submit();
    let token = world.accept(encoder);
    let payload = world.publish(encoder, token);
    world.complete(encoder, token);
    let offer = world.offer(denoiser).expect("an offer");
    assert_eq!((offer.token.job, offer.token.epoch), (job, world.sched.epoch()));
    assert_eq!(
        offer.inputs.iter().map(|input| input.payload.id).collect::<Vec<_>>(),
        [payload]
    );
    assert_eq!(
        (offer.output.publish, offer.output.chunks, offer.output.chunk_dim),
        (true, 3, 2)
    );
    assert!(
        !format!("{offer:?}").contains("[1, 2, 3]"),
        "handles carry capabilities"
    );
    let granted = world
        .effects
        .iter()
        .filter(|effect| matches!(effect, Effect::Grant { .. }))
        .count();
    assert_eq!(granted, 1);
}

#[test]
fn a_job_that_no_worker_can_run_fails_with_the_reason() {
    for class in [ErrorClass::Invalid, ErrorClass::Unsupported] {
        let mut world = World::new(crate::world::video());
        let encoder = world.attach("encode", 1);
        let [job, next] = [(); 2].map(|()| world.submit());
        let token = world.offer(encoder).expect("an offer").token;
        world.does(Input::Decline {
            worker: encoder,
            token,
            failure: failure(class),
        });
        assert_eq!(world.state(job), "failed");
        let outcome = world.sched.job(job).and_then(|job| job.outcome().cloned());
        assert_eq!(outcome, Some(Outcome::Failed(failure(class))));
        world.restart();
        assert_eq!((world.state(job), world.phase(next, "encode")), ("failed", "queued"));
    }
}

#[test]
fn a_job_says_why_its_offer_was_declined() {
    let mut world = painters();
    let busy = world.attach("paint", 1);
    let job = world.submit();
    let token = world.offer(busy).expect("an offer").token;
    let failure = failure(ErrorClass::Exhausted);
    world.does(Input::Decline {
        worker: busy,
        token,
        failure: failure.clone(),
    });
    let declined = |world: &World| match &world.sched.explain(world.now, job)[0].cause {
        WaitCause::Slot { declined, .. } => declined.clone(),
        other => panic!("instead of a slot: {other:?}"),
    };
    assert_eq!(declined(&world), Some(failure));
    world.jump();
    assert_eq!(world.jump(), "offer.answer");
    assert_eq!(declined(&world), None, "this offer was not answered");
}

#[test]
fn attempts_are_counted_from_1() {
    let mut world = World::new(crate::world::video());
    let [encoder, denoiser] = ["encode", "denoise"].map(|stage| world.attach(stage, 1));
    world.submit();
    assert_eq!(world.run(encoder).attempt, Attempt(1));
    assert_eq!(world.accept(denoiser).attempt, Attempt(2), "over all stages of a job");
    world.restart();
    world.submit();
    let encoder = world.attach("encode", 1);
    assert_eq!(world.accept(encoder).attempt, Attempt(1));
}
