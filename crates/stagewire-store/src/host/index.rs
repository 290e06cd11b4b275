use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use stagewire_core::{ByteCount, PayloadId, Token};
use tokio::sync::watch;
use tokio::time::Instant;
use uuid::Uuid;

use super::Inner;
use super::object::{About, HostObject};
use super::order::{Class, Order, Rank};
use crate::journal::Record;
use crate::spill::{Charge, Spill, SpillFile};
use crate::{Retention, Share, StoreError};

/// What stands under each key.
#[derive(Debug, Default)]
pub(super) struct Index {
    /// Nothing comes in any more, and nothing is here.
    closed: bool,
    slots: HashMap<PayloadId, Slot>,
    /// Who wrote what.
    writers: BTreeSet<(Token, PayloadId)>,
    /// When what is deleted.
    deadlines: BTreeSet<(Instant, PayloadId)>,
    order: Order,
    /// Whether held objects can move to files.
    spills: bool,
    /// Bytes in memory of objects that are being written to files.
    leaving: u64,
    /// Objects in files.
    files: Share,
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
            Self::Sealed(entry) => entry.about.token,
        }
    }
}

/// A sealed object.
#[derive(Debug)]
pub(super) struct Entry {
    about: Arc<About>,
    place: Place,
    reads: u32,
    /// Its place in the order, where it may leave the memory.
    rank: Option<Rank>,
}

/// Where the bytes of a sealed object are.
#[derive(Debug, Clone)]
pub(super) enum Place {
    Memory(Arc<HostObject>),
    /// In memory until all of it is in a file.
    Writing(Arc<HostObject>),
    File(Arc<SpillFile>),
    /// In a file until all of it is in memory. The channel closes then, or when that failed.
    Reading(Arc<SpillFile>, watch::Receiver<()>),
}

impl Entry {
    pub(super) const fn about(&self) -> &Arc<About> {
        &self.about
    }

    /// The object, where it is in memory.
    pub(super) const fn object(&self) -> Option<&Arc<HostObject>> {
        match &self.place {
            Place::Memory(object) | Place::Writing(object) => Some(object),
            Place::File(_) | Place::Reading(..) => None,
        }
    }
}

impl Index {
    pub(super) fn new(spills: bool) -> Self {
        Self {
            spills,
            ..Self::default()
        }
    }

    /// Begins a draft where the key is free. Gives a number that tells it from every other object under this key.
    pub(super) fn begin(&mut self, payload: PayloadId, token: Option<Token>) -> Result<u64, StoreError> {
        self.check_open()?;
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

    /// Whether anything is done here at all.
    pub(super) fn check_open(&self) -> Result<(), StoreError> {
        if self.closed { Err(StoreError::Closed) } else { Ok(()) }
    }

    /// Takes everything out, and nothing in any more; `None` where that was done before. Drafts are aborted.
    pub(super) fn close(&mut self) -> Option<Vec<Entry>> {
        if std::mem::replace(&mut self.closed, true) {
            return None;
        }
        let sealed = |slot| match slot {
            Slot::Draft { .. } => None,
            Slot::Sealed(entry) => Some(entry),
        };
        let slots = std::mem::take(&mut self.slots);
        self.writers.clear();
        self.deadlines.clear();
        self.order = Order::default();
        self.files = Share::default();
        Some(slots.into_values().filter_map(sealed).collect())
    }

    /// The objects that are in memory, and are not leaving it.
    pub(super) fn in_memory(&self) -> impl Iterator<Item = &Arc<HostObject>> {
        self.slots.values().filter_map(|slot| match slot {
            Slot::Sealed(Entry {
                place: Place::Memory(object),
                ..
            }) => Some(object),
            _ => None,
        })
    }

    /// Those that are leaving it for files.
    pub(super) fn moving(&self) -> impl Iterator<Item = &Arc<HostObject>> {
        self.slots.values().filter_map(|slot| match slot {
            Slot::Sealed(Entry {
                place: Place::Writing(object),
                ..
            }) => Some(object),
            _ => None,
        })
    }

    /// The objects of a class that nobody reads, in the order in which they leave the memory.
    pub(super) fn leavers(&self, class: Class) -> impl Iterator<Item = &Arc<HostObject>> {
        let objects = self
            .order
            .of(class)
            .filter_map(|rank| match self.slots.get(&rank.payload()) {
                Some(Slot::Sealed(Entry {
                    place: Place::Memory(object),
                    ..
                })) => Some(object),
                _ => None,
            });
        objects.filter(|object| !object.is_read_beside(0))
    }

    /// Where this very object is, which the caller has; `None` where it has gone, or somebody else has it, too.
    pub(super) fn unread(&mut self, object: &Arc<HostObject>) -> Option<&mut Place> {
        let entry = self.entry(object.about())?;
        let same = matches!(&entry.place, Place::Memory(found) if Arc::ptr_eq(found, object));
        (same && !object.is_read_beside(1)).then_some(&mut entry.place)
    }

    /// Bytes of objects that nobody reads and that may leave the memory, `spare` of them to files; no more than `enough`
    /// are looked for.
    pub(super) fn supply(&self, enough: u64, spare: u64) -> u64 {
        let nbytes = |object: &Arc<HostObject>| object.room().nbytes().0;
        let up_to = |class, most: u64| {
            let mut sum = 0_u64;
            for nbytes in self.leavers(class).map(nbytes) {
                if sum >= most {
                    break;
                }
                sum += nbytes;
            }
            sum.min(most)
        };
        let cached = up_to(Class::Cached, enough);
        let soft = up_to(Class::SoftPinned, enough);
        let held = up_to(Class::Held, spare.min(enough));
        self.leaving + cached + soft + held
    }

    /// Everything that is here.
    pub(super) fn slots(&self) -> impl Iterator<Item = &Slot> {
        self.slots.values()
    }

    pub(super) fn slot(&self, payload: PayloadId) -> Option<&Slot> {
        self.slots.get(&payload)
    }

    /// Where the sealed object is, which is read now.
    pub(super) fn read(&mut self, payload: PayloadId) -> Result<(Arc<About>, Place), StoreError> {
        self.check_open()?;
        match self.slots.get_mut(&payload) {
            Some(Slot::Sealed(entry)) => {
                entry.reads = entry.reads.saturating_add(1);
                if let (Place::Memory(object), Some(rank)) = (&entry.place, &mut entry.rank) {
                    self.order.remove(rank);
                    *rank = rank_of(&mut self.order, object, entry.reads);
                }
                Ok((Arc::clone(&entry.about), entry.place.clone()))
            }
            Some(Slot::Draft { .. }) => Err(StoreError::NotSealed { payload }),
            None => Err(StoreError::NotFound { payload }),
        }
    }

    /// The entry of this very object.
    fn entry(&mut self, about: &Arc<About>) -> Option<&mut Entry> {
        match self.slots.get_mut(&about.payload) {
            Some(Slot::Sealed(entry)) if Arc::ptr_eq(&entry.about, about) => Some(entry),
            _ => None,
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
            if let Some(deadline) = entry.about.deadline {
                self.deadlines.remove(&(deadline, payload));
            }
            if let Some(rank) = &entry.rank {
                self.order.remove(rank);
            }
            if let Place::File(_) | Place::Reading(..) = &entry.place {
                self.files.take(entry.about.nbytes());
            }
        }
        Some(slot)
    }

    /// Puts a sealed object in its place.
    pub(super) fn put(&mut self, about: &Arc<About>, place: Place) {
        let payload = about.payload;
        self.writers.extend(about.token.map(|token| (token, payload)));
        self.deadlines
            .extend(about.deadline.map(|deadline| (deadline, payload)));
        let rank = match &place {
            Place::Memory(object) => self.rank(object, 1),
            _ => {
                self.files.add(about.nbytes());
                None
            }
        };
        let entry = Entry {
            about: Arc::clone(about),
            place,
            reads: 1,
            rank,
        };
        self.slots.insert(payload, Slot::Sealed(entry));
    }

    /// A place in the order for an object in memory that may leave it.
    fn rank(&mut self, object: &HostObject, reads: u32) -> Option<Rank> {
        let stays = object.about().retention == Retention::Held && !self.spills;
        let nothing_to_gain = object.room().nbytes().0 == 0;
        (!stays && !nothing_to_gain).then(|| rank_of(&mut self.order, object, reads))
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
            Some(Slot::Sealed(entry)) => entry.about.deadline,
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

    /// Bytes in memory that may move to files.
    pub(super) const fn movable(&self) -> u64 {
        self.order.nbytes(Class::Held)
    }

    /// Bytes in memory that are moving to files.
    pub(super) const fn leaving(&self) -> u64 {
        self.leaving
    }

    /// Objects in files.
    pub(super) const fn files(&self) -> Share {
        self.files
    }

    /// Takes objects of a class out, in their order, until they free `wanted` bytes. What somebody reads now stays.
    pub(super) fn evict(&mut self, class: Class, wanted: u64) -> Vec<Arc<HostObject>> {
        let (mut evicted, mut busy, mut freed) = (Vec::new(), Vec::new(), 0);
        while freed < wanted
            && let Some((rank, object)) = self.pop(class)
        {
            if object.is_read_beside(1) {
                busy.push(object);
                continue;
            }
            freed += object.room().nbytes().0;
            self.order.evicted(&rank);
            self.take(rank.payload());
            evicted.push(object);
        }
        self.put_back(busy);
        evicted
    }

    /// Begins to move held objects to files, in their order, until they will free `wanted` bytes. What somebody reads now
    /// stays.
    pub(super) fn spill(&mut self, spill: &Spill, wanted: u64) -> Vec<(Arc<HostObject>, Charge)> {
        let (mut moving, mut staying, mut freed) = (Vec::new(), Vec::new(), 0);
        while freed < wanted
            && staying.len() < MAX_PASSED
            && !spill.is_busy()
            && let Some((_, object)) = self.pop(Class::Held)
        {
            let charge = match object.is_read_beside(1) {
                true => None,
                false => spill.admit(&object.about().parts),
            };
            let Some(charge) = charge else {
                staying.push(object);
                continue;
            };
            let nbytes = object.room().nbytes().0;
            freed += nbytes;
            self.leaving += nbytes;
            if let Some(entry) = self.entry(object.about()) {
                entry.place = Place::Writing(Arc::clone(&object));
            }
            moving.push((object, charge));
        }
        self.put_back(staying);
        moving
    }

    /// This very object, where it is still here, and in memory until all of it is in a file.
    pub(super) fn writing(&mut self, about: &Arc<About>) -> Option<&Arc<HostObject>> {
        match &self.entry(about)?.place {
            Place::Writing(object) => Some(object),
            _ => None,
        }
    }

    /// Notes that an object is in a file now, or could not be written there. Gives it back where it leaves the memory.
    pub(super) fn end_writing(
        &mut self,
        about: &Arc<About>,
        nbytes: ByteCount,
        file: Option<SpillFile>,
    ) -> Option<Arc<HostObject>> {
        self.leaving -= nbytes.0;
        let entry = self.entry(about)?;
        let Place::Writing(object) = &entry.place else {
            return None;
        };
        let (object, reads) = (Arc::clone(object), entry.reads);
        if let Some(file) = file {
            entry.place = Place::File(Arc::new(file));
            self.files.add(about.nbytes());
            return Some(object);
        }
        entry.place = Place::Memory(Arc::clone(&object));
        self.enter(&object, reads);
        None
    }

    /// Begins to bring an object back; false where it is not in a file any more, or somebody else does it.
    pub(super) fn begin_reading(&mut self, about: &Arc<About>, done: watch::Receiver<()>) -> bool {
        let Some(entry) = self.entry(about) else { return false };
        let Place::File(file) = &entry.place else { return false };
        entry.place = Place::Reading(Arc::clone(file), done);
        true
    }

    /// Ends what [`Index::begin_reading`] began: the object is in memory, or still in its file. Gives the file that is not
    /// needed any more; `None` as well where the object was deleted meanwhile.
    pub(super) fn end_reading(
        &mut self,
        about: &Arc<About>,
        object: Option<&Arc<HostObject>>,
    ) -> Option<Arc<SpillFile>> {
        let entry = self.entry(about)?;
        let Place::Reading(file, _) = &entry.place else {
            return None;
        };
        let (file, reads) = (Arc::clone(file), entry.reads);
        let Some(object) = object else {
            entry.place = Place::File(file);
            return None;
        };
        entry.place = Place::Memory(Arc::clone(object));
        self.files.take(about.nbytes());
        self.enter(object, reads);
        Some(file)
    }

    /// Whether this very object is still here, and being brought back.
    pub(super) fn is_reading(&mut self, about: &Arc<About>) -> bool {
        self.entry(about)
            .is_some_and(|entry| matches!(entry.place, Place::Reading(..)))
    }

    /// Puts an object into the order, as used just now.
    fn enter(&mut self, object: &HostObject, reads: u32) {
        let rank = self.rank(object, reads);
        if let Some(entry) = self.entry(object.about()) {
            entry.rank = rank;
        }
    }

    /// The object of a class that leaves first, out of the order.
    fn pop(&mut self, class: Class) -> Option<(Rank, Arc<HostObject>)> {
        let rank = self.order.pop(class)?;
        match self.slots.get_mut(&rank.payload()) {
            Some(Slot::Sealed(entry)) => {
                entry.rank = None;
                match &entry.place {
                    Place::Memory(object) => Some((rank, Arc::clone(object))),
                    _ => None,
                }
            }
            _ => None,
        }
    }

    fn put_back(&mut self, objects: Vec<Arc<HostObject>>) {
        for object in objects {
            let reads = self.entry(object.about()).map_or(1, |entry| entry.reads);
            self.enter(&object, reads);
        }
    }
}

/// Objects that are passed over at most, because somebody reads them or they are too large for the quota.
const MAX_PASSED: usize = 64;

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

    /// Puts the object in the place of the draft, unless that was deleted meanwhile.
    pub(super) fn seal(&self, object: &Arc<HostObject>) -> Result<(), StoreError> {
        let payload = self.payload;
        let mut index = self.inner.lock();
        index.check_open()?;
        if !index.is_draft(payload, self.serial) {
            return Err(StoreError::NotFound { payload });
        }
        // Under the lock: a delete comes before this record and is heard, or after it and is written.
        let written = self.inner.journal(|| Record::Sealed(payload, object.entry()));
        written.map_err(|source| StoreError::Index { payload, source })?;
        index.put(object.about(), Place::Memory(Arc::clone(object)));
        let next = index.next_deadline();
        drop(index);
        if object.about().deadline.is_some_and(|deadline| next == Some(deadline)) {
            self.inner.deadlines.notify_one();
        }
        Ok(())
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.inner.lock().abort(self.payload, self.serial);
    }
}
