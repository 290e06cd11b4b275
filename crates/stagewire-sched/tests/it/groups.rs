//! Groups of workers, the ranks, that run every attempt together.

use std::time::Duration;

use stagewire_core::{Classify, ErrorClass, Incarnation, JobId, Member, Token};
use stagewire_sched::{EdgeSpec, Effect, Input, Limits, Offer, StageKind, StageSpec, Topology, WaitCause, WorkerInfo};

use crate::world::{World, completed, name, whole, worker_info};

/// A denoiser that admits, and a decoder.
fn video() -> World {
    let denoise = StageSpec {
        kind: StageKind::Admission,
        ..StageSpec::new(name("denoise"))
    };
    let edges: Vec<EdgeSpec> = vec![whole("denoise", "decode")];
    let stages = vec![denoise, StageSpec::new(name("decode"))];
    World::new(Topology::new(stages, edges).expect("an allowed pipeline"))
}

fn info(incarnation: Incarnation, group: &str, rank: u32, world: u32) -> WorkerInfo {
    WorkerInfo {
        member: Some(Member {
            group: name(group),
            rank,
            world,
        }),
        ..worker_info(incarnation, "denoise", 1)
    }
}

fn attach_as(world: &mut World, worker: WorkerInfo, running: Vec<Token>) {
    world.does(Input::WorkerAttached {
        worker,
        running,
        holding: vec![],
    });
}

/// All the ranks of a group.
fn group<const N: usize>(world: &mut World, group: &str) -> [Incarnation; N] {
    let ranks = [(); N].map(|()| Incarnation(world.id()));
    for (rank, worker) in (0..).zip(ranks) {
        attach_as(world, info(worker, group, rank, N as u32), vec![]);
    }
    ranks
}

/// What the worker was last offered.
fn offer(world: &World, worker: Incarnation) -> Option<&Offer> {
    world.effects.iter().rev().find_map(|effect| match effect {
        Effect::Offer(offer) if offer.worker == worker => Some(&**offer),
        _ => None,
    })
}

fn stopped(world: &World, worker: Incarnation, token: Token) -> bool {
    let told = |effect: &Effect| matches!(effect, Effect::CancelAttempt { worker: to, token: what, .. } if (*to, *what) == (worker, token));
    world.effects.iter().any(told)
}

fn granted(world: &World, worker: Incarnation, token: Token) -> bool {
    world.effects.contains(&Effect::Grant { worker, token })
}

/// Starts a job on the group.
fn start(world: &mut World, ranks: &[Incarnation]) -> (JobId, Token) {
    let job = world.submit();
    let token = world.accept(ranks[0]);
    (job, token)
}

#[test]
fn a_group_is_offered_work_once_every_rank_is_there() {
    let mut world = video();
    let job = world.submit();
    let [zero, one] = [(); 2].map(|()| Incarnation(world.id()));
    attach_as(&mut world, info(one, "g", 1, 2), vec![]);
    assert_eq!(world.phase(job, "denoise"), "queued");
    attach_as(&mut world, info(zero, "g", 0, 2), vec![]);
    assert!(world.offer(one).is_none(), "rank 0 answers for all");
    let token = world.accept(zero);
    assert!(granted(&world, one, token));
    let [first, second] = [zero, one].map(|rank| offer(&world, rank).expect("it was offered").member.clone());
    assert_eq!(
        [first, second].map(|member| member.map(|member| member.rank)),
        [Some(0), Some(1)]
    );
    // What rank 1 answers to that is nothing new.
    world.does(Input::Accept { worker: one, token });
    world.renew(one, token, 1);
    let payload = world.publish(zero, token);
    world.does(completed(one, token));
    assert_eq!(world.phase(job, "denoise"), "running", "rank 0 completes");
    let other = world.submit();
    world.complete(zero, token);
    assert!(world.effects.contains(&Effect::Accepted { worker: one, token }));
    assert_eq!(
        (world.phase(job, "denoise"), world.live(job).contains(&payload)),
        ("done", true)
    );
    assert_eq!(world.phase(other, "denoise"), "offered");
}

/// A rank that stays away is not waited for, so it does not stop either.
#[test]
fn a_rank_that_is_lost_while_it_is_away_ends_the_attempt_on_the_others() {
    let mut world = video();
    let [zero, one] = group(&mut world, "g");
    let (job, token) = start(&mut world, &[zero, one]);
    world.away(one);
    world.take();
    world.lose(one);
    assert_eq!(world.phase(job, "denoise"), "queued");
    assert!(stopped(&world, zero, token) && !stopped(&world, one, token));
    world.cancel(job);
    assert_eq!(world.state(job), "cancelling", "rank 0 has not stopped");
    world.stop(zero, token);
    assert_eq!(world.state(job), "cancelled");
}

#[test]
fn whoever_is_lost_ends_the_attempt_on_every_rank() {
    for lost in [0, 1, 2] {
        let mut world = video();
        let ranks = group::<3>(&mut world, "g");
        let (job, token) = start(&mut world, &ranks);
        world.take();
        world.lose(ranks[lost]);
        let losses = world.sched.job(job).expect("it goes on").losses();
        assert_eq!((losses.killed_workers, world.phase(job, "denoise")), (1, "queued"));
        for rank in (0..3).filter(|rank| *rank != lost) {
            assert!(stopped(&world, ranks[rank], token), "rank {rank} without {lost}");
            world.stop(ranks[rank], token);
        }
        assert_eq!(world.phase(job, "denoise"), "queued", "a rank is missing");
        let new = Incarnation(world.id());
        attach_as(&mut world, info(new, "g", lost as u32, 3), vec![]);
        assert_eq!(world.phase(job, "denoise"), "offered");
    }
}

#[test]
fn a_job_that_kills_one_rank_after_the_other_is_in_quarantine() {
    let mut world = video();
    let [zero, mut one] = group::<2>(&mut world, "g");
    let job = world.submit();
    for _ in 0..world.sched.limits().max_killed_workers {
        assert_eq!(world.state(job), "active");
        let token = world.accept(zero);
        world.lose(one);
        world.stop(zero, token);
        one = Incarnation(world.id());
        attach_as(&mut world, info(one, "g", 1, 2), vec![]);
    }
    assert_eq!((world.state(job), world.dead()), ("failed", vec![job]));
}

#[test]
fn a_failure_on_any_rank_ends_the_attempt_on_all() {
    for failing in [0, 1] {
        let mut world = video();
        let ranks = group::<2>(&mut world, "g");
        let (job, token) = start(&mut world, &ranks);
        let other = world.submit();
        world.take();
        world.fail(ranks[failing], token, ErrorClass::Internal);
        assert_eq!(world.state(job), "failed");
        assert!(stopped(&world, ranks[1 - failing], token));
        assert_eq!(world.phase(other, "denoise"), "queued", "one rank has not stopped yet");
        world.stop(ranks[1 - failing], token);
        assert_eq!(world.phase(other, "denoise"), "offered");
    }
}

#[test]
fn a_cancelled_job_waits_for_every_rank_to_stop() {
    let mut world = video();
    let ranks = group::<2>(&mut world, "g");
    let (job, token) = start(&mut world, &ranks);
    world.cancel(job);
    world.stop(ranks[0], token);
    assert_eq!(world.state(job), "cancelling");
    world.stop(ranks[1], token);
    assert_eq!(world.state(job), "cancelled");
}

#[test]
fn a_group_goes_on_when_the_server_restarts() {
    let mut world = video();
    let ranks = group::<2>(&mut world, "g");
    let (job, token) = start(&mut world, &ranks);
    world.restart();
    for (rank, worker) in (0..).zip(ranks) {
        attach_as(&mut world, info(worker, "g", rank, 2), vec![token]);
    }
    assert_eq!(world.phase(job, "denoise"), "running");
    world.publish(ranks[0], token);
    world.does(completed(ranks[1], token));
    world.complete(ranks[0], token);
    assert_eq!(world.phase(job, "denoise"), "done");
    let decoder = world.attach("decode", 1);
    world.run(decoder);
    // A rank that comes back without the attempt has lost it for all.
    let (job, token) = start(&mut world, &ranks);
    world.restart();
    attach_as(&mut world, info(ranks[0], "g", 0, 2), vec![token]);
    attach_as(&mut world, info(ranks[1], "g", 1, 2), vec![]);
    assert!(stopped(&world, ranks[0], token));
    world.stop(ranks[0], token);
    world.wait(Limits::default().pause);
    assert_eq!(world.phase(job, "denoise"), "offered");
}

#[test]
fn a_rank_that_is_back_first_does_not_cut_short_how_long_rank_0_is_waited_for() {
    let mut world = video();
    let ranks = group::<2>(&mut world, "g");
    let (job, token) = start(&mut world, &ranks);
    world.restart();
    world.wait(Duration::from_secs(1));
    attach_as(&mut world, info(ranks[1], "g", 1, 2), vec![token]);
    world.wait(Limits::default().grant * 2);
    assert_eq!(world.phase(job, "denoise"), "running");
    attach_as(&mut world, info(ranks[0], "g", 0, 2), vec![token]);
    world.publish(ranks[0], token);
    world.complete(ranks[0], token);
    assert_eq!(world.phase(job, "denoise"), "done");
}

#[test]
fn a_rank_that_comes_and_goes_does_not_hide_that_rank_0_is_silent() {
    let mut world = video();
    let ranks = group::<2>(&mut world, "g");
    let (job, token) = start(&mut world, &ranks);
    let grant = Limits::default().grant;
    for _ in 0..4 {
        world.wait(grant / 4);
        world.away(ranks[1]);
        attach_as(&mut world, info(ranks[1], "g", 1, 2), vec![token]);
    }
    world.wait(grant / 4);
    assert_eq!(world.sched.job(job).expect("it goes on").losses().expired, 1);
}

#[test]
fn a_rank_that_is_away_is_waited_for_and_a_draining_one_ends_the_group() {
    let mut world = video();
    let ranks = group::<2>(&mut world, "g");
    let (job, token) = start(&mut world, &ranks);
    world.away(ranks[1]);
    assert_eq!(world.phase(job, "denoise"), "running");
    attach_as(&mut world, info(ranks[1], "g", 1, 2), vec![token]);
    world.publish(ranks[0], token);
    world.complete(ranks[0], token);
    world.does(Input::Drain {
        scope: stagewire_sched::DrainScope::Worker(ranks[1]),
        within: None,
    });
    let waiting = world.submit();
    assert_eq!(world.phase(waiting, "denoise"), "queued");
    let why = world.sched.explain(world.now, waiting);
    let (group, attached, world_size) = (name("g"), 1, 2);
    let expected = WaitCause::Ranks {
        group,
        attached,
        world: world_size,
    };
    assert_eq!(why[0].cause, expected);
}

#[test]
fn what_a_draining_rank_has_not_ended_in_time_ends_on_all() {
    let mut world = video();
    let ranks = group::<2>(&mut world, "g");
    let (job, token) = start(&mut world, &ranks);
    world.does(Input::Drain {
        scope: stagewire_sched::DrainScope::Worker(ranks[1]),
        within: Some(Duration::from_secs(5)),
    });
    world.take();
    world.wait(Duration::from_secs(6));
    assert_eq!(world.phase(job, "denoise"), "queued");
    for rank in ranks {
        assert!(stopped(&world, rank, token));
        assert_eq!(
            world.sched.worker(rank).expect("it is there").slots().len(),
            1,
            "until it says so"
        );
        world.stop(rank, token);
    }
    let other = group::<2>(&mut world, "h");
    assert!(world.offer(other[0]).is_some());
}

#[test]
fn a_rank_that_leaves_between_offer_and_grant_takes_the_offer_back() {
    let mut world = video();
    let ranks = group::<2>(&mut world, "g");
    let job = world.submit();
    let token = world.offer(ranks[0]).expect("it is offered").token;
    world.away(ranks[1]);
    let worker = ranks[0];
    world.does(Input::Accept { worker, token });
    assert!(!granted(&world, worker, token));
    assert_eq!(world.phase(job, "denoise"), "queued");
    attach_as(&mut world, info(ranks[1], "g", 1, 2), vec![]);
    assert_eq!(world.phase(job, "denoise"), "offered");
}

/// As where rank 0 declines an offer: the job is not at fault, and the group gets nothing for a while.
#[test]
fn a_rank_that_declines_costs_the_job_nothing_and_pauses_the_group() {
    let mut world = video();
    let ranks = group::<2>(&mut world, "g");
    let (job, mut token) = start(&mut world, &ranks);
    for _ in 0..10 {
        world.does(Input::Decline {
            worker: ranks[1],
            token,
            failure: crate::world::failure(ErrorClass::Exhausted),
        });
        assert!(stopped(&world, ranks[0], token));
        world.stop(ranks[0], token);
        assert_eq!(world.phase(job, "denoise"), "queued");
        let why = world.sched.explain(world.now, job);
        assert!(
            matches!(&why[0].cause, WaitCause::Slot { paused: 1, declined: Some(failure), .. } if failure.message.contains("rank")),
            "{why:?}"
        );
        while world.phase(job, "denoise") != "offered" {
            assert_eq!(world.jump(), "worker.resume");
        }
        token = world.accept(ranks[0]);
    }
    let losses = world.sched.job(job).expect("it goes on").losses();
    assert_eq!((losses.expired, losses.killed_workers), (0, 0));
    world.publish(ranks[0], token);
    world.complete(ranks[0], token);
    assert_eq!(world.phase(job, "denoise"), "done");
}

#[test]
fn groups_of_several_sizes_each_take_whose_turn_it_is() {
    let mut world = video();
    let large = group::<4>(&mut world, "large");
    let small = group::<1>(&mut world, "small");
    let jobs = [(); 3].map(|()| world.submit());
    let offered = |world: &World| jobs.map(|job| world.phase(job, "denoise"));
    assert_eq!(offered(&world), ["offered", "offered", "queued"]);
    // However often the small one is free, it takes nothing that the large one needs.
    let tokens = [large[0], small[0]].map(|rank| world.accept(rank));
    world.publish(small[0], tokens[1]);
    world.complete(small[0], tokens[1]);
    assert_eq!(offered(&world)[2], "offered");
    world.publish(large[0], tokens[0]);
    world.complete(large[0], tokens[0]);
    world.submit();
    assert!(world.offer(large[0]).is_some());
}

/// By the bound of the module `share`, with attempts of a second: after 18 of them.
#[test]
fn small_jobs_do_not_starve_a_large_group() {
    let denoise = StageSpec {
        kind: StageKind::Admission,
        ..StageSpec::new(name("denoise"))
    };
    let mut world = World::new(Topology::new(vec![denoise], vec![]).expect("an allowed pipeline"));
    let leaders = [group::<4>(&mut world, "large")[0], group::<1>(&mut world, "small")[0]];
    (0..40).for_each(|_| _ = world.submit_to("interactive", 1));
    let patient = world.submit_to("batch", 2);
    let mut started = 0;
    while world.phase(patient, "denoise") == "queued" {
        let tokens = leaders.map(|leader| world.accept(leader));
        world.wait(Duration::from_secs(1));
        for (leader, token) in leaders.into_iter().zip(tokens) {
            world.complete(leader, token);
            world.submit_to("interactive", 1);
            assert!(world.offer(leader).is_some(), "whoever is free has work at once");
            started += 1;
        }
        assert!(started <= 18, "the batch job still waits");
    }
    assert!(
        world.sched.queued(&name("denoise")) > 30,
        "interactive jobs never stopped coming"
    );
}

#[test]
fn a_rank_that_cannot_be_is_refused() {
    let mut world = video();
    let [zero, ..] = group::<2>(&mut world, "g");
    let mut refused = |worker: WorkerInfo| {
        let incarnation = Incarnation(world.id());
        let refused = world.refused(Input::WorkerAttached {
            worker: WorkerInfo { incarnation, ..worker },
            running: vec![],
            holding: vec![],
        });
        (refused.class(), refused.reason())
    };
    let invalid = (ErrorClass::Invalid, "worker.rank");
    assert_eq!(refused(info(zero, "h", 2, 2)), invalid);
    assert_eq!(refused(info(zero, "h", 0, 0)), invalid);
    let slots = WorkerInfo {
        slots: 2,
        ..info(zero, "h", 0, 2)
    };
    assert_eq!(refused(slots), invalid);
    let decoder = WorkerInfo {
        stage: name("decode"),
        ..info(zero, "h", 0, 2)
    };
    assert_eq!(refused(decoder), invalid);
    let taken = (ErrorClass::Conflict, "worker.rank_taken");
    assert_eq!(refused(info(zero, "g", 1, 2)), taken);
    assert_eq!(refused(info(zero, "g", 2, 3)), taken, "another number of ranks");
}

#[test]
fn only_rank_0_publishes() {
    let mut world = video();
    let ranks = group::<2>(&mut world, "g");
    let (job, token) = start(&mut world, &ranks);
    let payload = crate::world::payload_info(stagewire_core::PayloadId(world.id()), false);
    let refused = world.refused(Input::Published {
        worker: ranks[1],
        token,
        payload,
    });
    assert_eq!(refused.reason(), "payload.rank");
    world.wait(Duration::from_secs(1));
    assert_eq!(world.phase(job, "denoise"), "running");
}
