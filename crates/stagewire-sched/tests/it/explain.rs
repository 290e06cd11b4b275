use std::time::Duration;

use stagewire_sched::{DrainScope, Input, Limits, Position, WaitCause};

use crate::world::{World, name, topology, video};

fn cause(world: &World, job: stagewire_core::JobId, stage: &str) -> WaitCause {
    let waiting = world.sched.explain(world.now, job);
    let of_stage = waiting.into_iter().find(|waiting| waiting.stage == Some(name(stage)));
    of_stage.expect("the stage is not done").cause
}

#[test]
fn every_stage_says_what_it_waits_for() {
    let mut world = World::new(video());
    let job = world.submit();
    assert_eq!(
        cause(&world, job, "encode"),
        WaitCause::NoWorker { away: 0, draining: 0 }
    );
    let stages = vec![name("encode")];
    assert_eq!(cause(&world, job, "denoise"), WaitCause::Inputs { stages });
    let encoder = world.attach("encode", 1);
    let within = Limits::default().offer;
    assert_eq!(
        cause(&world, job, "encode"),
        WaitCause::Answer {
            worker: encoder,
            within
        }
    );
    let token = world.accept(encoder);
    world.renew(encoder, token, 3);
    let WaitCause::Attempt {
        worker,
        progress,
        within,
    } = cause(&world, job, "encode")
    else {
        panic!("it runs");
    };
    assert_eq!((worker, within), (encoder, Limits::default().grant));
    assert_eq!(progress.map(|progress| progress.done), Some(3));
    let next = world.submit();
    let expected = WaitCause::Slot {
        ahead: 0,
        others: 0,
        advertised: 1,
        running: 1,
        reserved: 0,
        stopping: 0,
        paused: 0,
        declined: None,
    };
    assert_eq!(cause(&world, next, "encode"), expected);
    world.away(encoder);
    assert_eq!(
        cause(&world, next, "encode"),
        WaitCause::NoWorker { away: 1, draining: 0 }
    );
}

#[test]
fn waiting_is_measured_from_the_time_it_began() {
    let mut world = World::new(topology(&["paint"], vec![]));
    let deaf = world.attach("paint", 1);
    let job = world.submit();
    world.wait(Duration::from_millis(1_500));
    let waiting = world.sched.explain(world.now, job);
    assert_eq!(
        waiting[0].waited,
        Duration::from_millis(1_500),
        "offers that end badly are waiting, too"
    );
    let expected = WaitCause::Slot {
        ahead: 0,
        others: 0,
        advertised: 1,
        running: 0,
        reserved: 0,
        stopping: 0,
        paused: 1,
        declined: None,
    };
    assert_eq!(waiting[0].cause, expected);
    world.lose(deaf);
}

#[test]
fn a_queue_says_how_many_are_ahead() {
    let mut world = World::new(topology(&["paint"], vec![]));
    let jobs = [(); 5].map(|()| world.submit());
    let painter = world.attach("paint", 1);
    world.accept(painter);
    for (position, job) in jobs[1..].iter().enumerate() {
        let WaitCause::Slot { ahead, .. } = cause(&world, *job, "paint") else {
            panic!("there is one slot");
        };
        assert_eq!(ahead, position);
    }
}

#[test]
fn stopping_and_draining_are_explained() {
    let mut world = World::new(topology(&["paint"], vec![]));
    let painter = world.attach("paint", 1);
    let job = world.submit();
    let waiting = world.submit();
    let token = world.accept(painter);
    world.cancel(job);
    let why = world.sched.explain(world.now, job);
    let within = Limits::default().cancel;
    assert_eq!(why[0].cause, WaitCause::Stopping { attempts: 1, within });
    world.does(Input::Drain {
        scope: DrainScope::All,
        within: None,
    });
    assert_eq!(cause(&world, waiting, "paint"), WaitCause::Draining);
    world.stop(painter, token);
    assert_eq!(world.sched.explain(world.now, job), []);
}

#[test]
fn a_position_is_that_of_the_explanation() {
    let mut world = World::new(video());
    let jobs: Vec<_> = ["standard", "batch", "standard", "standard"]
        .map(|class| world.submit_to(class, 0))
        .into();
    let position = |world: &World, job| {
        let mut positions = world
            .sched
            .positions(job)
            .map(|(stage, position)| (stage.to_string(), position));
        let first = positions.next();
        assert_eq!(positions.next(), None, "it waits for one stage");
        first
    };
    for (job, ahead, others) in [(jobs[0], 0, 1), (jobs[1], 0, 3), (jobs[3], 2, 1)] {
        let (stage, found) = position(&world, job).expect("it waits");
        assert_eq!((stage.as_str(), found), ("encode", Position { ahead, others }));
    }
    world.attach("encode", 1);
    assert_eq!(position(&world, jobs[0]), None, "it is offered");
    let moved = position(&world, jobs[3]).expect("it waits").1;
    assert_eq!(moved, Position { ahead: 1, others: 1 });
}
