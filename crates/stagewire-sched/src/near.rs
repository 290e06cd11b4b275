//! Workers with a free slot by where they are, so that those near a place are found without a look at all.

use std::collections::{BTreeMap, BTreeSet};

use stagewire_core::Incarnation;

use crate::Place;

/// Workers, those that use the fewest slots first.
type Free = BTreeSet<(u32, Incarnation)>;

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Near {
    places: BTreeMap<Place, Free>,
    rails: BTreeMap<u32, Free>,
}

impl Near {
    pub(crate) fn insert(&mut self, place: Place, used: u32, worker: Incarnation) {
        self.places.entry(place).or_default().insert((used, worker));
        if let Some(rail) = rail_of_a_host(place) {
            self.rails.entry(rail).or_default().insert((used, worker));
        }
    }

    pub(crate) fn remove(&mut self, place: Place, used: u32, worker: Incarnation) {
        take(&mut self.places, place, used, worker);
        if let Some(rail) = rail_of_a_host(place) {
            take(&mut self.rails, rail, used, worker);
        }
    }

    /// The least busy worker of each place on the host, and of the rail. All others are equally far away.
    pub(crate) fn around(&self, place: Place) -> impl Iterator<Item = (u32, Incarnation)> {
        let end = |number: Option<u32>| Place {
            host: place.host,
            numa: number,
            rail: number,
        };
        let host = self.places.range(end(None)..=end(Some(u32::MAX)));
        let rail = place.rail.and_then(|rail| self.rails.get(&rail));
        host.map(|(_, free)| free)
            .chain(rail)
            .filter_map(|free| free.first().copied())
    }
}

/// A worker whose host is not known is as far as any, whatever its rail: it must not hide a nearer one.
fn rail_of_a_host(place: Place) -> Option<u32> {
    place.host.and(place.rail)
}

fn take<K: Ord>(map: &mut BTreeMap<K, Free>, key: K, used: u32, worker: Incarnation) {
    if let Some(free) = map.get_mut(&key) {
        free.remove(&(used, worker));
        if free.is_empty() {
            map.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use uuid::Uuid;

    use super::*;

    fn place() -> impl Strategy<Value = Place> {
        let some = |most| proptest::option::of(0..most);
        (proptest::option::of(0..3_u64), some(3_u32), some(3)).prop_map(|(host, numa, rail)| Place { host, numa, rail })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2048))]

        /// Whatever a step and a slot in use cost: the cheapest of all is the least busy of all, or among those around.
        #[test]
        fn nobody_cheaper_is_missed(
            free in prop::collection::vec((place(), 0..4_u32), 1..20),
            gone in prop::collection::vec(any::<bool>(), 20),
            source in place().prop_filter("a host", |place| place.host.is_some()),
            (step, slot) in (0..5_u64, 0..5_u64),
        ) {
            let mut near = Near::default();
            let mut left = Vec::new();
            for (number, ((place, used), gone)) in free.into_iter().zip(gone).enumerate() {
                let worker = Incarnation(Uuid::from_u128(number as u128));
                near.insert(place, used, worker);
                if gone {
                    near.remove(place, used, worker);
                } else {
                    left.push((place, used, worker));
                }
            }
            let cost = |&(place, used, worker): &(Place, u32, Incarnation)| {
                let steps = source.steps(place).unwrap_or(Place::MOST_STEPS);
                (step * u64::from(steps) + slot * u64::from(used), used, worker)
            };
            let least_busy = left.iter().map(|&(_, used, worker)| (used, worker)).min();
            let found: Vec<_> = near.around(source).chain(least_busy).collect();
            let found = left.iter().filter(|&&(_, used, worker)| found.contains(&(used, worker)));
            prop_assert_eq!(found.map(cost).min(), left.iter().map(cost).min());
        }
    }
}
