//! Dead letters: what becomes one, how long it is kept, and its next life.

use std::time::Duration;

use stagewire_core::{Classify, ErrorClass, Incarnation, JobId};
use stagewire_sched::{
    AttemptEnd, DeathCause, Discard, Effect, Event, Input, Limits, Loss, NoticeKind, Refusal, StageSpec, Topology,
    Urgency,
};

use crate::world::{World, name, topology, video, whole};

fn painter() -> (World, Incarnation) {
    with_limits(Limits::default())
}

fn with_limits(limits: Limits) -> (World, Incarnation) {
    let mut world = World::with_limits(topology(&["paint"], vec![]), limits);
    let painter = world.attach("paint", 1);
    (world, painter)
}

/// A job that has failed.
fn die(world: &mut World, painter: Incarnation) -> JobId {
    let job = world.submit();
    let token = world.accept(painter);
    world.fail(painter, token, ErrorClass::Internal);
    job
}

fn cause(world: &World, job: JobId) -> Option<DeathCause> {
    Some(world.sched.job(job)?.dead_letter()?.cause)
}

/// How the attempts of the job ended, in one word each.
fn ends(world: &World, job: JobId) -> Vec<&'static str> {
    let attempts = world.sched.job(job).expect("the job is remembered").attempts();
    attempts.iter().map(|attempt| attempt.end.name()).collect()
}

#[test]
fn what_failed_is_a_dead_letter_and_what_ended_otherwise_is_none() {
    let (mut world, painter) = painter();
    let failed = die(&mut world, painter);
    world.submit();
    world.run(painter);
    let cancelled = world.submit();
    world.cancel(cancelled);
    let busy = world.submit();
    world.accept(painter);
    let late = world.submit_as(Urgency {
        queue_deadline: Some(Duration::from_secs(1)),
        ..Urgency::default()
    });
    let late = late.expect("a job");
    world.wait(Duration::from_secs(2));
    assert_eq!([world.state(late), world.state(busy)], ["failed", "active"]);
    assert_eq!(world.dead(), [failed], "nobody waits any more for what came too late");
    assert_eq!(cause(&world, failed), Some(DeathCause::Failed));
    let counters = world.sched.counters();
    assert_eq!(
        (counters.jobs_failed, counters.dead_letters, counters.jobs_dropped),
        (2, 1, 1)
    );
}

#[test]
fn a_dead_letter_says_what_it_died_of() {
    let edges = vec![whole("encode", "decode")];
    let mut world = World::new(topology(&["encode", "decode"], edges));
    let limits = *world.sched.limits();
    let quarantined = world.submit();
    for _ in 0..limits.max_killed_workers {
        let worker = world.attach("encode", 1);
        world.accept(worker);
        world.lose(worker);
    }
    assert_eq!(cause(&world, quarantined), Some(DeathCause::KilledWorkers));

    let encoder = world.attach("encode", 1);
    let silent = world.submit();
    for _ in 0..limits.max_expired {
        let token = world.accept(encoder);
        world.stop(encoder, token);
    }
    assert_eq!(cause(&world, silent), Some(DeathCause::Expired));

    let decoder = world.attach("decode", 1);
    let unread = world.submit();
    for _ in 0..limits.max_lost_inputs {
        let token = world.accept(encoder);
        let payload = world.publish(encoder, token);
        world.complete(encoder, token);
        let token = world.accept(decoder);
        world.fail_for_lost(decoder, token, payload);
    }
    assert_eq!(cause(&world, unread), Some(DeathCause::InputsLost));
    assert_eq!(world.dead(), [quarantined, silent, unread]);
}

#[test]
fn only_distinct_workers_count_for_quarantine() {
    let (mut world, flaky) = painter();
    let job = world.submit();
    for _ in 0..2 * Limits::default().max_killed_workers {
        world.accept(flaky);
        world.away(flaky);
        world.wait(Limits::default().linger);
        assert_eq!(world.phase(job, "paint"), "queued", "it stayed away for too long");
        world.attach_as(flaky, "paint", 1, vec![], vec![]);
    }
    let losses = world.sched.job(job).map(|job| job.losses());
    assert_eq!(losses.map(|losses| losses.killed_workers), Some(1), "always the same");
    world.restart();
    let losses = world.sched.job(job).map(|job| job.losses());
    assert_eq!(losses.map(|losses| losses.killed_workers), Some(1));
    world.attach_as(flaky, "paint", 1, vec![], vec![]);
    world.run(flaky);
    assert_eq!(world.state(job), "succeeded");
}

#[test]
fn causes_are_counted_apart() {
    let (mut world, painter) = painter();
    let job = world.submit();
    let token = world.offer(painter).expect("an offer").token;
    world.does(Input::Decline {
        worker: painter,
        token,
        failure: crate::world::failure(ErrorClass::Exhausted),
    });
    world.jump();
    assert_eq!(world.jump(), "offer.answer", "nobody answers");
    world.jump();
    let token = world.accept(painter);
    world.stop(painter, token);
    let other = world.attach("paint", 1);
    world.accept(painter);
    world.lose(painter);
    let losses = world.sched.job(job).expect("the job").losses();
    assert_eq!(
        (
            losses.unaccepted,
            losses.expired,
            losses.killed_workers,
            losses.lost_inputs
        ),
        (2, 1, 1, 0)
    );
    assert_eq!(world.stage(job, "paint").failures(), 0);
    assert_eq!(ends(&world, job), ["stopped", "worker_lost"], "an offer is no attempt");
    world.run(other);
    assert_eq!(world.state(job), "succeeded");
}

#[test]
fn the_log_names_each_attempt_with_its_worker_and_survives_a_restart() {
    let mut world = World::new(video());
    let [encoder, denoiser] = ["encode", "denoise"].map(|stage| world.attach(stage, 1));
    let job = world.submit();
    let encoded = world.run(encoder);
    let denoised = world.accept(denoiser);
    let began = world.now;
    world.wait(Duration::from_secs(3));
    world.lose(denoiser);
    world.restart();
    let log: Vec<_> = world
        .sched
        .job(job)
        .expect("the job")
        .attempts()
        .iter()
        .cloned()
        .collect();
    let [first, second] = &log[..] else {
        panic!("two attempts have ended: {log:?}")
    };
    assert_eq!((first.token, &first.end), (encoded, &AttemptEnd::Completed));
    assert_eq!(
        (second.token, second.worker, &*second.name),
        (denoised, denoiser, "denoise-1")
    );
    assert_eq!((second.stage.as_str(), second.began), ("denoise", began));
    assert_eq!(second.ended.since(second.began), Duration::from_secs(3));
    let AttemptEnd::Lost {
        loss: Loss::WorkerLost,
        failure,
    } = &second.end
    else {
        panic!("it was lost with its worker: {second:?}")
    };
    assert_eq!(failure.reason, "worker.lost");
}

#[test]
fn a_redriven_job_begins_anew_under_its_id_and_key() {
    let stage = StageSpec {
        max_attempts: 2,
        ..StageSpec::new(name("paint"))
    };
    let mut world = World::new(Topology::new(vec![stage], vec![]).expect("one stage"));
    let painter = world.attach("paint", 1);
    let job = world.submit_with_key("key", 7).expect("a job");
    let mut tokens = Vec::new();
    for last in [false, true] {
        let token = world.accept(painter);
        tokens.push(token);
        world.fail(painter, token, ErrorClass::Internal);
        assert!(last || world.jump() == "stage.retry");
    }
    world.wait(Duration::from_secs(1));
    assert_eq!(
        world.submit_with_key("key", 7),
        Ok(job),
        "the key is that of the dead letter"
    );
    world.take();
    world.redrive(job);
    assert_eq!(world.heard(job), ["redriven", "paint queued", "paint offered"]);
    assert_eq!((world.state(job), world.stage(job, "paint").failures()), ("active", 0));
    assert_eq!(world.submit_with_key("key", 7), Ok(job));
    assert!(world.dead().is_empty());
    world.restart();
    world.attach_as(painter, "paint", 1, vec![], vec![]);
    let known = world.sched.job(job).expect("the job");
    assert_eq!((known.redrives(), known.entered() > known.submitted()), (1, true));
    let token = world.accept(painter);
    assert!(!tokens.contains(&token), "no token comes twice");
    world.fail(painter, token, ErrorClass::Internal);
    assert_eq!(world.state(job), "active", "it may fail as often as before");
    world.jump();
    world.run(painter);
    assert_eq!(world.state(job), "succeeded");
    assert_eq!(ends(&world, job), ["failed", "failed", "failed", "completed"]);
}

#[test]
fn a_redriven_job_runs_all_its_stages_again() {
    let mut world = World::new(video());
    let [encoder, denoiser, decoder] = ["encode", "denoise", "decode"].map(|stage| world.attach(stage, 1));
    let job = world.submit();
    world.run(encoder);
    world.run(denoiser);
    let token = world.accept(decoder);
    world.fail(decoder, token, ErrorClass::Internal);
    assert_eq!((world.state(job), world.live(job).len()), ("failed", 0));
    world.redrive(job);
    assert_eq!(world.phases(job), ["offered", "blocked", "blocked"]);
    for worker in [encoder, denoiser, decoder] {
        world.run(worker);
    }
    assert_eq!(world.state(job), "succeeded");
}

#[test]
fn an_attempt_of_an_earlier_life_says_nothing_in_the_next() {
    let edges = vec![whole("encode", "left"), whole("encode", "right")];
    let mut world = World::new(topology(&["encode", "left", "right"], edges));
    let [encoder, left, right] = ["encode", "left", "right"].map(|stage| world.attach(stage, 1));
    let job = world.submit();
    world.run(encoder);
    let (bad, late) = (world.accept(left), world.accept(right));
    world.fail(left, bad, ErrorClass::Internal);
    assert_eq!(world.state(job), "failed");
    world.redrive(job);
    world.run(encoder);
    assert_eq!(
        world.phase(job, "right"),
        "queued",
        "its slot is used until the old attempt has stopped"
    );
    let decision = world.does(crate::world::completed(right, late));
    assert!(matches!(decision.effects[..], [Effect::Refused { .. }]), "{decision:?}");
    world.run(left);
    world.run(right);
    assert_eq!(world.state(job), "succeeded");
}

#[test]
fn a_redriven_job_has_its_deadline_again_and_stands_behind_those_that_wait() {
    let (mut world, painter) = painter();
    let dying = world.submit_as(Urgency {
        queue_deadline: Some(Duration::from_secs(10)),
        ..Urgency::default()
    });
    let dying = dying.expect("a job");
    let token = world.accept(painter);
    world.fail(painter, token, ErrorClass::Internal);
    world.wait(Duration::from_secs(60));
    let busy = world.submit();
    let running = world.accept(painter);
    assert_eq!(running.job, busy);
    world.redrive(dying);
    assert_eq!(world.state(dying), "active", "its time is not over");
    let due = world.sched.job(dying).and_then(|job| job.due());
    assert_eq!(due, Some(world.now + Duration::from_secs(10)));
    world.wait(Duration::from_secs(10));
    assert_eq!(world.state(dying), "failed");
    assert!(world.dead().is_empty(), "then it is dropped, as any other");

    let (mut world, painter) = self::painter();
    let dead = die(&mut world, painter);
    let waiting = [world.submit(), world.submit()];
    world.redrive(dead);
    let order = [(); 3].map(|()| world.run(painter).job);
    assert_eq!(order, [waiting[0], waiting[1], dead]);
}

#[test]
fn only_a_dead_letter_is_redriven_or_discarded_and_only_once() {
    let (mut world, painter) = painter();
    let active = world.submit();
    let not_dead = |world: &mut World, job, state| {
        let why = Discard::Asked;
        for input in [Input::Redrive { job }, Input::Discard { job, why }] {
            assert_eq!(world.refused(input), Refusal::NotDead { job, state });
        }
    };
    not_dead(&mut world, active, "active");
    world.run(painter);
    not_dead(&mut world, active, "succeeded");
    let dead = die(&mut world, painter);
    world.redrive(dead);
    not_dead(&mut world, dead, "active");
    let token = world.accept(painter);
    world.fail(painter, token, ErrorClass::Internal);
    world.discard(dead);
    not_dead(&mut world, dead, "failed");
    let job = JobId(world.id());
    assert_eq!(world.refused(Input::Redrive { job }), Refusal::UnknownJob { job });
    assert_eq!(Refusal::NotDead { job, state: "failed" }.class(), ErrorClass::Conflict);
}

#[test]
fn dead_letters_are_bounded_and_stay_beyond_other_ended_jobs() {
    let (mut world, painter) = with_limits(Limits {
        max_dead_letters: 2,
        max_ended: 1,
        ..Limits::default()
    });
    let dead = [(); 3].map(|()| {
        world.wait(Duration::from_secs(1));
        die(&mut world, painter)
    });
    assert_eq!(world.dead(), dead[1..], "the first to die makes room");
    let crowded = |event: &Event| matches!(event, Event::DeadLetterDiscarded { job, .. } if *job == dead[0]);
    assert!(world.journal.iter().any(|(_, event)| crowded(event)));
    assert_eq!(world.sched.counters().dead_letters_crowded_out, 1);
    assert_eq!(world.state(dead[0]), "failed", "it is still remembered");
    for _ in 0..3 {
        world.submit();
        world.run(painter);
    }
    assert!(world.sched.job(dead[0]).is_none(), "as long as any other job");
    assert_eq!(world.dead(), dead[1..]);
    world.restart();
    world.attach_as(painter, "paint", 1, vec![], vec![]);
    assert_eq!(world.dead(), dead[1..]);
    world.discard(dead[2]);
    assert_eq!(world.dead(), [dead[1]]);
    let told = |effect: &Effect| matches!(effect, Effect::Job(notice) if notice.kind == NoticeKind::Forgotten);
    assert!(world.effects.iter().any(told));
}

#[test]
fn a_full_queue_or_a_draining_server_takes_no_redriven_job() {
    let (mut world, painter) = with_limits(Limits {
        max_queued: 1,
        ..Limits::default()
    });
    let dead = die(&mut world, painter);
    let other = world.submit();
    let redrive = Input::Redrive { job: dead };
    assert_eq!(
        world.refused(redrive.clone()),
        Refusal::QueueFull { queued: 1, limit: 1 }
    );
    assert_eq!(world.dead(), [dead], "it stays what it is");
    world.cancel(other);
    world.does(Input::Drain {
        scope: stagewire_sched::DrainScope::All,
        within: None,
    });
    assert_eq!(world.refused(redrive), Refusal::Draining);
}
