use std::time::Duration;

use stagewire_core::{Classify, ErrorClass, Incarnation, JobId, StageName, Token};
use stagewire_sched::{
    ClassSpec, Effect, Event, Input, Limits, Outcome, StageKind, StageSpec, Topology, TopologyError, Urgency, WaitCause,
};

use crate::world::{World, name, topology, video};

const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

fn due_in(class: &str, secs: u64) -> Urgency {
    Urgency {
        class: Some(class.to_owned()),
        queue_deadline: Some(Duration::from_secs(secs)),
        shape: 0,
        ..Urgency::default()
    }
}

/// The one stage of a pipeline whose workers all take any job.
fn decoding() -> World {
    let limits = Limits {
        max_ended: 8,
        ..Limits::default()
    };
    World::with_limits(topology(&["decode"], vec![]), limits)
}

/// The offer that the worker has, and how long the job's attempt takes.
fn offered(world: &World, worker: stagewire_core::Incarnation) -> JobId {
    world.offer(worker).expect("the worker has an offer").token.job
}

#[test]
fn a_job_names_its_class_or_is_standard() {
    let mut world = World::new(video());
    let plain = world.submit();
    let batch = world.submit_to("batch", 0);
    let class = |world: &World, job| world.sched.job(job).expect("it exists").terms().class.to_string();
    assert_eq!(
        (class(&world, plain), class(&world, batch)),
        ("standard".to_owned(), "batch".to_owned())
    );
    let classes = vec![ClassSpec::new(name("gold"), 3), ClassSpec::new(name("tin"), 1)];
    let mut world = World::new(video().with_classes(classes).expect("allowed classes"));
    let plain = world.submit();
    assert_eq!(
        class(&world, plain),
        "gold",
        "the first one, where none is called standard"
    );
    let urgency = Urgency {
        class: Some("interactive".to_owned()),
        ..Urgency::default()
    };
    let refusal = world.submit_as(urgency).expect_err("there is no such class");
    assert_eq!(
        (refusal.class(), refusal.reason()),
        (ErrorClass::Invalid, "class.unknown")
    );
    assert_eq!(
        refusal.to_string(),
        "there is no class \"interactive\"; this pipeline has gold, tin"
    );
}

#[test]
fn deadlines_that_cannot_be_are_refused() {
    let mut world = World::new(video());
    for wrong in [Duration::ZERO, Duration::MAX] {
        let urgency = Urgency {
            queue_deadline: Some(wrong),
            ..Urgency::default()
        };
        let refusal = world.submit_as(urgency).expect_err("no such deadline");
        assert_eq!(
            (refusal.class(), refusal.reason()),
            (ErrorClass::Invalid, "job.deadline")
        );
    }
    assert_eq!(world.sched.jobs().count(), 0);
}

#[test]
fn classes_that_cannot_be_are_refused() {
    let gold = || ClassSpec::new(name("gold"), 1);
    let cases = [
        (vec![], "the pipeline has 0 classes; it must be 1 to 16"),
        (vec![gold(); 17], "the pipeline has 17 classes; it must be 1 to 16"),
        (
            vec![gold(); 2],
            "class gold is declared twice; each class needs its own name",
        ),
        (
            vec![ClassSpec::new(name("gold"), 0)],
            "the weight of class gold is 0; it must be 1 to 1000",
        ),
        (
            vec![ClassSpec::new(name("gold"), 1001)],
            "the weight of class gold is 1001; it must be 1 to 1000",
        ),
        (
            vec![ClassSpec {
                queue_deadline: Some(Duration::ZERO),
                ..gold()
            }],
            "the queue deadline of class gold is 0; its jobs could never begin",
        ),
    ];
    for (classes, message) in cases {
        let error: TopologyError = video().with_classes(classes).expect_err(message);
        assert_eq!(
            (error.class(), error.to_string().as_str()),
            (ErrorClass::Invalid, message)
        );
    }
}

#[test]
fn inside_a_class_the_earliest_deadline_comes_first() {
    let mut world = decoding();
    let first = world.submit_to("batch", 0);
    let late = world.submit_as(due_in("batch", 900)).expect("allowed");
    let soon = world.submit_as(due_in("batch", 60)).expect("allowed");
    let last = world.submit_to("batch", 0);
    let far = world.submit_as(due_in("batch", 5_000)).expect("allowed");
    let worker = world.attach("decode", 1);
    let mut order = Vec::new();
    for _ in 0..5 {
        order.push(offered(&world, worker));
        world.run(worker);
    }
    assert_eq!(
        order,
        [soon, late, first, last, far],
        "without a deadline a job is due in an hour"
    );
}

#[test]
fn a_job_that_has_not_begun_by_its_deadline_is_dropped_and_counted() {
    let mut world = World::new(video());
    let job = world.submit_as(due_in("interactive", 5)).expect("allowed");
    let patient = world.submit_to("batch", 0);
    let waiting = world.sched.explain(world.now, job);
    assert_eq!(waiting[0].dropped_in, Some(secs(5)));
    world.wait(secs(4));
    assert_eq!(world.state(job), "active");
    world.wait(secs(2));
    assert_eq!((world.state(job), world.state(patient)), ("failed", "active"));
    let Some(Outcome::Failed(failure)) = world.sched.job(job).expect("remembered").outcome() else {
        panic!("it failed");
    };
    assert_eq!(
        (failure.class, failure.reason.as_str()),
        (ErrorClass::Deadline, "job.queue_deadline")
    );
    assert!(
        failure.message.contains("class interactive had not begun 5.0s after"),
        "{}",
        failure.message
    );
    assert!(
        failure.message.contains("its queue deadline is 5.0s"),
        "{}",
        failure.message
    );
    let counters = world.sched.counters();
    assert_eq!((counters.jobs_dropped, counters.jobs_failed), (1, 1));
    let worker = world.attach("encode", 1);
    assert_eq!(offered(&world, worker), patient, "what was dropped is not dispatched");
}

#[test]
fn a_job_that_has_begun_is_not_dropped() {
    // With an admission stage that is where it begins: what comes before is little.
    let mut stages: Vec<_> = video().stages().to_vec();
    stages[1].kind = StageKind::Admission;
    let topology = || Topology::new(stages.clone(), video().edges().to_vec()).expect("an allowed pipeline");
    let mut world = World::new(topology());
    let [encoder, denoiser] = ["encode", "denoise"].map(|stage| world.attach(stage, 1));
    let begun = world.submit_as(due_in("standard", 5)).expect("allowed");
    world.run(encoder);
    world.accept(denoiser);
    let encoded = world.submit_as(due_in("standard", 5)).expect("allowed");
    world.run(encoder);
    world.wait(secs(6));
    assert_eq!((world.state(begun), world.state(encoded)), ("active", "failed"));
    assert_eq!(world.phases(begun), ["done", "running", "blocked"]);
    // Nor when its attempt is lost: it has begun, and goes on.
    world.lose(denoiser);
    world.wait(secs(60));
    assert_eq!(world.state(begun), "active");
    // Without one, any attempt will do.
    let mut world = World::new(video());
    let encoder = world.attach("encode", 1);
    let job = world.submit_as(due_in("standard", 5)).expect("allowed");
    world.run(encoder);
    world.wait(secs(6));
    assert_eq!(world.state(job), "active");
}

#[test]
fn what_runs_of_a_job_that_fails_is_told_why_the_job_failed() {
    let told = |world: &World, token: Token| {
        let mut cancelled = world.effects.iter().filter_map(|effect| match effect {
            Effect::CancelAttempt {
                token: other, failure, ..
            } if *other == token => Some(failure.clone()),
            _ => None,
        });
        cancelled.next().expect("it is told to stop")
    };
    let why = |world: &World, job| match world.sched.job(job).and_then(|job| job.outcome()) {
        Some(Outcome::Failed(failure)) => failure.message.clone(),
        other => panic!("it failed: {other:?}"),
    };
    // An encode that runs when the job is dropped, as its denoise has not begun.
    let mut stages: Vec<_> = video().stages().to_vec();
    stages[1].kind = StageKind::Admission;
    let mut world = World::new(Topology::new(stages, video().edges().to_vec()).expect("an allowed pipeline"));
    let encoder = world.attach("encode", 1);
    let late = world.submit_as(due_in("standard", 5)).expect("allowed");
    let encoding = world.accept(encoder);
    world.wait(secs(6));
    let failure = told(&world, encoding);
    assert_eq!(
        (failure.class, failure.reason.as_str()),
        (ErrorClass::Cancelled, "job.failed")
    );
    assert!(failure.message.contains("queue deadline is 5.0s"), "{failure:?}");
    assert!(failure.message.ends_with(&why(&world, late)), "{failure:?}");
    // A decode that reads from a denoise that fails.
    let mut world = World::new(video());
    let [encoder, denoiser, decoder] = ["encode", "denoise", "decode"].map(|stage| world.attach(stage, 1));
    let job = world.submit();
    world.run(encoder);
    let denoising = world.accept(denoiser);
    world.publish(denoiser, denoising);
    let decoding = world.accept(decoder);
    world.fail(denoiser, denoising, ErrorClass::Invalid);
    assert!(told(&world, decoding).message.ends_with(&why(&world, job)));
}

#[test]
fn the_class_says_how_long_its_jobs_wait() {
    let class = |name: &str, weight, deadline| ClassSpec {
        queue_deadline: deadline,
        ..ClassSpec::new(StageName::new(name).expect("a name"), weight)
    };
    let classes = vec![class("standard", 1, Some(secs(10))), class("batch", 1, None)];
    let mut world = World::new(video().with_classes(classes).expect("allowed classes"));
    let job = world.submit();
    let own = world.submit_as(due_in("standard", 30)).expect("allowed");
    let batch = world.submit_to("batch", 0);
    world.wait(secs(20));
    assert_eq!(
        [job, own, batch].map(|job| world.state(job)),
        ["failed", "active", "active"]
    );
}

#[test]
fn deadlines_hold_over_a_restart() {
    let mut world = World::new(video());
    let job = world.submit_as(due_in("batch", 5)).expect("allowed");
    world.restart();
    assert_eq!(world.sched.job(job).expect("remembered").terms().class, name("batch"));
    world.wait(secs(6));
    assert_eq!(world.state(job), "failed");
    world.restart();
    assert_eq!((world.state(job), world.sched.counters().jobs_dropped), ("failed", 1));
}

#[test]
fn what_was_learnt_outlives_the_server() {
    // What a job costs its class is what it is predicted to take.
    let price = |world: &World, asked: Incarnation, job| {
        let mut offered = world.history.iter().filter_map(|(_, event)| match event {
            Event::Offered {
                token, worker, price, ..
            } if (token.job, *worker) == (job, asked) => Some(*price),
            _ => None,
        });
        offered.next().expect("it was offered")
    };
    let mut world = decoding();
    let worker = world.attach("decode", 1);
    for (shape, took, known) in [(7, 3, 1), (8, 40, 3)] {
        let job = world.submit_to("batch", shape);
        assert_eq!(price(&world, worker, job), secs(known));
        let token = world.accept(worker);
        for _ in 0..took {
            world.wait(secs(1));
            world.renew(worker, token, took);
        }
        world.complete(worker, token);
    }
    world.lose(worker);
    let jobs = [7, 8, 9].map(|shape| world.submit_to("batch", shape));
    let worker = world.attach("decode", 3);
    let before = jobs.map(|job| price(&world, worker, job));
    assert_eq!(before[..2], [secs(3), secs(40)]);
    world.restart();
    let worker = world.attach("decode", 3);
    assert_eq!(jobs.map(|job| price(&world, worker, job)), before);
}

#[test]
fn a_waiting_job_names_class_rank_and_what_it_waits_for() {
    let mut world = decoding();
    let worker = world.attach("decode", 1);
    world.submit_to("interactive", 0);
    world.accept(worker);
    let jobs =
        [("batch", 0), ("batch", 0), ("standard", 0), ("batch", 0)].map(|(class, shape)| world.submit_to(class, shape));
    let waiting = world.sched.explain(world.now, jobs[3]);
    assert_eq!((waiting[0].class.as_str(), waiting[0].dropped_in), ("batch", None));
    let WaitCause::Slot {
        ahead,
        others,
        advertised,
        running,
        ..
    } = waiting[0].cause
    else {
        panic!("it waits for a slot: {waiting:?}");
    };
    assert_eq!((ahead, others, advertised, running), (2, 1, 1, 1));
    let queued = |stage, class| world.sched.queued_of(&name(stage), &name(class));
    let classes = ["batch", "standard", "interactive", "no-such-class"];
    assert_eq!(classes.map(|class| queued("decode", class)), [3, 1, 0, 0]);
    assert_eq!(queued("no-such-stage", "batch"), 0);
}

/// One decode worker, a backlog of batch videos, and images that people wait for: an image waits for the video that is
/// being decoded and for no other one, and the videos go on.
#[test]
fn interactive_images_wait_for_one_residual_decode_at_most() {
    const VIDEO: (u64, u64) = (1, 5_000);
    const IMAGE: (u64, u64) = (2, 200);
    let mut world = decoding();
    let worker = world.attach("decode", 1);
    let mut seed = 1_u64;
    let mut random = |below: u64| {
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % below
    };
    // Both lengths are learnt.
    for (shape, millis) in [VIDEO, IMAGE] {
        world.submit_to("batch", shape);
        let token = world.accept(worker);
        world.now = world.now + Duration::from_millis(millis);
        world.complete(worker, token);
    }
    for _ in 0..50 {
        world.submit_to("batch", VIDEO.0);
    }
    // Half of the worker's time is wanted for images, so that there is always a video to decode.
    let mut arrivals: Vec<Duration> = Vec::new();
    let mut at = Duration::ZERO;
    for _ in 0..400 {
        at += Duration::from_millis(random(800));
        arrivals.push(at);
    }
    let start = world.now;
    let (mut submitted, mut waits, mut videos) = (std::collections::BTreeMap::new(), Vec::new(), 0);
    let mut arrivals = arrivals.into_iter().peekable();
    while waits.len() < 400 {
        let token = world.accept(worker);
        let job = token.job;
        let millis = match submitted.remove(&job) {
            Some(since) => {
                waits.push(world.now.since(since));
                IMAGE.1
            }
            None => {
                videos += 1;
                world.submit_to("batch", VIDEO.0);
                VIDEO.1
            }
        };
        let end = world.now + Duration::from_millis(millis);
        while let Some(arrival) = arrivals.next_if(|arrival| start + *arrival <= end) {
            world.now = start + arrival;
            let image = world.submit_to("interactive", IMAGE.0);
            submitted.insert(image, world.now);
        }
        world.now = end;
        world.take();
        world.complete(worker, token);
    }
    waits.sort();
    let p99 = waits[waits.len() * 99 / 100];
    // Images that arrive during one decode wait for each other, too.
    let residual = Duration::from_millis(VIDEO.1);
    assert!(p99 <= residual, "P99 wait {p99:?}");
    assert!(videos >= 10, "batch starves: {videos} videos");
    assert!(world.sched.queued_of(&name("decode"), &name("batch")) >= 49);
}

/// Everybody always wants the worker: each class gets its share of the time, whatever its jobs take.
#[test]
fn time_is_shared_by_weight() {
    let mut world = decoding();
    let worker = world.attach("decode", 1);
    let classes = [("interactive", 1, 200), ("standard", 2, 1_000), ("batch", 3, 5_000)];
    for (class, shape, _) in classes {
        for _ in 0..2 {
            world.submit_to(class, shape);
        }
    }
    let mut served = [0_u64; 3];
    while served.iter().sum::<u64>() < 260_000 {
        let token = world.accept(worker);
        let class = world.sched.job(token.job).expect("it runs").terms().class.clone();
        let position = classes
            .iter()
            .position(|known| known.0 == class.as_str())
            .expect("a known class");
        let (class, shape, millis) = classes[position];
        world.now = world.now + Duration::from_millis(millis);
        served[position] += millis;
        world.submit_to(class, shape);
        world.take();
        world.complete(worker, token);
    }
    let total = served.iter().sum::<u64>();
    for (served, weight) in served.into_iter().zip([8, 4, 1]) {
        let (share, expected) = (served * 1_000 / total, weight * 1_000 / 13);
        assert!(share.abs_diff(expected) <= 30, "{share} of 1000, and not {expected}");
    }
}

/// An offer that nobody takes costs the class nothing, and a drained worker's neither.
#[test]
fn an_offer_that_is_declined_is_paid_back() {
    let mut world = decoding();
    let worker = world.attach("decode", 1);
    for class in ["interactive", "batch"] {
        for _ in 0..3 {
            world.submit_to(class, 0);
        }
    }
    let first = offered(&world, worker);
    for _ in 0..40 {
        let token = world.offer(worker).expect("an offer").token;
        assert_eq!(token.job, first, "it is still the turn of its class");
        let failure = crate::world::failure(ErrorClass::Exhausted);
        world.does(Input::Decline { worker, token, failure });
        while world.offer(worker).is_none() {
            world.jump();
        }
    }
}

#[test]
fn a_stage_spec_is_enough_for_the_defaults() {
    let topology = Topology::new(vec![StageSpec::new(name("paint"))], vec![]).expect("an allowed pipeline");
    let classes: Vec<_> = topology
        .classes()
        .iter()
        .map(|class| (class.name.as_str(), class.weight))
        .collect();
    assert_eq!(classes, [("interactive", 8), ("standard", 4), ("batch", 1)]);
    assert!(topology.classes().iter().all(|class| class.queue_deadline.is_none()));
    assert_eq!(topology.default_class().name.as_str(), "standard");
}
