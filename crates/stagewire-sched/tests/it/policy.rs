//! Policies: one of one's own steers, whatever it says holds, and what was chosen is said as data.

use std::sync::Arc;
use std::time::Duration;

use stagewire_core::{Incarnation, JobId, StageName};
use stagewire_sched::{
    Candidate, Cheapest, Choice, Contender, Effect, FairShare, Input, Limits, Ordering, Place, Policy, Routing, TurnOf,
    WorkerInfo,
};

use crate::world::{World, topology, whole, worker_info};

/// Takes the class that is next last.
#[derive(Debug)]
struct LastClass;

impl Ordering for LastClass {
    fn next(&self, _: &StageName, contenders: &[Contender]) -> usize {
        contenders.len() - 1
    }
}

/// Takes the worker that costs most.
#[derive(Debug)]
struct Dearest;

impl Routing for Dearest {
    fn choose(&self, _: &StageName, _: JobId, candidates: &[Candidate]) -> usize {
        let all = candidates.iter().enumerate();
        all.max_by_key(|(_, one)| one.cost).map_or(0, |(at, _)| at)
    }
}

/// Names a position that is not there.
#[derive(Debug)]
struct Nowhere;

impl Ordering for Nowhere {
    fn next(&self, _: &StageName, _: &[Contender]) -> usize {
        usize::MAX
    }
}

impl Routing for Nowhere {
    fn choose(&self, _: &StageName, _: JobId, _: &[Candidate]) -> usize {
        usize::MAX
    }
}

fn under(mut world: World, ordering: impl Ordering + 'static, routing: impl Routing + 'static) -> World {
    world.sched = world.sched.clone().with_policy(Policy {
        ordering: Arc::new(ordering),
        routing: Arc::new(routing),
    });
    world
}

/// What was chosen, in that order.
fn choices(world: &World) -> Vec<Choice> {
    let chosen = world.effects.iter().filter_map(|effect| match effect {
        Effect::Chosen(choice) => Some(Choice::clone(choice)),
        _ => None,
    });
    chosen.collect()
}

fn last(world: &World) -> Choice {
    choices(world).pop().expect("something was chosen")
}

/// A job of each of two classes that wait for a worker, the batch one first.
fn two_classes(world: &mut World) -> [JobId; 2] {
    ["batch", "interactive"].map(|class| world.submit_to(class, 7))
}

#[test]
fn the_class_that_an_ordering_names_is_served_and_what_it_chose_from_is_said() {
    for (ordering, expected) in [(Arc::new(FairShare) as Arc<dyn Ordering>, 1), (Arc::new(LastClass), 0)] {
        let mut world = World::new(topology(&["decode"], vec![]));
        world.sched = world.sched.clone().with_policy(Policy {
            ordering,
            ..Policy::default()
        });
        let jobs = two_classes(&mut world);
        let decoder = world.attach("decode", 1);
        assert_eq!(world.offer(decoder).expect("an offer").token.job, jobs[expected]);
        let choice = last(&world);
        assert_eq!((choice.token.job, choice.stage.as_str()), (jobs[expected], "decode"));
        let TurnOf::Class { contenders, chosen } = &choice.turn else {
            panic!("{choice:?}");
        };
        let said: Vec<(&str, JobId)> = contenders.iter().map(|one| (one.class.as_str(), one.job)).collect();
        assert_eq!(
            said,
            [("interactive", jobs[1]), ("batch", jobs[0])],
            "in the order of their turns"
        );
        assert_eq!(contenders[*chosen].job, jobs[expected]);
        assert!(contenders[0].turns < contenders[1].turns, "{contenders:?}");
        assert!(contenders.iter().all(|one| one.predicted > Duration::ZERO && !one.owed));
        assert_eq!(choice.candidates[choice.chosen].worker, decoder);
        world.run(decoder);
        world.run(decoder);
        assert_eq!(
            jobs.map(|job| world.state(job)),
            ["succeeded"; 2],
            "the other one is next"
        );
    }
}

fn attach_at(world: &mut World, stage: &str, host: u64) -> Incarnation {
    let incarnation = Incarnation(world.id());
    let place = Place {
        host: Some(host),
        ..Place::default()
    };
    let worker = WorkerInfo {
        place,
        ..worker_info(incarnation, stage, 1)
    };
    let (running, holding) = (vec![], vec![]);
    world.does(Input::WorkerAttached {
        worker,
        running,
        holding,
    });
    incarnation
}

#[test]
fn the_worker_that_a_routing_names_gets_the_job_and_all_that_were_compared_are_said() {
    for (routing, expected) in [(Arc::new(Cheapest) as Arc<dyn Routing>, 1), (Arc::new(Dearest), 0)] {
        let limits = Limits::default();
        let mut world = World::with_limits(topology(&["paint", "decode"], vec![whole("paint", "decode")]), limits);
        world.sched = world.sched.clone().with_policy(Policy {
            routing,
            ..Policy::default()
        });
        let painter = attach_at(&mut world, "paint", 1);
        let decoders = [2, 1].map(|host| attach_at(&mut world, "decode", host));
        world.submit();
        world.run(painter);
        assert!(world.offer(decoders[expected]).is_some() && world.offer(decoders[1 - expected]).is_none());
        let choice = last(&world);
        let steps = |worker: Incarnation| {
            let found = choice.candidates.iter().find(|one| one.worker == worker);
            found.map(|one| (one.used, one.slots, one.steps, one.cost))
        };
        let away = limits.affinity_step * Place::MOST_STEPS;
        assert_eq!(steps(decoders[0]), Some((0, 1, Some(Place::MOST_STEPS), away)));
        assert_eq!(steps(decoders[1]), Some((0, 1, Some(0), Duration::ZERO)));
        assert_eq!(choice.candidates[choice.chosen].worker, decoders[expected]);
    }
}

#[test]
fn a_policy_that_names_nobody_gets_the_last_one() {
    let mut world = under(World::new(topology(&["decode"], vec![])), Nowhere, Nowhere);
    let jobs = two_classes(&mut world);
    let decoder = world.attach("decode", 1);
    assert_eq!(world.offer(decoder).expect("an offer").token.job, jobs[0]);
    world.run(decoder);
    world.run(decoder);
    assert_eq!(jobs.map(|job| world.state(job)), ["succeeded"; 2]);
}

#[test]
fn who_comes_along_in_a_batch_says_with_whom() {
    let mut world = World::new(topology(&["decode"], vec![]));
    let jobs: Vec<JobId> = (0..3).map(|_| world.submit_to("standard", 7)).collect();
    let incarnation = Incarnation(world.id());
    let worker = WorkerInfo {
        max_batch: 3,
        ..worker_info(incarnation, "decode", 1)
    };
    let (running, holding) = (vec![], vec![]);
    world.does(Input::WorkerAttached {
        worker,
        running,
        holding,
    });
    let choices = choices(&world);
    let said: Vec<(JobId, bool)> = choices
        .iter()
        .map(|choice| (choice.token.job, choice.turn == TurnOf::Along(jobs[0])))
        .collect();
    assert_eq!(said, [(jobs[0], false), (jobs[1], true), (jobs[2], true)]);
    assert!(
        choices
            .iter()
            .all(|choice| choice.candidates[choice.chosen].worker == incarnation)
    );
}

#[test]
fn what_a_policy_chose_is_replayed_without_it() {
    let mut world = under(World::new(topology(&["decode"], vec![])), LastClass, Dearest);
    let decoder = world.attach("decode", 1);
    for _ in 0..8 {
        two_classes(&mut world);
        world.run(decoder);
    }
    assert_eq!(world.replayed().snapshot(), world.sched.snapshot());
}
