use stagewire_core::{Classify, Epoch, ErrorClass};
use stagewire_sched::{Effect, Holder, Input, Limits, Sched};

use crate::world::{World, completed, stored, stream, topology, video, whole};

#[test]
fn workers_that_reconnect_go_on_after_a_restart() {
    let mut world = World::new(video());
    let [encoder, denoiser, decoder] = ["encode", "denoise", "decode"].map(|stage| world.attach(stage, 1));
    let job = world.submit();
    let token = world.accept(encoder);
    let embeddings = world.publish(encoder, token);
    world.complete(encoder, token);
    let denoising = world.accept(denoiser);
    let latents = world.publish(denoiser, denoising);
    let decoding = world.accept(decoder);
    world.restart();
    assert_eq!(world.phases(job), ["done", "running", "running"]);
    world.wait(Limits::default().linger / 2);
    world.attach_as(encoder, "encode", 1, vec![], vec![embeddings]);
    world.attach_as(denoiser, "denoise", 1, vec![denoising], vec![latents]);
    world.attach_as(decoder, "decode", 1, vec![decoding], vec![]);
    assert_eq!(world.releases(), []);
    world.complete(denoiser, denoising);
    world.complete(decoder, decoding);
    assert_eq!(world.state(job), "succeeded");
    assert_eq!(world.sched.counters().attempts_granted, 3, "nothing ran twice");
    assert_eq!(world.releases().len(), 2);
}

#[test]
fn workers_that_do_not_reconnect_are_lost_after_a_restart() {
    let mut world = World::new(video());
    let [encoder, denoiser] = ["encode", "denoise"].map(|stage| world.attach(stage, 1));
    let job = world.submit();
    world.run(encoder);
    world.accept(denoiser);
    world.restart();
    let start = world.now;
    assert_eq!(world.jump(), "worker.away");
    assert_eq!(world.now.since(start), Limits::default().linger);
    assert_eq!(world.phases(job), ["queued", "blocked", "blocked"]);
    assert_eq!(world.sched.workers().count(), 0);
    let losses = world.sched.job(job).map(|job| job.losses());
    assert_eq!(losses, Some(Default::default()), "a restart is nobody's fault");
    for stage in ["encode", "denoise", "decode"] {
        let worker = world.attach(stage, 1);
        world.run(worker);
    }
    assert_eq!(world.state(job), "succeeded");
}

#[test]
fn offers_do_not_outlive_the_server() {
    let mut world = World::new(topology(&["paint"], vec![]));
    let painter = world.attach("paint", 1);
    let job = world.submit();
    let old = world.offer(painter).expect("an offer").token;
    world.restart();
    assert_eq!(world.phase(job, "paint"), "queued");
    world.attach_as(painter, "paint", 1, vec![], vec![]);
    let new = world.offer(painter).expect("an offer").token;
    assert_eq!(
        (old.epoch, new.epoch),
        (Epoch(1), Epoch(2)),
        "the same attempt number in another epoch"
    );
    let stale = Input::Accept {
        worker: painter,
        token: old,
    };
    assert_eq!(world.refused(stale).class(), ErrorClass::Fenced);
    world.run(painter);
    assert_eq!(world.state(job), "succeeded");
}

#[test]
fn what_the_store_held_is_made_again() {
    let edges = vec![whole("encode", "denoise"), stored(whole("denoise", "decode"))];
    let mut world = World::new(topology(&["encode", "denoise", "decode"], edges));
    let [encoder, denoiser] = ["encode", "denoise"].map(|stage| world.attach(stage, 1));
    let job = world.submit();
    world.run(encoder);
    world.run(denoiser);
    assert_eq!(
        world.releases().len(),
        1,
        "the embeddings went once the latents were stored"
    );
    world.restart();
    assert_eq!(
        world.phases(job),
        ["queued", "blocked", "blocked"],
        "so it starts from the parameters"
    );
    world.attach_as(encoder, "encode", 1, vec![], vec![]);
    world.attach_as(denoiser, "denoise", 1, vec![], vec![]);
    let decoder = world.attach("decode", 1);
    for worker in [encoder, denoiser, decoder] {
        world.run(worker);
    }
    assert_eq!(world.state(job), "succeeded");
}

#[test]
fn what_the_store_still_has_is_not_made_again() {
    let edges = vec![stored(whole("encode", "denoise")), stored(whole("denoise", "decode"))];
    let mut world = World::new(topology(&["encode", "denoise", "decode"], edges));
    let [encoder, denoiser] = ["encode", "denoise"].map(|stage| world.attach(stage, 1));
    let (kept, lost) = (world.submit(), world.submit());
    for _ in 0..2 {
        world.run(encoder);
    }
    for _ in 0..2 {
        world.run(denoiser);
    }
    let latents = world.live(kept);
    assert_eq!(latents.len(), 1);
    world.restart_with(latents);
    assert_eq!(world.phases(kept), ["done", "done", "queued"]);
    assert_eq!(world.phases(lost), ["queued", "blocked", "blocked"]);
    assert_eq!(world.releases(), []);
    let decoder = world.attach("decode", 1);
    world.run(decoder);
    assert_eq!(world.state(kept), "succeeded");
    assert_eq!(world.releases().len(), 1, "the store lets go of the latents");
}

#[test]
fn a_stream_into_the_store_ends_with_the_store() {
    let edges = vec![whole("encode", "denoise"), stored(stream("denoise", "decode"))];
    let mut world = World::new(topology(&["encode", "denoise", "decode"], edges));
    let [encoder, denoiser, decoder] = ["encode", "denoise", "decode"].map(|stage| world.attach(stage, 1));
    let job = world.submit();
    let token = world.accept(encoder);
    let embeddings = world.publish(encoder, token);
    world.complete(encoder, token);
    let denoising = world.accept(denoiser);
    world.publish_in(denoiser, denoising, true);
    let decoding = world.accept(decoder);
    world.restart();
    assert_eq!(world.phases(job), ["done", "queued", "blocked"]);
    world.attach_as(encoder, "encode", 1, vec![], vec![embeddings]);
    world.attach_as(denoiser, "denoise", 1, vec![denoising], vec![]);
    world.attach_as(decoder, "decode", 1, vec![decoding], vec![]);
    assert!(world.was_cancelled(denoising) && world.was_cancelled(decoding));
    world.stop(denoiser, denoising);
    world.stop(decoder, decoding);
    world.run(denoiser);
    world.run(decoder);
    assert_eq!(world.state(job), "succeeded");
}

#[test]
fn a_running_consumer_of_a_stored_payload_goes_on() {
    let edges = vec![stored(whole("encode", "decode"))];
    let mut world = World::new(topology(&["encode", "decode"], edges));
    let [encoder, decoder] = ["encode", "decode"].map(|stage| world.attach(stage, 1));
    let job = world.submit();
    world.run(encoder);
    let token = world.accept(decoder);
    world.restart();
    assert_eq!(world.phases(job), ["done", "running"]);
    world.attach_as(decoder, "decode", 1, vec![token], vec![]);
    world.complete(decoder, token);
    assert_eq!(world.state(job), "succeeded");
    assert!(world.releases().iter().all(|release| release.0 != Holder::Store));
}

#[test]
fn work_that_ended_while_the_server_was_down_is_not_done_again() {
    let mut world = World::new(video());
    let encoder = world.attach("encode", 1);
    let job = world.submit();
    let token = world.accept(encoder);
    world.restart();
    let payload = stagewire_core::PayloadId(world.id());
    world.attach_as(encoder, "encode", 1, vec![token], vec![payload]);
    assert_eq!(world.releases(), [], "not yet published, but about to be");
    let info = crate::world::payload_info(payload, false);
    world.does(Input::Published {
        worker: encoder,
        token,
        payload: info,
    });
    world.complete(encoder, token);
    assert_eq!(world.phases(job), ["done", "queued", "blocked"]);
    assert_eq!(world.releases(), []);
}

#[test]
fn a_result_that_was_on_its_way_is_kept_until_it_is_handed_in() {
    let mut world = World::new(topology(&["paint"], vec![]));
    let painter = world.attach("paint", 2);
    let job = world.submit();
    let token = world.accept(painter);
    world.restart();
    let result = stagewire_core::PayloadId(world.id());
    world.attach_as(painter, "paint", 2, vec![token], vec![result]);
    world.submit();
    world.accept(painter);
    assert_eq!(world.releases(), [], "the server has yet to fetch it");
    world.complete(painter, token);
    assert_eq!(world.state(job), "succeeded");
    assert_eq!(
        world.releases(),
        [(Holder::Worker(painter), result)],
        "whatever else runs"
    );
}

#[test]
fn a_job_that_was_being_cancelled_is_cancelled() {
    let mut world = World::new(topology(&["paint"], vec![]));
    let painter = world.attach("paint", 1);
    let job = world.submit();
    let token = world.accept(painter);
    world.cancel(job);
    assert_eq!(world.state(job), "cancelling");
    world.restart();
    assert_eq!(world.state(job), "cancelled");
    world.attach_as(painter, "paint", 1, vec![token], vec![]);
    assert!(world.was_cancelled(token));
    world.stop(painter, token);
}

#[test]
fn losses_and_failures_survive_a_restart() {
    let mut world = World::new(topology(&["paint"], vec![]));
    let job = world.submit();
    for _ in 1..Limits::default().max_killed_workers {
        let worker = world.attach("paint", 1);
        world.accept(worker);
        world.lose(worker);
        world.restart();
    }
    let worker = world.attach("paint", 1);
    world.accept(worker);
    world.lose(worker);
    assert_eq!(world.state(job), "failed");
    world.restart();
    assert_eq!(world.state(job), "failed");
}

#[test]
fn an_epoch_is_used_once() {
    let mut world = World::new(topology(&["paint"], vec![]));
    for epoch in [Epoch(0), Epoch(1)] {
        let stored = Default::default();
        let refusal = world.refused(Input::Restarted { epoch, stored });
        assert_eq!(
            (refusal.class(), refusal.reason()),
            (ErrorClass::Conflict, "server.epoch")
        );
    }
}

#[test]
fn a_job_of_another_pipeline_does_not_wait_for_ever() {
    let mut world = World::new(topology(&["encode", "decode"], vec![whole("encode", "decode")]));
    let encoder = world.attach("encode", 1);
    let job = world.submit();
    world.run(encoder);
    let snapshot = world.sched.snapshot();
    let shorter = topology(&["encode"], vec![]);
    assert!(Sched::restore(shorter.clone(), Limits::default(), snapshot).is_err());
    let mut sched = Sched::new(shorter, Limits::default());
    for (at, event) in &world.journal {
        sched.apply(*at, event);
    }
    let epoch = Epoch(2);
    let decision = sched
        .decide(
            world.now,
            Input::Restarted {
                epoch,
                stored: Default::default(),
            },
        )
        .expect("a higher epoch");
    for event in &decision.events {
        sched.apply(world.now, event);
    }
    sched.check().expect("all is well");
    let state = sched.job(job).map(|job| job.state().name());
    assert!(matches!(state, Some("active" | "succeeded")), "{state:?}");
}

#[test]
fn a_completion_is_judged_by_its_token_after_a_restart() {
    let mut world = World::new(topology(&["paint"], vec![]));
    let painter = world.attach("paint", 1);
    let job = world.submit();
    let token = world.accept(painter);
    world.restart();
    assert_eq!(
        world.refused(completed(painter, token)).reason(),
        "worker.unknown",
        "attach first"
    );
    world.attach_as(painter, "paint", 1, vec![token], vec![]);
    world.complete(painter, token);
    assert!(world.effects.contains(&Effect::Accepted { worker: painter, token }));
    assert_eq!(world.state(job), "succeeded");
}
