//! Makes room for those who wait for it.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use stagewire_core::ByteCount;
use tokio::time::{Sleep, sleep};

use super::Inner;
use super::order::Class;
use super::rooms::Room;
use crate::Reservation;

/// Pause before those who wait look again whether readers have let go of something.
const PAUSE: Duration = Duration::from_millis(5);

impl Inner {
    /// Room, reserved: what the caller reserved before, and more where that is too little; `None` when it is too late.
    pub(super) async fn room(
        self: &Arc<Self>,
        nbytes: ByteCount,
        reservation: Option<Reservation>,
        late: Pin<&mut Sleep>,
    ) -> Option<Room> {
        let reserved = reservation.and_then(Reservation::into_room::<Room>);
        let reserved = reserved.filter(|room| room.is_of(&self.rooms));
        let missing = nbytes
            .0
            .saturating_sub(reserved.as_ref().map_or(0, |room| room.nbytes().0));
        let mut room = match self.rooms.try_take(ByteCount(missing)) {
            Some(room) => room,
            None => self.wait_for_room(ByteCount(missing), late).await?,
        };
        if let Some(reserved) = reserved {
            room.join(reserved);
        }
        Some(room)
    }

    async fn wait_for_room(self: &Arc<Self>, nbytes: ByteCount, mut late: Pin<&mut Sleep>) -> Option<Room> {
        let mut queued = self.rooms.queue(nbytes);
        self.relieve();
        loop {
            tokio::select! {
                biased;
                room = queued.room() => return Some(room),
                () = &mut late => return None,
                () = sleep(PAUSE) => {}
            }
            if queued.is_first() {
                self.relieve();
            }
        }
    }

    /// Evicts what those who wait need, where that is enough for one of them.
    fn relieve(self: &Arc<Self>) {
        let mut index = self.lock();
        let short = self.rooms.shortage(index.evictable());
        let mut gone = index.evict(Class::Cached, short);
        let freed: u64 = gone.iter().map(|object| object.room().nbytes().0).sum();
        gone.extend(index.evict(Class::SoftPinned, short.saturating_sub(freed)));
        self.journal_gone(gone.iter().map(|object| object.about().payload));
        drop(index);
        for object in gone {
            self.counts.evicted.add(object.room().nbytes());
            self.drain(object);
        }
    }
}
