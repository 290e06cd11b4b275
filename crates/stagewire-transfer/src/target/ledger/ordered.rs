use std::collections::BTreeMap;
use std::ops::Range;

use smallvec::SmallVec;

/// So many ranges need no tree, and no allocation.
const FEW: usize = 4;

/// Disjoint ranges in order of their starts.
#[derive(Debug)]
pub(super) enum Ordered {
    Few(SmallVec<[Range<u64>; FEW]>),
    /// As start → end. Stays a tree: a set that was large once is soon large again.
    Many(BTreeMap<u64, u64>),
}

impl Default for Ordered {
    fn default() -> Self {
        Self::Few(SmallVec::new())
    }
}

impl Ordered {
    /// The last range that starts before `bound`.
    pub(super) fn last_before(&self, bound: u64) -> Option<Range<u64>> {
        match self {
            Self::Few(ranges) => ranges.iter().rfind(|range| range.start < bound).cloned(),
            Self::Many(tree) => tree.range(..bound).next_back().map(|(start, end)| *start..*end),
        }
    }

    /// The first of all.
    pub(super) fn first(&self) -> Option<Range<u64>> {
        match self {
            Self::Few(ranges) => ranges.first().cloned(),
            Self::Many(tree) => tree.first_key_value().map(|(start, end)| *start..*end),
        }
    }

    /// Adds a range that overlaps none.
    pub(super) fn put(&mut self, range: Range<u64>) {
        match self {
            Self::Few(ranges) if ranges.len() < FEW => {
                let at = ranges.partition_point(|other| other.start < range.start);
                ranges.insert(at, range);
            }
            Self::Few(ranges) => {
                let all = ranges.drain(..).chain([range]);
                *self = Self::Many(all.map(|range| (range.start, range.end)).collect());
            }
            Self::Many(tree) => {
                tree.insert(range.start, range.end);
            }
        }
    }

    /// Removes the range that starts here, and tells its end.
    pub(super) fn take(&mut self, start: u64) -> Option<u64> {
        match self {
            Self::Few(ranges) => {
                let at = ranges.iter().position(|range| range.start == start)?;
                Some(ranges.remove(at).end)
            }
            Self::Many(tree) => tree.remove(&start),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.first().is_none()
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Few(ranges) => ranges.len(),
            Self::Many(tree) => tree.len(),
        }
    }
}
