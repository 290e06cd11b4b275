use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use super::NixlPeer;
use crate::nixl::agent::Span;

/// Registrations of a peer whose metadata were fetched, or may have been.
#[derive(Default)]
pub(super) struct Known {
    entries: Mutex<BTreeMap<u64, Entry>>,
    /// Told when something is no longer in use, or forgotten.
    changed: Notify,
}

#[derive(Default)]
struct Entry {
    /// Once the metadata are there.
    span: Option<Span>,
    uses: u64,
    forgetting: bool,
}

impl Known {
    /// Enters a use of a registration, after it was forgotten where that is under way.
    pub(super) async fn begin(peer: &Arc<NixlPeer>, number: u64) -> Use {
        loop {
            let changed = peer.known.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            {
                let mut entries = peer.known.lock();
                let entry = entries.entry(number).or_default();
                if !entry.forgetting {
                    entry.uses += 1;
                    return Use {
                        peer: peer.clone(),
                        number,
                    };
                }
            }
            changed.await;
        }
    }

    pub(super) fn span(&self, number: u64) -> Option<Span> {
        self.lock().get(&number)?.span
    }

    pub(super) fn learned(&self, number: u64, span: Span) {
        if let Some(entry) = self.lock().get_mut(&number) {
            entry.span = Some(span);
        }
    }

    /// Waits until something is known that nobody uses.
    pub(super) async fn unused(&self) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if !self.list_unused(0, 1).is_empty() {
                return;
            }
            changed.await;
        }
    }

    /// The first `limit` with higher numbers than `after` that nobody uses.
    pub(super) fn list_unused(&self, after: u64, limit: usize) -> Vec<u64> {
        let entries = self.lock();
        let unused = entries.range(after + 1..).filter(|(_, entry)| entry.uses == 0);
        unused.map(|(number, _)| *number).take(limit).collect()
    }

    pub(super) fn len(&self) -> u64 {
        self.lock().len() as u64
    }

    /// Bytes of the registrations that nobody uses.
    pub(super) fn unused_bytes(&self) -> u64 {
        let entries = self.lock();
        let unused = entries.values().filter(|entry| entry.uses == 0);
        unused.filter_map(|entry| entry.span).map(|span| span.len).sum()
    }

    /// Marks those as about to be forgotten that nobody uses, and gives them.
    pub(super) fn forget(&self, numbers: &[u64]) -> Vec<u64> {
        let mut entries = self.lock();
        let marked = numbers.iter().copied().filter(|number| {
            let entry = entries.get_mut(number).filter(|entry| entry.uses == 0);
            entry.is_some_and(|entry| {
                entry.forgetting = true;
                true
            })
        });
        marked.collect()
    }

    pub(super) fn forgotten(&self, numbers: &[u64]) {
        let mut entries = self.lock();
        for number in numbers {
            entries.remove(number);
        }
        drop(entries);
        self.changed.notify_waiters();
    }

    fn end(&self, number: u64) {
        let mut entries = self.lock();
        if let Some(entry) = entries.get_mut(&number) {
            entry.uses -= 1;
            if entry.uses == 0 {
                drop(entries);
                self.changed.notify_waiters();
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps the metadata of a registration from being forgotten.
pub(in crate::nixl) struct Use {
    peer: Arc<NixlPeer>,
    number: u64,
}

impl Drop for Use {
    fn drop(&mut self) {
        self.peer.known.end(self.number);
    }
}

impl fmt::Debug for Use {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Use(registration {})", self.number)
    }
}
