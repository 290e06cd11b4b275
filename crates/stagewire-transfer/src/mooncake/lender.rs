use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::addresses::{Addresses, Lent};
use crate::network::Placer;
use crate::table::Hold;
use crate::wire::Place;

/// Gives each pin of our own peers an address at the data port, for as long as it is held.
pub(crate) struct Lender {
    addresses: Arc<Addresses>,
    stop: watch::Receiver<bool>,
    lent: Mutex<HashMap<(u128, u64), Lent>>,
}

impl Lender {
    pub(crate) fn new(addresses: Arc<Addresses>, stop: watch::Receiver<bool>) -> Self {
        let lent = Mutex::default();
        Self { addresses, stop, lent }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<(u128, u64), Lent>> {
        self.lent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn key(hold: &Hold) -> (u128, u64) {
    (hold.session(), hold.pin())
}

impl Placer for Lender {
    fn place(&self, hold: &Arc<Hold>) -> Result<Place, String> {
        if *self.stop.borrow() {
            return Err("its Mooncake ports were shut down".to_owned());
        }
        let lent = self.addresses.lend_pinned(hold.clone());
        let lent = lent.ok_or_else(|| format!("no free range of {} addresses was found", hold.memory().len()))?;
        let place = Place::Address(lent.base());
        self.lock().insert(key(hold), lent);
        Ok(place)
    }

    fn unpinned(&self, hold: &Arc<Hold>) {
        let lent = self.lock().remove(&key(hold));
        drop(lent);
    }
}
