//! Affinity: workers near what they read are preferred, and never waited for.

use std::time::Duration;

use stagewire_core::Incarnation;
use stagewire_sched::{Input, Limits, Place, WorkerInfo};

use crate::world::{World, stored, topology, whole, worker_info};

const fn place(host: u64, numa: u32, rail: u32) -> Place {
    Place {
        host: Some(host),
        numa: Some(numa),
        rail: Some(rail),
    }
}

/// Where what is decoded is made.
const HOME: Place = place(1, 0, 0);
const FAR: Place = place(3, 0, 9);

fn attach(world: &mut World, stage: &str, slots: u32, place: Place) -> Incarnation {
    let incarnation = Incarnation(world.id());
    let worker = WorkerInfo {
        place,
        ..worker_info(incarnation, stage, slots)
    };
    world.does(Input::WorkerAttached {
        worker,
        running: vec![],
        holding: vec![],
    });
    incarnation
}

/// A painter at home, and what it paints is decoded.
fn painting(limits: Limits) -> (World, Incarnation) {
    let pipeline = topology(&["paint", "decode"], vec![whole("paint", "decode")]);
    let mut world = World::with_limits(pipeline, limits);
    let painter = attach(&mut world, "paint", 1, HOME);
    (world, painter)
}

/// Offers near the producer, and further away.
fn counted(world: &World) -> (u64, u64) {
    let counters = world.sched.counters();
    (counters.offers_near, counters.offers_far)
}

#[test]
fn of_free_workers_the_nearest_is_taken_first() {
    let (mut world, painter) = painting(Limits::default());
    // The furthest has attached first, and would be taken where distance did not count.
    let places = [FAR, place(2, 0, 0), place(1, 1, 0), HOME];
    let decoders = places.map(|place| attach(&mut world, "decode", 1, place));
    for (expected, decoder) in [(1, 0), (1, 1), (1, 2), (1, 3)]
        .into_iter()
        .zip(decoders.into_iter().rev())
    {
        world.submit();
        world.run(painter);
        assert!(world.offer(decoder).is_some(), "after {expected:?}");
        world.accept(decoder);
        assert_eq!(counted(&world), expected);
    }
}

#[test]
fn a_free_worker_far_away_goes_before_a_busy_one_nearby() {
    let (mut world, painter) = painting(Limits {
        affinity_step: Duration::from_secs(3_600),
        ..Limits::default()
    });
    let [far, near] = [FAR, HOME].map(|place| attach(&mut world, "decode", 1, place));
    for decoder in [near, far] {
        world.submit();
        world.run(painter);
        world.accept(decoder);
    }
    let waiting = world.submit();
    world.run(painter);
    assert_eq!(world.phase(waiting, "decode"), "queued", "nobody is free");
    assert_eq!(counted(&world), (1, 1));
}

#[test]
fn distance_and_company_are_weighed_against_each_other() {
    // Nothing is known of how long decoding takes: a second. Half of the slots in use cost half of that.
    for (step, goes_near) in [(100, false), (200, true), (0, false)] {
        let (mut world, painter) = painting(Limits {
            affinity_step: Duration::from_millis(step),
            ..Limits::default()
        });
        let near = attach(&mut world, "decode", 2, HOME);
        world.submit();
        world.run(painter);
        world.accept(near);
        let far = attach(&mut world, "decode", 2, FAR);
        world.submit();
        world.run(painter);
        let offered = [near, far].map(|decoder| world.offer(decoder).is_some());
        assert_eq!(offered, [goes_near, !goes_near], "{step} ms for each of three steps");
    }
}

#[test]
fn what_is_in_the_store_is_equally_far_from_everywhere() {
    let pipeline = topology(&["paint", "decode"], vec![stored(whole("paint", "decode"))]);
    let mut world = World::new(pipeline);
    let painter = attach(&mut world, "paint", 1, HOME);
    let [far, near] = [FAR, HOME].map(|place| attach(&mut world, "decode", 1, place));
    world.submit();
    let token = world.accept(painter);
    world.publish_in(painter, token, true);
    world.complete(painter, token);
    assert!(world.offer(far).is_some() && world.offer(near).is_none());
    assert_eq!(counted(&world), (0, 0));
}

#[test]
fn where_no_host_is_known_the_least_busy_worker_is_taken() {
    let (mut world, _) = painting(Limits::default());
    let nowhere = attach(&mut world, "decode", 1, Place::default());
    world.submit();
    let painter = world.sched.workers().next().expect("the painter").incarnation();
    world.run(painter);
    assert!(world.offer(nowhere).is_some());
    assert_eq!((counted(&world), HOME.steps(Place::default())), ((0, 0), None));
}
