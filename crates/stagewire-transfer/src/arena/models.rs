//! What threads do to one arena at the same time, in the orders that loom finds. Run by `make loom`.

use loom::cell::UnsafeCell;
use stagewire_core::ByteCount;

use super::{Arena, ArenaStats, Extent, ExtentMut, GRANULE, SEGMENT};
use crate::ArenaError;
use crate::sync::{Arc, model, spawn};

/// Segments that a model makes at most.
const SEGMENTS: usize = 4;

/// Stands for the pages of the arena: loom fails the model where two threads use one without an order between them.
#[derive(Debug)]
struct Pages(Vec<Vec<UnsafeCell<()>>>);

// SAFETY: holds nothing; loom reports every access that is not ordered with the others.
unsafe impl Sync for Pages {}

impl Pages {
    fn new(limit: u64) -> Arc<Self> {
        let segment = || (0..limit).map(|_| UnsafeCell::new(())).collect();
        Arc::new(Self((0..SEGMENTS).map(|_| segment()).collect()))
    }

    /// Those of an extent.
    fn of(&self, extent: &Extent) -> &[UnsafeCell<()>] {
        let first = (extent.offset() / GRANULE) as usize;
        let count = extent.len().div_ceil(GRANULE) as usize;
        &self.0[extent.segment().id() as usize][first..first + count]
    }

    fn write(&self, extent: &Extent) {
        for page in self.of(extent) {
            page.with_mut(|_| ());
        }
    }

    fn read(&self, extent: &Extent) {
        for page in self.of(extent) {
            page.with(|_| ());
        }
    }
}

fn arena(pages: u64) -> Arena {
    Arena::with_available(ByteCount(pages * GRANULE), || None)
}

/// Nothing is left: no extent, no byte that cannot be allocated, no segment once it is trimmed.
fn assert_empty(arena: &Arena) {
    assert_eq!(arena.stats().allocated_bytes, 0);
    drop(arena.allocate(arena.limit().0).expect("all of it is free"));
    arena.trim();
    assert_eq!(arena.stats(), ArenaStats::default());
}

/// Allocates pages, writes and reads them, and gives them back; or finds the arena full.
fn use_pages(arena: &Arena, pages: &Pages, count: u64) {
    match arena.allocate(count * GRANULE) {
        Ok(extent) => {
            let extent = extent.freeze();
            pages.write(&extent);
            pages.read(&extent);
        }
        Err(ArenaError::Exhausted { .. }) => {}
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn pages_go_from_one_thread_to_the_other_one_at_a_time() {
    model(|| {
        let (arena, pages) = (arena(2), Pages::new(2));
        let other = spawn({
            let (arena, pages) = (arena.clone(), pages.clone());
            move || {
                use_pages(&arena, &pages, 1);
                use_pages(&arena, &pages, 1);
            }
        });
        use_pages(&arena, &pages, 2);
        use_pages(&arena, &pages, 1);
        other.join().expect("the other thread");
        assert_empty(&arena);
    });
}

#[test]
fn the_last_reference_gives_the_pages_back() {
    model(|| {
        let (arena, pages) = (arena(1), Pages::new(1));
        let extent = arena.allocate(GRANULE).expect("empty").freeze();
        pages.write(&extent);
        let other = spawn({
            let (extent, pages) = (extent.clone(), pages.clone());
            move || pages.read(&extent)
        });
        pages.read(&extent);
        drop(extent);
        use_pages(&arena, &pages, 1);
        other.join().expect("the other thread");
        assert_empty(&arena);
    });
}

#[test]
fn bytes_show_only_once_their_writer_has_ended() {
    model(|| {
        let (arena, pages) = (arena(1), Pages::new(1));
        let (extent, writer) = arena.allocate(GRANULE).expect("empty").open();
        let writing = spawn({
            let (extent, pages) = (extent.clone(), pages.clone());
            move || {
                pages.write(&extent);
                drop(writer);
            }
        });
        if extent.bytes().is_some() {
            pages.read(&extent);
        }
        writing.join().expect("the writer");
        assert!(extent.bytes().is_some(), "the writer has ended");
        drop(extent);
        assert_empty(&arena);
    });
}

/// Allocates and makes sure that the segment is there as long as the extent.
fn allocate_beside_a_trim(arena: &Arena) -> Option<ExtentMut> {
    let extent = arena.allocate(3 * GRANULE).ok()?;
    let frozen = extent.freeze();
    assert!(arena.has_segment(frozen.segment().id()), "a segment in use was retired");
    drop(frozen);
    None
}

#[test]
fn segments_in_use_are_not_retired() {
    model(|| {
        // Extents of three pages find no room in an idle segment of two: it is given up for a larger one.
        let limit = 2 * SEGMENT / GRANULE;
        let (arena, pages) = (arena(limit), Pages::new(limit));
        let trimming = spawn({
            let arena = arena.clone();
            move || arena.trim()
        });
        let other = spawn({
            let (arena, pages) = (arena.clone(), pages.clone());
            move || use_pages(&arena, &pages, 1)
        });
        allocate_beside_a_trim(&arena);
        trimming.join().expect("the trimming thread");
        other.join().expect("the other thread");
        assert_empty(&arena);
    });
}

#[test]
fn whoever_knows_a_segment_is_told_that_it_went() {
    model(|| {
        let arena = arena(1);
        // As a connection does: it listens first, then names segments to its reader.
        let retired = arena.retired();
        let extent = arena.allocate(GRANULE).expect("empty").freeze();
        let segment = extent.segment().id();
        let trimming = spawn({
            let arena = arena.clone();
            move || {
                drop(extent);
                arena.trim();
            }
        });
        let told = *retired.borrow() > 0;
        if told {
            assert!(!arena.has_segment(segment), "told before the segment went");
        }
        trimming.join().expect("the trimming thread");
        assert!(!arena.has_segment(segment), "an idle segment was kept");
        assert_eq!(*retired.borrow(), 1, "told of each segment that went");
    });
}
