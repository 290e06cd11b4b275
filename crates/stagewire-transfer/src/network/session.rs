use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use stagewire_core::Capability;
use tokio::sync::watch;

use crate::table::{Hold, Pins, RegionKey, Table};
use crate::wire::{Kind, Refusal};

/// One reader of this process's memory: its control connection, and the lanes that belong to it.
pub(crate) struct Session {
    id: u128,
    pins: Mutex<Pins>,
    over: watch::Sender<bool>,
}

impl Session {
    /// A session without lanes: the Unix socket's.
    pub(crate) fn local(table: Arc<Table>) -> Arc<Self> {
        Arc::new(Self::new(table, 0))
    }

    fn new(table: Arc<Table>, id: u128) -> Self {
        Self {
            id,
            pins: Mutex::new(Pins::new(table, id)),
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
        self.pins().pin(kind, key, capability)
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

    fn pins(&self) -> MutexGuard<'_, Pins> {
        self.pins.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The sessions of a network, by which lanes find theirs.
#[derive(Default)]
pub(crate) struct Sessions {
    sessions: Mutex<HashMap<u128, Weak<Session>>>,
}

impl Sessions {
    /// Begins a session; it is found until it is closed.
    pub(crate) fn open(&self, table: Arc<Table>) -> Arc<Session> {
        let session = Arc::new(Session::new(table, rand::random()));
        self.lock().insert(session.id, Arc::downgrade(&session));
        session
    }

    pub(crate) fn find(&self, id: u128) -> Option<Arc<Session>> {
        self.lock().get(&id)?.upgrade()
    }

    pub(crate) fn close(&self, session: &Session) {
        self.lock().remove(&session.id);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u128, Weak<Session>>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
