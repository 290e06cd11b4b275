use super::rooms::Room;
use crate::Reservation;

/// Room of an object that is not sealed yet. Dropped, it goes back to the reservation that it came from, if to any.
#[derive(Debug)]
pub(super) struct Lent {
    /// Always there until it is kept or dropped.
    room: Option<Room>,
    by: Option<Reservation>,
}

impl Lent {
    pub(super) const fn new(room: Room, by: Option<Reservation>) -> Self {
        Self { room: Some(room), by }
    }

    /// The object keeps it.
    pub(super) fn keep(mut self) -> Room {
        self.room.take().expect("it is there until it is kept")
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let (Some(room), Some(by)) = (self.room.take(), &self.by) {
            by.give_back(room.take_back());
        }
    }
}
