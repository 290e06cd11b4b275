//! Memory that is registered once and published again and again.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use stagewire_transfer::{Memory, Region};

/// Memory that was registered by [`Connector::register`](crate::Connector::register). Publications of these bytes, or
/// of a part of them, register nothing, for as long as this is kept; each still has an access right of its own, which
/// ends with it.
///
/// The memory may be written again once [`Publication::unread`](crate::Publication::unread) says so.
pub struct Registered {
    memory: Memory,
    region: Arc<Region>,
}

impl fmt::Debug for Registered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registered")
            .field("nbytes", &self.memory.len())
            .finish_non_exhaustive()
    }
}

impl Registered {
    /// The memory, to be published.
    pub fn memory(&self) -> Memory {
        self.memory.clone()
    }

    /// Whether nobody reads it: no payload of it lives, and no consumer of one has it pinned.
    pub fn is_unused(&self) -> bool {
        Arc::strong_count(&self.region) == 1 && self.region.is_idle()
    }
}

/// Registered memory by its first byte and length.
#[derive(Debug, Default)]
pub(crate) struct Registry(Mutex<BTreeMap<(usize, u64), Weak<Region>>>);

fn place(memory: &Memory) -> (usize, u64) {
    (memory.as_ptr().addr().get(), memory.len())
}

impl Registry {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<(usize, u64), Weak<Region>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn keep(&self, memory: Memory, region: Region) -> Registered {
        let region = Arc::new(region);
        let mut registry = self.lock();
        registry.retain(|_, region| region.strong_count() > 0);
        registry.insert(place(&memory), Arc::downgrade(&region));
        drop(registry);
        Registered { memory, region }
    }

    /// A region of its own for a publication of registered memory, or of a part of it.
    pub(crate) fn grant(&self, memory: &Memory) -> Option<Region> {
        let (address, _) = place(memory);
        let registry = self.lock();
        let (_, region) = registry.range(..=(address, u64::MAX)).next_back()?;
        let region = region.upgrade()?;
        drop(registry);
        region.grant(memory.clone())
    }
}
