//! In which order objects leave the memory of a store.

use std::collections::BTreeSet;
use std::time::Duration;

use stagewire_core::{ByteCount, PayloadId};

use crate::Retention;

/// Who leaves before whom, whatever else they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Class {
    /// Evicted by cost, size and reads.
    Cached,
    /// Moved to a file, the one whose last use is longest ago first.
    Held,
    /// Evicted after everything else, the one whose last use is longest ago first.
    SoftPinned,
}

impl From<Retention> for Class {
    fn from(retention: Retention) -> Self {
        match retention {
            Retention::Cached { .. } => Self::Cached,
            Retention::Held => Self::Held,
            Retention::SoftPinned => Self::SoftPinned,
        }
    }
}

/// The place of an object in the order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    class: Class,
    value: u128,
    used: u64,
    payload: PayloadId,
    nbytes: ByteCount,
}

impl Rank {
    pub(super) const fn payload(&self) -> PayloadId {
        self.payload
    }
}

/// Objects in memory that may leave it, in the order of leaving.
///
/// Cached objects follow GreedyDual-Size-Frequency (Cherkasova, "Improving WWW Proxies Performance with
/// Greedy-Dual-Size-Frequency Caching Policy", HP Labs 1998): the value of an object is `L + reads × cost / size` as of its
/// last read, the least goes first, and `L` becomes the value of the last one that went, so that what is not read ages.
#[derive(Debug, Default)]
pub(super) struct Order {
    ranks: BTreeSet<Rank>,
    /// Bytes in each class.
    nbytes: [u64; 3],
    /// `L`.
    age: u128,
    uses: u64,
}

/// Fixed-point digits of a value, for cheap objects of many bytes.
const FRACTION: u32 = 20;

impl Order {
    /// Adds an object that is used now for the `reads`th time.
    pub(super) fn add(&mut self, payload: PayloadId, nbytes: ByteCount, retention: Retention, reads: u32) -> Rank {
        let value = match retention {
            Retention::Cached { cost } => self.age.saturating_add(worth(cost, nbytes, reads)),
            Retention::Held | Retention::SoftPinned => 0,
        };
        self.uses += 1;
        let rank = Rank {
            class: retention.into(),
            value,
            used: self.uses,
            payload,
            nbytes,
        };
        self.nbytes[rank.class as usize] += nbytes.0;
        self.ranks.insert(rank);
        rank
    }

    pub(super) fn remove(&mut self, rank: &Rank) {
        if self.ranks.remove(rank) {
            self.nbytes[rank.class as usize] -= rank.nbytes.0;
        }
    }

    /// The objects of a class, in the order of leaving.
    pub(super) fn of(&self, class: Class) -> impl Iterator<Item = &Rank> {
        let least = Rank {
            class,
            value: 0,
            used: 0,
            payload: PayloadId(uuid::Uuid::nil()),
            nbytes: ByteCount(0),
        };
        self.ranks.range(least..).take_while(move |rank| rank.class == class)
    }

    /// Takes out the object of a class that leaves first.
    pub(super) fn pop(&mut self, class: Class) -> Option<Rank> {
        let first = *self.of(class).next()?;
        self.remove(&first);
        Some(first)
    }

    /// Notes that an object was evicted: what stays is worth less now.
    pub(super) fn evicted(&mut self, rank: &Rank) {
        if rank.class == Class::Cached {
            self.age = self.age.max(rank.value);
        }
    }

    /// Bytes of a class.
    pub(super) const fn nbytes(&self, class: Class) -> u64 {
        self.nbytes[class as usize]
    }
}

fn worth(cost: Duration, nbytes: ByteCount, reads: u32) -> u128 {
    (cost.as_nanos() << FRACTION).saturating_mul(u128::from(reads)) / u128::from(nbytes.0.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: ByteCount = ByteCount(4096);

    fn id(n: u128) -> PayloadId {
        format!("{n:032x}").parse().expect("an id")
    }

    fn cached(millis: u64) -> Retention {
        Retention::Cached {
            cost: Duration::from_millis(millis),
        }
    }

    fn leaving(order: &mut Order, class: Class) -> Vec<PayloadId> {
        std::iter::from_fn(|| order.pop(class))
            .map(|rank| rank.payload())
            .collect()
    }

    #[test]
    fn cheap_large_and_seldom_read_objects_go_first() {
        let mut order = Order::default();
        let large = ByteCount(100 * PAGE.0);
        order.add(id(1), PAGE, cached(10), 1);
        order.add(id(2), large, cached(10), 1);
        order.add(id(3), large, cached(2000), 1);
        order.add(id(4), PAGE, cached(10), 7);
        order.add(id(5), large, cached(0), 9);
        assert_eq!(leaving(&mut order, Class::Cached), [5, 2, 1, 3, 4].map(id));
        assert_eq!(order.nbytes(Class::Cached), 0);
    }

    #[test]
    fn among_equals_the_last_used_stays_and_classes_do_not_mix() {
        let mut order = Order::default();
        for class in [cached(0), Retention::Held, Retention::SoftPinned] {
            let first = order.add(id(1), PAGE, class, 1);
            order.add(id(2), PAGE, class, 1);
            order.remove(&first);
            order.add(id(1), PAGE, class, 2);
        }
        assert_eq!(order.nbytes(Class::Held), 2 * PAGE.0);
        for class in [Class::SoftPinned, Class::Cached, Class::Held] {
            assert_eq!(leaving(&mut order, class), [2, 1].map(id));
        }
    }

    #[test]
    fn what_was_dear_once_and_is_read_no_more_goes_at_last() {
        let mut order = Order::default();
        order.add(id(0), PAGE, cached(1000), 1);
        let mut evictions = 0;
        for n in 1.. {
            order.add(id(n), PAGE, cached(10), 1);
            let rank = order.pop(Class::Cached).expect("two are there");
            order.evicted(&rank);
            if rank.payload() == id(0) {
                break;
            }
            evictions += 1;
        }
        assert_eq!(evictions, 99, "cost by cost until the values meet");
    }
}
