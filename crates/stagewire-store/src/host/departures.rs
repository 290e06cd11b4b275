//! Tells whoever holds payloads for others which objects the store has taken away by itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use stagewire_core::PayloadId;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Notify, mpsc};

/// Departures that wait to be heard at most.
const WAITING: usize = 1024;

/// What a store took away by itself, evicted or expired.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Departure {
    /// This object.
    One(PayloadId),
    /// More than were listened to in time: any object may be gone.
    Many,
}

/// The departures of a store, see [`HostStore::departures`](crate::HostStore::departures).
#[derive(Debug)]
pub struct Departures {
    waiting: mpsc::Receiver<PayloadId>,
    missed: Arc<Missed>,
}

#[derive(Debug, Default)]
struct Missed {
    any: AtomicBool,
    changed: Notify,
}

impl Departures {
    /// The next one; `None` once the store is gone.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn next(&mut self) -> Option<Departure> {
        loop {
            if self.missed.any.swap(false, Ordering::AcqRel) {
                return Some(Departure::Many);
            }
            tokio::select! {
                departed = self.waiting.recv() => return departed.map(Departure::One),
                () = self.missed.changed.notified() => {}
            }
        }
    }
}

/// The store's end.
#[derive(Debug)]
pub(super) struct Farewell {
    waiting: mpsc::Sender<PayloadId>,
    missed: Arc<Missed>,
}

impl Farewell {
    pub(super) fn new() -> (Self, Departures) {
        let (sender, waiting) = mpsc::channel(WAITING);
        let missed = Arc::<Missed>::default();
        let farewell = Self {
            waiting: sender,
            missed: Arc::clone(&missed),
        };
        (farewell, Departures { waiting, missed })
    }

    /// Tells of one, without waiting.
    pub(super) fn tell(&self, payload: PayloadId) {
        // Whoever listened may have gone.
        if let Err(TrySendError::Full(_)) = self.waiting.try_send(payload) {
            self.missed.any.store(true, Ordering::Release);
            self.missed.changed.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    #[tokio::test]
    async fn who_does_not_listen_in_time_is_told_to_look() {
        let (farewell, mut departures) = Farewell::new();
        let id = |n: usize| PayloadId(Uuid::from_u128(n as u128));
        farewell.tell(id(7));
        assert_eq!(departures.next().await, Some(Departure::One(id(7))));
        for n in 0..WAITING + 5 {
            farewell.tell(id(n));
        }
        assert_eq!(departures.next().await, Some(Departure::Many));
        for n in 0..WAITING {
            assert_eq!(departures.next().await, Some(Departure::One(id(n))));
        }
        drop(farewell);
        assert_eq!(departures.next().await, None);
    }
}
