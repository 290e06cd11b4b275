mod ordered;

use std::ops::Range;

use ordered::Ordered;

use crate::TargetError;

/// Which bytes of a target a pull is writing, and which were written.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    writing: RangeSet,
    written: RangeSet,
    /// Keeps no book of what was written.
    forgets: bool,
}

impl Ledger {
    pub(super) fn claim(&mut self, rows: &[Range<u64>]) -> Result<(), TargetError> {
        for row in rows {
            if let Some(Range { start, end }) = self.writing.overlap(row) {
                return Err(TargetError::Busy { start, end });
            }
            if let Some(Range { start, end }) = self.written.overlap(row) {
                return Err(TargetError::Written { start, end });
            }
        }
        for row in rows {
            self.writing.insert(row.clone());
        }
        Ok(())
    }

    pub(super) fn commit(&mut self, rows: &[Range<u64>]) {
        for row in rows {
            self.writing.remove(row);
            if !self.forgets {
                self.written.insert(row.clone());
            }
        }
    }

    pub(super) fn give_up(&mut self, rows: &[Range<u64>]) {
        for row in rows {
            self.writing.remove(row);
        }
    }

    pub(super) fn is_written(&self, range: &Range<u64>) -> bool {
        range.is_empty() || self.written.covers(range)
    }

    pub(super) fn is_idle(&self) -> bool {
        self.writing.0.is_empty()
    }

    pub(super) fn is_idle_in(&self, range: &Range<u64>) -> bool {
        self.writing.overlap(range).is_none()
    }

    pub(super) fn forget_written(&mut self) {
        self.written = RangeSet::default();
        self.forgets = true;
    }

    pub(super) fn reset(&mut self) -> Result<(), TargetError> {
        match self.writing.0.first() {
            Some(Range { start, end }) => Err(TargetError::Busy { start, end }),
            None => {
                self.written = RangeSet::default();
                Ok(())
            }
        }
    }
}

/// Disjoint ranges that never touch.
#[derive(Debug, Default)]
struct RangeSet(Ordered);

impl RangeSet {
    /// The first range that shares a byte with this one.
    fn overlap(&self, range: &Range<u64>) -> Option<Range<u64>> {
        self.0.last_before(range.end).filter(|other| other.end > range.start)
    }

    fn covers(&self, range: &Range<u64>) -> bool {
        let around = self.0.last_before(range.start.saturating_add(1));
        around.is_some_and(|other| other.end >= range.end)
    }

    /// Adds a range that overlaps none.
    fn insert(&mut self, mut range: Range<u64>) {
        if let Some(Range { start, end }) = self.0.last_before(range.start)
            && end == range.start
        {
            self.0.take(start);
            range.start = start;
        }
        if let Some(end) = self.0.take(range.end) {
            range.end = end;
        }
        self.0.put(range);
    }

    /// Removes a range that is wholly inside.
    fn remove(&mut self, range: &Range<u64>) {
        let Some(Range { start, end }) = self.0.last_before(range.start.saturating_add(1)) else {
            return;
        };
        self.0.take(start);
        if start < range.start {
            self.0.put(start..range.start);
        }
        if range.end < end {
            self.0.put(range.end..end);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Against one flag per byte.
        #[test]
        fn range_sets_agree_with_a_byte_map(steps in prop::collection::vec((any::<bool>(), 0_u64..60, 1_u64..12), 1..100)) {
            let (mut set, mut map) = (RangeSet::default(), [false; 72]);
            for (insert, start, len) in steps {
                let range = start..start + len;
                let bytes = &mut map[start as usize..(start + len) as usize];
                let (any, all) = (bytes.contains(&true), !bytes.contains(&false));
                prop_assert_eq!(set.overlap(&range).is_some(), any);
                prop_assert_eq!(set.covers(&range), all);
                if insert && !any {
                    set.insert(range);
                    bytes.fill(true);
                } else if !insert && all {
                    set.remove(&range);
                    bytes.fill(false);
                }
            }
            let runs = map.chunk_by(|a, b| a == b).filter(|run| run[0]).count();
            prop_assert_eq!(set.0.len(), runs);
        }
    }
}
