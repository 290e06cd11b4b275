//! Batches: items of a work queue that one worker runs together.

use std::time::Duration;

use stagewire_core::{Classify, ErrorClass, Incarnation, JobId, Token};
use stagewire_sched::{Effect, Event, Input, Offer, StageKind, StageSpec, Topology, Urgency, WorkerInfo};

use crate::world::{World, name, topology, video, whole, worker_info};

fn info(incarnation: Incarnation, stage: &str, max_batch: u32) -> WorkerInfo {
    WorkerInfo {
        max_batch,
        ..worker_info(incarnation, stage, 1)
    }
}

fn attach_as(world: &mut World, incarnation: Incarnation, stage: &str, max_batch: u32, running: Vec<Token>) {
    world.does(Input::WorkerAttached {
        worker: info(incarnation, stage, max_batch),
        running,
        holding: vec![],
    });
}

fn attach(world: &mut World, stage: &str, max_batch: u32) -> Incarnation {
    let incarnation = Incarnation(world.id());
    attach_as(world, incarnation, stage, max_batch, vec![]);
    incarnation
}

/// One stage.
fn pool() -> World {
    World::new(topology(&["decode"], vec![]))
}

fn submit(world: &mut World, shapes: &[u64]) -> Vec<JobId> {
    let submit = |shape: &u64| world.submit_to("standard", *shape);
    shapes.iter().map(submit).collect()
}

/// Offers since the last call, of jobs in the order in which they were made.
fn offers(world: &mut World) -> Vec<Offer> {
    let offers = world.take().into_iter().filter_map(|effect| match effect {
        Effect::Offer(offer) => Some(*offer),
        _ => None,
    });
    offers.collect()
}

fn jobs(offers: &[Offer]) -> Vec<JobId> {
    offers.iter().map(|offer| offer.token.job).collect()
}

fn accept(world: &mut World, offer: &Offer) -> Token {
    let (worker, token) = (offer.worker, offer.token);
    world.does(Input::Accept { worker, token });
    token
}

#[test]
fn what_waits_is_offered_together_and_ends_apart() {
    let mut world = pool();
    let all = submit(&mut world, &[7; 6]);
    let worker = attach(&mut world, "decode", 4);
    let first = offers(&mut world);
    assert_eq!(jobs(&first), all[..4]);
    let tokens: Vec<Token> = first.iter().map(|offer| accept(&mut world, offer)).collect();
    for token in &tokens[..3] {
        world.complete(worker, *token);
    }
    assert_eq!(offers(&mut world), [], "one of the batch still runs");
    assert_eq!(world.state(all[0]), "succeeded");
    world.complete(worker, tokens[3]);
    assert_eq!(jobs(&offers(&mut world)), all[4..]);
}

#[test]
fn a_batch_waits_for_nobody() {
    let mut world = pool();
    attach(&mut world, "decode", 4);
    let first = submit(&mut world, &[7]);
    assert_eq!(jobs(&offers(&mut world)), first);
    submit(&mut world, &[7]);
    assert_eq!(offers(&mut world), []);
}

#[test]
fn only_jobs_of_one_shape_run_together() {
    let mut world = pool();
    let all = submit(&mut world, &[7, 8, 7, 9, 7]);
    let worker = attach(&mut world, "decode", 4);
    let first = offers(&mut world);
    assert_eq!(jobs(&first), [all[0], all[2], all[4]]);
    for offer in &first {
        let token = accept(&mut world, offer);
        world.complete(worker, token);
    }
    assert_eq!(jobs(&offers(&mut world)), [all[1]]);
}

#[test]
fn other_classes_fill_what_the_own_one_leaves() {
    let mut world = pool();
    let batch = world.submit_to("batch", 7);
    let standard = world.submit_to("standard", 7);
    let interactive = [(); 2].map(|()| world.submit_to("interactive", 7));
    attach(&mut world, "decode", 4);
    assert_eq!(
        jobs(&offers(&mut world)),
        [interactive[0], interactive[1], standard, batch]
    );
}

#[test]
fn one_that_fails_or_is_declined_leaves_the_others_alone() {
    let mut world = pool();
    let all = submit(&mut world, &[7; 3]);
    let worker = attach(&mut world, "decode", 3);
    let batch = offers(&mut world);
    let [failing, running] = [&batch[0], &batch[1]].map(|offer| accept(&mut world, offer));
    world.does(Input::Decline {
        worker,
        token: batch[2].token,
        failure: crate::world::failure(ErrorClass::Exhausted),
    });
    world.fail(worker, failing, ErrorClass::Internal);
    assert_eq!([0, 1, 2].map(|n| world.state(all[n])), ["failed", "active", "active"]);
    world.complete(worker, running);
    assert_eq!(world.state(all[1]), "succeeded");
    world.wait(Duration::from_secs(2));
    assert_eq!(
        jobs(&offers(&mut world)),
        [all[2]],
        "what was declined is offered again"
    );
}

#[test]
fn a_lost_worker_gives_back_every_item() {
    let mut world = pool();
    let all = submit(&mut world, &[7; 3]);
    let worker = attach(&mut world, "decode", 3);
    for offer in offers(&mut world) {
        accept(&mut world, &offer);
    }
    world.lose(worker);
    let losses = all
        .iter()
        .map(|job| world.sched.job(*job).expect("it goes on").losses().killed_workers);
    assert_eq!(losses.collect::<Vec<_>>(), [1, 1, 1]);
    attach(&mut world, "decode", 2);
    assert_eq!(jobs(&offers(&mut world)), all[..1], "each alone from now on");
}

/// Whatever runs together with one that kills its worker loses an attempt to that, and no more.
#[test]
fn one_that_kills_its_workers_takes_no_others_along() {
    let mut world = pool();
    let all = submit(&mut world, &[7; 8]);
    let poison = all[2];
    let (mut lost, mut together) = (0, 0);
    while world.state(poison) == "active" || all.iter().any(|job| world.state(*job) == "active") {
        let worker = attach(&mut world, "decode", 4);
        loop {
            let batch = offers(&mut world);
            let tokens: Vec<Token> = batch.iter().map(|offer| accept(&mut world, offer)).collect();
            if tokens.is_empty() {
                break;
            }
            together = together.max(tokens.len());
            if tokens.iter().any(|token| token.job == poison) {
                world.lose(worker);
                lost += 1;
                break;
            }
            for token in tokens {
                world.complete(worker, token);
            }
        }
    }
    assert_eq!(
        (lost, together),
        (3, 4),
        "what has not been tried runs together as before"
    );
    assert_eq!(world.dead(), [poison]);
    for job in all.iter().filter(|job| **job != poison) {
        assert_eq!(world.state(*job), "succeeded");
        let losses = world.sched.job(*job).expect("it is remembered").losses();
        assert!(losses.killed_workers <= 1, "{losses:?}");
    }
}

#[test]
fn what_has_failed_is_tried_again_alone() {
    let stage = StageSpec {
        max_attempts: 3,
        ..StageSpec::new(name("decode"))
    };
    let mut world = World::new(Topology::new(vec![stage], vec![]).expect("an allowed pipeline"));
    let tried = submit(&mut world, &[7; 2]);
    let worker = attach(&mut world, "decode", 4);
    for offer in offers(&mut world) {
        let token = accept(&mut world, &offer);
        world.fail(worker, token, ErrorClass::Internal);
    }
    world.lose(worker);
    let fresh = submit(&mut world, &[7; 2]);
    world.wait(Duration::from_secs(60));
    let worker = attach(&mut world, "decode", 4);
    let mut order = Vec::new();
    for _ in 0..3 {
        let batch = offers(&mut world);
        order.push(jobs(&batch));
        for offer in &batch {
            let token = accept(&mut world, offer);
            world.complete(worker, token);
        }
    }
    assert_eq!(order, [vec![tried[0]], vec![tried[1]], fresh]);
}

#[test]
fn a_batch_takes_no_more_than_there_is_room_for_its_outputs() {
    let mut stage = StageSpec::new(name("encode"));
    stage.max_held = 3;
    let stages = vec![stage, StageSpec::new(name("decode"))];
    let mut world = World::new(Topology::new(stages, vec![whole("encode", "decode")]).expect("an allowed pipeline"));
    let all = submit(&mut world, &[7; 6]);
    attach(&mut world, "encode", 8);
    assert_eq!(jobs(&offers(&mut world)), all[..3]);
}

#[test]
fn a_batch_goes_on_when_the_server_restarts() {
    let mut world = World::new(video());
    let all = submit(&mut world, &[7; 4]);
    let worker = attach(&mut world, "encode", 3);
    let batch = offers(&mut world);
    let tokens: Vec<Token> = batch.iter().map(|offer| accept(&mut world, offer)).collect();
    world.wait(Duration::from_secs(6));
    world.restart();
    attach_as(&mut world, worker, "encode", 3, tokens.clone());
    assert_eq!(offers(&mut world), [], "it has not ended");
    for token in &tokens {
        world.publish(worker, *token);
        world.complete(worker, *token);
    }
    assert_eq!(jobs(&offers(&mut world)), all[3..]);
    // Three attempts in six seconds: what was learnt is the same for those who saw it and those who read of it.
    world.restart();
    attach_as(&mut world, worker, "encode", 3, vec![]);
    let price = world.history.iter().rev().find_map(|(_, event)| match event {
        Event::Offered { price, .. } => Some(*price),
        _ => None,
    });
    assert_eq!(price, Some(Duration::from_secs(2)));
}

#[test]
fn what_has_not_begun_does_not_come_along_while_the_pipeline_is_paused() {
    let mut world = pool();
    let all = submit(&mut world, &[7; 3]);
    let worker = attach(&mut world, "decode", 1);
    let first = offers(&mut world).remove(0);
    accept(&mut world, &first);
    world.does(Input::Pause);
    world.lose(worker);
    attach(&mut world, "decode", 4);
    assert_eq!(jobs(&offers(&mut world)), all[..1]);
}

#[test]
fn a_worker_whose_batches_cannot_be_is_refused() {
    let kind = StageKind::Admission;
    let denoise = StageSpec {
        kind,
        ..StageSpec::new(name("denoise"))
    };
    let stages = vec![denoise, StageSpec::new(name("decode"))];
    let mut world = World::new(Topology::new(stages, vec![whole("denoise", "decode")]).expect("an allowed pipeline"));
    for (stage, slots, max_batch) in [("decode", 1, 0), ("decode", 2, 2), ("denoise", 1, 2)] {
        let incarnation = Incarnation(world.id());
        let refused = world.refused(Input::WorkerAttached {
            worker: WorkerInfo {
                slots,
                ..info(incarnation, stage, max_batch)
            },
            running: vec![],
            holding: vec![],
        });
        assert_eq!(
            (refused.class(), refused.reason()),
            (ErrorClass::Invalid, "worker.batch")
        );
        assert!(refused.to_string().contains(stage), "{refused}");
    }
    let incarnation = Incarnation(world.id());
    let refused = world.refused(Input::WorkerAttached {
        worker: info(incarnation, "decode", u32::MAX),
        running: vec![],
        holding: vec![],
    });
    assert_eq!(refused.reason(), "worker.slots");
}

#[test]
fn explain_counts_the_attempts_of_a_batch() {
    let mut world = pool();
    submit(&mut world, &[7; 2]);
    attach(&mut world, "decode", 4);
    let waiting = world.submit_as(Urgency::default()).expect("it is accepted");
    let waits = world.sched.explain(world.now, waiting);
    let stagewire_sched::WaitCause::Slot {
        advertised, reserved, ..
    } = waits[0].cause
    else {
        panic!("{waits:?}");
    };
    assert_eq!(
        (advertised, reserved),
        (2, 2),
        "the other places of the batch are nobody's"
    );
}
