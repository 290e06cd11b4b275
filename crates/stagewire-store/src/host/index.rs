use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use stagewire_core::{PayloadId, Token};

use super::Inner;
use super::object::HostObject;
use crate::{Object, StoreError};

/// What stands under each key.
#[derive(Debug, Default)]
pub(super) struct Index {
    slots: HashMap<PayloadId, Slot>,
    /// Who wrote what.
    writers: BTreeSet<(Token, PayloadId)>,
    next: u64,
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
    /// Begins a draft where the key is free. Gives a number that tells it from every other object under this key.
    pub(super) fn begin(&mut self, payload: PayloadId, token: Option<Token>) -> Result<u64, StoreError> {
        if let Some(slot) = self.slots.get(&payload) {
            let sealed = matches!(slot, Slot::Sealed(_));
            return Err(StoreError::Exists { payload, sealed });
        }
        let serial = self.next;
        self.next += 1;
        self.slots.insert(payload, Slot::Draft { serial, token });
        self.writers.extend(token.map(|token| (token, payload)));
        Ok(serial)
    }

    pub(super) fn slot(&self, payload: PayloadId) -> Option<&Slot> {
        self.slots.get(&payload)
    }

    pub(super) fn written_by(&self, token: Token) -> Vec<PayloadId> {
        let least = PayloadId(uuid::Uuid::nil());
        let written = self.writers.range((token, least)..);
        let written = written.take_while(|(writer, _)| *writer == token);
        written.map(|(_, payload)| *payload).collect()
    }

    pub(super) fn take(&mut self, payload: PayloadId) -> Option<Slot> {
        let slot = self.slots.remove(&payload)?;
        if let Some(token) = slot.token() {
            self.writers.remove(&(token, payload));
        }
        Some(slot)
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
            self.take(payload);
        }
    }

    fn is_draft(&self, payload: PayloadId, draft: u64) -> bool {
        matches!(self.slots.get(&payload), Some(Slot::Draft { serial, .. }) if *serial == draft)
    }
}

/// A key that is taken by a draft. Dropping it frees the key, unless the draft was sealed or deleted.
#[derive(Debug)]
pub(super) struct Claim {
    inner: Arc<Inner>,
    payload: PayloadId,
    serial: u64,
}

impl Claim {
    pub(super) fn new(inner: &Arc<Inner>, payload: PayloadId, token: Option<Token>) -> Result<Self, StoreError> {
        let serial = inner.lock().begin(payload, token)?;
        let inner = Arc::clone(inner);
        Ok(Self { inner, payload, serial })
    }

    pub(super) const fn store(&self) -> &Arc<Inner> {
        &self.inner
    }

    pub(super) const fn payload(&self) -> PayloadId {
        self.payload
    }

    /// Puts the object in the place of the draft; false where that was deleted meanwhile.
    pub(super) fn seal(&self, object: &Arc<HostObject>) -> bool {
        self.inner.lock().seal(self.serial, object)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.inner.lock().abort(self.payload, self.serial);
    }
}
