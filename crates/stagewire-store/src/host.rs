mod draft;
mod fetch;
mod index;
mod object;
mod rooms;

use std::fmt;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use stagewire_core::{ByteCount, PayloadId, Token};
use stagewire_transfer::{ArenaError, Host, Target, Transport};
use tokio::runtime;

use crate::gate::same_job;
use crate::{Draft, NewObject, Object, ObjectState, Reservation, Store, StoreError, TokenGate, Usage};
use draft::HostDraft;
use index::{Claim, Index, Slot};
use object::HostObject;
use rooms::{Room, Rooms, in_pages};

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
        if !self.inner.rooms.could_hold(wanted) {
            return Err(StoreError::TooLarge { payload, wanted, limit });
        }
        let claim = Claim::new(&self.inner, payload, object.token)?;
        let mut late = pin!(tokio::time::sleep(object.wait));
        let room = self.inner.room(wanted, object.reservation, late.as_mut()).await;
        let room = room.ok_or_else(|| StoreError::Exhausted {
            payload,
            wanted,
            waited: object.wait,
            usage: Box::new(self.usage()),
        })?;
        // From here on the draft gives key and room back when it is dropped.
        let mut draft = HostDraft::new(claim, object.token, room.give(payload, wanted));
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
        Ok(self.inner.sealed(payload)?)
    }

    async fn fetch(&self, payload: PayloadId, destinations: &[Arc<Target>]) -> Result<(), StoreError> {
        let object = self.inner.sealed(payload)?;
        object.copy_to(destinations).await
    }

    async fn reserve(&self, nbytes: ByteCount, wait: Duration) -> Result<Reservation, StoreError> {
        let late = pin!(tokio::time::sleep(wait));
        let room = match self.inner.rooms.could_hold(nbytes) {
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

    fn sealed(&self, payload: PayloadId) -> Result<Arc<HostObject>, StoreError> {
        match self.lock().slot(payload) {
            Some(Slot::Sealed(object)) => Ok(Arc::clone(object)),
            Some(Slot::Draft { .. }) => Err(StoreError::NotSealed { payload }),
            None => Err(StoreError::NotFound { payload }),
        }
    }

    /// Room, reserved: what the caller reserved before, and more where that is too little; `None` when it is too late.
    async fn room(
        &self,
        nbytes: ByteCount,
        reservation: Option<Reservation>,
        late: Pin<&mut tokio::time::Sleep>,
    ) -> Option<Room> {
        let reserved = reservation.and_then(Reservation::into_room::<Room>);
        let reserved = reserved.filter(|room| room.is_of(&self.rooms));
        let missing = reserved
            .as_ref()
            .map_or(nbytes.0, |room| nbytes.0.saturating_sub(room.nbytes().0));
        let mut room = match self.rooms.try_take(ByteCount(missing)) {
            Some(room) => room,
            None => tokio::select! {
                biased;
                room = self.rooms.take(ByteCount(missing)) => room,
                () = late => return None,
            },
        };
        if let Some(reserved) = reserved {
            room.join(reserved);
        }
        Some(room)
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
