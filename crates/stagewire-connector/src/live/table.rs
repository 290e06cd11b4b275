use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use stagewire_core::{Capability, Failure, PayloadId, PayloadLife, PayloadPhase};

use super::claim::{Claimant, Mover};
use super::tombstones::Tombstones;
use super::{Barred, Claim, Gone, Live, lock};
use crate::wire::Refusal;

/// All payloads that this process holds.
#[derive(Debug, Default)]
pub(crate) struct Table {
    inner: Mutex<Inner>,
    pub(crate) published: AtomicU64,
    pub(crate) released: AtomicU64,
    pub(crate) consumed: AtomicU64,
    pub(crate) moved: AtomicU64,
    pub(crate) expired: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) claims_refused: AtomicU64,
}

#[derive(Debug, Default)]
struct Inner {
    live: BTreeMap<PayloadId, Arc<Live>>,
    gone: Tombstones,
}

impl Table {
    /// Takes a payload in; `None` where one of the same id is held already.
    pub(crate) fn insert(&self, live: Live) -> Option<Arc<Live>> {
        let id = live.handle.payload;
        let mut inner = lock(&self.inner);
        if inner.live.contains_key(&id) {
            return None;
        }
        let live = Arc::new(live);
        inner.live.insert(id, Arc::clone(&live));
        drop(inner);
        self.published.fetch_add(1, Ordering::Relaxed);
        Some(live)
    }

    pub(crate) fn get(&self, payload: PayloadId) -> Option<Arc<Live>> {
        lock(&self.inner).live.get(&payload).cloned()
    }

    /// Whether this very payload is held.
    pub(crate) fn has(&self, live: &Arc<Live>) -> bool {
        let inner = lock(&self.inner);
        let held = inner.live.get(&live.handle.payload);
        held.is_some_and(|held| Arc::ptr_eq(held, live))
    }

    /// Why a payload is gone, where that is remembered.
    pub(crate) fn gone(&self, payload: PayloadId) -> Option<Gone> {
        lock(&self.inner).gone.get(payload).cloned()
    }

    pub(crate) fn ids(&self) -> Vec<PayloadId> {
        lock(&self.inner).live.keys().copied().collect()
    }

    /// Those that the store of this process has.
    pub(crate) fn stored(&self) -> Vec<PayloadId> {
        let inner = lock(&self.inner);
        let stored = inner.live.iter().filter(|(_, live)| live.shown.borrow().stored);
        stored.map(|(payload, _)| *payload).collect()
    }

    /// Number of payloads, and their bytes.
    pub(crate) fn size(&self) -> (u64, u64) {
        let inner = lock(&self.inner);
        let bytes = inner.live.values().map(|live| live.handle.manifest.nbytes().0).sum();
        (inner.live.len() as u64, bytes)
    }

    /// Lets a consumer in who presents the capability of the handle, or the right of a move.
    pub(crate) fn watch(self: &Arc<Self>, payload: PayloadId, capability: Capability) -> Result<Claim, Barred> {
        let admitted = self.admit(payload, capability);
        if let Err(Barred::Refused(Refusal::Claimed)) = &admitted {
            self.claims_refused.fetch_add(1, Ordering::Relaxed);
        }
        admitted
    }

    /// As [`Table::watch`], for this process itself, which counts nothing.
    pub(crate) fn admit(self: &Arc<Self>, payload: PayloadId, capability: Capability) -> Result<Claim, Barred> {
        let inner = lock(&self.inner);
        let Some(live) = inner.live.get(&payload).cloned() else {
            return Err(inner.gone.get(payload).map_or(Refusal::Unknown, Gone::refusal).into());
        };
        drop(inner);
        let (moving, mover) = {
            let moves = live.moves.borrow();
            let mover = moves.iter().find(|(right, _)| *right == capability);
            let mover = mover.map(|(right, store)| Mover {
                right: *right,
                store: Arc::clone(store),
            });
            (!moves.is_empty(), mover)
        };
        if mover.is_none() {
            if live.handle.capability != capability {
                return Err(Refusal::Denied.into());
            }
            if live.owner.is_exclusive() && moving {
                return Err(Barred::Moving(live));
            }
        }
        if live.owner.is_exclusive() && !live.claim(Claimant::of(mover.as_ref())) {
            return Err(Refusal::Claimed.into());
        }
        Ok(Claim::new(Arc::clone(self), live, mover))
    }

    /// Ends a payload for who presents its capability.
    pub(crate) fn release_by(&self, payload: PayloadId, capability: Capability) -> Result<(), Refusal> {
        match self.get(payload) {
            Some(live) if live.handle.capability == capability => {
                self.release_this(&live, Gone::Released);
                Ok(())
            }
            Some(_) => Err(Refusal::Denied),
            None => Err(lock(&self.inner)
                .gone
                .get(payload)
                .map_or(Refusal::Unknown, Gone::refusal)),
        }
    }

    /// Takes back the put of this right; the payload ends where no other put has found it.
    pub(crate) fn undo(&self, payload: PayloadId, right: Capability) {
        let Some(live) = self.get(payload) else { return };
        // Locked until it has ended: a put that finds it meanwhile looks afterwards whether it is still there.
        let mut puts = lock(&live.puts);
        let Some(rights) = puts.as_mut() else { return };
        let before = rights.len();
        rights.retain(|other| *other != right);
        if rights.is_empty() && before > 0 {
            self.release_this(&live, Gone::Released);
        }
    }

    /// Ends an open payload with the producer's reason. Its memory goes: no consumer sees a chunk of it any more.
    pub(crate) fn fail(&self, live: &Live, failure: Failure) {
        let failed = live.advance(|life| {
            let open = *life.phase() == PayloadPhase::Open;
            if open {
                live.close();
            }
            life.fail(failure.clone());
            open
        });
        if !failed {
            return;
        }
        self.failed.fetch_add(1, Ordering::Relaxed);
        live.forget();
        if !live.owner.releases_failed() {
            let mut inner = lock(&self.inner);
            if inner.live.remove(&live.handle.payload).is_some() {
                let _ = live.keeper.set(None);
                inner.gone.insert(live.handle.payload, Gone::Failed(failure));
            }
        }
    }

    /// Ends a payload. Returns whether it was there.
    pub(crate) fn release(&self, payload: PayloadId, why: Gone) -> bool {
        self.release_where(payload, why, |_| true)
    }

    /// Ends this payload, and no other that has its id by now.
    pub(crate) fn release_this(&self, live: &Arc<Live>, why: Gone) -> bool {
        self.release_where(live.handle.payload, why, |found| Arc::ptr_eq(found, live))
    }

    fn release_where(&self, payload: PayloadId, why: Gone, which: impl FnOnce(&Arc<Live>) -> bool) -> bool {
        let mut inner = lock(&self.inner);
        if !inner.live.get(&payload).is_some_and(which) {
            return false;
        }
        let Some(live) = inner.live.remove(&payload) else {
            return false;
        };
        let counter = match why {
            Gone::Expired => &self.expired,
            Gone::Consumed => &self.consumed,
            Gone::Moved(_) => &self.moved,
            Gone::Failed(_) => &self.failed,
            Gone::Released | Gone::Closed => &self.released,
        };
        if why == Gone::Closed {
            live.leave();
        }
        let _ = live.keeper.set(match &why {
            Gone::Moved(store) => Some(store.incarnation),
            _ => None,
        });
        inner.gone.insert(payload, why);
        drop(inner);
        counter.fetch_add(1, Ordering::Relaxed);
        live.close();
        live.advance(PayloadLife::release);
        live.forget();
        true
    }
}
