use stagewire_core::DType;
use stagewire_kv::{Component, Geometry};

use super::*;

/// Six tokens in pages of two, and a window that needs the last page only.
fn engine() -> Arc<Engine> {
    let full = Component::mha("full", 1, 1, [8, 8], DType::U8);
    let swa = Component {
        window: Some(1),
        ..Component::mha("swa", 1, 1, [8, 8], DType::U8)
    };
    let mut geometry = Geometry::new(1, 2, vec![full, swa]);
    geometry.num_pages.insert("full".to_owned(), 10);
    Arc::new(Engine::new(geometry).expect("sizes"))
}

fn room() -> Incoming {
    let needs = Needs {
        chunked: BTreeMap::from([(0, 0)]),
        at_last: BTreeSet::from([1]),
    };
    Incoming::new(7, 6, engine(), BTreeMap::from([(0, needs)]))
}

fn chunk(lo: u64, hi: u64, pages: &[i64]) -> Announced {
    let last = hi == 6;
    Announced {
        tokens: (lo, hi),
        pages: vec![pages.to_vec(), if last { vec![3] } else { vec![] }],
        last,
        aux: None,
    }
}

/// What is told to somebody who knows the chunks before.
fn news(before: u64, chunks: &[Announced]) -> News {
    News {
        seen: Seen {
            generation: 1,
            chunks: before + chunks.len() as u64,
        },
        seq_len: 6,
        chunks: chunks.to_vec(),
        failure: None,
    }
}

/// A sender whose words are wrong fails the room, and never lets it succeed with less than everything.
#[test]
fn chunks_that_no_sender_announces_fail_the_room() {
    let first = || chunk(0, 3, &[5, 6]);
    let not_last = |chunk| Announced { last: false, ..chunk };
    let wrong: Vec<(&[Announced], Announced)> = vec![
        (&[], chunk(0, 8, &[5, 6, 7, 8])),
        (&[], chunk(4, 2, &[])),
        (&[], chunk(0, 0, &[])),
        (&[], not_last(chunk(0, 6, &[5, 6, 7]))),
        (&[], chunk(1, 6, &[5, 6, 7])),
        (&[], chunk(0, 6, &[5, 6])),
        (&[], chunk(0, 6, &[5, 6, -1])),
        (&[], chunk(0, 6, &[5, 6, 0])),
        (&[], chunk(0, 6, &[5, 6, 10])),
        (&[], Announced { last: true, ..first() }),
        (
            &[],
            Announced {
                aux: Some(vec![1]),
                ..first()
            },
        ),
        (
            &[],
            Announced {
                pages: vec![vec![5, 6]],
                ..first()
            },
        ),
    ];
    let after: Vec<Announced> = vec![
        first(),
        chunk(4, 6, &[7]),
        chunk(2, 6, &[6, 7]),
        // The page that both chunks have is another one.
        chunk(3, 6, &[8, 7]),
        chunk(3, 3, &[]),
    ];
    let known = [first()];
    let all = [chunk(0, 6, &[5, 6, 7])];
    let wrong = wrong
        .into_iter()
        .chain(after.into_iter().map(|chunk| (&known[..], chunk)));
    let wrong = wrong.chain([(&all[..], chunk(6, 6, &[]))]);
    for (known, wrong) in wrong {
        let shown = format!("{wrong:?} after {known:?}");
        let mut room = room();
        room.heard(0, news(0, known));
        assert!(!room.phase().is_terminal(), "{shown}");
        room.heard(0, news(known.len() as u64, &[wrong]));
        assert!(
            matches!(room.phase(), Phase::Failed(failure) if failure.reason == "protocol.malformed"),
            "{shown}"
        );
        assert_eq!(room.step(0), Step::Over, "{shown}");
    }
    let mut room = room();
    let counts = News {
        seen: Seen {
            generation: 1,
            chunks: 0,
        },
        ..news(0, &known)
    };
    room.heard(0, counts);
    assert!(matches!(room.phase(), Phase::Failed(failure) if failure.reason == "protocol.malformed"));
}

#[test]
fn a_first_chunk_after_what_is_here_fails_the_room() {
    let mut room = room();
    room.heard(0, news(0, &[chunk(2, 6, &[6, 7])]));
    assert!(matches!(room.phase(), Phase::Failed(failure) if failure.reason == "kv.missing_tokens"));
}

/// Takes everything that there is to take.
fn take(room: &mut Incoming) -> Vec<(u32, Vec<u32>)> {
    let mut taken = Vec::new();
    while let Step::Pull(part) = room.step(0) {
        let together = room.parts(0);
        assert!(together.starts_with(std::slice::from_ref(&part)), "{together:?}");
        room.taken(0, &part);
        // What could be pulled with it is what comes next in the same chunk.
        let next = match room.step(0) {
            Step::Pull(next) if next.chunk == part.chunk => vec![next],
            _ => Vec::new(),
        };
        assert_eq!(together[1..], next);
        taken.push((part.chunk, part.components));
    }
    taken
}

#[test]
fn increments_come_in_any_order_and_any_number_of_times_and_each_chunk_is_taken_once() {
    let chunks = [chunk(0, 3, &[5, 6]), chunk(3, 4, &[6]), chunk(4, 6, &[7])];
    let told = |from: usize, to: usize| news(from as u64, &chunks[from..to]);
    let mut room = room();
    // Before what it follows on: nothing is known then.
    room.heard(0, told(1, 2));
    assert_eq!((room.seen(0), room.step(0)), (None, Step::Wait));
    room.heard(0, told(0, 1));
    let first = room.tables(0).expect("heard of").to_vec();
    assert_eq!(take(&mut room), [(0, vec![0])]);
    assert_eq!(room.step(0), Step::Wait);
    // More than what is new, what is old, and nothing.
    for (from, to) in [(0, 2), (0, 1), (1, 2), (2, 2)] {
        room.heard(0, told(from, to));
    }
    assert_eq!(take(&mut room), [(1, vec![0])]);
    room.heard(0, told(0, 3));
    assert_eq!(take(&mut room), [(2, vec![0]), (2, vec![1])]);
    assert_eq!(room.step(0), Step::Confirm { generation: 1 });
    let tables: Vec<_> = room
        .tables(0)
        .expect("heard of")
        .iter()
        .map(|table| table.to_vec())
        .collect();
    assert_eq!(tables, [[5, 6, 7], [-1, -1, 3]]);
    assert_eq!(*first[0], [5, 6, -1], "what a pull has begun with stays");
    let writer = &room.writers[&0];
    assert!(writer.taken.is_empty(), "{writer:?}");
    room.confirmed(0, 1);
    assert_eq!(room.phase(), Phase::Success);
}
