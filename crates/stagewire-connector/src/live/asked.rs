use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use stagewire_core::{Capability, Peer};

/// The puts that a store may have taken, by their rights: all but those of which it said that it has not.
#[derive(Debug, Default)]
pub(crate) struct Asked(Mutex<Vec<(Capability, Arc<Peer>)>>);

impl Asked {
    /// Asks a store.
    pub(crate) fn add(&self, right: Capability, store: &Arc<Peer>) {
        self.lock().push((right, Arc::clone(store)));
    }

    /// The store has not taken this put. It may have taken another.
    pub(crate) fn remove(&self, right: Capability) {
        self.lock().retain(|(known, _)| *known != right);
    }

    /// The stores that may have taken one.
    pub(crate) fn stores(&self) -> Vec<Peer> {
        let mut stores: Vec<Peer> = Vec::new();
        for (_, store) in &*self.lock() {
            if stores.iter().all(|known| known.incarnation != store.incarnation) {
                stores.push((**store).clone());
            }
        }
        stores
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(Capability, Arc<Peer>)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
