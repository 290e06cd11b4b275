use std::collections::BTreeMap;
use std::sync::Arc;

use stagewire_core::{PayloadId, Token};

use super::object::HostObject;
use super::rooms::{Room, Rooms, in_pages};
use crate::{NewObject, Object, StoreError};

/// What stands under each key.
#[derive(Debug, Default)]
pub(super) struct Index {
    slots: BTreeMap<PayloadId, Slot>,
}

#[derive(Debug)]
pub(super) enum Slot {
    Draft { serial: u64, token: Option<Token> },
    Sealed(Arc<HostObject>),
}

impl Slot {
    pub(super) fn token(&self) -> Option<Token> {
        match self {
            Self::Draft { token, .. } => *token,
            Self::Sealed(object) => object.token(),
        }
    }
}

impl Index {
    /// Begins a draft where the key is free; `None` where there is no room.
    pub(super) fn begin(&mut self, object: &NewObject, rooms: &Arc<Rooms>) -> Result<Option<Room>, StoreError> {
        let payload = object.payload;
        if let Some(slot) = self.slots.get(&payload) {
            let sealed = matches!(slot, Slot::Sealed(_));
            return Err(StoreError::Exists { payload, sealed });
        }
        let Some(room) = rooms.take(payload, in_pages(&object.parts)) else {
            return Ok(None);
        };
        let (serial, token) = (room.serial(), object.token);
        self.slots.insert(payload, Slot::Draft { serial, token });
        Ok(Some(room))
    }

    pub(super) fn slot(&self, payload: PayloadId) -> Option<&Slot> {
        self.slots.get(&payload)
    }

    pub(super) fn written_by(&self, token: Token) -> Vec<PayloadId> {
        let written = self.slots.iter().filter(|(_, slot)| slot.token() == Some(token));
        written.map(|(payload, _)| *payload).collect()
    }

    pub(super) fn take(&mut self, payload: PayloadId) -> Option<Slot> {
        self.slots.remove(&payload)
    }

    /// Puts the object in the place of its draft; false where that was deleted meanwhile.
    pub(super) fn seal(&mut self, draft: u64, object: &Arc<HostObject>) -> bool {
        let there = self.is_draft(object.payload(), draft);
        if there {
            self.slots.insert(object.payload(), Slot::Sealed(Arc::clone(object)));
        }
        there
    }

    /// Takes a draft away, unless something else stands under its key by now.
    pub(super) fn abort(&mut self, payload: PayloadId, draft: u64) {
        if self.is_draft(payload, draft) {
            self.slots.remove(&payload);
        }
    }

    fn is_draft(&self, payload: PayloadId, draft: u64) -> bool {
        matches!(self.slots.get(&payload), Some(Slot::Draft { serial, .. }) if *serial == draft)
    }
}
