use std::fmt;
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use stagewire_core::{Peer, StageName};
use stagewire_store::{OpenError, StoreLock};
use stagewire_transfer::{Host, Memory, Network, SocketFile, Transport};
use tokio::sync::{OnceCell, watch};
use tokio::task::AbortHandle;
use tokio::time::Instant;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TrackedFuture;

use crate::carriers::Carriers;
use crate::link::Links;
use crate::live::{Gone, Live, Table};
use crate::mode::ModeCounters;
use crate::publish::settle::Settling;
use crate::registered::Registry;
use crate::serve::Holder;
use crate::store_file::StoreFile;
use crate::wire::End;
use crate::{ModeReason, Publication, release};

/// What a connector and everything that came from it have in common.
pub(crate) struct Shared {
    pub(super) role: StageName,
    pub(super) store_file: StoreFile,
    /// The right to be the store of the run directory, where this is one.
    pub(super) serves: Mutex<Option<StoreLock>>,
    pub(super) peer: Peer,
    pub(super) socket: SocketFile,
    pub(super) host: Arc<Host>,
    pub(super) carriers: Carriers,
    pub(super) network: Arc<Network>,
    pub(super) holder: Arc<Holder>,
    pub(super) links: Links,
    pub(super) store: watch::Sender<Option<Peer>>,
    pub(super) runtime: tokio::runtime::Handle,
    pub(super) accept: AbortHandle,
    pub(super) closed: watch::Sender<bool>,
    /// Set once closing is over.
    pub(super) shut: OnceCell<()>,
    pub(super) consumers: Arc<AtomicU64>,
    pub(super) staged: Arc<AtomicU64>,
    pub(super) modes: ModeCounters,
    pub(super) registered: Registry,
    /// Moves payloads into stores.
    pub(super) moving: TaskTracker,
    /// Tells stores what they are not to keep.
    pub(super) parting: TaskTracker,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared")
            .field("role", &self.role)
            .finish_non_exhaustive()
    }
}

impl Shared {
    pub(crate) const fn host(&self) -> &Arc<Host> {
        &self.host
    }

    /// What memory is registered with: the first transport that takes it as it is, else the one to be refused by.
    pub(crate) fn carrier_of(&self, memory: &Memory) -> &dyn Transport {
        self.carriers.any(memory).unwrap_or_else(|| self.carriers.first())
    }

    pub(crate) fn table(&self) -> &Arc<Table> {
        &self.holder.table
    }

    pub(crate) const fn links(&self) -> &Links {
        &self.links
    }

    pub(crate) const fn holder(&self) -> &Arc<Holder> {
        &self.holder
    }

    pub(crate) const fn peer(&self) -> &Peer {
        &self.peer
    }

    pub(crate) const fn consumers(&self) -> &Arc<AtomicU64> {
        &self.consumers
    }

    pub(crate) const fn runtime(&self) -> &tokio::runtime::Handle {
        &self.runtime
    }

    pub(crate) const fn modes(&self) -> &ModeCounters {
        &self.modes
    }

    pub(crate) fn is_closed(&self) -> bool {
        *self.closed.borrow()
    }

    /// Becomes true once the connector closes, and ends with it.
    pub(crate) fn closing(&self) -> watch::Receiver<bool> {
        self.closed.subscribe()
    }

    /// Waits until the connector closes.
    pub(crate) async fn closed(&self) {
        // The sender is in `self`.
        let _ = self.closed.subscribe().wait_for(|closed| *closed).await;
    }

    /// Who keeps payloads: who was named, else the store of the run directory, the first that is alive.
    pub(crate) fn store(&self) -> Option<Arc<Peer>> {
        let stores = self.stores_of_run_dir();
        let alive = stores.iter().find(|store| self.is_alive(store));
        alive.or(stores.first()).cloned()
    }

    /// Whether there is one, alive or not.
    pub(crate) fn has_store(&self) -> bool {
        self.store.borrow().is_some() || self.store_of_run_dir().is_some()
    }

    /// Every store that this process knows of, alive or not.
    pub(crate) fn stores_of_run_dir(&self) -> Vec<Arc<Peer>> {
        let named = self.store.borrow().clone().map(Arc::new);
        named.into_iter().chain(self.store_of_run_dir()).collect()
    }

    /// The store that serves the run directory now, alive or not.
    pub(crate) fn store_of_run_dir(&self) -> Option<Arc<Peer>> {
        self.store_file.find()
    }

    /// Whether `store`, which serves the run directory now, has come in the place of one that is dead, and so has what
    /// that one had: nobody announces itself before.
    pub(crate) fn succeeds(&self, store: &Peer, dead: &Peer) -> bool {
        let place = |peer: &Peer| Path::new(&peer.socket).parent().map(Path::to_owned);
        store.incarnation != dead.incarnation && self.is_here(dead) && place(store) == place(dead)
    }

    /// Makes sure that no other process is the store of this run directory, before this one is.
    pub(crate) fn claim_run_dir(&self) -> Result<(), OpenError> {
        let lock = StoreLock::of_run_dir(self.store_file.run_dir())?;
        *self.serves.lock().unwrap_or_else(PoisonError::into_inner) = Some(lock);
        Ok(())
    }

    /// Says that this process is the store of its run directory.
    pub(crate) fn announce_store(&self) {
        if let Err(error) = self.store_file.announce(&self.peer) {
            tracing::warn!(%error, "only who is told finds this store: its address could not be written");
        }
    }

    /// The transports that this process can read over.
    pub(crate) fn transports(&self) -> impl Iterator<Item = &Arc<dyn Transport>> + Clone {
        self.carriers.iter()
    }

    /// Takes a payload in, and lets it expire; `None` where one of its id is held already.
    pub(crate) fn hold(self: &Arc<Self>, live: Live, deadline: Option<Duration>) -> Option<Publication> {
        let settling = Settling::new(live.handle().mode, ModeReason::Requested);
        settling.stay(&live);
        self.hold_while(live, deadline, settling)
    }

    /// As [`Shared::hold`], for a payload that is still to go somewhere.
    pub(crate) fn hold_while(
        self: &Arc<Self>,
        live: Live,
        deadline: Option<Duration>,
        settling: Arc<Settling>,
    ) -> Option<Publication> {
        let live = self.table().insert(live)?;
        let publication = Publication::new(Arc::clone(self), Arc::clone(&live), settling);
        if let Some(deadline) = live.owner().life(deadline) {
            live.expire_in(deadline);
            let (table, payload) = (Arc::clone(self.table()), live.handle().payload);
            let mut states = live.subscribe();
            drop(live);
            self.runtime.spawn(async move {
                // Ends early where the payload does: its state goes with it.
                let ended = states.wait_for(|state| matches!(state.end, Some(End::Released)));
                if tokio::time::timeout(deadline, ended).await.is_err() && table.release(payload, Gone::Expired) {
                    tracing::info!(%payload, ?deadline, "a payload has expired");
                }
            });
        }
        Some(publication)
    }

    /// Ends a payload in the stores that may have taken it, all but the one that has it then. Closing waits for that.
    fn release_elsewhere(self: &Arc<Self>, live: &Arc<Live>) {
        let keeper = live.keeper();
        if live
            .asked()
            .stores()
            .iter()
            .all(|store| Some(store.incarnation) == keeper)
        {
            return;
        }
        let (shared, live) = (Arc::clone(self), Arc::clone(live));
        let parting = async move {
            if let Err(error) = release::release_elsewhere(&shared, &live).await {
                tracing::warn!(%error, "a store may keep a payload that it is not to keep");
            }
        };
        self.parting.spawn_on(parting, &self.runtime);
    }

    /// Has closing wait for a payload that moves into a store.
    pub(crate) fn track_move<F: Future<Output = ()>>(&self, moving: F) -> TrackedFuture<F> {
        self.moving.track_future(moving)
    }

    /// Waits until nothing moves any more, which is soon once every payload has ended here.
    pub(super) async fn moved(&self, by: Instant) {
        over(&self.moving, by).await;
    }

    /// Waits until stores know what they are not to keep.
    pub(super) async fn parted(&self, by: Instant) {
        over(&self.parting, by).await;
    }

    /// Ends everything that needs no waiting. Returns whether it had not ended before.
    pub(super) fn end(&self) -> bool {
        if self.closed.send_replace(true) {
            return false;
        }
        self.accept.abort();
        for payload in self.table().ids() {
            self.table().release(payload, Gone::Closed);
        }
        self.links.close();
        self.host.stop();
        self.socket.remove();
        self.store_file.withdraw(&self.peer);
        let served = self.serves.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(served);
        true
    }
}

/// Waits until every task has ended, or it is time.
async fn over(tasks: &TaskTracker, by: Instant) {
    tasks.close();
    let _ = tokio::time::timeout_at(by, tasks.wait()).await;
}

/// Held while a payload is on its way into a store. Dropped, the payload has come to rest, here, there, or nowhere: all other
/// stores that may have taken it are told so.
#[derive(Debug)]
pub(crate) struct Moving {
    shared: Arc<Shared>,
    live: Arc<Live>,
}

impl Moving {
    pub(crate) fn new(shared: &Arc<Shared>, live: &Arc<Live>) -> Self {
        Self {
            shared: Arc::clone(shared),
            live: Arc::clone(live),
        }
    }
}

impl Drop for Moving {
    fn drop(&mut self) {
        self.shared.release_elsewhere(&self.live);
    }
}
