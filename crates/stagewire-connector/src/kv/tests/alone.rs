//! Each machine of a room alone.

use super::*;

#[test]
fn failed_is_final_on_both_sides() {
    let mut room = incoming();
    room.fail(aborted("first"));
    room.fail(aborted("second"));
    assert_eq!(room.phase(), Phase::Failed(aborted("first")));
    let engine = World::new(0).engine;
    let mut sent = Outgoing::new(ROOM, 1, &engine, 4);
    sent.fail(aborted("first"));
    sent.fail(aborted("second"));
    assert_eq!(sent.phase(), Phase::Failed(aborted("first")));
    let refused = sent.confirm((Uuid::nil(), 0), 1).expect_err("it has failed");
    assert_eq!(refused, aborted("first"));
    assert!(sent.is_released(), "nobody had read it");
}

#[test]
fn who_leaves_after_the_last_chunk_has_not_received_it() {
    let world = World::new(0);
    let readers: Vec<Attempt> = world.readers.iter().map(|reader| (reader.id, 0)).collect();
    let mut sent = Outgoing::new(ROOM, 1, &world.engine, 4);
    for (rank, &attempt) in (0..).zip(&readers) {
        assert!(sent.bind(rank, attempt, &world.destination));
        assert!(!sent.bind(rank, (attempt.0, 1), &world.destination), "another attempt");
    }
    sent.send(&world.engine, ChunkSpec::new(0..4).pages("full", [1, 2, 3, 4]).last())
        .expect("all");
    sent.confirm(readers[0], 1).expect("it has everything");
    sent.leave(readers[0], aborted("too late"));
    assert_eq!(sent.phase(), Phase::Transferring);
    sent.leave(readers[1], aborted("decode"));
    assert_eq!(sent.phase(), Phase::Failed(aborted("decode")));
    assert!(sent.is_released());
}

#[test]
fn a_state_that_comes_late_or_twice_changes_nothing() {
    let world = World::new(0);
    let mut sent = Outgoing::new(ROOM, 1, &world.engine, 4);
    let early = sent.state();
    let chunk = |lo: u64| ChunkSpec::new(lo..lo + 2).pages("full", [1, 2]);
    sent.send(&world.engine, chunk(0)).expect("the first");
    let first = sent.state();
    sent.send(&world.engine, chunk(2).last()).expect("the last");
    let mut room = incoming();
    room.heard(0, sent.state());
    let step = room.step(0);
    for late in [early, first, sent.state()] {
        room.heard(0, late);
        assert_eq!(room.step(0), step);
    }
    assert_eq!(room.phase(), Phase::Bootstrapping, "the other writer was not heard of");
    // Of another room of this number.
    let other = Outgoing::new(ROOM, 2, &world.engine, 4);
    room.heard(0, other.state());
    assert!(matches!(room.phase(), Phase::Failed(failure) if failure.reason == "kv.room_restarted"));
}

#[test]
fn a_room_waits_for_every_chunk_of_every_component_of_every_writer() {
    let world = World::new(0);
    let mut sent = Outgoing::new(ROOM, 1, &world.engine, 4);
    sent.send(&world.engine, ChunkSpec::new(0..4).pages("full", [1, 2, 3, 4]).last())
        .expect("all");
    let needs = |at_last: &[u32]| Needs {
        chunked: BTreeMap::from([(0, 0)]),
        at_last: at_last.iter().copied().collect(),
    };
    let mut room = Incoming::new(ROOM, 4, BTreeMap::from([(0, needs(&[1, 2])), (3, needs(&[]))]));
    for writer in [0, 3] {
        room.heard(writer, sent.state());
    }
    for writer in [0, 3] {
        loop {
            match room.step(writer) {
                Step::Pull(part) => {
                    assert_eq!(room.phase(), Phase::Transferring);
                    room.confirmed(writer, 1);
                    room.taken(writer, &part);
                }
                Step::Confirm { generation } => {
                    assert_ne!(room.phase(), Phase::Success);
                    room.confirmed(writer, generation + 1);
                    assert_eq!(
                        room.step(writer),
                        Step::Confirm { generation },
                        "another room's confirmation"
                    );
                    room.confirmed(writer, generation);
                }
                Step::Over => break,
                Step::Wait => panic!("there is nothing to wait for"),
            }
        }
    }
    assert_eq!(room.phase(), Phase::Success);
}
