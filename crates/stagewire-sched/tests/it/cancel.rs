use stagewire_core::{Classify, ErrorClass, JobId};
use stagewire_sched::{Effect, Input, Limits};

use crate::world::{World, completed, topology, video};

#[test]
fn a_queued_job_is_cancelled_at_once() {
    let mut world = World::new(video());
    let job = world.submit();
    world.cancel(job);
    assert_eq!(world.state(job), "cancelled");
    world.cancel(job);
    assert_eq!(
        world.heard(job),
        ["submitted", "encode queued", "cancelling", "cancelled"]
    );
}

#[test]
fn an_offered_job_is_cancelled_at_once() {
    let mut world = World::new(video());
    let encoder = world.attach("encode", 1);
    let job = world.submit();
    let token = world.offer(encoder).expect("an offer").token;
    world.cancel(job);
    assert_eq!(world.state(job), "cancelled");
    assert!(world.was_cancelled(token));
    assert_eq!(
        world.refused(Input::Accept { worker: encoder, token }).class(),
        ErrorClass::Fenced
    );
}

#[test]
fn a_running_job_is_cancelled_when_its_attempts_have_stopped() {
    let mut world = World::new(video());
    let [encoder, denoiser, decoder] = ["encode", "denoise", "decode"].map(|stage| world.attach(stage, 1));
    let job = world.submit();
    world.run(encoder);
    let denoising = world.accept(denoiser);
    world.publish(denoiser, denoising);
    let decoding = world.accept(decoder);
    world.cancel(job);
    assert_eq!(world.state(job), "cancelling");
    assert!(world.was_cancelled(denoising) && world.was_cancelled(decoding));
    assert_eq!(world.releases().len(), 2, "what was published goes at once");
    world.take();
    world.does(Input::Renew {
        worker: denoiser,
        token: denoising,
        sequence: 1,
        progress: None,
    });
    assert!(world.was_cancelled(denoising), "said again with each renewal");
    world.stop(denoiser, denoising);
    assert_eq!(world.state(job), "cancelling");
    let decision = world.does(completed(decoder, decoding));
    assert!(matches!(decision.effects[0], Effect::Refused { .. }), "too late");
    assert_eq!(world.state(job), "cancelled");
    assert_eq!(world.sched.live_payloads(), 0);
}

#[test]
fn what_was_stopped_for_a_cancelled_job_is_not_said_to_start_again() {
    let mut world = World::new(video());
    let [encoder, denoiser, decoder] = ["encode", "denoise", "decode"].map(|stage| world.attach(stage, 1));
    let job = world.submit();
    world.run(encoder);
    let denoising = world.accept(denoiser);
    world.publish(denoiser, denoising);
    assert!(
        world.offer(decoder).is_some(),
        "one that runs, and one that was offered"
    );
    world.cancel(job);
    world.stop(denoiser, denoising);
    let heard = world.heard(job);
    let from = heard.iter().position(|word| word == "cancelling");
    assert_eq!(heard[from.expect("it is cancelled")..], ["cancelling", "cancelled"]);
}

#[test]
fn a_worker_that_does_not_stop_holds_up_no_job() {
    let mut world = World::new(topology(&["paint"], vec![]));
    let painter = world.attach("paint", 1);
    let job = world.submit();
    world.accept(painter);
    world.cancel(job);
    let start = world.now;
    assert_eq!(world.jump(), "job.cancel");
    assert_eq!(world.now.since(start), Limits::default().cancel);
    assert_eq!(world.state(job), "cancelled");
    assert_eq!(world.jump(), "attempt.stop");
    assert!(world.sched.worker(painter).is_none());
}

#[test]
fn nobody_waits_for_a_worker_that_cannot_be_reached() {
    for dead in [true, false] {
        let mut world = World::new(topology(&["paint"], vec![]));
        let painter = world.attach("paint", 1);
        let [first, second] = [(); 2].map(|()| {
            let job = world.submit();
            if world.offer(painter).is_some() {
                world.accept(painter);
            }
            job
        });
        world.cancel(first);
        assert_eq!(world.state(first), "cancelling");
        if dead {
            world.lose(painter);
        } else {
            world.away(painter);
        }
        assert_eq!(world.state(first), "cancelled");
        world.cancel(second);
        assert_eq!(world.state(second), "cancelled");
    }
}

#[test]
fn a_worker_that_was_away_hears_of_the_cancellation() {
    let mut world = World::new(topology(&["paint"], vec![]));
    let painter = world.attach("paint", 1);
    let job = world.submit();
    let token = world.accept(painter);
    world.away(painter);
    world.cancel(job);
    assert_eq!(world.state(job), "cancelled");
    assert!(!world.was_cancelled(token), "it could not be told");
    world.attach_as(painter, "paint", 1, vec![token], vec![]);
    assert!(world.was_cancelled(token));
    let next = world.submit();
    assert_eq!(world.phase(next, "paint"), "queued");
    world.stop(painter, token);
    assert_eq!(world.phase(next, "paint"), "offered");
}

#[test]
fn what_has_ended_cannot_be_cancelled() {
    let mut world = World::new(topology(&["paint"], vec![]));
    let painter = world.attach("paint", 1);
    let job = world.submit();
    world.run(painter);
    let refusal = world.refused(Input::Cancel { job });
    assert_eq!((refusal.class(), refusal.reason()), (ErrorClass::Conflict, "job.ended"));
    assert!(refusal.to_string().contains("succeeded"));
    let job = JobId(world.id());
    assert_eq!(world.refused(Input::Cancel { job }).class(), ErrorClass::NotFound);
}

#[test]
fn a_failure_of_a_cancelled_attempt_is_not_the_jobs() {
    let mut world = World::new(topology(&["paint"], vec![]));
    let painter = world.attach("paint", 1);
    let job = world.submit();
    let token = world.accept(painter);
    world.cancel(job);
    world.fail(painter, token, ErrorClass::Internal);
    assert_eq!(world.state(job), "cancelled");
}
