//! Gets back what is wasted in segments of the process before: what is still used of one moves to memory of this process,
//! and the segment goes.

use std::sync::Arc;

use stagewire_core::{ByteCount, PayloadId};
use stagewire_transfer::{AdoptedSegment, Extent, SegmentName};

use super::Inner;
use super::object::{HostObject, Registered};
use crate::journal::Record;

/// A segment is worth emptying where at least this part of what is used of it is wasted. What less is wasted in others
/// altogether, the slack of the arena has room for.
const WORTH: u64 = 8;

impl Inner {
    /// Empties the segment of which the least is used, where one is worth it and nobody reads in it. Tells whether it did.
    /// Blocks.
    pub(super) fn evacuate_one(&self) -> bool {
        let worth = |segment: &AdoptedSegment| {
            let wasted = segment.taken.0.saturating_sub(segment.used.0);
            wasted > 0 && wasted.saturating_mul(WORTH) >= segment.used.0
        };
        let segments = self.host.arena().adopted().into_iter().filter(worth);
        segments.into_iter().any(|segment| !self.evacuate(&segment).is_empty())
    }

    /// Moves everything out of a segment, unless somebody reads in it. Gives what was moved. Blocks.
    pub(super) fn evacuate(&self, segment: &AdoptedSegment) -> Vec<(PayloadId, ByteCount)> {
        let objects = self.lock().lying_in(segment.name);
        let inside = |object: &Arc<HostObject>| {
            let extents = object
                .extents()
                .filter(|extent| extent.location().segment == segment.name);
            extents.cloned().collect::<Vec<_>>()
        };
        let extents: Vec<_> = objects.iter().flat_map(inside).collect();
        let lens: Vec<_> = extents.iter().map(Extent::len).collect();
        let used = super::rooms::in_pages(&lens.iter().copied().map(ByteCount).collect::<Vec<_>>());
        if extents.is_empty() || used != segment.used {
            // Somebody has the rest: the segment would stay.
            return Vec::new();
        }
        let Some(copies) = self.copy(&extents, &lens) else {
            return Vec::new();
        };
        drop(extents);
        let mut copies = copies.into_iter();
        let mut moved = Vec::new();
        for object in objects {
            let place = |extent: &Extent| match extent.location().segment == segment.name {
                true => copies.next(),
                false => Some(extent.clone()),
            };
            if self.swap(&object, place) {
                moved.push((object.about().payload, object.room().nbytes()));
                self.see_off(object);
            }
        }
        moved
    }

    /// Copies, as safe as the originals.
    fn copy(&self, extents: &[Extent], lens: &[u64]) -> Option<Vec<Extent>> {
        let (durable, arena) = (self.durable.as_ref()?, self.host.arena());
        let fresh = arena.allocate_together(lens);
        let mut fresh = fresh
            .inspect_err(|error| tracing::warn!(%error, "what is wasted of the store's memory stays so"))
            .ok()?;
        for (from, to) in extents.iter().zip(&mut fresh) {
            to.copy_from_slice(from.bytes()?);
        }
        let copies: Vec<_> = fresh.into_iter().map(|extent| extent.freeze()).collect();
        let kept = durable.keeping.keep_now(arena, &copies);
        kept.inspect_err(|error| tracing::warn!(%error, "what is wasted of the store's memory stays so"))
            .ok()?;
        Some(copies)
    }

    /// Puts the object in other places, unless somebody reads it by now. Tells whether it did.
    fn swap(&self, object: &Arc<HostObject>, mut place: impl FnMut(&Extent) -> Option<Extent>) -> bool {
        let part = |part: &Registered| match part {
            None => Some(None),
            Some((extent, _)) => self.register_part(Some(place(extent)?)).ok(),
        };
        // All of them, so that each copy is of its part.
        let parts: Vec<_> = object.parts().iter().map(part).collect();
        let Some(parts) = parts.into_iter().collect() else {
            return false;
        };
        let there = Arc::new(object.moved(parts));
        let mut index = self.lock();
        let Some(place) = index.unread(object) else {
            return false;
        };
        match self.journal(|| Record::Moved(object.about().payload, there.place())) {
            Ok(()) => *place = super::index::Place::Memory(there),
            Err(error) => {
                tracing::warn!(payload = %object.about().payload, %error, "a payload stays where it is");
                return false;
            }
        }
        true
    }
}

impl super::index::Index {
    /// The objects of which something lies in a segment, and that nobody reads.
    fn lying_in(&self, segment: SegmentName) -> Vec<Arc<HostObject>> {
        let lies = |object: &&Arc<HostObject>| object.extents().any(|extent| extent.location().segment == segment);
        let objects = self.in_memory().filter(lies);
        objects.filter(|object| !object.is_read_beside(0)).cloned().collect()
    }
}
