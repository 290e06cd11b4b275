use std::collections::BTreeMap;

/// The free ranges of one segment: disjoint, never adjacent, by offset.
#[derive(Debug)]
pub(super) struct FreeRanges {
    ranges: BTreeMap<u64, u64>,
}

impl FreeRanges {
    pub(super) fn new(len: u64) -> Self {
        Self {
            ranges: BTreeMap::from([(0, len)]),
        }
    }

    /// Nothing is free, and nothing will be.
    pub(super) fn none() -> Self {
        Self {
            ranges: BTreeMap::new(),
        }
    }

    /// The lowest offset with `len` free bytes after it.
    pub(super) fn first_fit(&self, len: u64) -> Option<u64> {
        let mut ranges = self.ranges.iter();
        ranges.find(|(_, free)| **free >= len).map(|(offset, _)| *offset)
    }

    /// Takes the first `len` bytes of the free range that starts at `offset`.
    pub(super) fn take(&mut self, offset: u64, len: u64) {
        let free = self.ranges.remove(&offset).expect("first_fit named this range");
        assert!(free >= len, "a range of {free} bytes cannot give {len}");
        if free > len {
            self.ranges.insert(offset + len, free - len);
        }
    }

    /// Takes a range back and merges it with its free neighbours.
    pub(super) fn give(&mut self, mut offset: u64, mut len: u64) {
        if let Some((&before, &free)) = self.ranges.range(..=offset).next_back() {
            assert!(before + free <= offset, "bytes at {offset} were freed twice");
            if before + free == offset {
                self.ranges.remove(&before);
                offset = before;
                len += free;
            }
        }
        if let Some((&after, &free)) = self.ranges.range(offset + 1..).next() {
            assert!(offset + len <= after, "bytes at {after} were freed twice");
            if offset + len == after {
                self.ranges.remove(&after);
                len += free;
            }
        }
        self.ranges.insert(offset, len);
    }

    /// The longest free range.
    pub(super) fn largest(&self) -> u64 {
        self.ranges.values().copied().max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PAGES: usize = 64;

    proptest! {
        /// Against a map with one entry per page, searched from the start.
        #[test]
        fn agrees_with_a_page_map(steps in prop::collection::vec((any::<bool>(), 1_usize..24, any::<prop::sample::Index>()), 1..200)) {
            let (mut free, mut map) = (FreeRanges::new(PAGES as u64), [false; PAGES]);
            let mut live: Vec<(usize, usize)> = Vec::new();
            for (allocate, len, pick) in steps {
                if allocate {
                    let expected = map.windows(len).position(|pages| pages.iter().all(|used| !used));
                    let found = free.first_fit(len as u64);
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
