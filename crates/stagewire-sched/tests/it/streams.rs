use stagewire_core::ErrorClass;
use stagewire_sched::Input;

use crate::world::{World, completed, stream, topology, video, whole};

/// A job whose decoder reads the first chunk of a denoiser that goes on.
fn streaming() -> (
    World,
    [stagewire_core::Incarnation; 2],
    stagewire_core::JobId,
    [stagewire_core::Token; 2],
) {
    let mut world = World::new(video());
    let [encoder, denoiser, decoder] = ["encode", "denoise", "decode"].map(|stage| world.attach(stage, 1));
    let job = world.submit();
    world.run(encoder);
    let denoising = world.accept(denoiser);
    assert_eq!(world.phase(job, "decode"), "blocked", "not before the first chunk");
    world.publish(denoiser, denoising);
    let decoding = world.accept(decoder);
    (world, [denoiser, decoder], job, [denoising, decoding])
}

#[test]
fn a_whole_edge_waits_for_the_end_of_the_producer() {
    let mut world = World::new(topology(&["encode", "decode"], vec![whole("encode", "decode")]));
    let [encoder, decoder] = ["encode", "decode"].map(|stage| world.attach(stage, 1));
    let job = world.submit();
    let token = world.accept(encoder);
    world.publish(encoder, token);
    assert_eq!(world.phase(job, "decode"), "blocked");
    world.complete(encoder, token);
    world.run(decoder);
    assert_eq!(world.state(job), "succeeded");
}

#[test]
fn a_stream_producer_that_dies_at_chunk_1_fences_its_consumer_free_of_charge() {
    let (mut world, [denoiser, decoder], job, [denoising, decoding]) = streaming();
    world.take();
    world.lose(denoiser);
    assert_eq!(world.phases(job), ["done", "queued", "blocked"]);
    assert!(world.was_cancelled(decoding), "the consumer is told at once");
    assert_eq!(world.stage(job, "decode").failures(), 0);
    assert_eq!(world.stage(job, "denoise").failures(), 0);
    assert_eq!(world.heard(job), ["denoise requeued", "decode requeued"]);
    let refused = world.does(completed(decoder, decoding));
    assert_eq!(
        world.phase(job, "decode"),
        "blocked",
        "what it completes late does not count: {refused:?}"
    );

    let second = world.attach("denoise", 1);
    let token = world.accept(second);
    assert_ne!(token, denoising);
    world.publish(second, token);
    world.complete(second, token);
    world.run(decoder);
    assert_eq!(world.state(job), "succeeded");
}

#[test]
fn a_stream_producer_that_fails_takes_its_consumer_along() {
    let (mut world, [denoiser, _], job, [denoising, decoding]) = streaming();
    world.fail(denoiser, denoising, ErrorClass::Internal);
    assert_eq!(world.state(job), "failed");
    assert!(world.was_cancelled(decoding));
    assert_eq!(world.sched.live_payloads(), 0);
}

#[test]
fn a_stream_producer_that_dies_takes_back_the_offer_to_its_consumer() {
    let mut world = World::new(video());
    let [encoder, denoiser, decoder] = ["encode", "denoise", "decode"].map(|stage| world.attach(stage, 1));
    let job = world.submit();
    world.run(encoder);
    let denoising = world.accept(denoiser);
    world.publish(denoiser, denoising);
    let token = world.offer(decoder).expect("an offer").token;
    world.lose(denoiser);
    assert_eq!(world.phase(job, "decode"), "blocked");
    assert!(world.was_cancelled(token));
    assert_eq!(
        world.refused(Input::Accept { worker: decoder, token }),
        stagewire_sched::Refusal::Stale { worker: decoder, token }
    );
}

#[test]
fn a_consumer_may_finish_before_its_producer_says_so() {
    let (mut world, [denoiser, decoder], job, [denoising, decoding]) = streaming();
    world.complete(decoder, decoding);
    assert_eq!(world.phases(job), ["done", "running", "done"]);
    assert_eq!(world.state(job), "active");
    world.complete(denoiser, denoising);
    assert_eq!(world.state(job), "succeeded");
}

#[test]
fn nobody_runs_a_stage_again_that_nobody_needs() {
    let (mut world, [denoiser, decoder], job, [_, decoding]) = streaming();
    world.complete(decoder, decoding);
    world.lose(denoiser);
    assert_eq!(world.phases(job), ["done", "skipped", "done"]);
    assert_eq!(world.state(job), "succeeded");
}

#[test]
fn fencing_goes_down_a_chain_of_streams() {
    let edges = vec![stream("encode", "denoise"), stream("denoise", "decode")];
    let mut world = World::new(topology(&["encode", "denoise", "decode"], edges));
    let [encoder, denoiser, decoder] = ["encode", "denoise", "decode"].map(|stage| world.attach(stage, 1));
    let job = world.submit();
    let encoding = world.accept(encoder);
    world.publish(encoder, encoding);
    let denoising = world.accept(denoiser);
    world.publish(denoiser, denoising);
    let decoding = world.accept(decoder);
    world.lose(encoder);
    assert_eq!(world.phases(job), ["queued", "blocked", "blocked"]);
    assert!(world.was_cancelled(denoising) && world.was_cancelled(decoding));
    world.stop(denoiser, denoising);
    world.stop(decoder, decoding);
    let encoder = world.attach("encode", 1);
    for worker in [encoder, denoiser, decoder] {
        world.run(worker);
    }
    assert_eq!(world.state(job), "succeeded");
}
