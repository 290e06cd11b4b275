//! What could be used in an arena, and is not.

use std::collections::{BTreeMap, BTreeSet};

use stagewire_core::ByteCount;

use super::{Arena, ExtentMut, FreeRanges, GRANULE, Location, Pooled, Segment, SegmentName, State};
use crate::ArenaError;
use crate::sync::Arc;

/// A segment that was adopted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdoptedSegment {
    /// Which one.
    pub name: SegmentName,
    /// Bytes in extents, in whole pages.
    pub used: ByteCount,
    /// Bytes that it takes until the last extent has gone.
    pub taken: ByteCount,
}

impl Arena {
    /// The segments that were adopted, in the order of what is used of them.
    pub fn adopted(&self) -> Vec<AdoptedSegment> {
        let state = self.inner.lock();
        let adopted = state.segments.values().filter_map(|pooled| {
            Some(AdoptedSegment {
                name: pooled.segment.name(),
                used: ByteCount(pooled.adopted?),
                taken: ByteCount(pooled.touched),
            })
        });
        let mut adopted: Vec<_> = adopted.collect();
        adopted.sort_unstable_by_key(|segment| (segment.used, segment.name));
        adopted
    }

    /// Allocates extents of `lens` bytes side by side, in a new segment of just their size, beyond the limit where need
    /// be: for copies of what is in an adopted segment, which goes for them.
    ///
    /// # Errors
    /// [`ArenaError::Memory`], [`ArenaError::Segment`]; [`ArenaError::Empty`] where there are none, or one is of no bytes.
    pub fn allocate_together(&self, lens: &[u64]) -> Result<Vec<ExtentMut>, ArenaError> {
        let pages = |len: &u64| len.next_multiple_of(GRANULE);
        let total: u64 = lens.iter().map(pages).sum();
        if total == 0 || lens.contains(&0) {
            return Err(ArenaError::Empty);
        }
        let mut state = self.inner.lock();
        self.inner.take_fresh(&mut state, total)?;
        let segment = Arc::new(Segment::create(state.next_id, total)?);
        let pooled = Pooled {
            segment: segment.clone(),
            free: FreeRanges::none(),
            touched: total,
            adopted: None,
        };
        state.next_id += 1;
        state.segments.insert(segment.id(), pooled);
        state.allocated += total;
        drop(state);
        let mut offset = 0;
        let extents = lens.iter().map(|len| {
            let extent = ExtentMut::new(self.inner.clone(), segment.clone(), offset, *len, pages(len));
            offset += pages(len);
            extent
        });
        Ok(extents.collect())
    }

    /// Whether extents of `lens` bytes, 0 of them needing nothing, could be allocated one after the other if what is at
    /// these places, each the whole of an extent, had come free. A place that is named twice comes free once.
    pub fn would_fit<'a>(&self, lens: &[u64], gone: impl IntoIterator<Item = &'a Location>) -> bool {
        let mut outlook = Outlook::of(&self.inner.lock(), self.inner.limit);
        let mut free = BTreeSet::new();
        for location in gone {
            if free.insert(location) {
                outlook.free(location);
            }
        }
        lens.iter().all(|len| outlook.allocate(len.next_multiple_of(GRANULE)))
    }
}

/// What an arena would have free. It does as the arena does.
struct Outlook {
    limit: u64,
    segment: u64,
    next_id: u64,
    total: u64,
    pools: BTreeMap<u64, Pool>,
    names: BTreeMap<SegmentName, u64>,
}

struct Pool {
    free: FreeRanges,
    len: u64,
    cost: u64,
    adopted: Option<u64>,
}

impl Outlook {
    fn of(state: &State, limit: u64) -> Self {
        let pool = |pooled: &Pooled| Pool {
            free: pooled.free.clone(),
            len: pooled.segment.len(),
            cost: pooled.cost(),
            adopted: pooled.adopted,
        };
        Self {
            limit,
            segment: state.segment,
            next_id: state.next_id,
            total: state.total(),
            pools: state.segments.iter().map(|(id, pooled)| (*id, pool(pooled))).collect(),
            names: state
                .segments
                .iter()
                .map(|(id, pooled)| (pooled.segment.name(), *id))
                .collect(),
        }
    }

    fn free(&mut self, location: &Location) {
        let Some((id, pool)) = self
            .names
            .get(&location.segment)
            .and_then(|id| Some((*id, self.pools.get_mut(id)?)))
        else {
            return;
        };
        let reserved = location.len.next_multiple_of(GRANULE);
        match &mut pool.adopted {
            None => pool.free.give(location.offset, reserved),
            Some(in_use) => {
                *in_use -= reserved;
                if *in_use == 0 {
                    self.retire(id);
                }
            }
        }
    }

    fn retire(&mut self, id: u64) {
        if let Some(pool) = self.pools.remove(&id) {
            self.total -= pool.cost;
        }
    }

    fn allocate(&mut self, reserved: u64) -> bool {
        if reserved == 0 {
            return true;
        }
        for pool in self.pools.values_mut() {
            if let Some(offset) = pool.free.best_fit(reserved) {
                pool.free.take(offset, reserved);
                return true;
            }
        }
        while self.limit.saturating_sub(self.total) < reserved {
            let idle = self.pools.iter().find(|(_, pool)| pool.free.largest() == pool.len);
            let Some(id) = idle.map(|(id, _)| *id) else {
                return false;
            };
            self.retire(id);
        }
        let len = reserved.max(self.segment.min(self.limit - self.total));
        let mut free = FreeRanges::new(len);
        free.take(0, reserved);
        self.total += len;
        let (cost, adopted) = (len, None);
        self.pools.insert(
            self.next_id,
            Pool {
                free,
                len,
                cost,
                adopted,
            },
        );
        self.next_id += 1;
        true
    }
}

#[cfg(all(test, not(stagewire_loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::arena::Extent;

    const LIMIT: u64 = 64 * GRANULE;

    proptest! {
        /// What is foretold comes true, whatever was allocated and freed before.
        #[test]
        fn what_would_fit_fits(
            before in prop::collection::vec((1_u64..12, any::<bool>()), 0..40),
            gone in prop::collection::vec(any::<bool>(), 40),
            wanted in prop::collection::vec(0_u64..24, 1..4),
        ) {
            let arena = Arena::with_available(ByteCount(LIMIT), || None);
            arena.segments_of(ByteCount(16 * GRANULE));
            let mut extents: Vec<(Extent, bool)> = Vec::new();
            for (pages, stays) in before {
                extents.extend(arena.allocate(pages * GRANULE).ok().map(|extent| (extent.freeze(), stays)));
            }
            extents.retain(|(_, stays)| *stays);
            let (leaving, _staying): (Vec<_>, Vec<_>) = extents.into_iter().zip(gone).partition(|(_, gone)| *gone);
            let places: Vec<_> = leaving.iter().map(|((extent, _), _)| extent.location()).collect();
            let lens: Vec<u64> = wanted.iter().map(|pages| pages * GRANULE).collect();
            let foretold = arena.would_fit(&lens, &places);
            drop(leaving);
            let mut got = Vec::new();
            let fits = lens.iter().filter(|len| **len > 0).all(|len| {
                let extent = arena.allocate(*len).ok();
                let fits = extent.is_some();
                got.extend(extent);
                fits
            });
            prop_assert_eq!(foretold, fits);
        }
    }

    #[test]
    fn a_place_that_is_named_twice_comes_free_once() {
        let arena = Arena::with_available(ByteCount(4 * GRANULE), || None);
        let extents: Vec<_> = (0..4)
            .map(|_| arena.allocate(GRANULE).expect("fits").freeze())
            .collect();
        let place = extents[1].location();
        assert!(arena.would_fit(&[GRANULE], [&place, &place]));
        assert!(!arena.would_fit(&[GRANULE, GRANULE], [&place, &place]));
    }

    #[test]
    fn copies_lie_together_and_their_memory_is_used_again() {
        let arena = Arena::with_available(ByteCount(4 * GRANULE), || None);
        let _all = arena.allocate(4 * GRANULE).expect("fits");
        let mut copies = arena.allocate_together(&[1, GRANULE + 1]).expect("beyond the limit");
        copies[0].fill(1);
        copies[1].fill(2);
        assert_eq!((copies[0][0], copies[1].len() as u64), (1, GRANULE + 1));
        assert_eq!(arena.stats().allocated_bytes, 7 * GRANULE);
        drop(copies);
        assert!(arena.allocate(3 * GRANULE).is_ok(), "a segment as any other");
        assert!(matches!(arena.allocate_together(&[]), Err(ArenaError::Empty)));
    }
}
