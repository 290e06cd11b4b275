//! The store's side of a put: takes payloads into a [`HostStore`], and serves them from there.

mod label;
mod survivors;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use stagewire_core::{
    ByteCount, Capability, Classify, ErrorClass, Failure, Handle, Lease, PayloadId, RegionRef, Token, TransferMode,
};
use stagewire_store::{
    Departure, Departures, Draft, HostStore, NewObject, Object, Reservation, Retention, Store, StoreError,
};
use stagewire_transfer::{Target, empty_region};
use tokio::time::Instant;

use crate::connector::Shared;
use crate::live::{Brought, Gone, Keep, Live};
use crate::put::ended;
use crate::serve::{PutHandler, PutRequest, Taken};
use crate::wire::PutBytes;
use crate::{Connector, ConsumeOptions, Consumer, Owner};
use label::Label;

/// What making a cached payload again is taken to cost: only those of the same store are compared.
const CACHED_COST: Duration = Duration::from_secs(1);

/// How long the end of a put that was given up is waited for, where another of the same payload has come.
const GIVEN_UP_WITHIN: Duration = Duration::from_secs(1);
/// Pause before another look whether it has ended.
const PAUSE: Duration = Duration::from_millis(1);

/// Takes payloads that other processes put, and holds them until they are released or consumed. When its connector closes
/// it serves nothing any more; what becomes of the payloads then is up to the store.
///
/// A payload keeps its id in the store. Consumers read it as they read one of a producer, from this process.
#[derive(Debug)]
pub struct StoreService {
    store: HostStore,
    shared: Weak<Shared>,
}

impl StoreService {
    /// Serves puts on the payload socket of `connector`, for as long as that lives. `store` must be in the arena of
    /// the same connector's host.
    pub fn serve(connector: &Connector, store: HostStore) -> Arc<Self> {
        let service = Arc::new(Self {
            store,
            shared: Arc::downgrade(connector.shared()),
        });
        if connector.shared().holder().puts.set(Arc::clone(&service) as _).is_err() {
            tracing::error!("this connector serves a store already; the second one gets no puts");
        }
        connector.shared().announce_store();
        if let Some(departures) = service.store.departures() {
            let departed = release_departed(Arc::downgrade(&service), departures);
            connector.shared().runtime().spawn(departed);
        }
        service
    }

    /// Where the payloads are.
    pub const fn store(&self) -> &HostStore {
        &self.store
    }

    /// Lets an attempt that has ended put nothing more, and takes away what it has put, but for payloads that are to
    /// outlive it.
    pub fn discard(&self, token: Token, kept: &[PayloadId]) {
        self.store.gate().revoke(token);
        let written = self.store.written_by(token).into_iter();
        for payload in written.filter(|payload| !kept.contains(payload)) {
            if let Some(shared) = self.shared.upgrade() {
                shared.table().release(payload, Gone::Released);
            }
            // What is still being written is not in the table.
            self.store.remove(payload);
        }
    }

    /// Takes the payload in. Returns the handle of what is here now.
    async fn take(&self, request: PutRequest) -> Result<Taken, Failure> {
        let PutRequest {
            handle,
            capability,
            bytes,
            token,
            owner,
            expires,
            wait,
            reservation,
        } = request;
        let Some(shared) = self.shared.upgrade() else {
            return Err(closed());
        };
        let begin = Instant::now();
        let draft = loop {
            let mut object = NewObject::new(handle.payload, handle.manifest.tensors().map(|tensor| tensor.nbytes()));
            object.token = token;
            object.wait = wait.saturating_sub(begin.elapsed());
            object.reservation = reservation.clone();
            object.retention = retention(owner);
            object.label = Label::new(&handle, capability, owner, owner.life(expires)).encode();
            match self.store.create(object).await {
                Ok(draft) => break draft,
                Err(error @ StoreError::Exists { sealed, .. }) => {
                    let known = shared.table().get(handle.payload);
                    // Another put of it is under way, or is being undone: one that was given up ends in a moment.
                    if known.is_none() && begin.elapsed() < wait.min(GIVEN_UP_WITHIN) {
                        tokio::time::sleep(PAUSE).await;
                        continue;
                    }
                    if !sealed {
                        return Err(error.to_failure());
                    }
                    // The answer to an earlier put was lost.
                    let live = known.ok_or_else(|| conflict(handle.payload))?;
                    let complete = bytes != PutBytes::Consumed;
                    if let Some(taken) = existing(&shared, &live, &handle, capability, complete).await? {
                        return Ok(taken);
                    }
                }
                Err(error) => return Err(error.to_failure()),
            }
        };

        let arriving = Arriving {
            store: self.store.clone(),
            draft,
            handle,
            capability,
            owner,
            expires,
        };
        match bytes {
            PutBytes::Sent(bytes) => arriving.write(&shared, &bytes).await,
            PutBytes::Complete => arriving.copy(&shared, wait).await,
            PutBytes::Consumed => arriving.consume(shared, wait).await,
        }
    }
}

/// A payload whose bytes are still to come.
struct Arriving {
    store: HostStore,
    draft: Box<dyn Draft>,
    /// As the producer lets the store pull it.
    handle: Handle,
    capability: Capability,
    owner: Owner,
    expires: Option<Duration>,
}

impl Arriving {
    /// Keeps a payload whose bytes came with it, until its producer says that it ended meanwhile.
    async fn write(mut self, shared: &Arc<Shared>, mut bytes: &[u8]) -> Result<Taken, Failure> {
        let (found, expected) = (bytes.len() as u64, self.handle.manifest.nbytes().0);
        if found != expected {
            let message = format!(
                "the put of payload {} came with {found} of {expected} bytes",
                self.handle.payload
            );
            return Err(Failure::new(ErrorClass::Invalid, "store.bytes", message));
        }
        for (part, tensor) in self.handle.manifest.tensors().enumerate() {
            let (here, rest) = bytes.split_at(tensor.nbytes().0 as usize);
            let room = self.draft.bytes_mut(part).map_err(|error| error.to_failure())?;
            room.copy_from_slice(here);
            bytes = rest;
        }
        self.keep(shared).await
    }

    /// Copies a payload that is complete out of its producer's memory, and keeps it as one whose bytes came with it. Pins of
    /// its regions have its producer leave the bytes as they are, also where it ends the payload meanwhile.
    async fn copy(mut self, shared: &Arc<Shared>, wait: Duration) -> Result<Taken, Failure> {
        let mut consumer = self.consumer(shared, wait)?;
        consumer.copy_complete().await.map_err(|error| error.to_failure())?;
        drop(consumer);
        self.keep(shared).await
    }

    /// Keeps what was written here, until its producer says that it ended meanwhile.
    async fn keep(self, shared: &Arc<Shared>) -> Result<Taken, Failure> {
        let right = self.handle.capability;
        // It waits for nothing once the object is sealed, nor does what follows.
        let object = self.draft.seal().await.map_err(|error| error.to_failure())?;
        let payload = self.handle.payload;
        let keep = Stored::new(&self.store, payload);
        let handle = Arc::new(here(shared, self.handle, self.capability, &*object));
        let live = Live::new(Arc::clone(&handle), self.owner, Arc::new(keep)).put_with(right);
        match shared.hold(live, self.expires) {
            Some(publication) => publication.seal(),
            None => return Err(conflict(payload)),
        }
        if !self.store.has(payload) {
            // Discarded in the meantime: its producer must not rely on this store.
            shared.table().release(payload, Gone::Released);
            return Err(ended(payload));
        }
        let undo = Some(right);
        Ok(Taken { handle, undo })
    }

    /// Consumes it into the draft.
    fn consumer(&mut self, shared: &Arc<Shared>, wait: Duration) -> Result<Consumer, Failure> {
        let mut destinations = Vec::new();
        for (part, tensor) in self.handle.manifest.tensors().enumerate() {
            let target = match tensor.nbytes().0 {
                0 => Target::allocate(0).map(Arc::new).map_err(|error| error.to_failure()),
                _ => self.draft.target(part).map_err(|error| error.to_failure()),
            };
            destinations.push(target?);
        }
        let options = ConsumeOptions {
            destinations: Some(destinations),
            deadline: Some(wait),
            ..ConsumeOptions::default()
        };
        let consumer = Consumer::new(Arc::clone(shared), self.handle.clone(), options);
        consumer.map_err(|error| error.to_failure())
    }

    /// Consumes it as anybody else would, and keeps it if it is still its producer's to give then.
    async fn consume(mut self, shared: Arc<Shared>, wait: Duration) -> Result<Taken, Failure> {
        let mut consumer = self.consumer(&shared, wait)?;
        for _ in 0..self.handle.manifest.chunks() {
            consumer.next().await.map_err(|error| error.to_failure())?;
        }
        consumer.let_go().await;
        let taking = Taking {
            arriving: self,
            consumer,
        };
        // From here on it is not given up half-way: whether the store has the payload, its producer decides.
        let taken = shared.runtime().spawn(taking.commit(Arc::clone(&shared)));
        let handle = taken.await.map_err(|_| closed())??;
        Ok(Taken { handle, undo: None })
    }
}

/// A payload whose bytes are all here, consumed from its producer.
struct Taking {
    arriving: Arriving,
    consumer: Consumer,
}

impl Taking {
    /// Keeps it from now on, unless its producer has ended it meanwhile. Returns the handle of what is here now.
    async fn commit(mut self, shared: Arc<Shared>) -> Result<Arc<Handle>, Failure> {
        let Arriving {
            store,
            draft,
            handle,
            capability,
            owner,
            expires,
        } = self.arriving;
        let (payload, producer) = (handle.payload, handle.holder.incarnation);
        let object = draft.seal().await.map_err(|error| error.to_failure())?;
        let keep = Stored::new(&store, payload);
        if shared.peer().incarnation == producer {
            // A producer in this very process makes room for its payload's new place.
            let here = Arc::new(shared.peer().clone());
            if !shared.table().release(payload, Gone::Moved(here)) {
                return Err(ended(payload));
            }
        }
        let stored = Arc::new(here(&shared, handle, capability, &*object));
        let live = Live::new(Arc::clone(&stored), owner, Arc::new(keep));
        // Nothing is awaited between the seal and this: what is sealed is held, or taken away again.
        match shared.hold(live, expires) {
            Some(publication) => publication.seal(),
            None => return Err(conflict(payload)),
        }
        if store.get(payload).await.is_err() {
            // Discarded in the meantime: its producer must not rely on this store.
            shared.table().release(payload, Gone::Released);
            return Err(ended(payload));
        }
        // Only now may the producer let go, whose consumers look for the payload here then.
        if let Err(refusal) = self.consumer.take_over().await {
            tracing::debug!(%payload, ?refusal, "a payload ended before the store had it");
            shared.table().release(payload, Gone::Released);
            return Err(ended(payload));
        }
        Ok(stored)
    }
}

/// The handle of a payload that is in the store now.
fn here(shared: &Shared, handle: Handle, capability: Capability, object: &dyn Object) -> Handle {
    Handle {
        mode: TransferMode::Store,
        holder: shared.peer().clone(),
        capability,
        regions: regions(object),
        ..handle
    }
}

/// The handle of a payload that is here already, for who may read it. `complete` says that the put may be undone, if those
/// before it could be. One of a payload that is to be consumed settles it: its producer relies on the answer.
/// `None` where it ended meanwhile, as a put before this one was undone: the bytes are to be taken from their producer then.
async fn existing(
    shared: &Shared,
    live: &Arc<Live>,
    handle: &Handle,
    capability: Capability,
    complete: bool,
) -> Result<Option<Taken>, Failure> {
    let mut found = Handle::clone(live.handle());
    if found.mode != TransferMode::Store || found.manifest != handle.manifest || found.capability != capability {
        return Err(conflict(handle.payload));
    }
    match live.bring().await {
        Ok(Some(brought)) => found.regions = brought.regions,
        Err(failure) if shared.table().has(live) => return Err(failure),
        Ok(None) | Err(_) => {}
    }
    let right = handle.capability;
    let undo = live.found_by(complete.then_some(right)).then_some(right);
    let handle = Arc::new(found);
    let there = shared.table().has(live);
    Ok(there.then_some(Taken { handle, undo }))
}

/// What the store may do with a payload of this owner when it needs room.
const fn retention(owner: Owner) -> Retention {
    match owner {
        Owner::Lease(Lease::Cached) => Retention::Cached { cost: CACHED_COST },
        _ => Retention::Held,
    }
}

/// Where consumers read the object, one region for each tensor.
fn regions(object: &dyn Object) -> Vec<RegionRef> {
    let regions = object.regions().into_iter();
    regions
        .map(|region| region.unwrap_or_else(|| empty_region("shm")))
        .collect()
}

/// Tells consumers of payloads that the store has taken away by itself.
async fn release_departed(service: Weak<StoreService>, mut departures: Departures) {
    while let Some(departure) = departures.next().await {
        let Some(service) = service.upgrade() else { return };
        let Some(shared) = service.shared.upgrade() else { return };
        let payloads = match departure {
            Departure::One(payload) => vec![payload],
            Departure::Many => shared.table().stored(),
        };
        for payload in payloads {
            if !service.store.has(payload) {
                shared.table().release(payload, Gone::Expired);
            }
        }
    }
}

fn closed() -> Failure {
    Failure::new(ErrorClass::Unavailable, "store.closed", "the store is shutting down")
}

fn conflict(payload: PayloadId) -> Failure {
    let message = format!("the store has another payload under the id {payload}");
    Failure::new(ErrorClass::Conflict, "store.exists", message)
}

#[async_trait]
impl PutHandler for StoreService {
    async fn put(&self, request: PutRequest) -> Result<Taken, Failure> {
        self.take(request).await
    }

    fn may_end(&self, payload: PayloadId, token: Option<Token>) -> Result<(), Failure> {
        let allowed = self.store.may_delete(payload, token);
        allowed.map_err(|error| error.to_failure())
    }

    async fn reserve(&self, nbytes: ByteCount, wait: Duration) -> Result<Reservation, Failure> {
        let reserved = self.store.reserve(nbytes, wait).await;
        reserved.map_err(|error| error.to_failure())
    }
}

/// Takes the object out of the store when the payload ends.
#[derive(Debug)]
struct Stored {
    store: HostStore,
    payload: PayloadId,
    /// Another object may have the key by now.
    ended: AtomicBool,
}

impl Stored {
    fn new(store: &HostStore, payload: PayloadId) -> Self {
        Self {
            store: store.clone(),
            payload,
            ended: AtomicBool::new(false),
        }
    }
}

#[async_trait]
impl Keep for Stored {
    fn is_stored(&self) -> bool {
        true
    }

    fn end(&self) {
        if !self.ended.swap(true, Ordering::AcqRel) {
            self.store.remove(self.payload);
        }
    }

    fn leave(&self) {
        // What becomes of it is up to the store.
        self.ended.store(true, Ordering::Release);
    }

    async fn bring(&self) -> Result<Option<Brought>, Failure> {
        let object = self.store.get(self.payload).await.map_err(|error| error.to_failure())?;
        Ok(Some(Brought {
            regions: regions(&*object),
            object,
        }))
    }
}

impl Drop for Stored {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests;
