//! Segments that outlive the process that made them.

use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};

use serde::{Deserialize, Serialize};
use stagewire_core::ByteCount;

use super::{Arena, Extent, FreeRanges, GRANULE, Pooled, Segment};
use crate::AdoptError;
use crate::sync::Arc;

/// Which segment: a random number, which no two segments of a host have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SegmentName(pub u128);

impl fmt::Display for SegmentName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// Where an extent lies, for as long as its segment exists, in whatever process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Location {
    /// The segment.
    pub segment: SegmentName,
    /// First byte in it.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// A segment, for a process that keeps it beyond this one.
#[derive(Debug, Clone, Copy)]
pub struct Lent<'a> {
    /// Which one.
    pub name: SegmentName,
    /// Its bytes.
    pub len: ByteCount,
    /// A read-only descriptor.
    pub descriptor: BorrowedFd<'a>,
}

/// A segment of a process that is gone.
#[derive(Debug)]
pub struct Inherited {
    /// Which one.
    pub name: SegmentName,
    /// Its bytes, as [`Lent::len`] said.
    pub len: ByteCount,
    /// A duplicate of [`Lent::descriptor`].
    pub descriptor: OwnedFd,
}

impl Extent {
    /// Where it lies.
    pub fn location(&self) -> Location {
        Location {
            segment: self.segment().name(),
            offset: self.offset(),
            len: self.len(),
        }
    }

    /// The segment that it lies in.
    pub fn lend(&self) -> Lent<'_> {
        self.segment().lend()
    }
}

impl Segment {
    fn lend(&self) -> Lent<'_> {
        Lent {
            name: self.name(),
            len: ByteCount(self.len()),
            descriptor: self.reader(),
        }
    }
}

impl Inherited {
    /// Bytes of physical memory that it takes.
    pub fn resident(&self) -> ByteCount {
        ByteCount(super::segment::resident(&self.descriptor, self.len.0))
    }
}

impl Arena {
    /// Takes over a segment of another process, with those of its extents that are still in use, at `in_use`: (first
    /// byte, bytes). Returns them in that order. Without any the segment is not kept.
    ///
    /// The bytes are read where they are, and nobody can write to them: the process that could is gone, and the seals
    /// keep everybody else out. So nothing in the segment is used again, what comes free included; its memory goes with
    /// its last extent and the last mapping of a reader. Until then all its pages count against the limit, which they
    /// may exceed.
    ///
    /// # Errors
    /// [`AdoptError`]; nothing is kept then.
    pub fn adopt(&self, inherited: Inherited, in_use: &[(u64, u64)]) -> Result<Vec<Extent>, AdoptError> {
        let Inherited { name, len, descriptor } = inherited;
        check(name, len.0, in_use)?;
        let mut state = self.inner.lock();
        if state.segments.values().any(|pooled| pooled.segment.name() == name) {
            return Err(AdoptError::Twice { segment: name });
        }
        let id = state.next_id;
        let segment = Segment::adopt(id, name, descriptor, len.0).map_err(|error| AdoptError::Segment {
            segment: name,
            len,
            error,
        })?;
        if in_use.is_empty() {
            return Ok(Vec::new());
        }
        let segment = Arc::new(segment);
        let adopted = in_use.iter().map(|(_, len)| len.next_multiple_of(GRANULE)).sum();
        let pooled = Pooled {
            segment: segment.clone(),
            free: FreeRanges::none(),
            touched: segment.resident(),
            adopted: Some(adopted),
        };
        state.next_id += 1;
        state.allocated += adopted;
        state.segments.insert(id, pooled);
        drop(state);
        let extent = |&(offset, len): &(u64, u64)| {
            let reserved = len.next_multiple_of(GRANULE);
            Extent::adopted(self.inner.clone(), segment.clone(), offset, len, reserved)
        };
        Ok(in_use.iter().map(extent).collect())
    }

    /// Lends every segment to `take`, until that fails.
    ///
    /// # Errors
    /// Those of `take`.
    pub fn lend_each<E>(&self, mut take: impl FnMut(Lent<'_>) -> Result<(), E>) -> Result<(), E> {
        let state = self.inner.lock();
        let segments: Vec<_> = state.segments.values().map(|pooled| pooled.segment.clone()).collect();
        drop(state);
        segments.iter().try_for_each(|segment| take(segment.lend()))
    }

    /// The segments that hold something, or could.
    pub fn segment_names(&self) -> Vec<SegmentName> {
        let state = self.inner.lock();
        state.segments.values().map(|pooled| pooled.segment.name()).collect()
    }
}

/// Whether the extents lie inside the segment, each in pages of its own.
fn check(segment: SegmentName, segment_len: u64, in_use: &[(u64, u64)]) -> Result<(), AdoptError> {
    let mut ranges = Vec::with_capacity(in_use.len());
    for &(offset, len) in in_use {
        let reserved = len.checked_next_multiple_of(GRANULE).unwrap_or(u64::MAX);
        let end = offset.checked_add(reserved).filter(|end| *end <= segment_len);
        match end {
            Some(end) if len > 0 && offset.is_multiple_of(GRANULE) => ranges.push((offset, end)),
            _ => {
                return Err(AdoptError::Outside {
                    segment,
                    offset,
                    len,
                    segment_len,
                });
            }
        }
    }
    ranges.sort_unstable();
    match ranges.windows(2).find(|pair| pair[0].1 > pair[1].0) {
        None => Ok(()),
        Some(pair) => Err(AdoptError::Overlap {
            segment,
            offset: pair[0].0,
            other: pair[1].0,
        }),
    }
}

#[cfg(all(test, not(stagewire_loom)))]
mod tests;
