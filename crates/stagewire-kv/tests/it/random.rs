//! Random geometries: what the plans of all routes and chunks do together is what the oracle says.

use proptest::prelude::*;
use stagewire_kv::{Descriptor, Plan};

use crate::memory::Memory;
use crate::world::World;

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 2_500,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// By records in even cases, by descriptors in odd ones; that both are the same bytes is checked in all.
    #[test]
    fn every_byte_is_the_right_one_or_untouched(seed in any::<u64>()) {
        let world = World::roll(seed);
        let pair = world.pair();
        let mut memory = Memory::new(&world);
        for route in pair.routes() {
            for request in world.requests(route) {
                let plan = pair.plan(&request).map_err(|error| TestCaseError::fail(format!("{world:?}: {error}")))?;
                let (rows, expanded) = (rows(&plan), plan.descriptors());
                prop_assert_eq!(expanded.len(), plan.descriptor_count());
                let bytes = |list: &[Descriptor]| list.iter().map(|row| row.nbytes).sum::<u64>();
                prop_assert_eq!([bytes(&rows), bytes(&expanded)], [plan.nbytes(); 2]);
                prop_assert!(expanded.is_sorted_by_key(|d| (d.component, d.kv, d.dst_layer, d.dst_off)));
                prop_assert!(!expanded.windows(2).any(|two| touch(&two[0], &two[1])), "{:?}", expanded);
                let list = if seed.is_multiple_of(2) { &rows } else { &expanded };
                for row in list {
                    memory.copy(route, row).map_err(TestCaseError::fail)?;
                }
            }
        }
        memory.check().map_err(|problem| TestCaseError::fail(format!("{world:?}: {problem}")))?;
    }
}

/// The rows of the records, one by one.
fn rows(plan: &Plan) -> Vec<Descriptor> {
    let all = plan.records().into_iter().flat_map(|planned| {
        let rows = planned.record.row_offsets();
        rows.map(move |(src_off, dst_off)| Descriptor {
            component: planned.component,
            src_layer: planned.src_layer,
            dst_layer: planned.dst_layer,
            kv: planned.kv,
            src_off,
            dst_off,
            nbytes: planned.record.width,
        })
    });
    all.collect()
}

fn touch(one: &Descriptor, two: &Descriptor) -> bool {
    (one.component, one.kv, one.src_layer, one.dst_layer) == (two.component, two.kv, two.src_layer, two.dst_layer)
        && one.src_off + one.nbytes == two.src_off
        && one.dst_off + one.nbytes == two.dst_off
}
