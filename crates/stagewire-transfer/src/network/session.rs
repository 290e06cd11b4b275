use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use stagewire_core::{Capability, ProcessRef};
use tokio::sync::{Semaphore, watch};

use super::limits::{NetworkLimits, one_more};
use crate::table::{Hold, Pins, RegionKey, Table};
use crate::wire::{Full, Kind, Refusal, Scarce};

/// One reader of this process's memory: its control connection, and the lanes that belong to it.
pub(crate) struct Session {
    id: u128,
    limits: NetworkLimits,
    pins: Mutex<Pins>,
    lanes: AtomicUsize,
    staging: OnceLock<Arc<Semaphore>>,
    over: watch::Sender<bool>,
}

impl Session {
    /// A session without lanes: the Unix socket's.
    pub(crate) fn local(table: Arc<Table>, pid: u32) -> Arc<Self> {
        Arc::new(Self::new(table, 0, NetworkLimits::default(), Some(pid)))
    }

    fn new(table: Arc<Table>, id: u128, limits: NetworkLimits, pid: Option<u32>) -> Self {
        Self {
            id,
            limits,
            pins: Mutex::new(Pins::new(table, id, pid)),
            lanes: AtomicUsize::new(0),
            staging: OnceLock::new(),
            over: watch::Sender::new(false),
        }
    }

    /// Random, known to the reader only.
    pub(crate) fn id(&self) -> u128 {
        self.id
    }

    /// The region behind a pin that the reader holds. It stays in place, whatever the reader does, until this is dropped:
    /// keep it for as long as the memory is touched, and no longer.
    pub(crate) fn hold(&self, pin: u64) -> Option<Arc<Hold>> {
        self.pins().get(pin).cloned()
    }

    /// Resolves when the control connection is over: its lanes end, too.
    ///
    /// # Cancel safety
    /// Safe.
    pub(crate) async fn over(&self) {
        let mut over = self.over.subscribe();
        // The sender is part of this session.
        let _ = over.wait_for(|over| *over).await;
    }

    pub(crate) fn pin(&self, kind: Kind, key: RegionKey, capability: &Capability) -> Result<Arc<Hold>, Refusal> {
        let mut pins = self.pins();
        one_more(Scarce::Pins, pins.len(), self.limits.pins).map_err(Refusal::Full)?;
        pins.pin(kind, key, capability)
    }

    pub(crate) fn unpin(&self, pin: u64) -> Option<Arc<Hold>> {
        self.pins().unpin(pin)
    }

    /// The reader has let go of everything. Gives what it still held, to be dropped.
    pub(crate) fn end(&self) -> Vec<Arc<Hold>> {
        let held = self.pins().end();
        self.over.send_replace(true);
        held
    }

    /// Its share of the room for pushes that have arrived in part: so many permits, which its first push makes.
    pub(crate) fn staging(&self, permits: u32) -> Arc<Semaphore> {
        let share = || Arc::new(Semaphore::new(permits as usize));
        self.staging.get_or_init(share).clone()
    }

    fn pins(&self) -> MutexGuard<'_, Pins> {
        self.pins.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One lane of a session, until this is dropped.
pub(super) struct Lane(Arc<Session>);

impl Lane {
    pub(super) fn of(session: Arc<Session>) -> Result<Self, Full> {
        // Counted before it is judged, so that two at a time are not both the last.
        let lane = Self(session);
        let held = lane.0.lanes.fetch_add(1, Ordering::Relaxed);
        one_more(Scarce::Lanes, held, lane.0.limits.lanes)?;
        Ok(lane)
    }

    pub(super) fn session(&self) -> &Arc<Session> {
        &self.0
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.0.lanes.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A process, as it names itself: its host, and which one there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Caller {
    pub(super) host: String,
    pub(super) process: ProcessRef,
}

/// The sessions of a network, by which lanes find theirs.
pub(super) struct Sessions {
    limits: NetworkLimits,
    known: Mutex<HashMap<u128, (Caller, Arc<Session>)>>,
}

/// A session that is found, and counts, until this is dropped.
pub(super) struct Known {
    sessions: Arc<Sessions>,
    session: Arc<Session>,
}

impl Sessions {
    pub(super) fn new(limits: NetworkLimits) -> Arc<Self> {
        let known = Mutex::default();
        Arc::new(Self { limits, known })
    }

    /// Begins a session, unless there are too many already.
    pub(super) fn open(self: &Arc<Self>, table: Arc<Table>, from: Caller) -> Result<Known, Full> {
        let mut known = self.lock();
        let same = known.values().filter(|(other, _)| *other == from).count();
        one_more(Scarce::SessionsOfProcess, same, self.limits.sessions_per_process)?;
        one_more(Scarce::Sessions, known.len(), self.limits.sessions)?;
        let session = Arc::new(Session::new(table, rand::random(), self.limits, None));
        known.insert(session.id, (from, session.clone()));
        let sessions = self.clone();
        Ok(Known { sessions, session })
    }

    pub(super) fn find(&self, id: u128) -> Option<Arc<Session>> {
        self.lock().get(&id).map(|(_, session)| session.clone())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u128, (Caller, Arc<Session>)>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    pub(super) fn session(&self) -> &Arc<Session> {
        &self.session
    }
}

impl Drop for Known {
    fn drop(&mut self) {
        let gone = self.sessions.lock().remove(&self.session.id);
        // Not under the lock: pins may end with it.
        drop(gone);
    }
}
