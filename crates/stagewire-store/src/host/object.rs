use std::sync::Arc;

use stagewire_core::{ByteCount, PayloadId, RegionRef, Token};
use stagewire_transfer::{Extent, Filling, Memory, Region, Target};
use tokio::time::Instant;

use super::fetch::{check_destinations, misfit};
use super::open::now;
use super::rooms::Room;
use crate::journal::{Entry, Place};
use crate::{Object, Retention, StoreError};

/// What stays the same of a sealed object, wherever its bytes are.
#[derive(Debug)]
pub(super) struct About {
    pub(super) payload: PayloadId,
    pub(super) token: Option<Token>,
    pub(super) retention: Retention,
    /// When it is deleted.
    pub(super) deadline: Option<Instant>,
    /// Bytes of each part.
    pub(super) parts: Vec<ByteCount>,
    /// [`NewObject::label`](crate::NewObject::label).
    pub(super) label: Vec<u8>,
}

impl About {
    /// What the index of a durable store remembers of it.
    pub(super) fn entry(&self, place: Place) -> Entry {
        let left = |deadline: Instant| deadline.saturating_duration_since(Instant::now()).as_millis();
        let expires_at = self
            .deadline
            .map(|deadline| now().saturating_add(u64::try_from(left(deadline)).unwrap_or(u64::MAX)));
        Entry {
            token: self.token,
            retention: self.retention.into(),
            expires_at,
            parts: self.parts.iter().map(|part| part.0).collect(),
            place,
            label: self.label.clone(),
        }
    }
}

impl About {
    /// Bytes of all parts.
    pub(super) fn nbytes(&self) -> ByteCount {
        ByteCount(self.parts.iter().map(|part| part.0).sum())
    }
}

/// A part in memory that others can read; `None` where it has no bytes.
pub(super) type Registered = Option<(Extent, Region)>;

/// A sealed object in memory.
#[derive(Debug)]
pub(super) struct HostObject {
    about: Arc<About>,
    // Regions and bytes go before the room is given back.
    parts: Vec<Registered>,
    /// Shared by the places of an object that has moved, for as long as somebody still reads at the old one.
    room: Arc<Room>,
}

impl HostObject {
    pub(super) fn new(about: Arc<About>, parts: Vec<Registered>, room: Room) -> Self {
        let room = Arc::new(room);
        Self { about, parts, room }
    }

    /// The same object with its bytes in other places.
    pub(super) fn moved(&self, parts: Vec<Registered>) -> Self {
        Self {
            about: Arc::clone(&self.about),
            parts,
            room: Arc::clone(&self.room),
        }
    }

    pub(super) fn parts(&self) -> &[Registered] {
        &self.parts
    }

    pub(super) fn extents(&self) -> impl Iterator<Item = &Extent> {
        self.parts.iter().flatten().map(|part| &part.0)
    }

    pub(super) const fn about(&self) -> &Arc<About> {
        &self.about
    }

    pub(super) fn room(&self) -> &Room {
        &self.room
    }

    /// What the index of a durable store remembers of it, here.
    pub(super) fn entry(&self) -> Entry {
        self.about.entry(self.place())
    }

    /// Where it is, for the index of a durable store.
    pub(super) fn place(&self) -> Place {
        let location = |part: &Registered| part.as_ref().map(|part| part.0.location());
        Place::Memory(self.parts.iter().map(location).collect())
    }

    pub(super) fn each_region(&self) -> impl Iterator<Item = &Region> {
        self.parts.iter().flatten().map(|part| &part.1)
    }

    /// Has its memory stay as it is for another process, see [`Extent::leave`].
    pub(super) fn leave(&self) {
        self.extents().for_each(Extent::leave);
    }

    /// Whether somebody beside the index and `others` has it, in this process or another.
    pub(super) fn is_read_beside(self: &Arc<Self>, others: usize) -> bool {
        Arc::strong_count(self) > 1 + others || self.each_region().any(|region| !region.is_idle())
    }

    /// Copies every part into its destination.
    pub(super) async fn copy_to(&self, destinations: &[Arc<Target>]) -> Result<(), StoreError> {
        check_destinations(&self.about, destinations)?;
        for (part, (source, destination)) in self.parts.iter().zip(destinations).enumerate() {
            let filled = match source {
                Some((extent, _)) => destination.fill(&Memory::from(extent.clone())).await,
                None => destination.begin().map(Filling::commit),
            };
            filled.map_err(|error| misfit(&self.about, part, destination, error))?;
        }
        Ok(())
    }
}

impl Object for HostObject {
    fn payload(&self) -> PayloadId {
        self.about.payload
    }

    fn parts(&self) -> usize {
        self.parts.len()
    }

    fn part(&self, part: usize) -> Option<&[u8]> {
        match self.parts.get(part)? {
            None => Some(&[]),
            Some((extent, _)) => extent.bytes(),
        }
    }

    fn regions(&self) -> Vec<Option<RegionRef>> {
        self.parts
            .iter()
            .map(|part| part.as_ref().map(|part| part.1.reference()))
            .collect()
    }
}
