//! Scratch in which a sender gathers rows for readers whose transport moves runs of bytes only.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use stagewire_core::{Classify, Record};
use stagewire_transfer::{Region, RegisterOptions, Target, Transport};

use super::super::RoomId;
use super::super::outgoing::{Attempt, Outgoing, restarted};
use super::super::protocol::Answer;
use super::super::sender::Inner;
use super::super::sender::room::Cell;

/// Bytes of scratch of one sender.
const MOST: u64 = 64 << 20;

/// What is gathered and not freed yet.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    held: Mutex<BTreeMap<(Attempt, u64), Gathered>>,
    nbytes: Arc<AtomicU64>,
    next: AtomicU64,
}

#[derive(Debug)]
struct Gathered {
    _region: Region,
    _room: Share,
}

/// A part of the scratch that is taken.
#[derive(Debug)]
struct Share {
    all: Arc<AtomicU64>,
    nbytes: u64,
}

impl Share {
    fn take(all: &Arc<AtomicU64>, nbytes: u64) -> Option<Self> {
        let taken = |held: u64| held.checked_add(nbytes).filter(|sum| *sum <= MOST);
        all.fetch_update(Ordering::Relaxed, Ordering::Relaxed, taken).ok()?;
        let all = Arc::clone(all);
        Some(Self { all, nbytes })
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.all.fetch_sub(self.nbytes, Ordering::Relaxed);
    }
}

impl Scratch {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<(Attempt, u64), Gathered>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn free(&self, attempt: Attempt, id: u64) {
        let gathered = self.lock().remove(&(attempt, id));
        drop(gathered);
    }

    /// An attempt has ended.
    pub(super) fn free_all(&self, which: impl Fn(&Attempt) -> bool) {
        let mut held = self.lock();
        let gone: Vec<(Attempt, u64)> = held.keys().filter(|(attempt, _)| which(attempt)).copied().collect();
        let gone: Vec<Gathered> = gone.iter().filter_map(|key| held.remove(key)).collect();
        drop(held);
        drop(gone);
    }
}

/// Keeps the pages of a room from being released while they are copied.
struct Copying(Arc<Cell>);

impl Drop for Copying {
    fn drop(&mut self) {
        self.0.change(Outgoing::copied);
    }
}

impl Inner {
    /// Gathers rows of a region; [`Answer::NoScratch`] where there is no room for them, or they are not in host memory.
    pub(super) async fn gather(
        self: Arc<Self>,
        room: RoomId,
        attempt: Attempt,
        region: usize,
        rows: Vec<Record>,
    ) -> Answer {
        let cell = self.rooms().read_by(room, attempt);
        let Some(cell) = cell else {
            return Answer::Refused(restarted(room.number, 0, 0));
        };
        if let Err(failure) = cell.change(|room| room.copies(attempt)) {
            return Answer::Refused(failure);
        }
        let copying = Copying(cell);
        let Some((memory, transport)) = self.memories.get(region).zip(self.transport_of(region)) else {
            return Answer::NoScratch;
        };
        let nbytes = rows.iter().map(Record::nbytes).fold(0, u64::saturating_add);
        let Some(share) = Share::take(&self.scratch.nbytes, nbytes) else {
            return Answer::NoScratch;
        };
        let Ok(extent) = self.shared.host().arena().allocate(nbytes) else {
            return Answer::NoScratch;
        };
        let scratch = Target::from(extent);
        if let Err(error) = scratch.copy(&rows, memory).await {
            tracing::debug!(%error, "rows of a cache could not be gathered");
            return Answer::NoScratch;
        }
        drop(copying);
        let Ok(extent) = scratch.into_extent() else {
            return Answer::NoScratch;
        };
        match transport.register(extent.into(), RegisterOptions::default()) {
            Ok(region) => {
                let id = self.scratch.next.fetch_add(1, Ordering::Relaxed);
                let reference = region.reference();
                let gathered = Gathered {
                    _region: region,
                    _room: share,
                };
                self.scratch.lock().insert((attempt, id), gathered);
                Answer::Gathered { id, region: reference }
            }
            Err(error) => {
                tracing::debug!(reason = error.reason(), "scratch could not be registered");
                Answer::NoScratch
            }
        }
    }

    /// What a region was registered with.
    fn transport_of(&self, region: usize) -> Option<Arc<dyn Transport>> {
        let name = &self.welcome.regions.get(region)?.transport;
        let own = self.options.transport.iter();
        own.chain(self.shared.transports())
            .find(|transport| transport.name() == name)
            .cloned()
    }
}
