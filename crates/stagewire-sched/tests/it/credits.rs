use std::time::Duration;

use stagewire_core::Incarnation;
use stagewire_sched::{EdgeSpec, Input, Slot, StageSpec, Topology, Urgency, WaitCause};

use crate::world::{World, name, whole};

/// Stages that may each hold so many payloads.
fn bounded(stages: &[&str], edges: Vec<EdgeSpec>, max_held: u32) -> World {
    let spec = |stage: &&str| StageSpec {
        max_held,
        ..StageSpec::new(name(stage))
    };
    let topology = Topology::new(stages.iter().map(spec).collect(), edges);
    World::new(topology.expect("an allowed pipeline"))
}

fn chain() -> Vec<EdgeSpec> {
    vec![whole("encode", "denoise"), whole("denoise", "decode")]
}

#[test]
fn a_stage_at_its_bound_is_not_dispatched() {
    let mut world = bounded(&["encode", "denoise", "decode"], chain(), 2);
    let encoder = world.attach("encode", 4);
    let jobs = [(); 4].map(|()| world.submit());
    world.run(encoder);
    world.run(encoder);
    assert!(world.offer(encoder).is_none(), "four slots, but two payloads are held");
    assert_eq!(world.sched.held(&name("encode")), 2);
    let waiting = world.sched.explain(world.now, jobs[3]);
    let expected = WaitCause::Credit {
        ahead: 1,
        others: 0,
        held: 2,
        limit: 2,
    };
    assert_eq!(waiting[0].cause, expected);
    let denoiser = world.attach("denoise", 1);
    world.run(denoiser);
    assert!(
        world.offer(encoder).is_none(),
        "the latents may be lost, so the embeddings are kept"
    );
    let decoder = world.attach("decode", 1);
    world.run(decoder);
    assert_eq!(world.state(jobs[0]), "succeeded");
    assert!(world.offer(encoder).is_some());
}

#[test]
fn running_attempts_count_as_held() {
    let mut world = bounded(&["encode", "denoise", "decode"], chain(), 3);
    let encoder = world.attach("encode", 8);
    for _ in 0..8 {
        world.submit();
    }
    for _ in 0..3 {
        world.accept(encoder);
    }
    assert!(world.offer(encoder).is_none());
}

#[test]
fn what_ends_gives_its_credit_back() {
    let mut world = bounded(&["encode", "denoise", "decode"], chain(), 1);
    let encoder = world.attach("encode", 2);
    let jobs = [(); 3].map(|()| world.submit());
    world.run(encoder);
    world.cancel(jobs[0]);
    let token = world.accept(encoder);
    assert_eq!(token.job, jobs[1]);
    world.fail(encoder, token, stagewire_core::ErrorClass::Internal);
    assert_eq!(world.offer(encoder).map(|offer| offer.token.job), Some(jobs[2]));
}

/// Lets whoever has an offer run it, the given workers first, until nobody has one.
fn run_all(world: &mut World, workers: &[Incarnation]) {
    while let Some(worker) = workers.iter().find(|worker| world.offer(**worker).is_some()) {
        world.run(*worker);
    }
}

#[test]
fn max_held_never_deadlocks_with_fan_out() {
    // Job 1 holds the only credit of the left path and waits for the right one; job 2 the other way round.
    let edges = || {
        vec![
            whole("split", "left"),
            whole("split", "prepare"),
            whole("prepare", "right"),
            whole("left", "join"),
            whole("right", "join"),
        ]
    };
    let stages = ["split", "left", "prepare", "right", "join"];
    for order in [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 3, 1, 0, 4], [3, 2, 0, 4, 1]] {
        let mut world = bounded(&stages, edges(), 1);
        let workers = stages.map(|stage| world.attach(stage, 2));
        let workers = order.map(|position| workers[position]);
        let jobs = [(); 12].map(|()| world.submit());
        run_all(&mut world, &workers);
        for job in jobs {
            assert_eq!(world.state(job), "succeeded");
        }
    }
}

#[test]
fn crossed_credits_are_untied_by_the_oldest_job() {
    let edges = vec![whole("prepare", "right"), whole("left", "join"), whole("right", "join")];
    let spec = |stage: &str| StageSpec {
        max_held: if stage == "prepare" { 2 } else { 1 },
        ..StageSpec::new(name(stage))
    };
    let stages = ["left", "prepare", "right", "join"];
    let topology = Topology::new(stages.map(spec).to_vec(), edges).expect("an allowed pipeline");
    let mut world = World::new(topology);
    let [left, prepare, right, join] = stages.map(|stage| world.attach(stage, 2));
    let (first, second) = (world.submit(), world.submit());
    assert_eq!(
        world.run(left).job,
        first,
        "the first job holds the only credit of the left path"
    );
    let [a, b] = [world.accept(prepare), world.accept(prepare)];
    let (slow, quick) = if a.job == first { (a, b) } else { (b, a) };
    world.publish(prepare, quick);
    world.complete(prepare, quick);
    assert_eq!(world.run(right).job, second, "the second one that of the right path");
    assert_eq!(world.phase(second, "left"), "queued");
    world.publish(prepare, slow);
    world.complete(prepare, slow);
    assert_eq!(
        world.run(right).job,
        first,
        "as the oldest it needs no credit once nothing of it runs"
    );
    assert_eq!(world.sched.held(&name("right")), 2, "which is the price");
    run_all(&mut world, &[left, prepare, right, join]);
    assert_eq!([world.state(first), world.state(second)], ["succeeded", "succeeded"]);
}

/// Two ways to a join that hold one payload each, the right one by way of `prepare`.
fn two_ways(stages: &[&str], mut edges: Vec<EdgeSpec>) -> World {
    let spec = |stage: &&str| StageSpec {
        max_held: if *stage == "prepare" { 2 } else { 1 },
        ..StageSpec::new(name(stage))
    };
    edges.extend([whole("prepare", "right"), whole("left", "join"), whole("right", "join")]);
    World::new(Topology::new(stages.iter().map(spec).collect(), edges).expect("an allowed pipeline"))
}

#[test]
fn crossed_credits_are_untied_while_paused_though_an_older_job_has_not_begun() {
    let stages = ["left", "prepare", "right", "join"];
    let mut world = two_ways(&stages, vec![]);
    let older = world.submit();
    // Due before the older one, and so begun before it.
    let soon = Urgency {
        queue_deadline: Some(Duration::from_secs(600)),
        ..Urgency::default()
    };
    let [first, second] = [(); 2].map(|()| world.submit_as(soon.clone()).expect("it is accepted"));
    let workers = stages.map(|stage| world.attach(stage, 2));
    let [left, prepare, right, _] = workers;
    assert_eq!(world.run(left).job, first);
    let [a, b] = [world.accept(prepare), world.accept(prepare)];
    let (slow, quick) = if a.job == first { (a, b) } else { (b, a) };
    world.publish(prepare, quick);
    world.complete(prepare, quick);
    assert_eq!(world.run(right).job, second);
    world.does(Input::Pause);
    world.publish(prepare, slow);
    world.complete(prepare, slow);
    assert_eq!(world.run(right).job, first);
    run_all(&mut world, &workers);
    let states = [first, second, older].map(|job| world.state(job));
    assert_eq!(states, ["succeeded", "succeeded", "active"]);
}

#[test]
fn a_job_that_lacks_a_worker_does_not_hold_up_those_that_need_none_there() {
    let stages = ["left", "prepare", "right", "extra", "join"];
    let mut world = two_ways(&stages, vec![whole("extra", "join")]);
    let workers = ["left", "prepare", "right", "join"].map(|stage| world.attach(stage, 2));
    let lacking = world.submit();
    let skip = Urgency {
        skip: vec![name("extra")],
        ..Urgency::default()
    };
    let others = [(); 4].map(|()| world.submit_as(skip.clone()).expect("it is accepted"));
    run_all(&mut world, &workers);
    assert_eq!(world.phases(lacking)[3], "queued", "it holds both ways' credits");
    for job in others {
        assert_eq!(world.state(job), "succeeded");
    }
    assert_eq!(world.sched.held(&name("left")), 1, "and no others' outputs are left");
    let extra = world.attach("extra", 1);
    run_all(&mut world, &[&workers[..], &[extra]].concat());
    assert_eq!(world.state(lacking), "succeeded");
}

#[test]
fn slots_add_up() {
    let mut world = bounded(&["encode", "denoise", "decode"], chain(), 16);
    let encoder = world.attach("encode", 3);
    for _ in 0..3 {
        world.submit();
    }
    let first = world.accept(encoder);
    world.cancel(first.job);
    let used = |world: &World| {
        let worker = world.sched.worker(encoder).expect("it is attached");
        let count = |usage: fn(&Slot) -> bool| worker.slots().values().filter(|slot| usage(slot)).count();
        let reserved = count(|slot| *slot == Slot::Reserved);
        let running = count(|slot| *slot == Slot::Running);
        let stopping = count(|slot| matches!(slot, Slot::Stopping { .. }));
        (worker.free(), reserved, running, stopping)
    };
    world.accept(encoder);
    assert_eq!(used(&world), (0, 1, 1, 1));
    world.stop(encoder, first);
    assert_eq!(used(&world), (1, 1, 1, 0));
}
