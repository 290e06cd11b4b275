use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use stagewire_core::{PayloadId, Token};
use tokio::time::Instant;
use uuid::Uuid;

use super::Inner;
use super::object::HostObject;
use super::order::{Class, Order, Rank};
use crate::journal::Record;
use crate::{JournalError, Retention, StoreError};

/// What stands under each key.
#[derive(Debug, Default)]
pub(super) struct Index {
    slots: HashMap<PayloadId, Slot>,
    /// Who wrote what.
    writers: BTreeSet<(Token, PayloadId)>,
    /// When what is deleted.
    deadlines: BTreeSet<(Instant, PayloadId)>,
    order: Order,
    next: u64,
}

#[derive(Debug)]
pub(super) enum Slot {
    Draft { serial: u64, token: Option<Token> },
    Sealed(Entry),
}

impl Slot {
    pub(super) fn token(&self) -> Option<Token> {
        match self {
            Self::Draft { token, .. } => *token,
            Self::Sealed(entry) => entry.object.about().token,
        }
    }
}

/// A sealed object.
#[derive(Debug)]
pub(super) struct Entry {
    object: Arc<HostObject>,
    reads: u32,
    /// Its place in the order, where it may leave.
    rank: Option<Rank>,
}

impl Entry {
    pub(super) fn into_object(self) -> Arc<HostObject> {
        self.object
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

    /// The sealed object, which is read now.
    pub(super) fn read(&mut self, payload: PayloadId) -> Result<Arc<HostObject>, StoreError> {
        match self.slots.get_mut(&payload) {
            Some(Slot::Sealed(entry)) => {
                entry.reads = entry.reads.saturating_add(1);
                if let Some(rank) = &mut entry.rank {
                    self.order.remove(rank);
                    *rank = rank_of(&mut self.order, &entry.object, entry.reads);
                }
                Ok(Arc::clone(&entry.object))
            }
            Some(Slot::Draft { .. }) => Err(StoreError::NotSealed { payload }),
            None => Err(StoreError::NotFound { payload }),
        }
    }

    pub(super) fn written_by(&self, token: Token) -> Vec<PayloadId> {
        let least = PayloadId(Uuid::nil());
        let written = self.writers.range((token, least)..);
        let written = written.take_while(|(writer, _)| *writer == token);
        written.map(|(_, payload)| *payload).collect()
    }

    /// Frees the key.
    pub(super) fn take(&mut self, payload: PayloadId) -> Option<Slot> {
        let slot = self.slots.remove(&payload)?;
        if let Some(token) = slot.token() {
            self.writers.remove(&(token, payload));
        }
        if let Slot::Sealed(entry) = &slot {
            if let Some(deadline) = entry.object.about().deadline {
                self.deadlines.remove(&(deadline, payload));
            }
            if let Some(rank) = &entry.rank {
                self.order.remove(rank);
            }
        }
        Some(slot)
    }

    /// Puts a sealed object in its place.
    pub(super) fn put(&mut self, object: &Arc<HostObject>) {
        let about = object.about();
        let payload = about.payload;
        self.writers.extend(about.token.map(|token| (token, payload)));
        self.deadlines
            .extend(about.deadline.map(|deadline| (deadline, payload)));
        let rank = match about.retention {
            Retention::Held => None,
            Retention::SoftPinned | Retention::Cached { .. } => Some(rank_of(&mut self.order, object, 1)),
        };
        let entry = Entry {
            object: Arc::clone(object),
            reads: 1,
            rank,
        };
        self.slots.insert(payload, Slot::Sealed(entry));
    }

    /// The keys of all sealed objects.
    pub(super) fn sealed(&self) -> Vec<PayloadId> {
        let sealed = self.slots.iter().filter(|(_, slot)| matches!(slot, Slot::Sealed(_)));
        sealed.map(|(payload, _)| *payload).collect()
    }

    /// Takes a draft away, unless something else stands under its key by now.
    fn abort(&mut self, payload: PayloadId, draft: u64) {
        if self.is_draft(payload, draft) {
            self.take(payload);
        }
    }

    fn is_draft(&self, payload: PayloadId, draft: u64) -> bool {
        matches!(self.slots.get(&payload), Some(Slot::Draft { serial, .. }) if *serial == draft)
    }

    /// The next deadline of all objects.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.first().map(|(deadline, _)| *deadline)
    }

    /// Whether the deadline of this object has come.
    pub(super) fn has_expired(&self, payload: PayloadId) -> bool {
        let deadline = match self.slots.get(&payload) {
            Some(Slot::Sealed(entry)) => entry.object.about().deadline,
            _ => None,
        };
        deadline.is_some_and(|deadline| deadline <= Instant::now())
    }

    /// An object whose deadline has come.
    pub(super) fn expired(&self, now: Instant) -> Option<PayloadId> {
        let (deadline, payload) = self.deadlines.first()?;
        (*deadline <= now).then_some(*payload)
    }

    /// Bytes in memory that may be evicted.
    pub(super) const fn evictable(&self) -> u64 {
        self.order.nbytes(Class::Cached) + self.order.nbytes(Class::SoftPinned)
    }

    /// Takes objects of a class out, in their order, until they free `wanted` bytes. What somebody reads now stays.
    pub(super) fn evict(&mut self, class: Class, wanted: u64) -> Vec<Arc<HostObject>> {
        let (mut evicted, mut busy, mut freed) = (Vec::new(), Vec::new(), 0);
        while freed < wanted
            && let Some(rank) = self.order.pop(class)
        {
            let payload = rank.payload();
            let Some(Slot::Sealed(entry)) = self.slots.get_mut(&payload) else {
                continue;
            };
            entry.rank = None;
            if entry.object.is_read() {
                busy.push(payload);
                continue;
            }
            freed += entry.object.room().nbytes().0;
            self.order.evicted(&rank);
            if let Some(Slot::Sealed(entry)) = self.take(payload) {
                evicted.push(entry.object);
            }
        }
        for payload in busy {
            if let Some(Slot::Sealed(entry)) = self.slots.get_mut(&payload) {
                entry.rank = Some(rank_of(&mut self.order, &entry.object, entry.reads));
            }
        }
        evicted
    }
}

fn rank_of(order: &mut Order, object: &HostObject, reads: u32) -> Rank {
    let about = object.about();
    order.add(about.payload, object.room().nbytes(), about.retention, reads)
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
        let serial = inner.index(payload).begin(payload, token)?;
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
    pub(super) fn seal(&self, object: &Arc<HostObject>) -> Result<bool, JournalError> {
        let mut index = self.inner.lock();
        if !index.is_draft(self.payload, self.serial) {
            return Ok(false);
        }
        // Under the lock: a delete comes before this record and is heard, or after it and is written.
        self.inner.journal(|| Record::Sealed(self.payload, object.entry()))?;
        index.put(object);
        let next = index.next_deadline();
        drop(index);
        if object.about().deadline.is_some_and(|deadline| next == Some(deadline)) {
            self.inner.deadlines.notify_one();
        }
        Ok(true)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.inner.lock().abort(self.payload, self.serial);
    }
}
