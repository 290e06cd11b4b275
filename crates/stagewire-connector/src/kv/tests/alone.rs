//! Each machine of a room alone.

use super::*;

#[test]
fn failed_is_final_on_both_sides() {
    let mut room = incoming(&engine());
    room.fail(aborted("first"));
    room.fail(aborted("second"));
    assert_eq!(room.phase(), Phase::Failed(aborted("first")));
    let mut sent = Outgoing::new(ROOM, 1, 4);
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
    let mut sent = Outgoing::new(ROOM, 1, 4);
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
    let mut sent = Outgoing::new(ROOM, 1, 4);
    let early = sent.news(None);
    let chunk = |lo: u64| ChunkSpec::new(lo..lo + 2).pages("full", [1, 2]);
    sent.send(&world.engine, chunk(0)).expect("the first");
    let first = sent.news(None);
    sent.send(&world.engine, chunk(2).last()).expect("the last");
    let mut room = incoming(&engine());
    room.heard(0, sent.news(None));
    let step = room.step(0);
    for late in [early, first, sent.news(None)] {
        room.heard(0, late);
        assert_eq!(room.step(0), step);
    }
    assert_eq!(room.phase(), Phase::Bootstrapping, "the other writer was not heard of");
    // Of another room of this number.
    let other = Outgoing::new(ROOM, 2, 4);
    room.heard(0, other.news(None));
    assert!(matches!(room.phase(), Phase::Failed(failure) if failure.reason == "kv.room_restarted"));
}

#[test]
fn a_room_waits_for_every_chunk_of_every_component_of_every_writer() {
    let world = World::new(0);
    let mut sent = Outgoing::new(ROOM, 1, 4);
    sent.send(&world.engine, ChunkSpec::new(0..4).pages("full", [1, 2, 3, 4]).last())
        .expect("all");
    let needs = |at_last: &[u32]| Needs {
        chunked: BTreeMap::from([(0, 0)]),
        at_last: at_last.iter().copied().collect(),
    };
    let mut room = Incoming::new(
        ROOM,
        4,
        engine(),
        BTreeMap::from([(0, needs(&[1, 2])), (3, needs(&[]))]),
    );
    for writer in [0, 3] {
        room.heard(writer, sent.news(None));
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

#[test]
fn a_sender_that_nobody_needs_has_succeeded_as_soon_as_it_knows() {
    let world = World::new(0);
    let mut sent = Outgoing::new(ROOM, 1, 4);
    let chunk = |lo: u64| ChunkSpec::new(lo..lo + 2).pages("full", [1, 2]);
    sent.send(&world.engine, chunk(0)).expect("the first");
    let nobody = Destination {
        readers: Arc::default(),
        ..world.destination
    };
    let attempt = (Uuid::nil(), 0);
    assert!(sent.bind(0, attempt, &nobody));
    assert_eq!(sent.phase(), Phase::Success);
    assert!(sent.is_released(), "nobody reads its pages");
    sent.leave(attempt, aborted("decode"));
    sent.send(&world.engine, chunk(2).last())
        .expect("the last, as if nothing was");
    assert_eq!(sent.phase(), Phase::Success);
}

/// Whatever a room may have, each answer has room in a message, and some of them have all.
#[test]
fn long_tables_are_told_bit_by_bit() {
    let engine = engine();
    let chunk = 1_u64 << 19;
    let tokens = 4 * chunk;
    let mut sent = Outgoing::new(ROOM, 1, tokens);
    for lo in (0..tokens).step_by(1 << 19) {
        // As many bytes as a page can take.
        let pages: Vec<i64> = (0..1 << 19).map(|page| i64::MAX - page).collect();
        let spec = ChunkSpec::new(lo..lo + chunk).pages("full", pages);
        let spec = if lo + chunk == tokens { spec.last() } else { spec };
        sent.send(&engine, spec).expect("right");
    }
    let needs = Needs {
        chunked: BTreeMap::from([(0, 0)]),
        at_last: BTreeSet::new(),
    };
    let mut room = Incoming::new(ROOM, tokens, engine, BTreeMap::from([(0, needs)]));
    let mut answers = 0;
    while sent.is_news(room.seen(0)) {
        let news = sent.news(room.seen(0));
        assert!(!news.chunks.is_empty(), "{:?}", news.seen);
        let nbytes = protocol::encode(&news).len();
        assert!(nbytes < 16 << 20, "{nbytes} bytes");
        room.heard(0, news);
        answers += 1;
    }
    assert_eq!(answers, 4);
    assert_eq!(
        room.seen(0),
        Some(Seen {
            generation: 1,
            chunks: 4
        })
    );
    assert_eq!(room.phase(), Phase::Transferring);
}
