//! Stages that a job does not need.

use std::time::Duration;

use stagewire_core::{Classify, ErrorClass, JobId};
use stagewire_sched::{EdgeSpec, Refusal, StageKind, StageSpec, Topology, Urgency};

use crate::world::{World, name, stored, topology, video, whole};

fn skip(stages: &[&str]) -> Urgency {
    Urgency {
        skip: stages.iter().map(|stage| name(stage)).collect(),
        ..Urgency::default()
    }
}

fn submit(world: &mut World, stages: &[&str]) -> JobId {
    world.submit_as(skip(stages)).expect("something is left to do")
}

/// Encode, denoise, and two decoders whose outputs are put together.
fn film() -> Topology {
    let edges = [
        ("encode", "denoise"),
        ("denoise", "video"),
        ("denoise", "audio"),
        ("video", "join"),
        ("audio", "join"),
    ];
    topology(
        &["encode", "denoise", "video", "audio", "join"],
        edges.map(|(from, to)| whole(from, to)).into(),
    )
}

fn reads(world: &World, worker: stagewire_core::Incarnation) -> Vec<String> {
    let offer = world.offer(worker).expect("the worker has an offer");
    offer.inputs.iter().map(|input| input.stage.to_string()).collect()
}

#[test]
fn a_job_with_its_embeddings_given_begins_at_the_denoiser() {
    let mut world = World::new(video());
    let denoiser = world.attach("denoise", 1);
    let decoder = world.attach("decode", 1);
    let job = submit(&mut world, &["encode"]);
    assert_eq!(world.heard(job)[..3], ["submitted", "encode done", "denoise queued"]);
    assert_eq!(world.phases(job), ["skipped", "offered", "blocked"]);
    assert_eq!(reads(&world, denoiser), [] as [&str; 0]);
    world.run(denoiser);
    assert_eq!(reads(&world, decoder), ["denoise"]);
    world.run(decoder);
    assert_eq!(world.state(job), "succeeded");
    assert_eq!(world.phases(job), ["skipped", "done", "done"]);
}

#[test]
fn what_only_skipped_stages_would_read_does_not_run() {
    let mut world = World::new(video());
    let decoder = world.attach("decode", 1);
    let job = submit(&mut world, &["denoise"]);
    assert_eq!(world.phases(job), ["skipped", "skipped", "offered"]);
    world.run(decoder);
    assert_eq!(world.state(job), "succeeded");
}

#[test]
fn a_join_goes_without_the_input_from_a_skipped_stage() {
    let mut world = World::new(film());
    let workers = ["encode", "denoise", "video", "join"].map(|stage| world.attach(stage, 1));
    let job = submit(&mut world, &["audio"]);
    for worker in &workers[..3] {
        world.run(*worker);
    }
    assert_eq!(reads(&world, workers[3]), ["video"]);
    world.run(workers[3]);
    assert_eq!(world.state(job), "succeeded");
    assert_eq!(world.phases(job), ["done", "done", "done", "skipped", "done"]);
    assert_eq!(world.releases().len(), 3, "each payload once");
}

#[test]
fn a_payload_is_not_held_for_a_skipped_reader() {
    let edges = vec![
        whole("a", "skipped"),
        stored(whole("skipped", "z")),
        whole("a", "b"),
        whole("b", "z"),
    ];
    let mut world = World::new(topology(&["a", "skipped", "b", "z"], edges));
    let [a, b, z] = ["a", "b", "z"].map(|stage| world.attach(stage, 1));
    let job = submit(&mut world, &["skipped"]);
    world.run(a);
    assert_eq!(world.phases(job), ["done", "skipped", "offered", "blocked"]);
    world.run(b);
    assert_eq!(reads(&world, z), ["b"]);
    world.run(z);
    assert_eq!(world.state(job), "succeeded");
}

#[test]
fn a_skipped_stage_stays_skipped_when_what_follows_runs_again() {
    let mut world = World::new(video());
    let denoiser = world.attach("denoise", 1);
    let job = submit(&mut world, &["encode"]);
    world.run(denoiser);
    assert_eq!(world.phases(job), ["skipped", "done", "queued"]);
    world.lose(denoiser);
    assert_eq!(world.phases(job), ["skipped", "queued", "blocked"]);
    world.restart();
    assert_eq!(world.phases(job), ["skipped", "queued", "blocked"]);
    let denoiser = world.attach("denoise", 1);
    world.run(denoiser);
    world.restart();
    assert_eq!(world.phases(job)[0], "skipped");
}

#[test]
fn a_job_has_begun_with_any_attempt_where_it_skips_what_admits() {
    let kind = |stage: &str, kind| StageSpec {
        kind,
        ..StageSpec::new(name(stage))
    };
    let stages = vec![
        kind("denoise", StageKind::Admission),
        kind("decode", StageKind::WorkQueue),
    ];
    let edges: Vec<EdgeSpec> = vec![whole("denoise", "decode")];
    let mut world = World::new(Topology::new(stages, edges).expect("an allowed pipeline"));
    let decoder = world.attach("decode", 1);
    let urgency = Urgency {
        queue_deadline: Some(Duration::from_secs(2)),
        ..skip(&["denoise"])
    };
    let job = world.submit_as(urgency.clone()).expect("something is left to do");
    let late = world.submit_as(urgency).expect("something is left to do");
    let token = world.accept(decoder);
    world.wait(Duration::from_secs(5));
    assert_eq!((world.state(job), world.state(late)), ("active", "failed"));
    world.complete(decoder, token);
    assert_eq!(world.state(job), "succeeded");
}

#[test]
fn what_cannot_be_skipped_is_refused() {
    let mut world = World::new(film());
    let refused = world
        .submit_as(skip(&["encode", "mux"]))
        .expect_err("there is no such stage");
    assert_eq!(
        (refused.class(), refused.reason()),
        (ErrorClass::NotFound, "stage.unknown")
    );
    assert!(refused.to_string().contains("mux"), "{refused}");
    let refused = world
        .submit_as(skip(&["join", "join"]))
        .expect_err("nothing would be left to do");
    assert_eq!(
        refused,
        Refusal::NothingToDo {
            skip: vec![name("join")]
        }
    );
    assert_eq!(
        (refused.class(), refused.reason()),
        (ErrorClass::Invalid, "job.nothing_to_do")
    );
    assert_eq!(world.sched.jobs().count(), 0);
}
