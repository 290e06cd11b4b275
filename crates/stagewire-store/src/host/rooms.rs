use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use stagewire_core::{ByteCount, PayloadId};
use tokio::sync::oneshot;

use crate::{Holding, ObjectState, Share, Usage};

/// The arena takes whole pages of this size, so that rooms do.
const PAGE: u64 = 4096;

/// Room for these parts, each in pages of its own, saturating.
pub(super) fn in_pages(parts: &[ByteCount]) -> ByteCount {
    let page = |part: &ByteCount| part.0.checked_next_multiple_of(PAGE).unwrap_or(u64::MAX);
    ByteCount(parts.iter().map(page).fold(0, u64::saturating_add))
}

/// Who holds how many of a bounded number of bytes, in pages. When some come free, those who wait get theirs in the
/// order they came; who needs too much is overtaken, since it may be the others who free what it waits for.
#[derive(Debug)]
pub(super) struct Rooms {
    limit: ByteCount,
    books: Mutex<Books>,
}

#[derive(Debug, Default)]
struct Books {
    used: u64,
    reserved: Share,
    /// One for each [`ObjectState`].
    shares: [Share; ObjectState::ALL.len()],
    /// Objects by size, then in the order they came.
    by_size: BTreeMap<(ByteCount, u64), Holding>,
    waiting: BTreeMap<u64, Waiter>,
    next: u64,
}

#[derive(Debug)]
struct Waiter {
    nbytes: u64,
    grant: oneshot::Sender<Room>,
}

impl Books {
    fn share(&mut self, state: ObjectState) -> &mut Share {
        &mut self.shares[state as usize]
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Reserves room, if there is some.
    fn take(&mut self, rooms: &Arc<Rooms>, nbytes: u64) -> Option<Room> {
        let after = self.used.checked_add(nbytes)?;
        if after > rooms.limit.0 {
            return None;
        }
        self.used = after;
        let nbytes = ByteCount(nbytes);
        self.reserved.add(nbytes);
        Some(Room {
            rooms: Arc::clone(rooms),
            nbytes,
            serial: None,
        })
    }
}

impl Rooms {
    pub(super) fn new(limit: ByteCount) -> Arc<Self> {
        let books = Mutex::default();
        Arc::new(Self { limit, books })
    }

    pub(super) const fn limit(&self) -> ByteCount {
        self.limit
    }

    /// Reserves room, in whole pages, if it is there.
    pub(super) fn try_take(self: &Arc<Self>, nbytes: ByteCount) -> Option<Room> {
        let nbytes = nbytes.0.checked_next_multiple_of(PAGE)?;
        self.books().take(self, nbytes)
    }

    /// Waits for room, in whole pages.
    pub(super) fn queue(self: &Arc<Self>, nbytes: ByteCount) -> Queued {
        let nbytes = nbytes.0.saturating_add(PAGE - 1) / PAGE * PAGE;
        let (grant, granted) = oneshot::channel();
        let mut books = self.books();
        let ticket = books.number();
        books.waiting.insert(ticket, Waiter { nbytes, grant });
        drop(books);
        self.settle();
        let rooms = Arc::clone(self);
        Queued { rooms, ticket, granted }
    }

    /// Bytes that must come free for those who wait, as many of them as `supply` bytes are enough for, in the order they
    /// came.
    pub(super) fn shortage(&self, supply: u64) -> u64 {
        let books = self.books();
        let short = |wanted: u64| books.used.saturating_add(wanted).saturating_sub(self.limit.0);
        let mut wanted = 0_u64;
        for waiter in books.waiting.values() {
            let more = wanted.saturating_add(waiter.nbytes);
            if short(more) <= supply {
                wanted = more;
            }
        }
        if wanted == 0 { 0 } else { short(wanted) }
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
            spilled: Share::default(),
            spill: None,
            largest: books.by_size.values().rev().take(Usage::LARGEST).copied().collect(),
            readers: Vec::new(),
        }
    }

    /// Gives free room to those who wait for no more than that.
    fn settle(self: &Arc<Self>) {
        let mut books = self.books();
        let mut granted = Vec::new();
        let tickets: Vec<u64> = books.waiting.keys().copied().collect();
        for ticket in tickets {
            if let Some(nbytes) = books.waiting.get(&ticket).map(|waiter| waiter.nbytes)
                && let Some(room) = books.take(self, nbytes)
                && let Some(waiter) = books.waiting.remove(&ticket)
            {
                granted.push((waiter.grant, room));
            }
        }
        drop(books);
        for (grant, room) in granted {
            // Who waits no more gives it back.
            drop(grant.send(room));
        }
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place among those who wait. Dropping it gives the place up.
#[derive(Debug)]
pub(super) struct Queued {
    rooms: Arc<Rooms>,
    ticket: u64,
    granted: oneshot::Receiver<Room>,
}

impl Queued {
    /// Whether nobody has waited longer.
    pub(super) fn is_first(&self) -> bool {
        let books = self.rooms.books();
        books
            .waiting
            .first_key_value()
            .is_none_or(|(ticket, _)| *ticket >= self.ticket)
    }

    /// Resolves when there is room.
    ///
    /// # Cancel safety
    /// Safe: call it again.
    pub(super) async fn room(&mut self) -> Room {
        (&mut self.granted)
            .await
            .expect("it stays in the queue until it has room")
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        let waiter = self.rooms.books().waiting.remove(&self.ticket);
        drop(waiter);
    }
}

/// Room that is reserved, or that one object holds; given back on drop.
#[derive(Debug)]
pub(super) struct Room {
    rooms: Arc<Rooms>,
    nbytes: ByteCount,
    /// Where it stands in the books by size; `None` while it is reserved.
    serial: Option<u64>,
}

impl Room {
    pub(super) const fn nbytes(&self) -> ByteCount {
        self.nbytes
    }

    /// Whether it is room of this store.
    pub(super) fn is_of(&self, rooms: &Arc<Rooms>) -> bool {
        Arc::ptr_eq(&self.rooms, rooms)
    }

    /// Adds other reserved room of the same store to this.
    pub(super) fn join(&mut self, mut other: Self) {
        // The books stay as they are: the other one, now of no bytes, takes itself out.
        self.nbytes += std::mem::take(&mut other.nbytes);
    }

    /// Gives the reserved room to an object being written, and back what it does not need.
    pub(super) fn give(mut self, payload: PayloadId, nbytes: ByteCount) -> Self {
        let nbytes = nbytes.min(self.nbytes);
        let surplus = self.nbytes.0 - nbytes.0;
        let mut books = self.rooms.books();
        books.reserved.take(self.nbytes);
        books.used -= surplus;
        let serial = books.number();
        let state = ObjectState::Draft;
        books.share(state).add(nbytes);
        let holding = Holding { payload, nbytes, state };
        books.by_size.insert((nbytes, serial), holding);
        drop(books);
        self.nbytes = nbytes;
        self.serial = Some(serial);
        if surplus > 0 {
            self.rooms.settle();
        }
        self
    }

    /// Reserves the room of an object that is given up.
    pub(super) fn take_back(mut self) -> Self {
        let mut books = self.rooms.books();
        if let Some(serial) = self.serial.take()
            && let Some(holding) = books.by_size.remove(&(self.nbytes, serial))
        {
            books.share(holding.state).take(self.nbytes);
            books.reserved.add(self.nbytes);
        }
        drop(books);
        self
    }

    /// Says what the object does with its room.
    pub(super) fn set(&self, state: ObjectState) {
        let Some(serial) = self.serial else { return };
        let mut books = self.rooms.books();
        let Some(holding) = books.by_size.get_mut(&(self.nbytes, serial)) else {
            return;
        };
        let before = std::mem::replace(&mut holding.state, state);
        books.share(before).take(self.nbytes);
        books.share(state).add(self.nbytes);
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let mut books = self.rooms.books();
        books.used -= self.nbytes.0;
        match self.serial {
            None => books.reserved.take(self.nbytes),
            Some(serial) => {
                let holding = books.by_size.remove(&(self.nbytes, serial));
                let state = holding.expect("it is there until it is dropped").state;
                books.share(state).take(self.nbytes);
            }
        }
        let waited_for = !books.waiting.is_empty();
        drop(books);
        if waited_for {
            self.rooms.settle();
        }
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
        let room = room.take_back();
        let usage = rooms.usage();
        assert_eq!((usage.reserved.nbytes, usage.drafts), (pages(5), Share::default()));
        assert!(usage.largest.is_empty(), "{usage:?}");
        drop(room);
        assert_eq!(rooms.usage().used(), ByteCount(0));
    }

    #[tokio::test]
    async fn who_waits_gets_room_in_order_as_far_as_there_is_some() {
        let rooms = Rooms::new(pages(4));
        let held = [(); 4].map(|()| rooms.try_take(pages(1)).expect("room"));
        let mut queued = [3, 1, 2, 9].map(|count| rooms.queue(pages(count)));
        assert!(queued[0].is_first() && !queued[1].is_first());
        let shortage = |supply| rooms.shortage(supply * PAGE) / PAGE;
        assert_eq!(shortage(100), 15);
        assert_eq!(shortage(6), 6, "the last one needs more than there is");
        assert_eq!(shortage(2), 1, "enough for the second alone");
        assert_eq!(shortage(0), 0);
        let [first, second, third, fourth] = held;
        drop(first);
        let small = queued[1].room().await;
        assert_eq!(small.nbytes(), pages(1));
        drop((second, third));
        assert_eq!(queued[2].room().await.nbytes(), pages(2), "the first needs three");
        drop(fourth);
        assert_eq!(queued[0].room().await.nbytes(), pages(3));
        drop((small, queued));
        assert_eq!(rooms.usage().used(), ByteCount(0));
        assert_eq!(rooms.shortage(u64::MAX), 0, "somebody still waits");
    }
}
