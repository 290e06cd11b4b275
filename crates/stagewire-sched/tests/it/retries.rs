//! What failed is tried again, later and later, and never in anybody's way.

use std::time::Duration;

use stagewire_core::{ErrorClass, Incarnation, JobId};
use stagewire_sched::{Backoff, Limits, StageSpec, Topology, WaitCause};

use crate::world::{World, name, whole};

const LIMIT: u32 = 4;
const BACKOFF: Backoff = Backoff {
    first: Duration::from_secs(2),
    longest: Duration::from_secs(5),
};

fn world() -> (World, Incarnation) {
    let stage = StageSpec {
        max_attempts: LIMIT,
        backoff: BACKOFF,
        ..StageSpec::new(name("paint"))
    };
    let mut world = World::new(Topology::new(vec![stage], vec![]).expect("one stage"));
    let painter = world.attach("paint", 1);
    (world, painter)
}

fn fail(world: &mut World, worker: Incarnation) {
    let token = world.accept(worker);
    world.fail(worker, token, ErrorClass::Internal);
}

/// What the job waits for, where that is time.
fn backoff(world: &World, job: JobId) -> (u32, Duration) {
    match &world.sched.explain(world.now, job)[0].cause {
        WaitCause::Backoff {
            failures,
            limit,
            within,
            failure,
        } => {
            assert_eq!(*limit, LIMIT);
            assert_eq!(failure.as_ref().map(|failure| &*failure.reason), Some("test.failure"));
            (*failures, *within)
        }
        other => panic!("it waits for {other:?}"),
    }
}

#[test]
fn a_failure_is_tried_again_after_a_wait_that_doubles() {
    let (mut world, painter) = world();
    let job = world.submit();
    for (failures, most) in [(1, 2), (2, 4), (3, 5)] {
        fail(&mut world, painter);
        let most = Duration::from_secs(most);
        let (counted, within) = backoff(&world, job);
        assert_eq!((counted, world.phase(job, "paint")), (failures, "blocked"));
        assert!(
            (most / 2..=most).contains(&within),
            "{within:?} after {failures} failures"
        );
        let began = world.now;
        assert_eq!(world.jump(), "stage.retry");
        assert_eq!((world.now.since(began), world.phase(job, "paint")), (within, "offered"));
    }
    world.run(painter);
    assert_eq!(world.state(job), "succeeded");
}

#[test]
fn a_job_that_waits_to_be_tried_again_holds_no_slot_and_blocks_nobody() {
    let (mut world, painter) = world();
    let [first, second] = [world.submit(), world.submit()];
    fail(&mut world, painter);
    assert_eq!(world.run(painter).job, second, "in the meantime the next one runs");
    world.jump();
    let third = world.submit();
    assert_eq!(
        [world.run(painter).job, world.run(painter).job],
        [first, third],
        "and then it goes first"
    );
}

#[test]
fn a_wait_survives_a_restart_and_one_that_is_over_ends_then() {
    let (mut world, painter) = world();
    let job = world.submit();
    fail(&mut world, painter);
    let (_, within) = backoff(&world, job);
    world.restart();
    assert_eq!(backoff(&world, job), (1, within));
    world.attach_as(painter, "paint", 1, vec![], vec![]);
    world.wait(within);
    fail(&mut world, painter);
    let (failures, within) = backoff(&world, job);
    assert_eq!(failures, 2);
    world.now = world.now + within;
    world.restart();
    world.attach_as(painter, "paint", 1, vec![], vec![]);
    world.run(painter);
    assert_eq!(world.state(job), "succeeded");
}

/// What was announced stays true where a server starts on the same journal with other limits.
#[test]
fn a_replay_says_the_same_whatever_the_configuration_is_now() {
    let (mut world, painter) = world();
    let job = world.submit();
    fail(&mut world, painter);
    let announced = world.stage(job, "paint").retry();
    assert!(announced.is_some());
    for (max_attempts, backoff) in [
        (1, BACKOFF),
        (
            LIMIT,
            Backoff {
                first: Duration::from_secs(60),
                longest: Duration::from_secs(60),
            },
        ),
    ] {
        let stage = StageSpec {
            max_attempts,
            backoff,
            ..StageSpec::new(name("paint"))
        };
        let topology = Topology::new(vec![stage], vec![]).expect("one stage");
        let replayed = world.replayed_with(topology);
        assert_eq!(
            replayed.job(job).expect("it is there").stages()[0].retry(),
            announced,
            "{max_attempts} attempts"
        );
        assert_eq!(replayed.snapshot(), world.sched.snapshot());
    }
}

#[test]
fn a_job_that_waits_can_be_cancelled() {
    let (mut world, painter) = world();
    let job = world.submit();
    fail(&mut world, painter);
    world.cancel(job);
    assert_eq!(world.state(job), "cancelled");
    assert_eq!(world.sched.poll_timeout(), None, "nothing is due any more");
    world.restart();
}

#[test]
fn losses_are_not_waited_for() {
    let (mut world, painter) = world();
    let job = world.submit();
    world.accept(painter);
    world.lose(painter);
    let other = world.attach("paint", 1);
    let token = world.accept(other);
    world.stop(other, token);
    world.run(other);
    assert_eq!(
        (world.state(job), world.stage(job, "paint").failures()),
        ("succeeded", 0)
    );
}

#[test]
fn an_input_that_is_lost_during_the_wait_is_made_again_meanwhile() {
    let stages = ["encode", "decode"].map(|stage| StageSpec {
        max_attempts: 2,
        ..StageSpec::new(name(stage))
    });
    let topology = Topology::new(stages.to_vec(), vec![whole("encode", "decode")]);
    let mut world = World::with_limits(topology.expect("a pipeline"), Limits::default());
    let [encoder, decoder] = ["encode", "decode"].map(|stage| world.attach(stage, 1));
    let job = world.submit();
    world.run(encoder);
    fail(&mut world, decoder);
    world.lose(encoder);
    assert_eq!(world.phases(job), ["queued", "blocked"]);
    let encoder = world.attach("encode", 1);
    world.run(encoder);
    assert_eq!(world.phases(job), ["done", "blocked"], "the wait is not over");
    world.jump();
    world.run(decoder);
    assert_eq!(world.state(job), "succeeded");
}
