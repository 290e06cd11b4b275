use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use stagewire_core::{ByteCount, PayloadId};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::{Holding, ObjectState, Share, Usage};

/// The arena takes whole pages of this size, so that rooms do.
const PAGE: u64 = 4096;

/// Room for these parts, each in pages of its own, saturating.
pub(super) fn in_pages(parts: &[ByteCount]) -> ByteCount {
    let page = |part: &ByteCount| part.0.checked_next_multiple_of(PAGE).unwrap_or(u64::MAX);
    ByteCount(parts.iter().map(page).fold(0, u64::saturating_add))
}

/// Who holds how many of a bounded number of pages. Who asks first gets first.
#[derive(Debug)]
pub(super) struct Rooms {
    limit: ByteCount,
    free: Arc<Semaphore>,
    books: Mutex<Books>,
}

#[derive(Debug, Default)]
struct Books {
    /// Objects by size, then in the order they came.
    by_size: BTreeMap<(ByteCount, u64), Holding>,
    /// One for each [`ObjectState`].
    shares: [Share; ObjectState::ALL.len()],
    reserved: Share,
    /// Bytes that somebody waits for.
    wanted: u64,
    next: u64,
}

impl Books {
    fn share(&mut self, state: ObjectState) -> &mut Share {
        &mut self.shares[state as usize]
    }

    #[cfg(test)]
    fn used(&self) -> u64 {
        let objects: u64 = self.shares.iter().map(|share| share.nbytes.0).sum();
        objects + self.reserved.nbytes.0
    }
}

impl Rooms {
    pub(super) fn new(limit: ByteCount) -> Arc<Self> {
        let pages = usize::try_from(limit.0 / PAGE).unwrap_or(usize::MAX);
        Arc::new(Self {
            limit,
            free: Arc::new(Semaphore::new(pages.min(Semaphore::MAX_PERMITS))),
            books: Mutex::default(),
        })
    }

    pub(super) const fn limit(&self) -> ByteCount {
        self.limit
    }

    /// Whether so much fits into the empty store.
    pub(super) fn could_hold(&self, nbytes: ByteCount) -> bool {
        nbytes.0.div_ceil(PAGE) <= (self.limit.0 / PAGE).min(u64::from(u32::MAX))
    }

    /// Reserves room, in whole pages, if it is there and nobody waits for it.
    pub(super) fn try_take(self: &Arc<Self>, nbytes: ByteCount) -> Option<Room> {
        let pages = u32::try_from(nbytes.0.div_ceil(PAGE)).ok()?;
        let permit = Arc::clone(&self.free).try_acquire_many_owned(pages).ok()?;
        Some(Room::reserve(self, permit))
    }

    /// Reserves room, in whole pages, once it is there; for ever where it [could not](Rooms::could_hold) be.
    ///
    /// # Cancel safety
    /// A dropped future has taken nothing, and lost its place.
    pub(super) async fn take(self: &Arc<Self>, nbytes: ByteCount) -> Room {
        let _waiting = Waiting::new(self, nbytes);
        let pages = u32::try_from(nbytes.0.div_ceil(PAGE)).unwrap_or(u32::MAX);
        let permit = Arc::clone(&self.free).acquire_many_owned(pages).await;
        Room::reserve(self, permit.expect("the semaphore is never closed"))
    }

    #[cfg(test)]
    /// Bytes that must come free before all who wait have room.
    pub(super) fn shortage(&self) -> u64 {
        let books = self.books();
        (books.used() + books.wanted).saturating_sub(self.limit.0 / PAGE * PAGE)
    }

    pub(super) fn usage(&self) -> Usage {
        let books = self.books();
        let share = |state: ObjectState| books.shares[state as usize];
        Usage {
            limit: self.limit,
            drafts: share(ObjectState::Draft),
            sealed: share(ObjectState::Sealed),
            draining: share(ObjectState::Draining),
            reserved: books.reserved,
            largest: books.by_size.values().rev().take(Usage::LARGEST).copied().collect(),
        }
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts as wanted.
struct Waiting<'a> {
    rooms: &'a Rooms,
    nbytes: u64,
}

impl<'a> Waiting<'a> {
    fn new(rooms: &'a Rooms, nbytes: ByteCount) -> Self {
        let nbytes = nbytes.0.next_multiple_of(PAGE);
        rooms.books().wanted += nbytes;
        Self { rooms, nbytes }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.rooms.books().wanted -= self.nbytes;
    }
}

/// Room that is reserved, or that one object holds; given back on drop.
#[derive(Debug)]
pub(super) struct Room {
    rooms: Arc<Rooms>,
    pages: OwnedSemaphorePermit,
    /// Where it stands in the books by size; `None` while it is reserved.
    serial: Option<u64>,
}

impl Room {
    fn reserve(rooms: &Arc<Rooms>, pages: OwnedSemaphorePermit) -> Self {
        let room = Self {
            rooms: Arc::clone(rooms),
            pages,
            serial: None,
        };
        rooms.books().reserved.add(room.nbytes());
        room
    }

    pub(super) fn nbytes(&self) -> ByteCount {
        ByteCount(self.pages.num_permits() as u64 * PAGE)
    }

    /// Whether it is room of this store.
    pub(super) fn is_of(&self, rooms: &Arc<Rooms>) -> bool {
        Arc::ptr_eq(&self.rooms, rooms)
    }

    /// Adds other reserved room of the same store to this.
    pub(super) fn join(&mut self, mut other: Self) {
        let pages = other.pages.split(other.pages.num_permits());
        // The books stay as they are: the other one, now of no bytes, takes itself out.
        self.pages.merge(pages.expect("all of them"));
    }

    /// Gives the reserved room to an object being written, and back what it does not need.
    pub(super) fn give(mut self, payload: PayloadId, nbytes: ByteCount) -> Self {
        let surplus = self.pages.num_permits() - (nbytes.0.div_ceil(PAGE) as usize).min(self.pages.num_permits());
        let before = self.nbytes();
        let surplus = self.pages.split(surplus);
        let nbytes = self.nbytes();
        let mut books = self.rooms.books();
        books.reserved.take(before);
        let serial = books.next;
        books.next += 1;
        let state = ObjectState::Draft;
        books.share(state).add(nbytes);
        books
            .by_size
            .insert((nbytes, serial), Holding { payload, nbytes, state });
        drop(books);
        drop(surplus);
        self.serial = Some(serial);
        self
    }

    /// Says what the object does with its room.
    pub(super) fn set(&self, state: ObjectState) {
        let Some(serial) = self.serial else { return };
        let nbytes = self.nbytes();
        let mut books = self.rooms.books();
        let Some(holding) = books.by_size.get_mut(&(nbytes, serial)) else {
            return;
        };
        let before = std::mem::replace(&mut holding.state, state);
        books.share(before).take(nbytes);
        books.share(state).add(nbytes);
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let nbytes = self.nbytes();
        let mut books = self.rooms.books();
        let share = match self.serial {
            None => &mut books.reserved,
            Some(serial) => match books.by_size.remove(&(nbytes, serial)) {
                Some(holding) => books.share(holding.state),
                None => return,
            },
        };
        share.take(nbytes);
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

    fn id(n: u128) -> PayloadId {
        format!("{n:032x}").parse().expect("an id")
    }

    fn pages(count: u64) -> ByteCount {
        ByteCount(count * PAGE)
    }

    #[test]
    fn room_is_bounded_and_comes_back() {
        let rooms = Rooms::new(pages(10));
        let first = rooms.try_take(pages(6)).expect("room").give(id(1), pages(6));
        assert!(rooms.try_take(pages(5)).is_none());
        assert!(rooms.try_take(ByteCount(u64::MAX)).is_none());
        assert!(!rooms.could_hold(pages(11)) && rooms.could_hold(pages(10)));
        let second = rooms.try_take(pages(4)).expect("room").give(id(2), pages(4));
        second.set(ObjectState::Sealed);
        let usage = rooms.usage();
        assert_eq!(
            (usage.used(), usage.sealed.objects, usage.drafts.objects),
            (pages(10), 1, 1)
        );
        assert_eq!(usage.largest[0].payload, id(1));
        drop(first);
        assert_eq!(rooms.usage().used(), pages(4));
    }

    #[test]
    fn reserved_room_is_joined_and_given() {
        let rooms = Rooms::new(pages(10));
        let mut room = rooms.try_take(pages(3)).expect("room");
        room.join(rooms.try_take(pages(4)).expect("room"));
        let usage = rooms.usage();
        assert_eq!((usage.reserved.objects, usage.reserved.nbytes), (1, pages(7)));
        let room = room.give(id(1), pages(5));
        let usage = rooms.usage();
        assert_eq!((usage.reserved, usage.drafts.nbytes), (Share::default(), pages(5)));
        assert!(rooms.try_take(pages(5)).is_some(), "the rest was not given back");
        drop(room);
        assert_eq!(rooms.usage().used(), ByteCount(0));
    }

    #[tokio::test]
    async fn who_asks_first_gets_first() {
        let rooms = Rooms::new(pages(2));
        let held = rooms.try_take(pages(1)).expect("room");
        let mut large = Box::pin(rooms.take(pages(2)));
        tokio::select! {
            biased;
            _ = &mut large => panic!("there is room for one"),
            () = std::future::ready(()) => {}
        }
        assert_eq!(rooms.shortage(), PAGE);
        assert!(rooms.try_take(pages(1)).is_none(), "a small one overtook");
        drop(held);
        assert_eq!(large.await.nbytes(), pages(2));
        assert_eq!(rooms.shortage(), 0);
    }
}
