//! Attempts that yield: to jobs of other classes, and where their worker leaves.

use std::time::Duration;

use stagewire_core::{Incarnation, JobId, Member, Token};
use stagewire_sched::{
    ClassSpec, DrainScope, Effect, Input, Losses, StageKind, StageSpec, Topology, TopologyError, WaitCause, WorkerInfo,
};

use crate::checkpoints::topology;
use crate::world::{World, name, steps, worker_info};

/// Batch jobs that run, each on a worker of its own, the first to be granted first.
fn busy(world: &mut World, workers: usize) -> Vec<(Incarnation, JobId, Token)> {
    let mut running = Vec::new();
    for _ in 0..workers {
        world.wait(Duration::from_secs(1));
        let worker = world.attach("denoise", 1);
        let job = world.submit_to("batch", 1);
        let token = world.accept(worker);
        running.push((worker, job, token));
    }
    world.take();
    running
}

/// The attempt that the worker runs.
fn running(world: &World, worker: Incarnation) -> (JobId, Token) {
    let slots = world.sched.worker(worker).expect("it is there").slots();
    let token = *slots.iter().next().expect("it runs something").0;
    (token.job, token)
}

#[test]
fn an_interactive_job_gets_the_worker_of_the_batch_job_that_was_granted_last() {
    let mut world = World::new(topology());
    let [(early, _, first), (late, batch, second)] = busy(&mut world, 2)[..] else {
        panic!("two workers")
    };
    world.renew(early, first, 50);
    world.renew(late, second, 5);
    let wanted = world.submit_to("interactive", 2);
    assert_eq!(world.asked(), [second], "the least is lost with it");
    let told = world.sched.explain(world.now, batch);
    let why = told[0].yields.as_ref().expect("it says that it yields");
    assert_eq!(why.reason, "attempt.preempted");
    assert_eq!(why.details.get("by"), Some(&wanted.to_string()));
    let kept = world.yield_at(late, second, 6);
    assert!(world.effects.contains(&Effect::Accepted {
        worker: late,
        token: second
    }));
    let heard = [
        "denoise progress",
        "denoise yielding",
        "denoise checkpointed",
        "denoise yielded",
    ];
    assert_eq!(world.heard(batch), heard);
    let told = world.sched.explain(world.now, batch);
    assert_eq!(told[0].resumes, Some(steps(6)));
    assert_eq!(
        told[0].yields.as_ref().map(|why| &*why.reason),
        Some("attempt.preempted")
    );
    assert!(matches!(told[0].cause, WaitCause::Slot { .. }), "{told:?}");
    let token = world.accept(late);
    assert_eq!(token.job, wanted, "the worker was freed for it");
    world.publish(late, token);
    world.complete(late, token);
    let offer = world.offer(late).expect("it goes on");
    assert_eq!(offer.token.job, batch);
    assert_eq!(offer.checkpoint.as_ref().map(|kept| kept.payload.id), Some(kept));
    let job = world.sched.job(batch).expect("it is remembered");
    assert_eq!(
        (job.losses(), job.stages()[0].failures(), job.stages()[0].preemptions()),
        (Losses::default(), 0, 1)
    );
    let ends: Vec<_> = job.attempts().iter().map(|attempt| attempt.end.name()).collect();
    assert_eq!(ends, ["yielded"]);
    assert_eq!(world.sched.counters().attempts_preempted, 1);
}

#[test]
fn nobody_is_asked_without_need_or_before_it_has_advanced() {
    let mut world = World::new(topology());
    let [(worker, _, token)] = busy(&mut world, 1)[..] else {
        panic!("one worker")
    };
    let first = world.submit_to("interactive", 2);
    assert_eq!(world.asked(), [], "nothing of it is done");
    world.submit_to("standard", 2);
    world.renew(worker, token, 99);
    assert_eq!(world.asked(), [], "its next step is its last");
    world.cancel(first);
    world.renew(worker, token, 1);
    assert_eq!(world.asked(), []);
    // A standard job waits as before; an idle worker leaves nobody to ask.
    let other = world.attach("denoise", 1);
    world.accept(other);
    world.submit_to("interactive", 2);
    let idle = world.attach("denoise", 1);
    assert!(world.offer(idle).is_some());
    assert_eq!(world.asked(), []);
}

#[test]
fn each_waiting_job_asks_one_attempt_and_each_attempt_is_asked_once() {
    let mut world = World::new(topology());
    let jobs = busy(&mut world, 3);
    for (worker, _, token) in &jobs {
        world.renew(*worker, *token, 5);
    }
    world.submit_to("interactive", 2);
    assert_eq!(world.asked().len(), 1);
    for (sequence, (worker, _, token)) in (10..).zip(&jobs) {
        world.renew(*worker, *token, sequence);
    }
    assert_eq!(world.asked().len(), 1, "it has yet to answer");
    world.submit_to("interactive", 2);
    world.submit_to("interactive", 2);
    world.submit_to("interactive", 2);
    let mut asked = world.asked();
    asked.sort();
    asked.dedup();
    assert_eq!(asked.len(), 3, "each once, and there are no more");
}

#[test]
fn a_job_is_preempted_three_times_and_then_runs_to_its_end() {
    let mut world = World::new(topology());
    let [(worker, batch, mut token)] = busy(&mut world, 1)[..] else {
        panic!("one worker")
    };
    for round in 1..=4 {
        world.take();
        world.renew(worker, token, round * 10);
        let wanted = world.submit_to("interactive", 2);
        if round == 4 {
            assert_eq!(world.asked(), [], "it has made way often enough");
            break;
        }
        assert_eq!(world.asked(), [token], "round {round}");
        world.yield_at(worker, token, round * 10 + 1);
        assert_eq!(world.run(worker).job, wanted);
        token = world.accept(worker);
        assert_eq!(token.job, batch);
    }
    world.publish(worker, token);
    world.complete(worker, token);
    assert_eq!(world.phase(batch, "denoise"), "done");
}

/// Interactive jobs that never end do not keep batch jobs from ending: without preemption they would start in turn, and with
/// it each start of one of them is undone three times at most.
#[test]
fn no_class_starves() {
    let mut world = World::new(topology());
    let worker = world.attach("denoise", 1);
    let batch = world.submit_to("batch", 1);
    let mut done = 0_u64;
    let mut interactive = 0;
    while world.phase(batch, "denoise") != "done" {
        while world.sched.queued_of(&name("denoise"), &name("interactive")) < 2 {
            world.submit_to("interactive", 2);
        }
        let token = world.accept(worker);
        world.wait(Duration::from_secs(1));
        if token.job != batch {
            interactive += 1;
            world.publish(worker, token);
            world.complete(worker, token);
            let decoder = world.attach("decode", 1);
            world.run(decoder);
            world.lose(decoder);
            assert!(interactive < 100, "the batch job starves with {done} steps done");
            continue;
        }
        // A job of ten steps.
        loop {
            done += 1;
            world.take();
            world.renew(worker, token, done);
            if done >= 10 {
                world.publish(worker, token);
                world.complete(worker, token);
                break;
            }
            if world.asked() == [token] {
                world.yield_at(worker, token, done);
                break;
            }
        }
    }
    assert_eq!(world.stage(batch, "denoise").preemptions(), 3);
    assert!(interactive > 3, "{interactive} interactive jobs ran meanwhile");
}

#[test]
fn a_yield_that_comes_too_late_or_twice_changes_nothing() {
    let mut world = World::new(topology());
    let [(worker, batch, token)] = busy(&mut world, 1)[..] else {
        panic!("one worker")
    };
    world.renew(worker, token, 5);
    world.submit_to("interactive", 2);
    world.wait(Duration::from_secs(16));
    assert_eq!(world.phase(batch, "denoise"), "queued", "the grant ran out");
    world.take();
    world.yield_at(worker, token, 6);
    assert!(world.stage(batch, "denoise").checkpoint().is_none());
    assert!(
        world
            .effects
            .iter()
            .any(|effect| matches!(effect, Effect::Refused { .. }))
    );
    assert!(
        world.offer(worker).is_some(),
        "it has stopped, so that its slot is free"
    );
    let job = world.sched.job(batch).expect("it is remembered");
    assert_eq!((job.losses().expired, job.stages()[0].preemptions()), (1, 0));
    // Twice.
    let mut world = World::new(topology());
    let [(worker, batch, token)] = busy(&mut world, 1)[..] else {
        panic!("one worker")
    };
    world.renew(worker, token, 5);
    world.submit_to("interactive", 2);
    world.yield_at(worker, token, 6);
    let before = world.sched.snapshot();
    world.refused(Input::Yielded {
        worker,
        token,
        payload: None,
        progress: steps(7),
    });
    assert_eq!(world.sched.snapshot(), before);
    assert_eq!(world.stage(batch, "denoise").preemptions(), 1);
}

#[test]
fn a_job_that_is_cancelled_while_it_yields_is_cancelled() {
    let mut world = World::new(topology());
    let [(worker, batch, token)] = busy(&mut world, 1)[..] else {
        panic!("one worker")
    };
    world.renew(worker, token, 5);
    world.submit_to("interactive", 2);
    world.cancel(batch);
    assert!(world.was_cancelled(token));
    let kept = world.yield_at(worker, token, 6);
    assert_eq!(world.state(batch), "cancelled");
    assert!(world.releases().iter().any(|(_, payload)| *payload == kept));
    assert!(world.offer(worker).is_some());
}

#[test]
fn a_job_that_waits_no_more_leaves_the_worker_to_whoever_is_next() {
    let mut world = World::new(topology());
    let [(worker, batch, token)] = busy(&mut world, 1)[..] else {
        panic!("one worker")
    };
    world.renew(worker, token, 5);
    let wanted = world.submit_to("interactive", 2);
    world.cancel(wanted);
    world.yield_at(worker, token, 6);
    assert_eq!(world.accept(worker).job, batch, "it goes on at once");
}

#[test]
fn what_a_leaving_worker_runs_goes_on_elsewhere_from_its_step() {
    let mut world = World::new(topology());
    let [(worker, batch, token)] = busy(&mut world, 1)[..] else {
        panic!("one worker")
    };
    world.renew(worker, token, 5);
    let scope = DrainScope::Worker(worker);
    let within = Some(Duration::from_secs(60));
    world.does(Input::Drain {
        scope: scope.clone(),
        within,
    });
    assert_eq!(world.asked(), [token]);
    world.does(Input::Drain { scope, within });
    assert_eq!(world.asked(), [token], "once");
    // Its stream breaks; it may not have heard.
    world.away(worker);
    world.take();
    world.attach_as(worker, "denoise", 1, vec![token], vec![]);
    assert_eq!(world.asked(), [token]);
    let kept = world.yield_at(worker, token, 7);
    let other = world.attach("denoise", 1);
    let offer = world.offer(other).expect("it goes on");
    assert_eq!(
        (offer.token.job, offer.checkpoint.as_ref().map(|kept| kept.payload.id)),
        (batch, Some(kept))
    );
    let run = world.stage(batch, "denoise");
    assert_eq!(run.preemptions(), 0, "it made way for nobody");
    // Who does not listen is stopped in the end, as without checkpoints.
    let token = world.accept(other);
    let scope = DrainScope::Stage(name("denoise"));
    world.does(Input::Drain { scope, within });
    for _ in 0..6 {
        world.wait(Duration::from_secs(10));
        world.renew(other, token, 8);
    }
    assert!(world.was_cancelled(token));
}

#[test]
fn who_was_preempted_and_leaves_frees_no_worker_and_another_is_asked() {
    let mut world = World::new(topology());
    let [(early, older, first), (late, _, second)] = busy(&mut world, 2)[..] else {
        panic!("two workers")
    };
    world.renew(early, first, 5);
    world.renew(late, second, 5);
    let wanted = world.submit_to("interactive", 2);
    assert_eq!(world.asked(), [second]);
    world.does(Input::Drain {
        scope: DrainScope::Worker(late),
        within: None,
    });
    world.take();
    world.yield_at(late, second, 6);
    assert_eq!(world.asked(), [first], "the freed worker is not for the job that waits");
    world.yield_at(early, first, 6);
    assert_eq!(world.run(early).job, wanted);
    assert_eq!(world.accept(early).job, older, "in its turn");
}

/// One of the two ranks of a group.
fn attach_rank(world: &mut World, ranks: &[Incarnation; 2], rank: usize) {
    let worker = WorkerInfo {
        member: Some(Member {
            group: name("g"),
            rank: rank as u32,
            world: 2,
        }),
        ..worker_info(ranks[rank], "denoise", 1)
    };
    world.does(Input::WorkerAttached {
        worker,
        running: vec![],
        holding: vec![],
    });
}

/// A group that is whole.
fn group(world: &mut World) -> [Incarnation; 2] {
    let ranks = [(); 2].map(|()| Incarnation(world.id()));
    attach_rank(world, &ranks, 0);
    attach_rank(world, &ranks, 1);
    ranks
}

#[test]
fn a_group_whose_ranks_leave_together_is_asked_once() {
    let mut world = World::new(topology());
    let ranks = group(&mut world);
    let batch = world.submit_to("batch", 1);
    let token = world.accept(ranks[0]);
    world.take();
    world.does(Input::Drain {
        scope: DrainScope::Stage(name("denoise")),
        within: None,
    });
    assert_eq!(world.asked(), [token]);
    assert_eq!(world.heard(batch), ["denoise yielding"]);
}

#[test]
fn ranks_yield_as_one_and_the_loss_of_one_ends_what_yields() {
    let mut world = World::new(topology());
    let ranks = group(&mut world);
    let batch = world.submit_to("batch", 1);
    let token = world.accept(ranks[0]);
    world.renew(ranks[0], token, 5);
    let wanted = world.submit_to("interactive", 2);
    assert_eq!(world.asked(), [token], "rank 0");
    // Another rank that has heard of it first says nothing for the group.
    world.does(Input::Yielded {
        worker: ranks[1],
        token,
        payload: None,
        progress: steps(6),
    });
    assert_eq!(world.phase(batch, "denoise"), "running");
    world.yield_at(ranks[0], token, 6);
    let told = |world: &World, rank: usize| {
        world.effects.iter().any(
            |effect| matches!(effect, Effect::CancelAttempt { worker, token: other, .. } if (*worker, *other) == (ranks[rank], token)),
        )
    };
    assert!(told(&world, 1) && !told(&world, 0));
    assert!(world.offer(ranks[0]).is_none(), "rank 1 has not stopped");
    world.stop(ranks[1], token);
    let second = world.accept(ranks[0]);
    assert_eq!(second.job, wanted);
    world.publish(ranks[0], second);
    world.complete(ranks[0], second);
    // The batch job goes on, is asked again, and a rank dies.
    let third = world.accept(ranks[0]);
    assert_eq!(third.job, batch);
    world.renew(ranks[0], third, 20);
    world.submit_to("interactive", 2);
    world.lose(ranks[1]);
    let late = world.yield_at(ranks[0], third, 21);
    assert!(world.releases().iter().any(|(_, payload)| *payload == late));
    attach_rank(&mut world, &ranks, 1);
    assert!(world.offer(ranks[0]).is_some(), "the group is whole again");
    let run = world.stage(batch, "denoise");
    assert_eq!(
        (run.preemptions(), run.checkpoint().map(|kept| kept.progress.done)),
        (1, Some(6))
    );
}

#[test]
fn classes_that_preempt_nobody_or_each_other_are_refused() {
    let class = |class: &str, preempts: &[&str]| ClassSpec {
        preempts: preempts.iter().map(|class| name(class)).collect(),
        ..ClassSpec::new(name(class), 1)
    };
    let refused = |classes| topology().with_classes(classes).expect_err("it is refused");
    let unknown = refused(vec![class("a", &["b"])]);
    assert!(matches!(unknown, TopologyError::UnknownPreempted { .. }), "{unknown:?}");
    for circle in [
        vec![class("a", &["a"])],
        vec![class("a", &["b"]), class("b", &["a"])],
        vec![
            class("x", &[]),
            class("a", &["x", "b"]),
            class("b", &["c"]),
            class("c", &["a"]),
        ],
    ] {
        let error = refused(circle);
        assert!(matches!(error, TopologyError::PreemptionCycle { .. }), "{error:?}");
    }
    let ordered = vec![class("a", &["b", "c"]), class("b", &["c"]), class("c", &[])];
    assert!(topology().with_classes(ordered).is_ok());
}

#[test]
fn stages_without_checkpoints_are_not_preempted() {
    let denoise = StageSpec {
        kind: StageKind::Admission,
        ..StageSpec::new(name("denoise"))
    };
    let mut world = World::new(Topology::new(vec![denoise], vec![]).expect("an allowed pipeline"));
    let [(worker, _, token)] = busy(&mut world, 1)[..] else {
        panic!("one worker")
    };
    world.renew(worker, token, 5);
    world.submit_to("interactive", 2);
    assert_eq!(world.asked(), []);
    assert_eq!(running(&world, worker).1, token);
}
