use proptest::prelude::*;
use stagewire_core::{ByteCount, Classify, ErrorClass, Record};
use stagewire_transfer::{Arena, ArenaStats, Borrowed, Extent, Target};

const PAGE: u64 = 4096;
const PAGES: u64 = 64;

#[derive(Debug, Clone)]
enum Step {
    Allocate(u64),
    Share(prop::sample::Index),
    Free(prop::sample::Index),
    Trim,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        5 => (1..20 * PAGE).prop_map(Step::Allocate),
        1 => any::<prop::sample::Index>().prop_map(Step::Share),
        4 => any::<prop::sample::Index>().prop_map(Step::Free),
        1 => Just(Step::Trim),
    ]
}

/// An extent, and the byte that it is filled with.
type Live = Vec<(Extent, u8)>;

fn pages(extent: &Extent) -> std::ops::Range<u64> {
    let start = extent.as_ptr().addr().get() as u64 / PAGE;
    start..start + extent.len().div_ceil(PAGE)
}

/// Different extents, by address: clones count once.
fn distinct(live: &Live) -> Vec<std::ops::Range<u64>> {
    let mut ranges: Vec<_> = live.iter().map(|(extent, _)| pages(extent)).collect();
    ranges.sort_by_key(|range| range.start);
    ranges.dedup();
    ranges
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Against what the extents say of themselves: none overlaps another, none loses a byte, all are accounted for, and
    /// what is refused had no room in one piece.
    #[test]
    fn extents_never_overlap_and_all_comes_back(steps in prop::collection::vec(step(), 1..120)) {
        let arena = Arena::new(ByteCount(PAGES * PAGE + 17));
        let mut live: Live = Vec::new();
        for (number, step) in steps.into_iter().enumerate() {
            let fill = number as u8;
            match step {
                Step::Allocate(len) => match arena.allocate(len) {
                    Ok(mut extent) => {
                        prop_assert_eq!(extent.len() as u64, len);
                        extent.fill(fill);
                        live.push((extent.freeze(), fill));
                    }
                    Err(error) => {
                        prop_assert_eq!(error.class(), ErrorClass::Exhausted);
                        let used: u64 = distinct(&live).iter().map(|range| range.end - range.start).sum();
                        // Refused only where no gap between extents could hold it.
                        let gaps = distinct(&live).len() as u64 + 1;
                        prop_assert!(len.div_ceil(PAGE) * gaps > PAGES - used, "{}", error);
                    }
                },
                Step::Share(index) if !live.is_empty() => {
                    let shared = live[index.index(live.len())].clone();
                    live.push(shared);
                }
                Step::Free(index) if !live.is_empty() => drop(live.swap_remove(index.index(live.len()))),
                Step::Trim => arena.trim(),
                Step::Share(_) | Step::Free(_) => {}
            }
            let ranges = distinct(&live);
            prop_assert!(ranges.windows(2).all(|pair| pair[0].end <= pair[1].start), "overlap: {:?}", ranges);
            for (extent, fill) in &live {
                prop_assert!(extent.bytes().expect("no writer") == vec![*fill; extent.len() as usize]);
            }
            let used: u64 = ranges.iter().map(|range| range.end - range.start).sum();
            let stats = arena.stats();
            prop_assert_eq!(stats.allocated_bytes, used * PAGE);
            prop_assert!(stats.segment_bytes <= PAGES * PAGE && stats.resident_bytes <= stats.segment_bytes);
        }
        live.clear();
        drop(arena.allocate(PAGES * PAGE).expect("free ranges were merged"));
        arena.trim();
        prop_assert_eq!(arena.stats(), ArenaStats::default());
    }
}

#[test]
fn an_open_extent_shows_its_bytes_when_its_writer_is_gone() {
    let arena = Arena::new(ByteCount(PAGE));
    let (extent, mut writer) = arena.allocate(8).expect("room").open();
    let source = Borrowed::from(vec![1, 2, 3, 4]);
    let error = writer
        .copy(&[Record::contiguous(0, 5, 4)], &source)
        .expect_err("one byte too far");
    assert_eq!(error.class(), ErrorClass::Invalid);
    let strided = Record {
        src_offset: 0,
        dst_offset: 0,
        width: 2,
        rows: 2,
        src_pitch: 2,
        dst_pitch: 4,
    };
    writer.copy(&[strided], &source).expect("inside");
    assert_eq!(extent.bytes(), None, "shown while it may change");
    drop(writer);
    assert_eq!(extent.bytes(), Some(&[1, 2, 0, 0, 3, 4, 0, 0][..]));
}

#[test]
fn parts_share_the_bytes_and_keep_them() {
    let arena = Arena::new(ByteCount(PAGE));
    let mut memory = arena.allocate(8).expect("room");
    memory.copy_from_slice(&[0, 1, 2, 3, 4, 5, 6, 7]);
    let whole = memory.freeze();
    let part = whole.slice(2, 4).expect("inside").slice(1, 2).expect("inside");
    assert_eq!(part.bytes(), Some(&[3, 4][..]));
    assert_eq!(part.as_ptr().addr().get() - whole.as_ptr().addr().get(), 3);
    for (offset, len) in [(0, 0), (8, 1), (1, 8), (9, 1), (u64::MAX, 2)] {
        assert!(whole.slice(offset, len).is_none(), "{len} bytes at {offset}");
    }
    assert!(part.slice(1, 2).is_none(), "a part has no more than its own bytes");
    drop(whole);
    assert_eq!(arena.stats().allocated_bytes, PAGE, "the part keeps them");
    drop(part);
    assert_eq!(arena.stats().allocated_bytes, 0);
}

#[test]
fn a_target_of_an_extent_becomes_that_extent() {
    let arena = Arena::new(ByteCount(PAGE));
    let target = Target::from(arena.allocate(100).expect("room"));
    let address = target.as_ptr();
    let extent = target.into_extent().expect("made of one, and idle");
    assert_eq!((extent.as_ptr(), extent.len()), (address, 100));
    assert!(
        Target::allocate(100).expect("memory").into_extent().is_err(),
        "made of private memory"
    );
}
