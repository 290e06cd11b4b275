use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use stagewire_core::Failure;

use super::super::Heartbeat;
use super::super::heartbeat::Silence;
use super::super::outgoing::Destination;
use super::super::protocol::ReceiverId;

/// Attempts of a receiver that are remembered to have let go.
const LEFT: usize = 4096;

/// The receivers that a sender has greeted.
#[derive(Debug, Default)]
pub(super) struct Receivers(Mutex<BTreeMap<ReceiverId, Known>>);

#[derive(Debug)]
struct Known {
    rank: u32,
    destination: Destination,
    silence: Silence,
    /// Connections over which it asks.
    visits: BTreeSet<u64>,
    /// Attempts that want nothing any more, and why; a question of theirs that comes late must not count.
    left: BTreeMap<u64, Arc<Failure>>,
}

/// Who asks for a room.
#[derive(Debug)]
pub(super) enum Reader {
    Unknown,
    /// It has let go, for this reason.
    Left(Arc<Failure>),
    Reads {
        rank: u32,
        destination: Destination,
    },
}

impl Receivers {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<ReceiverId, Known>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn len(&self) -> usize {
        self.lock().len()
    }

    /// It has asked something. False where it must greet first.
    pub(super) fn heard(&self, receiver: ReceiverId, visit: u64) -> bool {
        let mut all = self.lock();
        let Some(known) = all.get_mut(&receiver) else {
            return false;
        };
        known.silence.heard();
        known.visits.insert(visit);
        true
    }

    /// Its engine fits.
    pub(super) fn greet(&self, receiver: ReceiverId, visit: u64, rank: u32, destination: Destination) {
        let mut all = self.lock();
        let known = all.entry(receiver).or_insert_with(|| Known {
            rank,
            destination,
            silence: Silence::default(),
            visits: BTreeSet::new(),
            left: BTreeMap::new(),
        });
        known.silence.heard();
        known.visits.insert(visit);
    }

    pub(super) fn reader(&self, receiver: ReceiverId, attempt: u64) -> Reader {
        let all = self.lock();
        let Some(known) = all.get(&receiver) else {
            return Reader::Unknown;
        };
        match known.left.get(&attempt) {
            Some(failure) => Reader::Left(Arc::clone(failure)),
            None => Reader::Reads {
                rank: known.rank,
                destination: known.destination.clone(),
            },
        }
    }

    /// It wants nothing any more. Whoever finds that from now on finds the reason as well.
    pub(super) fn leaves(&self, receiver: ReceiverId, attempt: u64, failure: Failure) {
        if let Some(Known { left, .. }) = self.lock().get_mut(&receiver) {
            left.insert(attempt, Arc::new(failure));
            if left.len() > LEFT {
                left.pop_first();
            }
        }
    }

    /// A connection of it has ended. True where that was the last one.
    pub(super) fn hangs_up(&self, receiver: ReceiverId, visit: u64) -> bool {
        let mut all = self.lock();
        let known = all.get_mut(&receiver);
        known.is_some_and(|known| known.visits.remove(&visit) && known.visits.is_empty())
    }

    /// Forgets a receiver. Its rank, where it was known.
    pub(super) fn forget(&self, receiver: ReceiverId) -> Option<u32> {
        Some(self.lock().remove(&receiver)?.rank)
    }

    /// Forgets a receiver that has no connection. Its rank, where it had none.
    pub(super) fn forget_away(&self, receiver: ReceiverId) -> Option<u32> {
        let mut all = self.lock();
        all.get(&receiver).filter(|known| known.visits.is_empty())?;
        Some(all.remove(&receiver)?.rank)
    }

    /// Forgets those that have said nothing for too long: whoever goes on has to greet anew. Each with its rank.
    pub(super) fn forget_silent(&self, heartbeat: &Heartbeat) -> Vec<(ReceiverId, u32)> {
        let mut all = self.lock();
        let silent = all.iter().filter(|(_, known)| known.silence.goes_on(heartbeat));
        let silent: Vec<_> = silent.map(|(receiver, known)| (*receiver, known.rank)).collect();
        for (receiver, _) in &silent {
            all.remove(receiver);
        }
        silent
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use stagewire_core::ErrorClass;
    use uuid::Uuid;

    use super::*;

    const HEARTBEAT: Heartbeat = Heartbeat {
        interval: Duration::from_millis(400),
        misses: 0,
    };
    /// Parts in which it is noticed.
    const LIMIT: usize = 5;
    const RANK: u32 = 3;

    fn greeted(visits: &[u64]) -> (Receivers, ReceiverId) {
        let (receivers, receiver) = (Receivers::default(), Uuid::from_u128(1));
        for &visit in visits {
            receivers.greet(receiver, visit, RANK, destination());
        }
        (receivers, receiver)
    }

    fn destination() -> Destination {
        Destination {
            engine: Arc::from([1]),
            readers: Arc::new([RANK].into()),
        }
    }

    fn why(message: &str) -> Failure {
        Failure::new(ErrorClass::Invalid, "kv.not_resident", message)
    }

    /// A question that goes on beside the word of who left may be the first to find it so.
    #[test]
    fn who_has_left_has_left_for_its_reason() {
        let (receivers, receiver) = greeted(&[7]);
        assert!(matches!(
            receivers.reader(receiver, 5),
            Reader::Reads { rank: RANK, .. }
        ));
        receivers.leaves(receiver, 5, why("page 0"));
        let found = receivers.reader(receiver, 5);
        assert!(
            matches!(&found, Reader::Left(failure) if **failure == why("page 0")),
            "{found:?}"
        );
        assert!(
            matches!(receivers.reader(receiver, 6), Reader::Reads { .. }),
            "another attempt"
        );
        for attempt in 6..6 + LEFT as u64 {
            receivers.leaves(receiver, attempt, why("page 1"));
        }
        assert!(
            matches!(receivers.reader(receiver, 5), Reader::Reads { .. }),
            "it is forgotten"
        );
    }

    /// Whoever goes in whatever way is remembered by nothing, and asks as a stranger then.
    #[test]
    fn nothing_is_left_of_who_goes() {
        for way in 0..3 {
            let (receivers, receiver) = greeted(&[7]);
            assert!(receivers.heard(receiver, 7));
            match way {
                0 => assert_eq!(receivers.forget(receiver), Some(RANK)),
                1 => {
                    for _ in 1..LIMIT {
                        assert!(receivers.forget_silent(&HEARTBEAT).is_empty());
                    }
                    assert_eq!(receivers.forget_silent(&HEARTBEAT), [(receiver, RANK)]);
                }
                _ => {
                    assert!(receivers.hangs_up(receiver, 7));
                    assert_eq!(receivers.forget_away(receiver), Some(RANK));
                }
            }
            assert_eq!(receivers.len(), 0);
            receivers.leaves(receiver, 0, why("page 0"));
            assert!(!receivers.heard(receiver, 7), "it must greet first");
            assert!(matches!(receivers.reader(receiver, 0), Reader::Unknown));
            assert!(!receivers.hangs_up(receiver, 7));
            assert_eq!(receivers.len(), 0);
        }
    }

    #[test]
    fn a_connection_that_ends_is_not_the_one_that_was_made_since() {
        let (receivers, receiver) = greeted(&[7, 8]);
        assert!(!receivers.hangs_up(receiver, 7), "the other one stands");
        assert!(!receivers.hangs_up(receiver, 7), "it has ended before");
        assert!(receivers.hangs_up(receiver, 8));
        assert!(receivers.heard(receiver, 9), "it has come back in time");
        assert_eq!(receivers.forget_away(receiver), None);
        // Also of one that was taken for silent, and greets over the connection that it has.
        for _ in 0..LIMIT {
            receivers.forget_silent(&HEARTBEAT);
        }
        assert_eq!(receivers.len(), 0);
        receivers.greet(receiver, 9, RANK, destination());
        assert!(receivers.hangs_up(receiver, 9));
    }
}
