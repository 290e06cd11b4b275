use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use stagewire_core::ByteCount;

/// Room in a store that nobody else gets. Dropping it and all its clones gives the room back.
///
/// A store makes it of whatever stands for the room inside, and takes that out again when an object is written into it.
/// An object that is given up before it is sealed leaves its room to the reservation again: keep a clone to try once more.
#[derive(Clone)]
pub struct Reservation {
    nbytes: ByteCount,
    room: Arc<Mutex<Option<Box<dyn Any + Send>>>>,
}

impl Reservation {
    /// For a store: `nbytes` of room, which come free when `room` is dropped.
    pub fn new(nbytes: ByteCount, room: impl Any + Send) -> Self {
        let reservation = Self {
            nbytes,
            room: Arc::default(),
        };
        reservation.give_back(room);
        reservation
    }

    /// Bytes that were asked for.
    pub const fn nbytes(&self) -> ByteCount {
        self.nbytes
    }

    /// For a store: what it was made of; `None` while an object has it, and of another kind of store.
    pub fn take<T: Any>(&self) -> Option<T> {
        let mut room = self.lock();
        let taken = room.take_if(|room| room.is::<T>())?;
        taken.downcast().ok().map(|taken| *taken)
    }

    /// For a store: the object that had it was given up.
    pub fn give_back(&self, room: impl Any + Send) {
        let before = self.lock().replace(Box::new(room));
        drop(before);
    }

    fn lock(&self) -> MutexGuard<'_, Option<Box<dyn Any + Send>>> {
        self.room.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Reservation").field(&self.nbytes).finish()
    }
}
