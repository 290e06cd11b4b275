//! Random geometries: what the plans of all routes and chunks do together is what the oracle says.

use proptest::prelude::*;
use stagewire_kv::{Descriptor, Kind, Layout, Plan};

use crate::memory::Memory;
use crate::world::World;

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 2_500,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// By records in even cases, by descriptors in odd ones; that both are as many bytes is checked in all.
    #[test]
    fn every_byte_is_the_right_one_or_untouched(seed in any::<u64>()) {
        let world = World::roll(seed);
        let pair = world.pair();
        let mut memory = Memory::new(&world);
        for route in pair.routes() {
            for request in world.requests(route) {
                let plan = pair.plan(&request).map_err(|error| TestCaseError::fail(format!("{world:?}: {error}")))?;
                let (rows, expanded) = (rows(&plan), plan.descriptors().unwrap());
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
    let all = plan.records().unwrap().into_iter().flat_map(|planned| {
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

/// What the random geometries must not miss.
#[test]
fn the_worlds_have_everything() {
    let worlds: Vec<World> = (0..500).map(World::roll).collect();
    let some = |what: &str, has: fn(&World) -> bool| {
        let found = worlds.iter().filter(|world| has(world)).count();
        assert!(found >= 10, "{found} of 500 worlds have {what}");
    };
    some("a wider decode side", |w| w.prefill.tp_size > w.decode.tp_size);
    some("a wider prefill side", |w| w.prefill.tp_size < w.decode.tp_size);
    some("sizes that do not divide each other", |w| {
        let (src, dst) = (w.prefill.tp_size, w.decode.tp_size);
        !src.is_multiple_of(dst) && !dst.is_multiple_of(src)
    });
    some("replicas at prefill", |w| {
        w.prefill.tp_size > w.prefill.components[0].kv_heads
    });
    some("replicas at decode", |w| {
        w.decode.tp_size > w.decode.components[0].kv_heads
    });
    some("K and V of different size", |w| {
        w.decode.components[0].k_dim != w.decode.components[0].v_dim
    });
    some("other heads in the window", |w| {
        w.decode.components[0].kv_heads != w.decode.components[1].kv_heads
    });
    some("pages of one token", |w| w.decode.page_size == 1);
    some("pages of 64 tokens", |w| w.decode.page_size == 64);
    some("a window that begins inside a page", |w| {
        let start = w.seq_len.saturating_sub(w.decode.components[1].window.unwrap_or(0));
        !start.is_multiple_of(w.decode.page_size.into())
    });
    some("a prefix that was kept", |w| w.rooms[1].prefix > 0);
    some("a prefix whose window was evicted", |w| {
        w.rooms[0].prefix > 0 && w.rooms[1].prefix == 0
    });
    some("pipeline stages on one side", |w| w.prefill.pp_size > w.decode.pp_size);
    some("pipeline stages on both sides", |w| w.decode.pp_size > 1);
    some("chunks", |w| w.chunks.len() > 2);
    some("exact windows", |w| w.exact);
    some("head-major pages", |w| w.decode.components[0].layout == Layout::Hnd);
    some("latents", |w| w.decode.components[0].kind == Kind::Mla);
}
