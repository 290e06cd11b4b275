use std::collections::{BTreeMap, BTreeSet};

/// The free ranges of one segment: disjoint, never adjacent.
#[derive(Debug, Clone)]
pub(super) struct FreeRanges {
    /// Length by offset.
    ranges: BTreeMap<u64, u64>,
    /// Length and offset.
    sizes: BTreeSet<(u64, u64)>,
}

impl FreeRanges {
    pub(super) fn new(len: u64) -> Self {
        let mut free = Self::none();
        free.insert(0, len);
        free
    }

    /// Nothing is free.
    pub(super) const fn none() -> Self {
        Self {
            ranges: BTreeMap::new(),
            sizes: BTreeSet::new(),
        }
    }

    /// Where the smallest range of at least `len` bytes starts; the lowest of equals. So what was never used, which is
    /// one long range at the end, is used last.
    pub(super) fn best_fit(&self, len: u64) -> Option<u64> {
        self.sizes.range((len, 0)..).next().map(|(_, offset)| *offset)
    }

    /// Takes the first `len` bytes of the free range that starts at `offset`.
    pub(super) fn take(&mut self, offset: u64, len: u64) {
        let free = self.remove(offset).expect("best_fit named this range");
        assert!(free >= len, "a range of {free} bytes cannot give {len}");
        if free > len {
            self.insert(offset + len, free - len);
        }
    }

    /// Takes a range back and merges it with its free neighbours.
    pub(super) fn give(&mut self, mut offset: u64, mut len: u64) {
        if let Some((&before, &free)) = self.ranges.range(..=offset).next_back() {
            assert!(before + free <= offset, "bytes at {offset} were freed twice");
            if before + free == offset {
                self.remove(before);
                offset = before;
                len += free;
            }
        }
        if let Some((&after, &free)) = self.ranges.range(offset + 1..).next() {
            assert!(offset + len <= after, "bytes at {after} were freed twice");
            if offset + len == after {
                self.remove(after);
                len += free;
            }
        }
        self.insert(offset, len);
    }

    /// The longest free range.
    pub(super) fn largest(&self) -> u64 {
        self.sizes.last().map_or(0, |(len, _)| *len)
    }

    fn insert(&mut self, offset: u64, len: u64) {
        self.ranges.insert(offset, len);
        self.sizes.insert((len, offset));
    }

    fn remove(&mut self, offset: u64) -> Option<u64> {
        let len = self.ranges.remove(&offset)?;
        self.sizes.remove(&(len, offset));
        Some(len)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PAGES: usize = 64;

    /// Where the smallest free run of at least `len` pages starts.
    fn smallest(map: &[bool; PAGES], len: usize) -> Option<usize> {
        let mut at = 0;
        let runs = map.chunk_by(|a, b| a == b).map(|run| {
            at += run.len();
            (run[0], run.len(), at - run.len())
        });
        let fitting = runs.filter(|(used, run, _)| !used && *run >= len);
        fitting.map(|(_, run, at)| (run, at)).min().map(|(_, at)| at)
    }

    proptest! {
        /// Against a map with one entry per page, searched in full.
        #[test]
        fn agrees_with_a_page_map(steps in prop::collection::vec((any::<bool>(), 1_usize..24, any::<prop::sample::Index>()), 1..200)) {
            let (mut free, mut map) = (FreeRanges::new(PAGES as u64), [false; PAGES]);
            let mut live: Vec<(usize, usize)> = Vec::new();
            for (allocate, len, pick) in steps {
                if allocate {
                    let expected = smallest(&map, len);
                    let found = free.best_fit(len as u64);
                    prop_assert_eq!(found, expected.map(|offset| offset as u64));
                    if let Some(offset) = expected {
                        free.take(offset as u64, len as u64);
                        map[offset..offset + len].fill(true);
                        live.push((offset, len));
                    }
                } else if !live.is_empty() {
                    let (offset, len) = live.swap_remove(pick.index(live.len()));
                    free.give(offset as u64, len as u64);
                    map[offset..offset + len].fill(false);
                }
                let longest = map.split(|used| *used).map(<[bool]>::len).max().unwrap_or(0);
                prop_assert_eq!(free.largest(), longest as u64);
            }
        }
    }

    #[test]
    #[should_panic(expected = "freed twice")]
    fn a_second_free_is_a_defect() {
        let mut free = FreeRanges::new(16);
        free.take(0, 8);
        free.give(4, 4);
        free.give(4, 4);
    }
}
