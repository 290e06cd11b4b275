use std::sync::Arc;

use stagewire_core::ByteCount;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::network::Session;

/// Bytes that one permit stands for.
const UNIT: u64 = 4096;

/// One session gets this part of the room at most, so that whoever pushes slowly keeps room from itself and not from
/// others.
const SHARES: u32 = 4;

/// The memory of all pushes that have arrived in part.
#[derive(Debug)]
pub(crate) struct Staging {
    free: Arc<Semaphore>,
    /// Permits of one session at most.
    share: u32,
    /// The turn of pushes larger than a share: one at a time, beside the others.
    giant: Arc<Semaphore>,
}

/// Room for one push, until this is dropped.
#[derive(Debug)]
pub(super) struct Room {
    _of_session: OwnedSemaphorePermit,
    _of_all: OwnedSemaphorePermit,
}

impl Staging {
    pub(crate) fn new(bytes: ByteCount) -> Self {
        let units = u32::try_from(bytes.0 / UNIT).unwrap_or(u32::MAX).max(1);
        Self {
            free: Arc::new(Semaphore::new(units as usize)),
            share: (units / SHARES).max(1),
            giant: Arc::new(Semaphore::new(1)),
        }
    }

    /// Waits for room, first that of the session, then that of all.
    pub(super) async fn room(&self, session: &Session, bytes: u64) -> Room {
        let units = u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX);
        let of_session = acquire(session.staging(self.share), units.min(self.share)).await;
        let of_all = if units <= self.share {
            acquire(self.free.clone(), units).await
        } else {
            acquire(self.giant.clone(), 1).await
        };
        Room {
            _of_session: of_session,
            _of_all: of_all,
        }
    }
}

async fn acquire(semaphore: Arc<Semaphore>, permits: u32) -> OwnedSemaphorePermit {
    let permit = semaphore.acquire_many_owned(permits).await;
    permit.expect("the semaphore is never closed")
}
