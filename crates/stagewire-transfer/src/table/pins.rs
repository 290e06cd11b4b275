use std::collections::HashMap;
use std::mem;
use std::sync::Arc;

use stagewire_core::Capability;

use super::{RegionKey, Table};
use crate::Memory;
use crate::wire::{Kind, Refusal};

/// One pin: the region stays in place as long as this is held.
///
/// The connection holds it until its reader lets go, and whoever serves the pinned bytes as long as it touches them.
pub(crate) struct Hold {
    session: u128,
    pin: u64,
    kind: Kind,
    // Goes first: where a region is idle, nobody has its memory any more.
    memory: Memory,
    place: Place,
}

/// A region that stays in place as long as this is held.
struct Place {
    table: Arc<Table>,
    key: RegionKey,
    /// The reader's process, where it is one of this host.
    pid: Option<u32>,
}

impl Hold {
    /// The connection whose pin this is; zero for all on the Unix socket.
    pub(crate) fn session(&self) -> u128 {
        self.session
    }

    /// Number of the pin on its connection.
    pub(crate) fn pin(&self) -> u64 {
        self.pin
    }

    pub(crate) fn key(&self) -> RegionKey {
        self.place.key
    }

    /// The transport that pinned it.
    pub(crate) fn kind(&self) -> Kind {
        self.kind
    }

    /// Whether bytes of it may be written meanwhile.
    pub(crate) fn may_change(&self) -> bool {
        self.memory.may_change() || self.place.table.is_open(self.place.key)
    }

    /// The memory, no longer than this.
    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.table.unpin(self.key, self.pid);
    }
}

/// A region's memory, read by the process whose it is.
pub(crate) struct OwnHold {
    // Goes first, as in [`Hold`].
    memory: Memory,
    _place: Place,
}

impl OwnHold {
    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }
}

impl Table {
    /// Keeps a region in place for this very process to read it; `None` where it was released, or its bytes may change.
    pub(crate) fn hold(self: &Arc<Self>, key: RegionKey) -> Option<OwnHold> {
        let mut slots = self.lock();
        let entry = slots.entry(key).filter(|entry| !entry.released && !entry.open)?;
        let memory = entry.kept.as_ref()?.memory.clone();
        if memory.may_change() {
            return None;
        }
        let pid = Some(std::process::id());
        entry.pin(pid);
        slots.pins_held += 1;
        drop(slots);
        let table = Arc::clone(self);
        Some(OwnHold {
            memory,
            _place: Place { table, key, pid },
        })
    }
}

/// The pins of one connection.
///
/// They end one by one, or all together with [`Pins::end`] once the reader has let go or died. Dropped without that
/// (its task was aborted, so nobody knows what the reader still does), they are held for ever.
pub(crate) struct Pins {
    table: Arc<Table>,
    session: u128,
    pid: Option<u32>,
    held: HashMap<u64, Arc<Hold>>,
    next: u64,
}

impl Pins {
    /// `pid` is the reader's process, where it is one of this host.
    pub(crate) fn new(table: Arc<Table>, session: u128, pid: Option<u32>) -> Self {
        Self {
            table,
            session,
            pid,
            held: HashMap::new(),
            next: 0,
        }
    }

    pub(crate) fn pin(&mut self, kind: Kind, key: RegionKey, capability: &Capability) -> Result<Arc<Hold>, Refusal> {
        let pid = self.pid;
        let memory = self.table.pin(kind, key, capability, pid)?;
        let pin = self.next;
        self.next += 1;
        let table = self.table.clone();
        let hold = Arc::new(Hold {
            session: self.session,
            pin,
            kind,
            memory,
            place: Place { table, key, pid },
        });
        self.held.insert(pin, hold.clone());
        Ok(hold)
    }

    pub(crate) fn len(&self) -> usize {
        self.held.len()
    }

    pub(crate) fn get(&self, pin: u64) -> Option<&Arc<Hold>> {
        self.held.get(&pin)
    }

    /// Ends one pin, as far as the connection is concerned.
    pub(crate) fn unpin(&mut self, pin: u64) -> Option<Arc<Hold>> {
        self.held.remove(&pin)
    }

    /// Ends all pins, as far as the connection is concerned.
    pub(crate) fn end(&mut self) -> Vec<Arc<Hold>> {
        mem::take(&mut self.held).into_values().collect()
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        for hold in self.end() {
            mem::forget(hold);
        }
    }
}
