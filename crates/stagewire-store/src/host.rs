mod departures;
mod draft;
mod durable;
mod end;
mod evacuate;
mod expiry;
mod fetch;
mod index;
mod lent;
mod object;
mod open;
mod order;
mod pressure;
mod readers;
mod restore;
mod rooms;

use std::fmt;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use stagewire_core::{ByteCount, PayloadId, Token};
use stagewire_transfer::{Extent, Host, Memory, RegisterError, RegisterOptions, Target, Transport};
use tokio::runtime;
use tokio::sync::Notify;

use crate::gate::same_job;
use crate::journal::{Appended, Record};
use crate::spill::{Spill, SpillFile};
use crate::stats::Counts;
use crate::{
    Draft, Fenced, JournalError, NewObject, Object, ObjectState, Reservation, Store, StoreError, StoreStats, TokenGate,
    Usage,
};
use departures::Farewell;
pub use departures::{Departure, Departures};
use draft::HostDraft;
use durable::Durable;
use index::{Claim, Entry, Index, Slot};
use lent::Lent;
use object::{HostObject, Registered};
use readers::Leaving;
use rooms::{Rooms, in_pages};

/// Shared memory beyond the bound of a store and a quarter: what lies between payloads, too small for the next one, and
/// copies into aborted drafts that still run. Pages that were never used take no memory.
const SLACK: u64 = 64 << 20;

/// A store in the shared memory of this process: readers map it or copy out of it. It ends with the process, unless it
/// was opened as a durable one.
///
/// Cloning gives another reference to the same store.
#[derive(Clone)]
pub struct HostStore {
    inner: Arc<Inner>,
}

struct Inner {
    host: Arc<Host>,
    shm: Arc<dyn Transport>,
    gate: Arc<TokenGate>,
    rooms: Arc<Rooms>,
    index: Mutex<Index>,
    /// Tells of a deadline that comes before all others.
    deadlines: Arc<Notify>,
    counts: Counts,
    spill: Option<Spill>,
    runtime: runtime::Handle,
    durable: Option<Arc<Durable>>,
    departures: OnceLock<Farewell>,
    /// Objects that are gone, though the index on disk still names their memory.
    condemned: Mutex<Vec<Arc<HostObject>>>,
    /// Objects that are gone, though others read them.
    leaving: Leaving,
    /// Held by who gets memory together that is free in pieces.
    gathering: Arc<tokio::sync::Mutex<()>>,
    /// Held by who ends the store.
    ending: Mutex<()>,
    /// What the next process gets. It can be read here until this one ends.
    left: OnceLock<Vec<Entry>>,
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostStore({})", self.usage())
    }
}

impl fmt::Debug for HostStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl HostStore {
    /// The arena that a store of at most `limit` bytes needs.
    pub const fn arena_limit(limit: ByteCount) -> ByteCount {
        ByteCount(limit.0.saturating_add(limit.0 / 4).saturating_add(SLACK))
    }

    /// A store of at most `limit` bytes, in whole pages for each part, in the arena of `host`: see
    /// [`HostStore::arena_limit`]. `gate` says who may write and delete.
    ///
    /// # Panics
    /// Where it is not called on a tokio runtime.
    pub fn new(host: &Arc<Host>, limit: ByteCount, gate: Arc<TokenGate>) -> Self {
        Self::start(Inner::new(host, limit, gate, None))
    }

    fn start(inner: Inner) -> Self {
        let inner = Arc::new(inner);
        let expiry = expiry::run(Arc::downgrade(&inner), Arc::clone(&inner.deadlines));
        inner.runtime.spawn(expiry);
        Self { inner }
    }

    /// What it has done so far.
    pub fn stats(&self) -> StoreStats {
        self.inner.counts.stats()
    }

    /// The objects that it takes away by itself from now on: evicted, or expired. To be asked for once.
    pub fn departures(&self) -> Option<Departures> {
        let (farewell, departures) = Farewell::new();
        self.inner.departures.set(farewell).ok().map(|()| departures)
    }

    /// Whether there is an object under this key, sealed or being written.
    pub fn has(&self, payload: PayloadId) -> bool {
        self.inner.lock().slot(payload).is_some()
    }

    /// Who may write and delete.
    pub fn gate(&self) -> &Arc<TokenGate> {
        &self.inner.gate
    }

    /// What this attempt has written and nobody has deleted, unsealed objects included.
    pub fn written_by(&self, token: Token) -> Vec<PayloadId> {
        self.inner.lock().written_by(token)
    }

    /// Whether an attempt may take this object away: its token passes the gate, and is not one of another job.
    ///
    /// # Errors
    /// [`Fenced`].
    pub fn may_delete(&self, payload: PayloadId, token: Option<Token>) -> Result<(), Fenced> {
        self.inner.gate.check(token)?;
        same_job(self.inner.lock().slot(payload).and_then(Slot::token), token)
    }

    /// Takes an object away, whoever wrote it: for the process that the store belongs to. Returns whether it was
    /// there.
    pub fn remove(&self, payload: PayloadId) -> bool {
        self.inner.remove(payload).unwrap_or_else(|error| {
            // It is written with the next record.
            tracing::error!(%payload, %error, "a payload that is gone is still in the store's index");
            true
        })
    }
}

#[async_trait]
impl Store for HostStore {
    fn name(&self) -> &'static str {
        "host"
    }

    fn usage(&self) -> Usage {
        self.inner.usage()
    }

    async fn create(&self, mut object: NewObject) -> Result<Box<dyn Draft>, StoreError> {
        let payload = object.payload;
        let fenced = |source| StoreError::Fenced { payload, source };
        self.inner.gate.check(object.token).map_err(fenced)?;
        let wanted = in_pages(&object.parts);
        let limit = self.inner.rooms.limit();
        if wanted > limit {
            return Err(StoreError::TooLarge { payload, wanted, limit });
        }
        let claim = Claim::new(&self.inner, payload, object.token)?;
        let mut late = pin!(tokio::time::sleep(object.wait));
        let (waited, reservation) = (object.wait, object.reservation.take());
        let room = self.inner.room(wanted, reservation.as_ref(), late.as_mut()).await;
        let room = room.ok_or_else(|| StoreError::Exhausted {
            payload,
            wanted,
            waited,
            usage: Box::new(self.usage()),
        })?;
        // From here on key and room are given back when the draft, or what is to become one, is dropped.
        let room = Lent::new(room.give(payload, wanted), reservation);
        let extents = self.inner.allocate(payload, &object.parts, late).await?;
        Ok(Box::new(HostDraft::new(claim, object, room, extents)))
    }

    async fn get(&self, payload: PayloadId) -> Result<Arc<dyn Object>, StoreError> {
        Ok(self.inner.get(payload).await?)
    }

    async fn fetch(&self, payload: PayloadId, destinations: &[Arc<Target>]) -> Result<(), StoreError> {
        self.inner.fetch(payload, destinations).await
    }

    async fn reserve(&self, nbytes: ByteCount, wait: Duration) -> Result<Reservation, StoreError> {
        let late = pin!(tokio::time::sleep(wait));
        let room = match nbytes <= self.inner.rooms.limit() {
            true => self.inner.room(nbytes, None, late).await,
            false => None,
        };
        let room = room.ok_or_else(|| StoreError::Unreserved {
            wanted: nbytes,
            waited: wait,
            usage: Box::new(self.usage()),
        })?;
        Ok(Reservation::new(room.nbytes(), room))
    }

    async fn delete(&self, payload: PayloadId, token: Option<Token>) -> Result<(), StoreError> {
        let fenced = |source| StoreError::Fenced { payload, source };
        self.inner.gate.check(token).map_err(fenced)?;
        let index = self.inner.index(payload);
        index.check_open()?;
        let Some(slot) = index.slot(payload) else {
            return Err(StoreError::NotFound { payload });
        };
        same_job(slot.token(), token).map_err(fenced)?;
        let gone = self.inner.take(index, payload);
        gone.map(drop).map_err(|source| StoreError::Index { payload, source })
    }
}

impl Inner {
    fn new(host: &Arc<Host>, limit: ByteCount, gate: Arc<TokenGate>, spill: Option<Spill>) -> Self {
        Self {
            host: Arc::clone(host),
            shm: host.shm(),
            gate,
            rooms: Rooms::new(limit),
            index: Mutex::new(Index::new(spill.is_some())),
            deadlines: Arc::default(),
            counts: Counts::default(),
            spill,
            runtime: runtime::Handle::current(),
            durable: None,
            departures: OnceLock::new(),
            condemned: Mutex::default(),
            leaving: Leaving::default(),
            gathering: Arc::default(),
            ending: Mutex::default(),
            left: OnceLock::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The index, in which an object under this key has not expired.
    fn index(self: &Arc<Self>, payload: PayloadId) -> MutexGuard<'_, Index> {
        let index = self.lock();
        if !index.has_expired(payload) {
            return index;
        }
        drop(index);
        self.expire();
        self.lock()
    }

    /// Takes an object away. It is gone also where the index on disk could not be told.
    fn remove(&self, payload: PayloadId) -> Result<bool, JournalError> {
        self.take(self.lock(), payload)
    }

    fn take(&self, mut index: MutexGuard<'_, Index>, payload: PayloadId) -> Result<bool, JournalError> {
        match index.take(payload) {
            Some(Slot::Sealed(entry)) => {
                // Under the lock: nobody writes another object of this key before.
                let written = self.journal(|| Record::Gone(payload));
                drop(index);
                self.part_with(entry, written.is_ok());
                written.map(|()| true)
            }
            // The draft finds out when it seals; its bytes go with it.
            Some(Slot::Draft { .. }) => Ok(true),
            None => Ok(false),
        }
    }

    /// Writes that an object was taken away, before anybody can write another under its key. Tells whether it is written.
    fn journal_gone(&self, payload: PayloadId) -> bool {
        if let Some(departures) = self.departures.get() {
            departures.tell(payload);
        }
        let written = self.journal(|| Record::Gone(payload));
        if let Err(error) = &written {
            tracing::error!(%payload, %error, "a payload that is gone is still in the store's index");
        }
        written.is_ok()
    }

    /// Writes a record, where the store is a durable one. It outlives this process at once, and the machine's power a
    /// moment later, where that matters.
    fn journal(&self, record: impl FnOnce() -> Record) -> Result<(), JournalError> {
        let Some(durable) = &self.durable else { return Ok(()) };
        let appended = durable.journal.append(record())?;
        let long = durable.journal.is_long();
        if appended == Appended::Sync || long {
            let durable = Arc::clone(durable);
            self.runtime.spawn_blocking(move || {
                // Which syncs, too.
                if long && let Err(error) = durable.journal.shorten() {
                    tracing::warn!(%error, "the store's index could not be shortened");
                }
                if let Err(error) = durable.journal.sync() {
                    tracing::error!(%error, "a deleted payload may come back after a loss of power");
                }
            });
        }
        Ok(())
    }

    /// Returns once the memory of these extents outlives this process, where the store is a durable one.
    async fn keep(&self, payload: PayloadId, extents: &[Option<Extent>]) -> Result<(), StoreError> {
        let Some(durable) = &self.durable else { return Ok(()) };
        let extents = extents.iter().flatten().cloned().collect();
        let kept = durable.keeping.keep(self.host.arena(), extents).await;
        kept.map_err(|source| StoreError::Keeper { payload, source })
    }

    /// Frees what a sealed object held that the index has no more. Its file goes with it.
    fn part_with(&self, entry: Entry, written: bool) {
        if let Some(object) = entry.object() {
            self.let_go(Arc::clone(object), written);
        }
    }

    /// Removes a file that the index does not name any more, once that is safe from a loss of power.
    fn part_with_file(&self, file: Arc<SpillFile>) {
        let Some(durable) = self.durable.clone() else { return };
        self.runtime.spawn_blocking(move || {
            if let Err(error) = durable.journal.sync() {
                tracing::error!(?file, %error, "a file that is not needed stays until the next start");
                file.abandon();
            }
        });
    }

    /// Frees the memory of an object that is gone, once the index on disk knows that it is: a process that is killed before
    /// would leave an index which names memory that others have written since.
    fn let_go(&self, object: Arc<HostObject>, written: bool) {
        if written {
            self.drain(object);
        } else {
            object.room().set(ObjectState::Draining);
            self.condemned().push(object);
        }
    }

    /// Frees what [`Inner::let_go`] kept, where the index can be written again.
    fn free_condemned(&self) {
        let Some(durable) = &self.durable else { return };
        let mut condemned = self.condemned();
        if condemned.is_empty() || durable.journal.retry().is_err() {
            return;
        }
        let objects = std::mem::take(&mut *condemned);
        drop(condemned);
        for object in objects {
            self.drain(object);
        }
    }

    fn condemned(&self) -> MutexGuard<'_, Vec<Arc<HostObject>>> {
        self.condemned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets other processes read the parts.
    fn register(&self, payload: PayloadId, extents: Vec<Option<Extent>>) -> Result<Vec<Registered>, StoreError> {
        let parts = extents
            .into_iter()
            .map(|extent| self.register_part(extent))
            .collect::<Result<_, _>>();
        parts.map_err(|source| StoreError::Register { payload, source })
    }

    fn register_part(&self, extent: Option<Extent>) -> Result<Registered, RegisterError> {
        let Some(extent) = extent else { return Ok(None) };
        let region = self
            .shm
            .register(Memory::Arena(extent.clone()), RegisterOptions::default())?;
        Ok(Some((extent, region)))
    }

    fn usage(&self) -> Usage {
        let spilled = self.lock().files();
        Usage {
            spilled,
            spill: self.spill.as_ref().map(Spill::usage),
            readers: self.leaving.readers(),
            ..self.rooms.usage()
        }
    }

    /// Keeps a deleted object in the books until its last reader is done.
    fn drain(&self, object: Arc<HostObject>) {
        object.room().set(ObjectState::Draining);
        self.see_off(object);
    }

    /// Lets nobody read it who does not yet, and keeps it until its last reader is done.
    fn see_off(&self, object: Arc<HostObject>) {
        for region in object.each_region() {
            region.release();
        }
        if object.each_region().any(|region| !region.is_idle()) {
            self.leaving.add(&object);
            self.runtime.spawn(async move {
                for region in object.each_region() {
                    region.idle().await;
                }
            });
        }
    }
}

#[cfg(test)]
mod tests;
