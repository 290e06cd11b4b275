use std::sync::Arc;

use stagewire_core::{ByteCount, PayloadId, RegionRef, Token};
use stagewire_transfer::{Extent, Filling, Memory, Region, Target};

use super::fetch::{check_destinations, misfit};
use super::rooms::Room;
use crate::{Object, StoreError};

/// A sealed object.
#[derive(Debug)]
pub(super) struct HostObject {
    payload: PayloadId,
    token: Option<Token>,
    // Regions and bytes go before the room is given back.
    parts: Vec<Option<(Extent, Region)>>,
    room: Room,
}

impl HostObject {
    pub(super) fn new(
        payload: PayloadId,
        token: Option<Token>,
        parts: Vec<Option<(Extent, Region)>>,
        room: Room,
    ) -> Self {
        Self {
            payload,
            token,
            parts,
            room,
        }
    }

    pub(super) const fn token(&self) -> Option<Token> {
        self.token
    }

    pub(super) const fn room(&self) -> &Room {
        &self.room
    }

    pub(super) fn each_region(&self) -> impl Iterator<Item = &Region> {
        self.parts.iter().flatten().map(|part| &part.1)
    }
}

impl HostObject {
    /// Copies every part into its destination.
    pub(super) async fn copy_to(&self, destinations: &[Arc<Target>]) -> Result<(), StoreError> {
        let payload = self.payload;
        let sizes: Vec<ByteCount> = self.parts.iter().map(|part| part_size(part.as_ref())).collect();
        check_destinations(payload, &sizes, destinations)?;
        for (part, (source, destination)) in self.parts.iter().zip(destinations).enumerate() {
            let filled = match source {
                Some((extent, _)) => destination.fill(&Memory::from(extent.clone())).await,
                None => destination.begin().map(Filling::commit),
            };
            filled.map_err(|error| misfit(payload, part, sizes[part], destination, error))?;
        }
        Ok(())
    }
}

fn part_size(part: Option<&(Extent, Region)>) -> ByteCount {
    ByteCount(part.map_or(0, |(extent, _)| extent.len()))
}

impl Object for HostObject {
    fn payload(&self) -> PayloadId {
        self.payload
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
