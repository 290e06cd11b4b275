//! The reader's ends of the lanes to one peer.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::{Semaphore, SemaphorePermit};

use super::line::Line;

/// Lanes that wait for work, and room for those that may still be made.
#[derive(Debug)]
pub(crate) struct LanePool {
    idle: Mutex<Vec<Lane>>,
    room: Semaphore,
}

/// One lane.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) stream: Line,
    transfers: u64,
}

impl Lane {
    pub(crate) fn new(stream: Line) -> Self {
        Self { stream, transfers: 0 }
    }

    /// A number that no transfer on this lane had.
    pub(crate) fn next_transfer(&mut self) -> u64 {
        self.transfers += 1;
        self.transfers
    }
}

/// The right to use one lane. The lane itself goes back with [`LanePool::give_back`]; one that does not is closed.
pub(crate) type Turn<'a> = SemaphorePermit<'a>;

impl LanePool {
    pub(crate) fn new(lanes: usize) -> Self {
        Self {
            idle: Mutex::default(),
            room: Semaphore::new(lanes.clamp(1, Semaphore::MAX_PERMITS)),
        }
    }

    /// Waits in line for the right to use a lane.
    pub(crate) async fn turn(&self) -> Turn<'_> {
        self.room.acquire().await.expect("the semaphore is never closed")
    }

    /// The right to use one more lane, if nobody waits for it.
    pub(crate) fn try_turn(&self) -> Option<Turn<'_>> {
        self.room.try_acquire().ok()
    }

    /// A lane that waits, if there is one. Else its user makes one.
    pub(crate) fn take(&self, _turn: &Turn<'_>) -> Option<Lane> {
        let mut idle = self.idle();
        // What the peer has closed is dropped.
        std::iter::from_fn(|| idle.pop()).find(|lane| lane.stream.is_quiet())
    }

    /// Takes back a lane whose last transfer ended in order.
    pub(crate) fn give_back(&self, lane: Lane) {
        self.idle().push(lane);
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Lane>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
