use stagewire_core::{PayloadId, RegionRef, Token};
use stagewire_transfer::{Extent, Region};

use super::rooms::Room;
use crate::Object;

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
