use std::any::Any;
use std::fmt;

use stagewire_core::ByteCount;

/// Room in a store that nobody else gets. Dropping it gives the room back.
///
/// A store makes it of whatever stands for the room inside, and takes that out again when an object is written into it.
pub struct Reservation {
    nbytes: ByteCount,
    room: Box<dyn Any + Send + Sync>,
}

impl Reservation {
    /// For a store: `nbytes` of room, which come free when `room` is dropped.
    pub fn new(nbytes: ByteCount, room: impl Any + Send + Sync) -> Self {
        let room = Box::new(room);
        Self { nbytes, room }
    }

    /// Bytes.
    pub const fn nbytes(&self) -> ByteCount {
        self.nbytes
    }

    /// For a store: what it was made of. A reservation of another kind of store is given back.
    pub fn into_room<T: Any>(self) -> Option<T> {
        self.room.downcast().ok().map(|room| *room)
    }
}

impl fmt::Debug for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Reservation").field(&self.nbytes).finish()
    }
}
