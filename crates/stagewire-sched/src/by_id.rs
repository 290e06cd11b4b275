use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};
use std::marker::PhantomData;

use stagewire_core::{Incarnation, JobId, PayloadId};

#[expect(clippy::disallowed_types, reason = "nothing iterates over it")]
type Map<T> = std::collections::HashMap<u128, T, BuildHasherDefault<Mix>>;

/// An id that is a UUID.
pub(crate) trait Id: Copy {
    /// Sorts as the id does.
    fn number(self) -> u128;
}

impl Id for JobId {
    fn number(self) -> u128 {
        self.0.as_u128()
    }
}

impl Id for Incarnation {
    fn number(self) -> u128 {
        self.0.as_u128()
    }
}

impl Id for PayloadId {
    fn number(self) -> u128 {
        self.0.as_u128()
    }
}

/// A map that finds by hash.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Lookup<I, T> {
    map: Map<T>,
    id: PhantomData<I>,
}

impl<I: Id, T> Lookup<I, T> {
    pub(crate) fn new() -> Self {
        Self {
            map: Map::default(),
            id: PhantomData,
        }
    }

    pub(crate) fn get(&self, id: &I) -> Option<&T> {
        self.map.get(&id.number())
    }

    pub(crate) fn get_mut(&mut self, id: &I) -> Option<&mut T> {
        self.map.get_mut(&id.number())
    }

    pub(crate) fn contains_key(&self, id: &I) -> bool {
        self.map.contains_key(&id.number())
    }

    pub(crate) fn insert(&mut self, id: I, value: T) {
        self.map.insert(id.number(), value);
    }

    pub(crate) fn remove(&mut self, id: &I) -> Option<T> {
        self.map.remove(&id.number())
    }

    pub(crate) fn len(&self) -> usize {
        self.map.len()
    }
}

impl<I, T: fmt::Debug> fmt::Debug for Lookup<I, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map()
            .entries(self.map.iter().collect::<BTreeMap<_, _>>())
            .finish()
    }
}

/// A map that finds by hash and iterates in the order of its ids, which is the same in every run. Ids are looked up
/// several times for each event, and come and go once in their lives.
#[derive(Clone)]
pub(crate) struct ById<I, T> {
    map: Lookup<I, Box<T>>,
    order: BTreeSet<u128>,
}

impl<I: Id, T> ById<I, T> {
    pub(crate) fn new() -> Self {
        Self {
            map: Lookup::new(),
            order: BTreeSet::new(),
        }
    }

    pub(crate) fn get(&self, id: &I) -> Option<&T> {
        self.map.get(id).map(|found| &**found)
    }

    pub(crate) fn get_mut(&mut self, id: &I) -> Option<&mut T> {
        self.map.get_mut(id).map(|found| &mut **found)
    }

    pub(crate) fn contains_key(&self, id: &I) -> bool {
        self.map.contains_key(id)
    }

    pub(crate) fn insert(&mut self, id: I, value: T) {
        self.order.insert(id.number());
        self.map.insert(id, Box::new(value));
    }

    pub(crate) fn remove(&mut self, id: &I) -> Option<T> {
        self.order.remove(&id.number());
        self.map.remove(id).map(|found| *found)
    }

    pub(crate) fn values(&self) -> impl DoubleEndedIterator<Item = &T> {
        self.order
            .iter()
            .filter_map(|id| self.map.map.get(id))
            .map(|value| &**value)
    }
}

impl<I: Id, T: fmt::Debug> fmt::Debug for ById<I, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.values()).finish()
    }
}

/// Spreads the bits of an id that differ over those that a hash table looks at. Ids are random where it counts, and come
/// from the server or from workers that it trusts.
#[derive(Clone, Copy, Default)]
struct Mix(u64);

impl Hasher for Mix {
    fn write_u128(&mut self, id: u128) {
        #[expect(clippy::cast_possible_truncation, reason = "both halves are used")]
        let halves = (id >> 64) as u64 ^ (id as u64).rotate_left(32);
        let product = u128::from(halves) * 0x9e37_79b9_7f4a_7c15;
        #[expect(clippy::cast_possible_truncation, reason = "both halves are used")]
        let folded = (product >> 64) as u64 ^ product as u64;
        self.0 ^= folded;
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u128(u128::from(*byte) ^ u128::from(self.0));
        }
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_the_order_of_arrival_iteration_has_one() {
        let mut map = ById::new();
        let id = |number: u128| JobId(uuid::Uuid::from_u128(number));
        for number in (0..1_000_u128).map(|n| n * 7_919 % 1_000) {
            map.insert(id(number << 64), number);
        }
        map.remove(&id(500 << 64));
        map.insert(id(3 << 64), 3);
        let expected: Vec<u128> = (0..1_000).filter(|number| *number != 500).collect();
        assert_eq!(map.values().copied().collect::<Vec<_>>(), expected);
        assert_eq!(map.values().next_back(), Some(&999));
        assert_eq!((map.get(&id(500 << 64)), map.get(&id(7 << 64))), (None, Some(&7)));
    }

    #[test]
    fn ids_that_differ_in_few_bits_are_spread() {
        for step in [0, 1, 40, 64, 100] {
            let hash = |number: u128| {
                let mut mix = Mix::default();
                mix.write_u128(number << step);
                mix.finish()
            };
            let low: BTreeSet<u64> = (0..1_000).map(|number| hash(number) % 4_096).collect();
            let high: BTreeSet<u64> = (0..1_000).map(|number| hash(number) >> 57).collect();
            assert!(
                low.len() > 700 && high.len() > 100,
                "step {step}: {} and {}",
                low.len(),
                high.len()
            );
        }
    }
}
