use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use stagewire_core::{Failure, PayloadId, Peer};

use crate::wire::Refusal;

/// How many payloads that are gone are remembered.
const REMEMBERED: usize = 4096;

/// Why a payload is gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Gone {
    Released,
    Consumed,
    Expired,
    Moved(Arc<Peer>),
    Failed(Failure),
    /// The process ends.
    Closed,
}

impl Gone {
    pub(crate) fn refusal(&self) -> Refusal {
        match self {
            Self::Released => Refusal::Released,
            Self::Consumed => Refusal::Consumed,
            Self::Expired => Refusal::Expired,
            Self::Moved(store) => Refusal::Moved((**store).clone()),
            Self::Failed(failure) => Refusal::Failed(failure.clone()),
            // Another process may have it.
            Self::Closed => Refusal::Unknown,
        }
    }
}

/// The payloads that went last and why, so that who comes late is told the truth.
#[derive(Debug, Default)]
pub(super) struct Tombstones {
    why: BTreeMap<PayloadId, Gone>,
    order: VecDeque<PayloadId>,
}

impl Tombstones {
    pub(super) fn insert(&mut self, payload: PayloadId, why: Gone) {
        if self.why.insert(payload, why).is_none() {
            self.order.push_back(payload);
        }
        if self.order.len() > REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.why.remove(&oldest);
        }
    }

    pub(super) fn get(&self, payload: PayloadId) -> Option<&Gone> {
        self.why.get(&payload)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_are_forgotten() {
        let mut stones = Tombstones::default();
        let id = |n: usize| format!("{n:032x}").parse::<PayloadId>().expect("an id");
        for n in 0..REMEMBERED + 10 {
            stones.insert(id(n), Gone::Released);
            stones.insert(id(n), Gone::Released);
        }
        assert_eq!(stones.get(id(9)), None);
        assert_eq!(stones.get(id(10)), Some(&Gone::Released));
        assert_eq!((stones.why.len(), stones.order.len()), (REMEMBERED, REMEMBERED));
    }
}
