use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use stagewire_core::{ByteCount, PayloadId};
use tokio::sync::watch;

use crate::{Holding, ObjectState, Usage};

/// The arena takes whole pages of this size, so that rooms do.
const PAGE: u64 = 4096;

/// Room for these parts, each in pages of its own, saturating.
pub(super) fn in_pages(parts: &[ByteCount]) -> ByteCount {
    let page = |part: &ByteCount| part.0.checked_next_multiple_of(PAGE).unwrap_or(u64::MAX);
    ByteCount(parts.iter().map(page).fold(0, u64::saturating_add))
}

/// Who holds how many of a bounded number of bytes.
#[derive(Debug)]
pub(super) struct Rooms {
    limit: ByteCount,
    taken: Mutex<Taken>,
    /// Counts the times that room came free.
    freed: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Taken {
    by: BTreeMap<u64, Holding>,
    next: u64,
    nbytes: u64,
}

impl Rooms {
    pub(super) fn new(limit: ByteCount) -> Arc<Self> {
        Arc::new(Self {
            limit,
            taken: Mutex::default(),
            freed: watch::Sender::new(0),
        })
    }

    pub(super) const fn limit(&self) -> ByteCount {
        self.limit
    }

    /// Takes room for a draft of `payload`; `None` where there is too little.
    pub(super) fn take(self: &Arc<Self>, payload: PayloadId, nbytes: ByteCount) -> Option<Room> {
        let mut taken = self.lock();
        let after = taken
            .nbytes
            .checked_add(nbytes.0)
            .filter(|after| *after <= self.limit.0)?;
        taken.nbytes = after;
        let serial = taken.next;
        taken.next += 1;
        let state = ObjectState::Draft;
        taken.by.insert(serial, Holding { payload, nbytes, state });
        drop(taken);
        Some(Room {
            rooms: Arc::clone(self),
            serial,
        })
    }

    /// Changes whenever room comes free.
    pub(super) fn freed(&self) -> watch::Receiver<u64> {
        self.freed.subscribe()
    }

    pub(super) fn usage(&self) -> Usage {
        Usage::of(self.limit, self.lock().by.values().copied())
    }

    fn lock(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Room that one object holds, given back on drop.
#[derive(Debug)]
pub(super) struct Room {
    rooms: Arc<Rooms>,
    serial: u64,
}

impl Room {
    /// Tells this object from every other that had the same key.
    pub(super) const fn serial(&self) -> u64 {
        self.serial
    }

    /// Says what the object does with its room.
    pub(super) fn set(&self, state: ObjectState) {
        if let Some(holding) = self.rooms.lock().by.get_mut(&self.serial) {
            holding.state = state;
        }
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let mut taken = self.rooms.lock();
        if let Some(holding) = taken.by.remove(&self.serial) {
            taken.nbytes -= holding.nbytes.0;
        }
        drop(taken);
        self.rooms.freed.send_modify(|count| *count += 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_part_has_pages_of_its_own() {
        let room = |parts: &[u64]| in_pages(&parts.iter().copied().map(ByteCount).collect::<Vec<_>>()).0;
        assert_eq!(room(&[]), 0);
        assert_eq!(room(&[0, 1, PAGE, PAGE + 1]), 4 * PAGE);
        assert_eq!(room(&[u64::MAX, 1]), u64::MAX);
    }

    #[test]
    fn room_is_bounded_and_comes_back() {
        let id = |n: u128| format!("{n:032x}").parse::<PayloadId>().expect("an id");
        let rooms = Rooms::new(ByteCount(100));
        let first = rooms.take(id(1), ByteCount(60)).expect("room");
        assert!(rooms.take(id(2), ByteCount(41)).is_none());
        assert!(rooms.take(id(2), ByteCount(u64::MAX)).is_none());
        let second = rooms.take(id(2), ByteCount(40)).expect("room");
        assert_ne!(first.serial(), second.serial());
        second.set(ObjectState::Sealed);
        let usage = rooms.usage();
        assert_eq!(
            (usage.used(), usage.sealed.objects, usage.drafts.objects),
            (ByteCount(100), 1, 1)
        );
        let freed = rooms.freed();
        drop(first);
        assert!(freed.has_changed().expect("alive"));
        assert_eq!(rooms.usage().used(), ByteCount(40));
    }
}
