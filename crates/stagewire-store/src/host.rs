mod draft;
mod index;
mod object;
mod rooms;

use std::fmt;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use stagewire_core::{ByteCount, PayloadId, Token};
use stagewire_transfer::{ArenaError, Host, Transport};
use tokio::runtime;

use crate::gate::same_job;
use crate::{Draft, NewObject, Object, ObjectState, Store, StoreError, TokenGate, Usage};
use draft::HostDraft;
use index::{Index, Slot};
use object::HostObject;
use rooms::{Rooms, in_pages};

/// Shared memory beyond the bound of a store: what lies between payloads, too small for the next one, and copies into
/// aborted drafts that still run.
const SLACK: u64 = 64 << 20;
/// Pause before the arena is asked again where there is room in the books but none in one piece.
const ARENA_PAUSE: Duration = Duration::from_millis(5);

/// A store in the shared memory of this process: readers map it or copy out of it. It ends with the process.
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
    runtime: runtime::Handle,
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostStore({})", self.rooms.usage())
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
        ByteCount(limit.0.saturating_add(SLACK))
    }

    /// A store of at most `limit` bytes, in whole pages for each part, in the arena of `host`: see
    /// [`HostStore::arena_limit`]. `gate` says who may write and delete.
    ///
    /// # Panics
    /// Where it is not called on a tokio runtime.
    pub fn new(host: &Arc<Host>, limit: ByteCount, gate: Arc<TokenGate>) -> Self {
        Self {
            inner: Arc::new(Inner {
                host: Arc::clone(host),
                shm: host.shm(),
                gate,
                rooms: Rooms::new(limit),
                index: Mutex::default(),
                runtime: runtime::Handle::current(),
            }),
        }
    }

    /// Who may write and delete.
    pub fn gate(&self) -> &Arc<TokenGate> {
        &self.inner.gate
    }

    /// What this attempt has written and nobody has deleted, unsealed objects included.
    pub fn written_by(&self, token: Token) -> Vec<PayloadId> {
        self.inner.lock().written_by(token)
    }

    /// Takes an object away, whoever wrote it: for the process that the store belongs to. Returns whether it was
    /// there.
    pub fn remove(&self, payload: PayloadId) -> bool {
        self.inner.remove(payload)
    }
}

#[async_trait]
impl Store for HostStore {
    fn name(&self) -> &'static str {
        "host"
    }

    fn usage(&self) -> Usage {
        self.inner.rooms.usage()
    }

    async fn create(&self, object: NewObject) -> Result<Box<dyn Draft>, StoreError> {
        let payload = object.payload;
        let fenced = |source| StoreError::Fenced { payload, source };
        self.inner.gate.check(object.token).map_err(fenced)?;
        let wanted = in_pages(&object.parts);
        let limit = self.inner.rooms.limit();
        if wanted > limit {
            return Err(StoreError::TooLarge { payload, wanted, limit });
        }
        let mut late = pin!(tokio::time::sleep(object.wait));
        let mut freed = self.inner.rooms.freed();
        let room = loop {
            freed.mark_unchanged();
            // The room is taken before the arena is asked, so that two writers cannot share it.
            if let Some(room) = self.inner.lock().begin(&object, &self.inner.rooms)? {
                break room;
            }
            tokio::select! {
                biased;
                // The sender is in `rooms`.
                _ = freed.changed() => {}
                () = &mut late => return Err(StoreError::Exhausted {
                    payload,
                    wanted,
                    waited: object.wait,
                    usage: Box::new(self.usage()),
                }),
            }
        };
        // From here on the draft gives key and room back when it is dropped.
        let mut draft = HostDraft::new(Arc::clone(&self.inner), payload, object.token, room);
        while let Err(source) = draft.allocate(&object.parts) {
            // The pieces that are free may be too small, or belong to a copy into an aborted draft that still runs.
            let full = matches!(source, ArenaError::Exhausted { .. });
            if !full || tokio::time::timeout(ARENA_PAUSE, late.as_mut()).await.is_ok() {
                return Err(StoreError::Arena {
                    payload,
                    wanted,
                    source,
                });
            }
        }
        Ok(Box::new(draft))
    }

    async fn get(&self, payload: PayloadId) -> Result<Arc<dyn Object>, StoreError> {
        match self.inner.lock().slot(payload) {
            Some(Slot::Sealed(object)) => Ok(Arc::clone(object) as _),
            Some(Slot::Draft { .. }) => Err(StoreError::NotSealed { payload }),
            None => Err(StoreError::NotFound { payload }),
        }
    }

    async fn delete(&self, payload: PayloadId, token: Option<Token>) -> Result<(), StoreError> {
        let fenced = |source| StoreError::Fenced { payload, source };
        self.inner.gate.check(token).map_err(fenced)?;
        let owner = match self.inner.lock().slot(payload) {
            Some(slot) => slot.token(),
            None => return Err(StoreError::NotFound { payload }),
        };
        same_job(owner, token).map_err(fenced)?;
        if self.inner.remove(payload) {
            Ok(())
        } else {
            Err(StoreError::NotFound { payload })
        }
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn remove(&self, payload: PayloadId) -> bool {
        let slot = self.lock().take(payload);
        match slot {
            Some(Slot::Sealed(object)) => self.drain(object),
            // The draft finds out when it seals; its bytes go with it.
            Some(Slot::Draft { .. }) => {}
            None => return false,
        }
        true
    }

    /// Keeps a deleted object in the books until its last reader is done.
    fn drain(&self, object: Arc<HostObject>) {
        object.room().set(ObjectState::Draining);
        for region in object.each_region() {
            region.release();
        }
        if object.each_region().any(|region| !region.is_idle()) {
            self.runtime.spawn(async move {
                for region in object.each_region() {
                    region.idle().await;
                }
            });
        }
    }
}
