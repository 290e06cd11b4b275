use stagewire_core::{ByteCount, Classify, ErrorClass, JobId};
use stagewire_sched::{DrainScope, Effect, Input, Limits, Outcome, Refusal, ResultInfo, StageSpec, Topology};

use crate::world::{World, completed, name, payload_info, submission, topology, video};

#[test]
fn a_job_goes_through_its_stages_and_is_heard_of() {
    let mut world = World::new(video());
    let [encoder, denoiser, decoder] = ["encode", "denoise", "decode"].map(|stage| world.attach(stage, 1));
    let job = world.submit();
    assert_eq!(world.phases(job), ["offered", "blocked", "blocked"]);
    world.run(encoder);
    assert_eq!(world.phases(job), ["done", "offered", "blocked"]);
    let denoising = world.accept(denoiser);
    assert_eq!(world.phases(job), ["done", "running", "blocked"]);
    world.renew(denoiser, denoising, 1);
    world.publish(denoiser, denoising);
    assert_eq!(world.phases(job), ["done", "running", "offered"]);
    let decoding = world.accept(decoder);
    world.complete(denoiser, denoising);
    assert_eq!(world.phases(job), ["done", "done", "running"]);
    world.complete(decoder, decoding);
    assert_eq!(world.phases(job), ["done", "done", "done"]);
    assert_eq!(
        world.sched.job(job).and_then(|job| job.outcome()),
        Some(&Outcome::Succeeded)
    );
    let results: Vec<_> = world.sched.job(job).into_iter().flat_map(|job| job.results()).collect();
    assert_eq!(results, [(&name("decode"), &ResultInfo::default())]);
    let heard = world.heard(job);
    let expected = [
        "submitted",
        "encode queued",
        "encode offered",
        "encode running",
        "encode published",
        "encode done",
        "denoise queued",
        "denoise offered",
        "denoise running",
        "denoise progress",
        "denoise published",
        "decode queued",
        "decode offered",
        "decode running",
        "denoise done",
        "decode done",
        "succeeded",
    ];
    assert_eq!(heard, expected);
    assert_eq!(world.sched.live_payloads(), 0);
}

#[test]
fn a_pipeline_of_one_stage_needs_no_payload() {
    let mut world = World::new(topology(&["paint"], vec![]));
    let painter = world.attach("paint", 1);
    let job = world.submit();
    assert!(!world.offer(painter).expect("an offer").output.publish);
    world.run(painter);
    assert_eq!(world.state(job), "succeeded");
}

#[test]
fn jobs_start_in_the_order_of_submission() {
    let mut world = World::new(topology(&["paint"], vec![]));
    let jobs = [(); 5].map(|()| world.submit());
    let painter = world.attach("paint", 1);
    let order: Vec<_> = jobs.iter().map(|_| world.run(painter).job).collect();
    assert_eq!(order, jobs);
}

#[test]
fn a_key_names_one_job_and_one_request() {
    let mut world = World::new(topology(&["paint"], vec![]));
    let painter = world.attach("paint", 1);
    let job = world.submit_with_key("mine", 7).expect("a new key");
    assert_eq!(world.submit_with_key("mine", 7), Ok(job));
    let refusal = world.submit_with_key("mine", 8).expect_err("another request");
    assert_eq!(
        (refusal.class(), refusal.reason()),
        (ErrorClass::Conflict, "job.key_conflict")
    );
    world.run(painter);
    assert_eq!(
        world.submit_with_key("mine", 7),
        Ok(job),
        "as long as the job is remembered"
    );
    world.restart();
    assert_eq!(world.submit_with_key("mine", 7), Ok(job), "and after a restart");
}

#[test]
fn too_many_jobs_are_refused_and_the_oldest_ended_ones_forgotten() {
    let limits = Limits {
        max_queued: 3,
        max_ended: 2,
        ..Limits::default()
    };
    let mut world = World::with_limits(topology(&["paint"], vec![]), limits);
    let jobs = [(); 3].map(|()| world.submit());
    let job = JobId(world.id());
    let params = "{}".into();
    let refusal = world.refused(submission(job, params));
    assert_eq!(
        (refusal.class(), refusal.reason()),
        (ErrorClass::Exhausted, "queue.full")
    );
    let painter = world.attach("paint", 1);
    for _ in jobs {
        world.run(painter);
    }
    let known: Vec<_> = world.sched.jobs().map(|job| job.id()).collect();
    assert_eq!(known, jobs[1..]);
    assert_eq!(world.heard(jobs[0]).last().map(String::as_str), Some("forgotten"));
    assert_eq!(
        world.refused(Input::Cancel { job: jobs[0] }),
        Refusal::UnknownJob { job: jobs[0] }
    );
}

#[test]
fn a_job_id_is_used_once() {
    let mut world = World::new(topology(&["paint"], vec![]));
    let job = world.submit();
    let params = "{}".into();
    assert_eq!(world.refused(submission(job, params)), Refusal::DuplicateJob { job });
}

#[test]
fn what_fails_for_good_fails_at_once_and_the_rest_after_its_attempts() {
    let stage = StageSpec {
        max_attempts: 3,
        ..StageSpec::new(name("paint"))
    };
    let mut world = World::new(Topology::new(vec![stage], vec![]).expect("one stage"));
    let painter = world.attach("paint", 1);
    let wrong = world.submit();
    let token = world.accept(painter);
    world.fail(painter, token, ErrorClass::Invalid);
    assert_eq!(world.state(wrong), "failed");

    let unlucky = world.submit();
    for attempt in 1..=3 {
        assert_eq!(world.state(unlucky), "active");
        let token = world.accept(painter);
        world.fail(painter, token, ErrorClass::Internal);
        assert_eq!(world.stage(unlucky, "paint").failures(), attempt);
        if attempt < 3 {
            assert_eq!(world.jump(), "stage.retry");
        }
    }
    assert_eq!(world.state(unlucky), "failed");
    let outcome = world.sched.job(unlucky).and_then(|job| job.outcome()).cloned();
    let Some(Outcome::Failed(failure)) = outcome else {
        panic!("failed without a failure");
    };
    assert_eq!(failure.reason, "test.failure", "the stage's own failure is the job's");
}

#[test]
fn a_failed_job_stops_its_other_branches_and_releases_everything() {
    let edges = vec![
        crate::world::whole("encode", "left"),
        crate::world::whole("encode", "right"),
    ];
    let mut world = World::new(topology(&["encode", "left", "right"], edges));
    let [encoder, left, right] = ["encode", "left", "right"].map(|stage| world.attach(stage, 1));
    let job = world.submit();
    world.run(encoder);
    let (a, b) = (world.accept(left), world.accept(right));
    world.fail(left, a, ErrorClass::Internal);
    assert_eq!(world.state(job), "failed");
    assert!(world.was_cancelled(b));
    assert_eq!(world.releases().len(), 1);
    let next = world.submit();
    world.run(encoder);
    assert_eq!(
        world.phase(next, "right"),
        "queued",
        "the slot is used until the attempt has stopped"
    );
    world.stop(right, b);
    assert_eq!(world.phase(next, "right"), "offered");
}

#[test]
fn completion_without_output_is_a_failure_of_the_stage() {
    let mut world = World::new(video());
    let encoder = world.attach("encode", 1);
    let job = world.submit();
    let token = world.accept(encoder);
    world.complete(encoder, token);
    assert_eq!(world.state(job), "failed");
    let refused = |effect: &Effect| matches!(effect, Effect::Refused { token: other, .. } if *other == token);
    assert!(world.effects.iter().any(refused));
}

#[test]
fn what_is_said_twice_counts_once() {
    let mut world = World::new(video());
    let [encoder, denoiser] = ["encode", "denoise"].map(|stage| world.attach(stage, 1));
    world.submit();
    let token = world.accept(encoder);
    let again = world.does(Input::Accept { worker: encoder, token });
    assert_eq!(
        (again.events.len(), again.effects.len()),
        (0, 1),
        "the grant is said again"
    );
    let id = world.publish(encoder, token);
    let payload = payload_info(id, false);
    let again = world.does(Input::Published {
        worker: encoder,
        token,
        payload,
    });
    assert_eq!(again, Default::default());
    world.complete(encoder, token);
    let again = world.does(completed(encoder, token));
    assert_eq!(
        (again.events, again.effects),
        (vec![], vec![Effect::Accepted { worker: encoder, token }])
    );
    assert!(world.offer(denoiser).is_some());
    let stage = world.does(Input::Renew {
        worker: encoder,
        token,
        sequence: 9,
        progress: None,
    });
    assert_eq!(stage, Default::default(), "a renewal that was on its way");
}

#[test]
fn a_draining_server_offers_and_accepts_nothing() {
    let mut world = World::new(topology(&["paint"], vec![]));
    let painter = world.attach("paint", 2);
    let job = world.submit();
    let token = world.accept(painter);
    world.submit_with_key("mine", 1).expect("a job");
    let second = world.accept(painter);
    let waiting = world.submit();
    world.does(Input::Drain {
        scope: DrainScope::All,
        within: None,
    });
    assert!(world.effects.contains(&Effect::Drain {
        worker: painter,
        within: None
    }));
    let refusal = world.submit_with_key("other", 1).expect_err("draining");
    assert_eq!(refusal.class(), ErrorClass::Unavailable);
    assert!(world.submit_with_key("mine", 1).is_ok(), "what is there is there");
    world.complete(painter, token);
    world.complete(painter, second);
    assert_eq!((world.state(job), world.state(waiting)), ("succeeded", "active"));
    assert!(world.offer(painter).is_none());
    world.restart();
    let painter = world.attach("paint", 1);
    world.run(painter);
    assert_eq!(world.state(waiting), "succeeded");
}

#[test]
fn the_parameters_of_jobs_that_have_not_ended_are_bounded() {
    let limits = Limits {
        max_queued_bytes: ByteCount(10),
        ..Limits::default()
    };
    let mut world = World::with_limits(topology(&["paint"], vec![]), limits);
    let submit = |world: &mut World, params: &str| {
        let job = JobId(world.id());
        let params = params.into();
        world.step(submission(job, params)).map(|_| job)
    };
    let long = submit(&mut world, r#"{"p":"x"}"#).expect("9 bytes fit");
    let refusal = submit(&mut world, "{}").expect_err("11 bytes do not");
    assert_eq!(
        (refusal.class(), refusal.reason()),
        (ErrorClass::Exhausted, "queue.full")
    );
    assert_eq!(refusal.details()["queued_bytes"], "9");
    world.restart();
    assert!(submit(&mut world, "{}").is_err(), "nor after a restart");
    world.cancel(long);
    for _ in 0..5 {
        submit(&mut world, "{}").expect("the long one has ended");
    }
    assert!(submit(&mut world, "{}").is_err());
}
