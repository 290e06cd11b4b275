//! The store's side of a put: pulls payloads into a [`HostStore`] and serves them from there.

use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use stagewire_core::{ByteCount, Classify, ErrorClass, Failure, Handle, PayloadId, Token, TransferMode};
use stagewire_store::{HostStore, NewObject, Reservation, Store, StoreError};
use stagewire_transfer::{Target, empty_region};

use crate::connector::Shared;
use crate::live::{Gone, Keep, Live};
use crate::serve::{PutHandler, PutRequest};
use crate::{Connector, ConsumeOptions, Consumer};

/// Takes payloads that other processes put, and holds them until they are released or consumed.
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
        service
    }

    /// Where the payloads are.
    pub const fn store(&self) -> &HostStore {
        &self.store
    }

    /// Lets an attempt that ended badly put nothing more, and takes away what it has put.
    pub fn discard(&self, token: Token) {
        self.store.gate().revoke(token);
        for payload in self.store.written_by(token) {
            if let Some(shared) = self.shared.upgrade() {
                shared.table().release(payload, Gone::Released);
            }
            // What is still being written is not in the table.
            self.store.remove(payload);
        }
    }

    /// Pulls the payload in. Returns the handle of what is here now.
    async fn take(&self, request: PutRequest) -> Result<Handle, Failure> {
        let PutRequest {
            handle,
            capability,
            token,
            owner,
            expires,
            wait,
            reservation,
        } = request;
        let Some(shared) = self.shared.upgrade() else {
            return Err(Failure::new(
                ErrorClass::Unavailable,
                "store.closed",
                "the store is shutting down",
            ));
        };
        let mut object = NewObject::new(handle.payload, handle.manifest.tensors().map(|tensor| tensor.nbytes()));
        object.token = token;
        object.wait = wait;
        object.reservation = reservation;
        let mut draft = match self.store.create(object).await {
            Ok(draft) => draft,
            // The answer to an earlier put was lost.
            Err(StoreError::Exists { sealed: true, .. }) => return self.existing(&shared, &handle),
            Err(error) => return Err(error.to_failure()),
        };

        let mut destinations = Vec::new();
        for (part, tensor) in handle.manifest.tensors().enumerate() {
            let target = match tensor.nbytes().0 {
                0 => Target::allocate(0).map(Arc::new).map_err(|error| error.to_failure()),
                _ => draft.target(part).map_err(|error| error.to_failure()),
            };
            destinations.push(target?);
        }
        let options = ConsumeOptions {
            destinations: Some(destinations),
            deadline: Some(wait),
            ..ConsumeOptions::default()
        };
        let consumer = Consumer::new(Arc::clone(&shared), handle.clone(), options);
        let mut consumer = consumer.map_err(|error| error.to_failure())?;
        for _ in 0..handle.manifest.chunks() {
            consumer.next().await.map_err(|error| error.to_failure())?;
        }
        consumer.let_go();
        let object = draft.seal().await.map_err(|error| error.to_failure())?;
        let regions = object.regions().into_iter();
        let producer = handle.holder.incarnation;
        let stored = Handle {
            mode: TransferMode::Store,
            holder: shared.peer().clone(),
            capability,
            regions: regions
                .map(|region| region.unwrap_or_else(|| empty_region("shm")))
                .collect(),
            ..handle
        };
        let keep = Stored {
            store: self.store.clone(),
            payload: stored.payload,
        };
        if shared.peer().incarnation == producer {
            // A producer in this very process makes room for its payload's new place.
            shared.table().release(stored.payload, Gone::Released);
        }
        let live = Live::new(stored.clone(), owner, Arc::new(keep));
        // Nothing is awaited between the seal and this: a put that is given up half-way leaves no object behind.
        match shared.hold(live, expires) {
            Some(publication) => publication.seal(),
            None => return Err(conflict(stored.payload)),
        }
        if self.store.get(stored.payload).await.is_err() {
            // Discarded in the meantime.
            shared.table().release(stored.payload, Gone::Released);
        }
        // Only now may the producer let go. Where it cannot be told, it keeps its copy until its owner releases it.
        if let Err(error) = consumer.ack().await {
            tracing::debug!(%error, "the producer of a stored payload could not be told");
        }
        Ok(stored)
    }

    fn existing(&self, shared: &Shared, handle: &Handle) -> Result<Handle, Failure> {
        match shared.table().get(handle.payload) {
            Some(live) if live.handle().mode == TransferMode::Store && live.handle().manifest == handle.manifest => {
                Ok(live.handle().clone())
            }
            _ => Err(conflict(handle.payload)),
        }
    }
}

fn conflict(payload: PayloadId) -> Failure {
    let message = format!("the store has another payload under the id {payload}");
    Failure::new(ErrorClass::Conflict, "store.exists", message)
}

#[async_trait]
impl PutHandler for StoreService {
    async fn put(&self, request: PutRequest) -> Result<Handle, Failure> {
        self.take(request).await
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
}

impl Keep for Stored {}

impl Drop for Stored {
    fn drop(&mut self) {
        self.store.remove(self.payload);
    }
}
