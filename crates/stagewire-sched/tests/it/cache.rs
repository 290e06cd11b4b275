//! Outputs that are made once for all jobs that would make the same.

use std::collections::BTreeSet;
use std::time::Duration;

use stagewire_core::{ByteCount, Epoch, ErrorClass, Incarnation, JobId, PayloadId};
use stagewire_sched::{CacheKey, Effect, Event, Holder, Input, Limits, Sched, StageSpec, Topology, Urgency, WaitCause};

use crate::world::{World, name, stored, topology, whole};

/// Encode, denoise, decode; what the encoder makes goes through the store.
fn pipeline() -> Topology {
    let edges = vec![stored(whole("encode", "denoise")), whole("denoise", "decode")];
    topology(&["encode", "denoise", "decode"], edges)
}

/// A job whose prompt has this number.
fn prompt(world: &mut World, number: u128) -> JobId {
    let urgency = Urgency {
        cache: vec![(name("encode"), CacheKey(number))],
        ..Urgency::default()
    };
    world.submit_as(urgency).expect("a job like others")
}

fn in_store(world: &World) -> Vec<PayloadId> {
    let of_store = |(holder, payload): (Holder, PayloadId)| (holder == Holder::Store).then_some(payload);
    world.releases().into_iter().filter_map(of_store).collect()
}

fn input(world: &World, worker: Incarnation) -> PayloadId {
    world.offer(worker).expect("the worker has an offer").inputs[0]
        .payload
        .id
}

#[test]
fn a_stage_is_not_run_again_for_what_another_job_has_made() {
    let mut world = World::new(pipeline());
    let [encoder, denoiser, decoder] = ["encode", "denoise", "decode"].map(|stage| world.attach(stage, 1));
    let first = prompt(&mut world, 1);
    world.run(encoder);
    let made = input(&world, denoiser);
    for worker in [denoiser, decoder] {
        world.run(worker);
    }
    assert_eq!(world.state(first), "succeeded");
    assert_eq!(in_store(&world), [], "it is kept");

    let second = prompt(&mut world, 1);
    assert_eq!(world.phases(second), ["cached", "offered", "blocked"]);
    assert_eq!(
        world.heard(second)[..3],
        ["submitted", "encode queued", "encode cached"]
    );
    assert_eq!(input(&world, denoiser), made);
    for worker in [denoiser, decoder] {
        world.run(worker);
    }
    assert_eq!(world.state(second), "succeeded");
    assert_eq!(world.sched.counters().stages_cached, 1);

    let other = prompt(&mut world, 2);
    assert_eq!(world.phases(other)[0], "offered", "another prompt is encoded");
}

#[test]
fn what_is_made_at_present_is_waited_for() {
    let mut world = World::new(pipeline());
    let encoder = world.attach("encode", 2);
    let first = prompt(&mut world, 1);
    let token = world.accept(encoder);
    let second = prompt(&mut world, 1);
    let other = prompt(&mut world, 2);
    assert_eq!(world.phases(second)[0], "queued");
    assert_eq!(
        world.phases(other)[0],
        "offered",
        "it takes the slot that the second job leaves"
    );
    let waiting = world.sched.explain(world.now, second);
    assert_eq!(waiting[0].cause, WaitCause::SameWork { job: first });
    world.publish_in(encoder, token, true);
    world.complete(encoder, token);
    assert_eq!(world.phases(second)[0], "cached");
}

#[test]
fn who_waits_for_one_that_fails_makes_it_itself() {
    let ends: [fn(&mut World, Incarnation, JobId); 3] = [
        |world, encoder, job| {
            let token = world.sched.job(job).and_then(|job| job.stages()[0].phase().token());
            world.fail(encoder, token.expect("it runs"), ErrorClass::Internal);
        },
        |world, _, job| _ = world.does(Input::Cancel { job }),
        |world, worker, _| _ = world.does(Input::WorkerLost { worker }),
    ];
    for end in ends {
        let mut world = World::new(pipeline());
        let (encoder, another) = (world.attach("encode", 1), world.attach("encode", 1));
        let first = prompt(&mut world, 1);
        world.accept(encoder);
        let second = prompt(&mut world, 1);
        assert_eq!(world.phases(second)[0], "queued");
        end(&mut world, encoder, first);
        let phases = [first, second].map(|job| world.phases(job)[0]);
        assert!(phases.contains(&"offered"), "{phases:?}");
        let mut workers = [encoder, another].into_iter();
        let asked = workers.find(|worker| world.offer(*worker).is_some());
        world.run(asked.expect("somebody was asked"));
        assert_eq!(world.sched.cache_tally().payloads, 1);
        assert!(["done", "cached"].contains(&world.phases(second)[0]));
    }
}

#[test]
fn a_batch_makes_each_once() {
    let mut world = World::new(pipeline());
    let jobs: Vec<_> = [1, 1, 2, 2].map(|number| prompt(&mut world, number)).into();
    let encoder = Incarnation(world.id());
    let mut worker = crate::world::worker_info(encoder, "encode", 1);
    worker.max_batch = 4;
    world.does(Input::WorkerAttached {
        worker,
        running: vec![],
        holding: vec![],
    });
    let offered = |world: &World| {
        let phases = jobs.iter().map(|job| world.phases(*job)[0]);
        phases.map(|phase| phase == "offered").collect::<Vec<_>>()
    };
    assert_eq!(offered(&world), [true, false, true, false]);
}

#[test]
fn what_is_kept_survives_a_restart_with_the_store_and_is_made_again_without() {
    for there in [true, false] {
        let mut world = World::new(pipeline());
        let [encoder, denoiser] = ["encode", "denoise"].map(|stage| world.attach(stage, 1));
        prompt(&mut world, 1);
        world.run(encoder);
        let made = input(&world, denoiser);
        let mut sched = Sched::new(pipeline(), Limits::default());
        for (at, event) in &world.journal {
            sched.apply(*at, event);
        }
        assert_eq!(sched.snapshot(), world.sched.snapshot());
        let restored = Sched::restore(pipeline(), Limits::default(), sched.snapshot()).expect("the same pipeline");
        assert_eq!(restored.check_index(), Ok(()));
        assert_eq!(restored.snapshot(), sched.snapshot());
        world.sched = sched;
        world.does(Input::Restarted {
            epoch: Epoch(2),
            stored: there.then_some(made).into_iter().collect::<BTreeSet<_>>(),
        });
        assert_eq!(world.sched.needs_payload(made), there);
        let second = prompt(&mut world, 1);
        assert_eq!(world.phases(second)[0], if there { "cached" } else { "queued" });
    }
}

#[test]
fn a_payload_that_is_lost_is_made_again_once_for_all() {
    let mut world = World::new(pipeline());
    let [encoder, denoiser] = ["encode", "denoise"].map(|stage| world.attach(stage, 1));
    let jobs = [1; 3].map(|number| prompt(&mut world, number));
    world.run(encoder);
    let made = input(&world, denoiser);
    assert_eq!(jobs.map(|job| world.phases(job)[0]), ["done", "cached", "cached"]);
    let token = world.accept(denoiser);
    world.fail_for_lost(denoiser, token, made);
    assert_eq!(in_store(&world), [made], "whoever keeps it hears so once");
    let phases = jobs.map(|job| world.phases(job)[0]);
    assert_eq!(
        phases.iter().filter(|phase| **phase == "offered").count(),
        1,
        "{phases:?}"
    );
    world.run(encoder);
    for _ in jobs {
        world.run(denoiser);
    }
    let encoded = world.sched.counters();
    assert_eq!((encoded.attempts_completed, encoded.cache_kept), (5, 2));
}

#[test]
fn what_nobody_needs_goes_for_what_somebody_does_the_least_recently_used_first() {
    // Payloads have a MiB each: two for nobody, of eight in all.
    let limits = Limits {
        payload_bytes: Some(ByteCount(8 << 20)),
        ..Limits::default()
    };
    let mut world = World::with_limits(pipeline(), limits);
    let workers = ["encode", "denoise", "decode"].map(|stage| world.attach(stage, 1));
    let mut payloads = Vec::new();
    let mut all = |world: &mut World, number| {
        let job = prompt(world, number);
        if world.phases(job)[0] != "cached" {
            world.run(workers[0]);
        }
        payloads.push(input(world, workers[1]));
        world.run(workers[1]);
        world.run(workers[2]);
    };
    for number in [1, 2, 1, 3] {
        all(&mut world, number);
    }
    assert_eq!(in_store(&world), [payloads[1]], "the second was used longest ago");
    let tally = world.sched.cache_tally();
    assert_eq!((tally.payloads, tally.idle_bytes, tally.used_bytes), (2, 2 << 20, 0));
    let credit = world.sched.byte_credit().expect("there is a bound");
    assert_eq!(credit.free, credit.advertised, "it is in nobody's way");
}

#[test]
fn a_payload_that_is_used_counts_once_and_is_not_dropped() {
    let limits = Limits {
        payload_bytes: Some(ByteCount(4 << 20)),
        ..Limits::default()
    };
    let mut world = World::with_limits(pipeline(), limits);
    let encoder = world.attach("encode", 1);
    let jobs: Vec<_> = (0..20).map(|_| prompt(&mut world, 1)).collect();
    world.run(encoder);
    assert!(jobs[1..].iter().all(|job| world.phases(*job)[0] == "cached"));
    let credit = world.sched.byte_credit().expect("there is a bound");
    assert_eq!(credit.held, ByteCount(1 << 20));
    for job in jobs {
        world.does(Input::Cancel { job });
    }
    assert_eq!(world.sched.cache_tally().idle_bytes, 1 << 20, "kept for the next");
}

#[test]
fn what_the_store_does_not_have_is_not_kept() {
    let mut world = World::new(topology(&["encode", "denoise"], vec![whole("encode", "denoise")]));
    let encoder = world.attach("encode", 1);
    prompt(&mut world, 1);
    let second = prompt(&mut world, 1);
    world.run(encoder);
    assert_eq!(world.phases(second)[0], "offered");
    assert_eq!(world.sched.cache_tally().payloads, 0);
}

#[test]
fn what_follows_from_what_is_kept_saves_what_it_was_made_of() {
    let edges = vec![stored(whole("encode", "refine")), stored(whole("refine", "denoise"))];
    let mut world = World::new(topology(&["encode", "refine", "denoise"], edges));
    let [encoder, refiner] = ["encode", "refine"].map(|stage| world.attach(stage, 1));
    let refined = || Urgency {
        cache: vec![(name("refine"), CacheKey(1))],
        ..Urgency::default()
    };
    world.submit_as(refined()).expect("a job like others");
    world.run(encoder);
    world.run(refiner);
    let second = world.submit_as(refined()).expect("a job like others");
    assert_eq!(world.phases(second), ["skipped", "cached", "queued"]);
}

#[test]
fn a_cached_stage_is_no_beginning() {
    let stages = ["encode", "denoise"].map(|stage| StageSpec::new(name(stage)));
    let edges = vec![stored(whole("encode", "denoise"))];
    let mut world = World::new(Topology::new(stages.into(), edges).expect("an allowed pipeline"));
    let encoder = world.attach("encode", 1);
    prompt(&mut world, 1);
    world.run(encoder);
    let late = world.submit_as(Urgency {
        cache: vec![(name("encode"), CacheKey(1))],
        queue_deadline: Some(Duration::from_secs(5)),
        ..Urgency::default()
    });
    let late = late.expect("a job like others");
    assert_eq!(world.phases(late)[0], "cached");
    world.wait(Duration::from_secs(6));
    assert_eq!(world.state(late), "failed");
}

#[test]
fn the_bytes_are_released_once_when_the_last_is_dropped() {
    let mut world = World::new(pipeline());
    let [encoder, denoiser] = ["encode", "denoise"].map(|stage| world.attach(stage, 1));
    let jobs = [1, 1].map(|number| prompt(&mut world, number));
    world.run(encoder);
    let made = input(&world, denoiser);
    for job in jobs {
        world.does(Input::Cancel { job });
    }
    assert_eq!(in_store(&world), []);
    let decision = world.does(Input::PayloadLost { payload: made });
    assert_eq!(decision.events, [Event::CacheDropped { payload: made }]);
    assert_eq!(in_store(&world), [made]);
    world.effects.retain(|effect| !matches!(effect, Effect::Release { .. }));
    world.does(Input::PayloadLost { payload: made });
    assert_eq!(in_store(&world), []);
}
