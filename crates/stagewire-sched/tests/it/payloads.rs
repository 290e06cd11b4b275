use stagewire_core::{Classify, ErrorClass, PayloadId};
use stagewire_sched::{Holder, Input};

use crate::world::{World, payload_info, stored, stream, topology, video, whole};

#[test]
fn p2p_payloads_are_kept_until_what_was_made_of_them_is_safe() {
    let mut world = World::new(video());
    let [encoder, denoiser, decoder] = ["encode", "denoise", "decode"].map(|stage| world.attach(stage, 1));
    world.submit();
    let token = world.accept(encoder);
    let embeddings = world.publish(encoder, token);
    world.complete(encoder, token);
    let token = world.accept(denoiser);
    let latents = world.publish(denoiser, token);
    world.complete(denoiser, token);
    assert_eq!(
        world.releases(),
        [],
        "the latents may still be lost, and are made of the embeddings"
    );
    world.run(decoder);
    let releases = [
        (Holder::Worker(denoiser), latents),
        (Holder::Worker(encoder), embeddings),
    ];
    assert_eq!(world.releases(), releases);
}

#[test]
fn a_stored_output_lets_go_of_its_inputs() {
    let edges = vec![whole("encode", "denoise"), stored(stream("denoise", "decode"))];
    let mut world = World::new(topology(&["encode", "denoise", "decode"], edges));
    let [encoder, denoiser, decoder] = ["encode", "denoise", "decode"].map(|stage| world.attach(stage, 1));
    let job = world.submit();
    let token = world.accept(encoder);
    let embeddings = world.publish(encoder, token);
    world.complete(encoder, token);
    assert!(world.offer(denoiser).expect("an offer").output.stored);
    let token = world.accept(denoiser);
    let latents = world.publish_in(denoiser, token, true);
    assert_eq!(world.releases(), [], "published is not sealed");
    world.complete(denoiser, token);
    assert_eq!(world.releases(), [(Holder::Worker(encoder), embeddings)]);
    world.lose(denoiser);
    world.run(decoder);
    assert_eq!(
        world.releases().last(),
        Some(&(Holder::Store, latents)),
        "the store outlives the producer"
    );
    assert_eq!(world.state(job), "succeeded");
}

#[test]
fn a_payload_with_two_consumers_waits_for_both() {
    let edges = vec![whole("encode", "video"), whole("encode", "audio")];
    let mut world = World::new(topology(&["encode", "video", "audio"], edges));
    let [encoder, video, audio] = ["encode", "video", "audio"].map(|stage| world.attach(stage, 1));
    let job = world.submit();
    world.run(encoder);
    world.run(video);
    assert_eq!(world.releases(), []);
    assert_eq!(world.state(job), "active");
    world.run(audio);
    assert_eq!(world.releases().len(), 1);
    assert_eq!(world.state(job), "succeeded");
}

#[test]
fn a_lost_payload_is_made_again_for_the_one_who_has_not_begun() {
    let edges = vec![whole("encode", "video"), whole("encode", "audio")];
    let mut world = World::new(topology(&["encode", "video", "audio"], edges));
    let [encoder, video] = ["encode", "video"].map(|stage| world.attach(stage, 1));
    let job = world.submit();
    world.run(encoder);
    let token = world.accept(video);
    world.lose(encoder);
    assert_eq!(world.phases(job), ["queued", "running", "blocked"]);
    world.complete(video, token);
    let [encoder, audio] = ["encode", "audio"].map(|stage| world.attach(stage, 1));
    world.run(encoder);
    world.run(audio);
    assert_eq!(world.state(job), "succeeded");
    assert_eq!(world.sched.live_payloads(), 0);
}

#[test]
fn a_join_waits_for_all_its_inputs() {
    let edges = vec![
        stream("denoise", "video"),
        whole("denoise", "audio"),
        whole("video", "mux"),
        whole("audio", "mux"),
    ];
    let mut world = World::new(topology(&["denoise", "video", "audio", "mux"], edges));
    let workers = ["denoise", "video", "audio", "mux"].map(|stage| world.attach(stage, 1));
    let job = world.submit();
    let token = world.accept(workers[0]);
    world.publish(workers[0], token);
    assert_eq!(
        world.phases(job),
        ["running", "offered", "blocked", "blocked"],
        "one streams, the other waits"
    );
    world.complete(workers[0], token);
    world.run(workers[1]);
    assert_eq!(world.phase(job, "mux"), "blocked");
    world.run(workers[2]);
    let offer = world.offer(workers[3]).expect("an offer");
    let from: Vec<_> = offer.inputs.iter().map(|input| input.stage.as_str()).collect();
    assert_eq!(from, ["video", "audio"]);
    world.run(workers[3]);
    assert_eq!((world.state(job), world.releases().len()), ("succeeded", 3));
}

#[test]
fn a_last_stage_publishes_nothing() {
    let mut world = World::new(topology(&["paint"], vec![]));
    let painter = world.attach("paint", 1);
    world.submit();
    let token = world.accept(painter);
    let payload = payload_info(PayloadId(world.id()), false);
    let worker = painter;
    let refusal = world.refused(Input::Published { worker, token, payload });
    assert_eq!(
        (refusal.class(), refusal.reason()),
        (ErrorClass::Invalid, "payload.no_consumer")
    );
}

#[test]
fn an_attempt_publishes_once_and_with_its_own_id() {
    let mut world = World::new(video());
    let worker = world.attach("encode", 2);
    world.submit();
    let first = world.accept(worker);
    world.submit();
    let second = world.accept(worker);
    let id = world.publish(worker, first);
    let again = payload_info(PayloadId(world.id()), false);
    let refusal = world.refused(Input::Published {
        worker,
        token: first,
        payload: again,
    });
    assert_eq!(refusal.reason(), "payload.published_twice");
    let refusal = world.refused(Input::Published {
        worker,
        token: second,
        payload: payload_info(id, false),
    });
    assert_eq!(refusal.reason(), "payload.in_use");
}

#[test]
fn what_a_superseded_attempt_publishes_is_released() {
    let mut world = World::new(video());
    let worker = world.attach("encode", 1);
    let job = world.submit();
    let token = world.accept(worker);
    world.cancel(job);
    let payload = payload_info(PayloadId(world.id()), false);
    let id = payload.id;
    world.does(Input::Published { worker, token, payload });
    assert_eq!(world.releases(), [(Holder::Worker(worker), id)]);
}
