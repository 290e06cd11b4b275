use std::sync::{Mutex, MutexGuard, PoisonError};

use stagewire_core::Peer;

/// The stores that were asked to take a payload, apart from those that said that they do not have it: any of them may.
#[derive(Debug, Default)]
pub(crate) struct Asked(Mutex<Vec<Peer>>);

impl Asked {
    /// Asks a store. Returns whether it is the first time.
    pub(crate) fn add(&self, store: &Peer) -> bool {
        let mut asked = self.lock();
        let first = asked.iter().all(|known| known.incarnation != store.incarnation);
        if first {
            asked.push(store.clone());
        }
        first
    }

    /// The store does not have it.
    pub(crate) fn remove(&self, store: &Peer) {
        self.lock().retain(|known| known.incarnation != store.incarnation);
    }

    pub(crate) fn all(&self) -> Vec<Peer> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Peer>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
