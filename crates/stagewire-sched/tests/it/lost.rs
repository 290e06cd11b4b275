use stagewire_core::{Classify, ErrorClass, Incarnation, JobId, PayloadId, Token};
use stagewire_sched::{Effect, Holder, Input, Limits, Outcome};

use crate::world::{World, completed, topology, video, whole};

struct Chain {
    world: World,
    encoder: Incarnation,
    denoiser: Incarnation,
    decoder: Incarnation,
    job: JobId,
    denoised: PayloadId,
}

/// A job whose latents are sealed in the memory of the denoiser, and offered to the decoder.
fn sealed() -> Chain {
    let mut world = World::new(video());
    let [encoder, denoiser, decoder] = ["encode", "denoise", "decode"].map(|stage| world.attach(stage, 1));
    let job = world.submit();
    world.run(encoder);
    let token = world.accept(denoiser);
    let denoised = world.publish(denoiser, token);
    world.complete(denoiser, token);
    Chain {
        world,
        encoder,
        denoiser,
        decoder,
        job,
        denoised,
    }
}

impl Chain {
    /// A new denoiser makes the latents again, and the decoder finishes the job.
    fn finish(mut self) {
        let denoiser = self.world.attach("denoise", 1);
        self.world.run(denoiser);
        self.world.run(self.decoder);
        assert_eq!(self.world.state(self.job), "succeeded");
        assert_eq!(self.world.stage(self.job, "decode").failures(), 0);
    }
}

fn reason(world: &World, job: JobId) -> String {
    match world.sched.job(job).and_then(|job| job.outcome()) {
        Some(Outcome::Failed(failure)) => failure.reason.clone(),
        other => panic!("job {job} did not fail: {other:?}"),
    }
}

#[test]
fn a_producer_that_dies_after_sealing_while_its_consumer_is_queued() {
    let mut chain = sealed();
    chain.world.lose(chain.decoder);
    assert_eq!(chain.world.phase(chain.job, "decode"), "queued");
    chain.world.lose(chain.denoiser);
    assert_eq!(chain.world.phases(chain.job), ["done", "queued", "blocked"]);
    chain.decoder = chain.world.attach("decode", 1);
    chain.finish();
}

#[test]
fn a_producer_that_dies_after_sealing_while_its_consumer_is_offered() {
    let mut chain = sealed();
    let token = chain.world.offer(chain.decoder).expect("an offer").token;
    chain.world.lose(chain.denoiser);
    assert_eq!(chain.world.phases(chain.job), ["done", "queued", "blocked"]);
    assert!(chain.world.was_cancelled(token));
    chain.finish();
}

#[test]
fn a_producer_that_dies_after_sealing_while_its_consumer_runs_lets_it_go_on() {
    let mut chain = sealed();
    let decoding = chain.world.accept(chain.decoder);
    chain.world.lose(chain.denoiser);
    assert_eq!(
        chain.world.phases(chain.job),
        ["done", "done", "running"],
        "it may have all bytes"
    );
    chain.world.complete(chain.decoder, decoding);
    assert_eq!(chain.world.state(chain.job), "succeeded");
    let releases = chain.world.releases();
    assert!(
        releases
            .iter()
            .all(|release| release.0 != Holder::Worker(chain.denoiser)),
        "the dead need no telling"
    );
    assert!(
        releases
            .iter()
            .any(|release| release.0 == Holder::Worker(chain.encoder))
    );
}

#[test]
fn a_consumer_that_misses_bytes_of_a_dead_producer_is_queued_again_free_of_charge() {
    let mut chain = sealed();
    let decoding = chain.world.accept(chain.decoder);
    chain.world.lose(chain.denoiser);
    chain.world.fail_for_lost(chain.decoder, decoding, chain.denoised);
    assert_eq!(chain.world.phases(chain.job), ["done", "queued", "blocked"]);
    chain.finish();
}

#[test]
fn a_consumer_may_notice_first() {
    let mut chain = sealed();
    let decoding = chain.world.accept(chain.decoder);
    chain.world.fail_for_lost(chain.decoder, decoding, chain.denoised);
    assert_eq!(chain.world.phases(chain.job), ["done", "offered", "blocked"]);
    let release = (Holder::Worker(chain.denoiser), chain.denoised);
    assert!(
        chain.world.releases().contains(&release),
        "should it live after all, it can forget it"
    );
    chain.world.lose(chain.denoiser);
    chain.finish();
}

#[test]
fn a_lost_payload_that_was_none_of_its_inputs_is_a_failure() {
    let mut chain = sealed();
    let decoding = chain.world.accept(chain.decoder);
    let other = PayloadId(chain.world.id());
    chain.world.fail_for_lost(chain.decoder, decoding, other);
    assert_eq!(chain.world.state(chain.job), "failed");
}

#[test]
fn loss_goes_up_the_chain_where_the_inputs_are_gone_too() {
    let mut chain = sealed();
    chain.world.lose(chain.encoder);
    assert_eq!(
        chain.world.phases(chain.job),
        ["done", "done", "offered"],
        "nobody needs the embeddings now"
    );
    chain.world.lose(chain.denoiser);
    assert_eq!(chain.world.phases(chain.job), ["queued", "blocked", "blocked"]);
    let encoder = chain.world.attach("encode", 1);
    chain.world.run(encoder);
    chain.finish();
}

#[test]
fn a_worker_that_dies_costs_no_attempt_and_its_job_goes_first() {
    let mut world = World::new(topology(&["paint"], vec![]));
    let first = world.attach("paint", 1);
    let older = world.submit();
    let job = {
        world.run(first);
        world.submit()
    };
    assert_eq!(world.state(older), "succeeded");
    world.accept(first);
    let younger = world.submit();
    world.lose(first);
    assert_eq!(world.stage(job, "paint").failures(), 0);
    assert_eq!(world.sched.job(job).map(|job| job.losses().killed_workers), Some(1));
    let second = world.attach("paint", 1);
    assert_eq!([world.run(second).job, world.run(second).job], [job, younger]);
}

#[test]
fn a_job_that_kills_workers_is_not_given_to_all_of_them() {
    let mut world = World::new(topology(&["paint"], vec![]));
    let job = world.submit();
    for _ in 0..Limits::default().max_killed_workers {
        assert_eq!(world.state(job), "active");
        let worker = world.attach("paint", 1);
        world.accept(worker);
        world.lose(worker);
    }
    assert_eq!(reason(&world, job), "job.killed_workers");
}

#[test]
fn late_completion_after_supersede_changes_nothing_but_frees_the_slot() {
    let mut world = World::new(topology(&["paint"], vec![]));
    let slow = world.attach("paint", 1);
    let job = world.submit();
    let late = world.accept(slow);
    assert_eq!(world.jump(), "attempt.renewal");
    assert_eq!(world.phase(job, "paint"), "queued", "its only slot is still used");
    assert!(world.was_cancelled(late));
    let other = world.attach("paint", 1);
    let token = world.accept(other);
    let before = world.sched.snapshot();
    let decision = world.does(completed(slow, late));
    assert_eq!(world.sched.snapshot(), before);
    assert!(matches!(decision.effects[..], [Effect::Refused { .. }]));
    let next = world.submit();
    assert_eq!(
        world.offer(slow).map(|offer| offer.token.job),
        Some(next),
        "its slot is free again"
    );
    assert_eq!(
        world.refused(completed(slow, late)).class(),
        ErrorClass::Fenced,
        "and only once"
    );
    assert_eq!(
        world.refused(completed(slow, token)).class(),
        ErrorClass::Fenced,
        "somebody else's attempt"
    );
    world.complete(other, token);
    assert_eq!(world.state(job), "succeeded");
}

#[test]
fn silence_and_standstill_are_losses_with_a_bound() {
    let mut world = World::new(topology(&["paint"], vec![]));
    let limits = Limits::default();
    let painter = world.attach("paint", 1);
    let job = world.submit();

    let silent = world.accept(painter);
    let start = world.now;
    assert_eq!(world.jump(), "attempt.renewal");
    assert_eq!(world.now.since(start), limits.grant);
    assert_eq!(world.sched.counters().attempts_expired, 1);
    let advice = |world: &World| {
        world
            .stage(job, "paint")
            .last_failure()
            .expect("it was lost")
            .message
            .clone()
    };
    assert!(advice(&world).contains("see its log"), "{}", advice(&world));
    world.stop(painter, silent);

    let stuck = world.accept(painter);
    let start = world.now;
    world.renew(painter, stuck, 1);
    while world.phase(job, "paint") == "running" {
        world.wait(limits.renew_interval());
        if world.phase(job, "paint") == "running" {
            world.renew(painter, stuck, 1);
        }
    }
    assert!(world.now.since(start) >= world.sched.topology().stages()[0].no_progress);
    assert_eq!(world.sched.counters().attempts_without_progress, 1);
    assert!(
        advice(&world).contains("raise \"no-progress\" of the stage"),
        "{}",
        advice(&world)
    );
    world.stop(painter, stuck);

    world.accept(painter);
    world.jump();
    assert_eq!(reason(&world, job), "job.attempts_expired");
}

#[test]
fn renewal_with_progress_keeps_an_attempt_for_ever() {
    let mut world = World::new(topology(&["paint"], vec![]));
    let painter = world.attach("paint", 1);
    let job = world.submit();
    let token = world.accept(painter);
    for sequence in 1..=1000 {
        world.wait(Limits::default().renew_interval());
        world.renew(painter, token, sequence);
    }
    world.complete(painter, token);
    assert_eq!(world.state(job), "succeeded");
}

#[test]
fn a_worker_that_does_not_stop_is_given_up() {
    let mut world = World::new(topology(&["paint"], vec![]));
    let hung = world.attach("paint", 2);
    let job = world.submit();
    let token = world.accept(hung);
    world.jump();
    let started = world.now;
    let second = world.accept(hung);
    assert_ne!(second, token);
    for sequence in 1..30 {
        world.wait(Limits::default().renew_interval());
        if world.sched.worker(hung).is_some() {
            world.renew(hung, second, sequence);
        }
    }
    assert!(world.sched.worker(hung).is_none());
    assert!(world.now.since(started) >= Limits::default().stop);
    assert!(
        world
            .effects
            .iter()
            .any(|effect| matches!(effect, Effect::Evict { worker, .. } if *worker == hung))
    );
    let renew = Input::Renew {
        worker: hung,
        token: second,
        sequence: 99,
        progress: None,
    };
    assert_eq!(world.refused(renew).reason(), "worker.unknown");
    let other = world.attach("paint", 1);
    world.run(other);
    assert_eq!(world.state(job), "succeeded");
}

#[test]
fn a_consumer_that_can_never_read_ends_the_job() {
    let mut world = World::new(topology(&["encode", "decode"], vec![whole("encode", "decode")]));
    let [encoder, decoder] = ["encode", "decode"].map(|stage| world.attach(stage, 1));
    let job = world.submit();
    for _ in 0..Limits::default().max_lost_inputs {
        assert_eq!(world.state(job), "active");
        let token = world.accept(encoder);
        let payload = world.publish(encoder, token);
        world.complete(encoder, token);
        let token = world.accept(decoder);
        world.fail_for_lost(decoder, token, payload);
    }
    assert_eq!(reason(&world, job), "job.inputs_lost");
}

#[test]
fn an_attempt_that_stops_unasked_is_tried_again() {
    let mut world = World::new(topology(&["paint"], vec![]));
    let painter = world.attach("paint", 1);
    let job = world.submit();
    let token: Token = world.accept(painter);
    world.stop(painter, token);
    let token = world.accept(painter);
    world.fail(painter, token, ErrorClass::Cancelled);
    assert_eq!((world.state(job), world.stage(job, "paint").failures()), ("active", 0));
    world.run(painter);
    assert_eq!(world.state(job), "succeeded");
}

#[test]
fn a_payload_whose_bytes_are_gone_is_made_again_if_somebody_waits_for_it() {
    let mut chain = sealed();
    chain.world.does(Input::PayloadLost {
        payload: chain.denoised,
    });
    assert_eq!(chain.world.phases(chain.job), ["done", "offered", "blocked"]);
    let unknown = PayloadId(chain.world.id());
    assert_eq!(
        chain.world.does(Input::PayloadLost { payload: unknown }),
        Default::default()
    );
    chain.world.run(chain.denoiser);
    chain.world.run(chain.decoder);
    assert_eq!(chain.world.state(chain.job), "succeeded");
}
