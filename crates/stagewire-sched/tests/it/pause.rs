//! A paused pipeline ends what has begun and begins nothing, across restarts.

use std::time::Duration;

use stagewire_core::ErrorClass;
use stagewire_sched::{Input, StageKind, StageSpec, Topology, Urgency, WaitCause};

use crate::world::{World, name, topology, whole};

/// Encode and decode take any item; a job begins with its denoise.
fn admitting() -> Topology {
    let spec = |stage: &str| StageSpec {
        kind: if stage == "denoise" {
            StageKind::Admission
        } else {
            StageKind::WorkQueue
        },
        max_attempts: 2,
        ..StageSpec::new(name(stage))
    };
    let edges = vec![whole("encode", "denoise"), whole("denoise", "decode")];
    Topology::new(["encode", "denoise", "decode"].map(spec).to_vec(), edges).expect("an allowed pipeline")
}

#[test]
fn what_has_begun_goes_on_and_what_has_not_waits() {
    let mut world = World::new(admitting());
    let [encoder, denoiser, decoder] = ["encode", "denoise", "decode"].map(|stage| world.attach(stage, 1));
    let [begun, encoded] = [world.submit(), world.submit()];
    world.run(encoder);
    let first = world.accept(denoiser);
    assert_eq!(first.job, begun);
    world.run(encoder);
    world.does(Input::Pause);
    let new = world.submit();
    assert!(world.offer(encoder).is_none(), "a job is accepted and waits");
    world.fail(denoiser, first, ErrorClass::Internal);
    while world.phase(begun, "denoise") != "offered" {
        world.jump();
    }
    assert_eq!(world.run(denoiser).job, begun, "tried again, as it had begun");
    assert_eq!(world.run(decoder).job, begun);
    assert_eq!(world.state(begun), "succeeded");
    let cause = |world: &World, job| world.sched.explain(world.now, job)[0].cause.clone();
    let waits = WaitCause::Paused { ahead: 0, others: 0 };
    assert_eq!(
        (cause(&world, encoded), cause(&world, new)),
        (waits.clone(), waits.clone())
    );

    world.restart();
    for stage in ["encode", "denoise", "decode"] {
        world.attach(stage, 1);
    }
    world.wait(Duration::from_secs(600));
    assert!(world.sched.is_paused(), "it is in the journal");
    let lost = WaitCause::Paused { ahead: 1, others: 0 };
    assert_eq!(cause(&world, new), lost, "the other one has to be encoded again");
    world.does(Input::Resume);
    assert_eq!(world.phase(encoded, "encode"), "offered");
}

#[test]
fn without_admission_a_job_begins_with_its_first_attempt() {
    let mut world = World::new(topology(&["encode", "decode"], vec![whole("encode", "decode")]));
    let [encoder, decoder] = ["encode", "decode"].map(|stage| world.attach(stage, 1));
    let [offered, waiting] = [world.submit(), world.submit()];
    world.does(Input::Pause);
    assert_eq!(world.run(encoder).job, offered, "the offer was made before");
    assert!(world.offer(encoder).is_none());
    world.run(decoder);
    assert_eq!(
        (world.state(offered), world.phase(waiting, "encode")),
        ("succeeded", "queued")
    );
}

#[test]
fn deadlines_of_what_waits_go_on() {
    let mut world = World::new(admitting());
    world.attach("encode", 1);
    world.does(Input::Pause);
    let urgency = Urgency {
        queue_deadline: Some(Duration::from_secs(5)),
        ..Urgency::default()
    };
    let job = world.submit_as(urgency).expect("a paused pipeline takes jobs");
    assert_eq!(world.jump(), "job.queue_deadline");
    assert_eq!(world.state(job), "failed");
}

#[test]
fn said_twice_it_changes_nothing() {
    let mut world = World::new(admitting());
    for (input, paused) in [(Input::Pause, true), (Input::Resume, false)] {
        assert_eq!(world.does(input.clone()).events.len(), 1);
        assert_eq!(world.does(input).events, []);
        assert_eq!(world.sched.is_paused(), paused);
    }
}
