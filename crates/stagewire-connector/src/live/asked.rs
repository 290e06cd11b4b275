use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use stagewire_core::{Capability, Peer, Token};

/// The puts that a store may have taken, by their rights: all but those of which it said that it has not.
#[derive(Debug, Default)]
pub(crate) struct Asked(Mutex<Vec<Put>>);

#[derive(Debug)]
struct Put {
    right: Capability,
    store: Arc<Peer>,
    token: Option<Token>,
}

impl Asked {
    /// Asks a store, with the token of the attempt that produced the payload.
    pub(crate) fn add(&self, right: Capability, store: &Arc<Peer>, token: Option<Token>) {
        let store = Arc::clone(store);
        self.lock().push(Put { right, store, token });
    }

    /// The store has not taken this put. It may have taken another.
    pub(crate) fn remove(&self, right: Capability) {
        self.lock().retain(|put| put.right != right);
    }

    /// The stores that may have taken one.
    pub(crate) fn stores(&self) -> Vec<Peer> {
        let mut stores: Vec<Peer> = Vec::new();
        for Put { store, .. } in &*self.lock() {
            if stores.iter().all(|known| known.incarnation != store.incarnation) {
                stores.push((**store).clone());
            }
        }
        stores
    }

    /// What shows the stores that who asks them has put the payload there.
    pub(crate) fn token(&self) -> Option<Token> {
        self.lock().iter().rev().find_map(|put| put.token)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Put>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
