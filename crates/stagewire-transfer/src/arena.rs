//! Shared memory that this process hands out: extents cut from sealed memfd segments.

mod adopt;
mod available;
mod extent;
mod free;
#[cfg(all(test, stagewire_loom))]
mod models;
mod segment;
mod spare;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::PoisonError;

use stagewire_core::ByteCount;
use tokio::sync::watch;

pub use adopt::{Inherited, Lent, Location, SegmentName};
pub use extent::{Extent, ExtentMut, ExtentWriter};
use free::FreeRanges;
pub(crate) use segment::{Segment, check_sealed, map};
pub use spare::AdoptedSegment;

use crate::ArenaError;
use crate::sync::{Arc, Mutex, MutexGuard};

/// Extents start and end at multiples of this.
const GRANULE: u64 = 4096;

/// Size of a segment where the limit allows it. Pages are taken on first touch, so size costs nothing; one large
/// segment means one descriptor and one mapping per reader, and no space lost between segments.
const SEGMENT: u64 = if cfg!(stagewire_loom) { 2 * GRANULE } else { 1 << 30 };

/// Asking the machine how much memory it has takes some 100 µs: more than a small extent. So it is asked once for so many
/// bytes.
const HEADROOM: u64 = 16 << 20;

/// Memory from which extents are allocated, up to a limit. Cloning gives another reference to the same arena.
///
/// A freed extent is merged with its free neighbours and used again; the smallest piece that fits first, so that the
/// pages in use stay the ones already touched. A segment without extents is kept for reuse until [`Arena::trim`], or until its room
/// is needed for an extent that fits nowhere else.
///
/// Segments of a process that has died can be adopted, see [`Arena::adopt`]: their extents are read as any others, but
/// what comes free in them is not used again, and each goes with its last extent.
#[derive(Clone)]
pub struct Arena {
    inner: Arc<Inner>,
}

/// What an arena holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ArenaStats {
    /// Segments.
    pub segments: u64,
    /// Bytes of address space of all segments.
    pub segment_bytes: u64,
    /// Bytes that were in use at least once, and so take physical memory.
    pub resident_bytes: u64,
    /// Bytes in extents, rounded up to pages.
    pub allocated_bytes: u64,
}

struct Inner {
    limit: u64,
    state: Mutex<State>,
    /// Counts the segments given up, so that readers can be told to unmap them.
    retired: watch::Sender<u64>,
    available: fn() -> Option<u64>,
}

struct State {
    segments: BTreeMap<u64, Pooled>,
    next_id: u64,
    allocated: u64,
    /// Bytes for fresh pages that the machine had when it was last asked, and that were not taken since.
    headroom: u64,
    /// Size of a new segment, where the limit allows it and no extent needs a larger one.
    segment: u64,
}

impl Default for State {
    fn default() -> Self {
        Self {
            segments: BTreeMap::new(),
            next_id: 0,
            allocated: 0,
            headroom: 0,
            segment: SEGMENT,
        }
    }
}

/// A segment and what of it is free.
struct Pooled {
    segment: Arc<Segment>,
    free: FreeRanges,
    /// Bytes before this offset were in use at least once.
    touched: u64,
    /// Bytes in extents of a segment that was adopted.
    adopted: Option<u64>,
}

impl Pooled {
    /// What it takes of the arena's limit. Nothing is ever added to an adopted segment, so that its untouched pages
    /// stay so.
    fn cost(&self) -> u64 {
        match self.adopted {
            None => self.segment.len(),
            Some(_) => self.touched,
        }
    }
}

impl Arena {
    /// An arena of at most `limit` bytes, rounded down to pages. Takes no memory yet.
    pub fn new(limit: ByteCount) -> Self {
        Self::with_available(limit, available::available_memory)
    }

    fn with_available(limit: ByteCount, available: fn() -> Option<u64>) -> Self {
        Self {
            inner: Arc::new(Inner {
                limit: limit.0 / GRANULE * GRANULE,
                state: Mutex::default(),
                retired: watch::Sender::new(0),
                available,
            }),
        }
    }

    /// Allocates `len` bytes, page-aligned. They hold what was there before: zeros or an earlier payload of this
    /// process.
    ///
    /// # Errors
    /// [`ArenaError::Exhausted`] where the limit or fragmentation leaves no room, [`ArenaError::Memory`] where the
    /// machine has less memory left than the extent needs.
    pub fn allocate(&self, len: u64) -> Result<ExtentMut, ArenaError> {
        if len == 0 {
            return Err(ArenaError::Empty);
        }
        let mut guard = self.inner.lock();
        let state = &mut *guard;
        let exhausted = |state: &State| ArenaError::Exhausted {
            requested: ByteCount(len),
            allocated: ByteCount(state.allocated),
            limit: ByteCount(self.inner.limit),
            largest: ByteCount(state.largest(self.inner.limit)),
        };
        let Some(reserved) = len.checked_next_multiple_of(GRANULE) else {
            return Err(exhausted(state));
        };
        let id = match state.fitting(reserved) {
            Some(id) => id,
            None if state.largest(self.inner.limit) < reserved => return Err(exhausted(state)),
            None => self.inner.grow(state, reserved)?,
        };
        let pooled = state.segments.get(&id).expect("the segment was just found or made");
        let offset = pooled.free.best_fit(reserved).expect("the segment has a fitting range");
        let end = offset + reserved;
        let fresh = end.saturating_sub(pooled.touched.max(offset));
        if fresh > 0 {
            self.inner.take_fresh(state, fresh)?;
        }
        let pooled = state.segments.get_mut(&id).expect("the segment was just found or made");
        pooled.touched = pooled.touched.max(end);
        pooled.free.take(offset, reserved);
        let segment = pooled.segment.clone();
        state.allocated += reserved;
        drop(guard);
        Ok(ExtentMut::new(self.inner.clone(), segment, offset, len, reserved))
    }

    /// Gives up the segments without extents. Their memory is free once readers have unmapped them, which they are
    /// told to do.
    pub fn trim(&self) {
        let mut state = self.inner.lock();
        let idle: Vec<u64> = state.idle().map(|(id, _)| id).collect();
        let gone = self.inner.retire(&mut state, &idle);
        drop(state);
        drop(gone);
    }

    /// Makes segments of `len` bytes from now on, in whole pages, and larger ones only for extents that need it. Small
    /// ones go one by one where nothing is left in them; large ones lose less between extents.
    pub fn segments_of(&self, len: ByteCount) {
        self.inner.lock().segment = (len.0 / GRANULE * GRANULE).clamp(GRANULE, SEGMENT);
    }

    /// The limit, in whole pages.
    pub fn limit(&self) -> ByteCount {
        ByteCount(self.inner.limit)
    }

    /// What it holds now.
    pub fn stats(&self) -> ArenaStats {
        let state = self.inner.lock();
        ArenaStats {
            segments: state.segments.len() as u64,
            segment_bytes: state.segments.values().map(|pooled| pooled.segment.len()).sum(),
            resident_bytes: state.segments.values().map(|pooled| pooled.touched).sum(),
            allocated_bytes: state.allocated,
        }
    }

    /// Whether the extent was allocated here.
    pub(crate) fn owns(&self, extent: &Extent) -> bool {
        Arc::ptr_eq(&self.inner, extent.arena())
    }

    /// Changes whenever a segment was given up.
    pub fn retired(&self) -> watch::Receiver<u64> {
        self.inner.retired.subscribe()
    }

    /// Whether the segment with this number is still in use.
    pub(crate) fn has_segment(&self, id: u64) -> bool {
        self.inner.lock().segments.contains_key(&id)
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stats = self.stats();
        let (allocated, limit) = (ByteCount(stats.allocated_bytes), self.limit());
        write!(f, "Arena({allocated} of {limit} in {} segments)", stats.segments)
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes `needed` bytes of fresh pages, where the machine has them.
    fn take_fresh(&self, state: &mut State, needed: u64) -> Result<(), ArenaError> {
        if needed > state.headroom {
            let available = (self.available)().unwrap_or(u64::MAX);
            if available < needed {
                return Err(ArenaError::Memory {
                    needed: ByteCount(needed),
                    available: ByteCount(available),
                });
            }
            state.headroom = available.min(needed.saturating_add(HEADROOM));
        }
        state.headroom -= needed;
        Ok(())
    }

    /// Makes a segment with at least `reserved` bytes, at the cost of idle ones where the limit leaves no other room.
    fn grow(&self, state: &mut State, reserved: u64) -> Result<u64, ArenaError> {
        let mut room = self.limit.saturating_sub(state.total());
        let mut given_up = Vec::new();
        if room < reserved {
            for (id, len) in state.idle() {
                given_up.push(id);
                room += len;
                if room >= reserved {
                    break;
                }
            }
        }
        let len = reserved.max(state.segment.min(room));
        let segment = Arc::new(Segment::create(state.next_id, len)?);
        drop(self.retire(state, &given_up));
        let id = segment.id();
        state.next_id += 1;
        let pooled = Pooled {
            segment,
            free: FreeRanges::new(len),
            touched: 0,
            adopted: None,
        };
        state.segments.insert(id, pooled);
        Ok(id)
    }

    fn retire(&self, state: &mut State, ids: &[u64]) -> Vec<Pooled> {
        let gone: Vec<Pooled> = ids.iter().filter_map(|id| state.segments.remove(id)).collect();
        if !gone.is_empty() {
            self.retired.send_modify(|count| *count += gone.len() as u64);
        }
        gone
    }

    /// Takes an extent back.
    fn free(&self, segment: u64, offset: u64, reserved: u64) {
        let mut state = self.lock();
        let Some(pooled) = state.segments.get_mut(&segment) else {
            return;
        };
        let last = match &mut pooled.adopted {
            // Who reads it for the process that is dead may still do so, and nobody could write there anyway.
            Some(in_use) => {
                *in_use -= reserved;
                *in_use == 0
            }
            None => {
                pooled.free.give(offset, reserved);
                false
            }
        };
        state.allocated -= reserved;
        let gone = last.then(|| self.retire(&mut state, &[segment]));
        drop(state);
        drop(gone);
    }
}

impl State {
    fn total(&self) -> u64 {
        self.segments.values().map(Pooled::cost).sum()
    }

    /// The oldest segment with room for `reserved` bytes in one piece.
    fn fitting(&self, reserved: u64) -> Option<u64> {
        let mut segments = self.segments.iter();
        segments.find_map(|(id, pooled)| pooled.free.best_fit(reserved).map(|_| *id))
    }

    /// Segments without extents, and their bytes.
    fn idle(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let whole = |pooled: &Pooled| pooled.free.largest() == pooled.segment.len();
        let idle = self.segments.iter().filter(move |(_, pooled)| whole(pooled));
        idle.map(|(id, pooled)| (*id, pooled.segment.len()))
    }

    /// The largest extent that could be allocated now.
    fn largest(&self, limit: u64) -> u64 {
        let pooled = self.segments.values().map(|pooled| pooled.free.largest()).max();
        let idle = self.idle().map(|(_, len)| len).sum::<u64>();
        let fresh = (limit + idle).saturating_sub(self.total());
        fresh.max(pooled.unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_machine_without_memory_is_told_apart_from_a_full_arena() {
        let arena = Arena::with_available(ByteCount(64 * MIB), || Some(3 * MIB));
        let error = arena.allocate(4 * MIB).expect_err("more than the machine has");
        assert!(matches!(error, ArenaError::Memory { needed, available }
            if needed == ByteCount(4 * MIB) && available == ByteCount(3 * MIB)));
        assert_eq!(arena.stats().allocated_bytes, 0);
        drop(arena.allocate(2 * MIB).expect("fits"));
        // Pages already taken need no more memory: 2 of these 4 MiB are fresh.
        assert!(arena.allocate(4 * MIB).is_ok());
    }

    #[test]
    fn the_error_says_what_would_still_fit() {
        let arena = Arena::new(ByteCount(4 * MIB));
        let _kept = arena.allocate(MIB).expect("fits");
        match arena.allocate(4 * MIB).expect_err("does not fit") {
            ArenaError::Exhausted {
                requested,
                allocated,
                limit,
                largest,
            } => assert_eq!(
                [requested.0, allocated.0, limit.0, largest.0],
                [4 * MIB, MIB, 4 * MIB, 3 * MIB]
            ),
            other => panic!("{other}"),
        }
        assert!(matches!(arena.allocate(u64::MAX), Err(ArenaError::Exhausted { .. })));
        assert!(matches!(arena.allocate(0), Err(ArenaError::Empty)));
    }

    #[test]
    fn idle_segments_make_room_for_an_extent_larger_than_any_of_them() {
        let arena = Arena::new(ByteCount(2 * SEGMENT));
        let first = arena.allocate(SEGMENT).expect("fits");
        let second = arena.allocate(SEGMENT).expect("fits");
        assert_eq!(arena.stats().segments, 2);
        let retired = arena.retired();
        drop((first, second));
        assert_eq!(arena.stats().segments, 2, "kept for reuse");
        let both = arena
            .allocate(2 * SEGMENT)
            .expect("fits once the idle segments are gone");
        assert_eq!((arena.stats().segments, *retired.borrow()), (1, 2));
        drop(both);
        arena.trim();
        assert_eq!(arena.stats(), ArenaStats::default());
    }
}
