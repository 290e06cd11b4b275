mod draft;
mod index;
mod object;
mod rooms;

use std::fmt;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use stagewire_core::{ByteCount, PayloadId, Token};
use stagewire_transfer::{Host, Transport};
use tokio::runtime;

use crate::gate::same_job;
use crate::{Draft, NewObject, Object, ObjectState, Store, StoreError, TokenGate, Usage};
use draft::{HostDraft, Part};
use index::{Index, Slot};
use object::HostObject;
use rooms::Rooms;

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
    /// A store of at most `limit` bytes in the arena of `host`. `gate` says who may write and delete.
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
        let wanted = object.nbytes();
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
        for nbytes in object.parts {
            let part = match nbytes {
                ByteCount(0) => Part::Empty,
                ByteCount(len) => {
                    let extent = self.inner.host.arena().allocate(len);
                    Part::Extent(extent.map_err(|source| StoreError::Arena {
                        payload,
                        wanted,
                        source,
                    })?)
                }
            };
            draft.push(part);
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
