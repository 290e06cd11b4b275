//! Deletes what has outlived its deadline.

use std::sync::{Arc, Weak};

use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use super::Inner;
use super::index::Slot;

/// Runs until the store is gone. `changed` tells of a deadline that comes before all others.
pub(super) async fn run(store: Weak<Inner>, changed: Arc<Notify>) {
    loop {
        let Some(next) = store.upgrade().map(|store| store.expire()) else {
            return;
        };
        match next {
            Some(next) => tokio::select! {
                () = sleep_until(next) => {}
                () = changed.notified() => {}
            },
            None => changed.notified().await,
        }
    }
}

impl Inner {
    /// Deletes the objects whose deadline has come; gives the next deadline.
    pub(super) fn expire(self: &Arc<Self>) -> Option<Instant> {
        let now = Instant::now();
        loop {
            let mut index = self.lock();
            let Some(payload) = index.expired(now) else {
                return index.next_deadline();
            };
            let slot = index.take(payload);
            let written = self.journal_gone(payload);
            drop(index);
            if let Some(Slot::Sealed(entry)) = slot {
                self.counts.expired.add(entry.about().nbytes());
                self.part_with(entry, written);
            }
        }
    }
}
