//! Published unit cases of SGLang, and which side packs.

use stagewire_core::DType;
use stagewire_kv::{Component, Descriptor, Engine, Geometry, Layout, Packing, Pair, PlanError, PlanRequest, handshake};

fn pair(component: &Component, page: u32, src_tp: u32, dst_tp: u32) -> Pair {
    let engine = |tp| Engine::new(Geometry::new(tp, page, vec![component.clone()])).unwrap();
    handshake(&engine(src_tp), &engine(dst_tp)).unwrap()
}

fn k_rows(pair: &Pair, request: &PlanRequest<'_>) -> Vec<Descriptor> {
    let all = pair.plan(request).unwrap().descriptors().unwrap();
    all.into_iter().filter(|d| (d.kv, d.dst_layer) == (0, 0)).collect()
}

/// One layer whose token has `heads` heads of 8 bytes.
fn eights(heads: u32) -> Component {
    Component::mha("full", 1, heads, [4, 4], DType::BF16)
}

#[test]
fn second_half_of_each_row() {
    let pair = pair(&eights(2), 2, 2, 1);
    let rows = k_rows(&pair, &PlanRequest::new(1, 0, 4).pages("full", &[3, 7], &[5, 9]));
    let offsets: Vec<_> = rows.iter().map(|row| (row.src_off, row.dst_off, row.nbytes)).collect();
    assert_eq!(
        offsets,
        [(0x30, 0xA8, 8), (0x38, 0xB8, 8), (0x70, 0x128, 8), (0x78, 0x138, 8)]
    );
}

#[test]
fn four_to_two() {
    // Items of 8 and 16 bytes for pages of one token: heads of 8 bytes.
    let pair = pair(&eights(4), 1, 4, 2);
    for (src, dst_off) in [(2, 0x40), (3, 0x48)] {
        let rows = k_rows(&pair, &PlanRequest::new(src, 1, 1).pages("full", &[2], &[4]));
        assert_eq!((rows[0].src_off, rows[0].dst_off), (0x10, dst_off));
    }
}

#[test]
fn two_to_four() {
    let pair = pair(&eights(4), 1, 2, 4);
    for (dst, src_off) in [(2, 0x20), (3, 0x28)] {
        let rows = k_rows(&pair, &PlanRequest::new(1, dst, 1).pages("full", &[2], &[4]));
        assert_eq!((rows[0].src_off, rows[0].dst_off), (src_off, 0x20));
    }
}

#[test]
fn offsets_of_other_dimensions_do_not_matter() {
    let pair = pair(&eights(4), 2, 4, 2);
    let plan = |src, dst| {
        pair.plan(&PlanRequest::new(src, dst, 2).pages("full", &[2], &[4]))
            .unwrap()
    };
    assert_eq!(plan(7, 5).descriptors().unwrap(), plan(3, 1).descriptors().unwrap());
    assert_eq!((plan(7, 5).src_rank(), plan(7, 5).dst_rank()), (3, 1));
}

#[test]
fn a_rank_that_sends_nothing_there_is_refused() {
    let pair = pair(&eights(4), 2, 4, 2);
    let found = pair.plan(&PlanRequest::new(1, 1, 2).pages("full", &[2], &[4]));
    let wanted = PlanError::Route {
        src_rank: 1,
        dst_rank: 1,
        writers: vec![2, 3],
    };
    assert_eq!(found.unwrap_err(), wanted);
}

#[test]
fn many_heads_of_a_large_page() {
    // Items of 4096 and 2048 bytes: 64 heads of 2 bytes. Bases 100000 and 300000.
    let component = Component::mha("full", 1, 64, [2, 2], DType::U8);
    let pair = pair(&component, 64, 2, 4);
    let rows = k_rows(&pair, &PlanRequest::new(0, 1, 64).pages("full", &[2], &[3]));
    assert_eq!(
        (100_000 + rows[0].src_off, 300_000 + rows[0].dst_off),
        (108_224, 306_144)
    );
    assert_eq!((rows.len(), rows[0].nbytes), (64, 32));
}

#[test]
fn a_prefix_that_decode_kept_is_not_sent_again() {
    let component = Component {
        window: Some(16),
        ..eights(1)
    };
    let pair = pair(&component, 4, 1, 1);
    let table = [1, 2, 3, 4, 5];
    let mut request = PlanRequest::new(0, 0, 20).pages("full", &table, &table);
    request.prefix.insert("full", 12);
    let plan = pair.plan(&request).unwrap();
    let range = plan.section("full").unwrap().token_range();
    assert_eq!((range.start, range.end), (12, 20));
    assert_eq!(plan.nbytes(), 8 * 8 * 2);
}

#[test]
fn the_side_with_fewer_heads_is_contiguous() {
    let packing = |heads, src_tp, dst_tp, route: (u32, u32)| {
        let pair = pair(&eights(heads), 2, src_tp, dst_tp);
        let plan = pair
            .plan(&PlanRequest::new(route.0, route.1, 2).pages("full", &[2], &[4]))
            .unwrap();
        plan.sections()[0].packing()
    };
    assert_eq!(packing(8, 2, 4, (0, 0)), Packing::Gather);
    assert_eq!(packing(8, 4, 2, (0, 0)), Packing::Scatter);
    assert_eq!(packing(8, 2, 2, (0, 0)), Packing::None);
    // Replicated on both sides: whole rows, although the sizes differ.
    assert_eq!(packing(2, 4, 8, (0, 0)), Packing::None);
    // 3 and 2 heads a rank: rank 1 of 6 takes head 2 from rank 0 and head 3 from rank 1.
    assert_eq!(packing(12, 4, 6, (0, 1)), Packing::Rows);
}

/// Head after head, a slice of a whole page is one run of bytes on both sides; a part of a page is a run for each head.
#[test]
fn head_major_pages_need_no_packing() {
    let component = Component {
        layout: Layout::Hnd,
        ..eights(8)
    };
    for (src_tp, dst_tp, exact_window, wanted) in [
        (1, 4, false, Packing::None),
        (4, 1, false, Packing::None),
        (2, 2, true, Packing::Rows),
        (1, 4, true, Packing::Rows),
        (1, 8, true, Packing::None),
    ] {
        let pair = pair(&component, 2, src_tp, dst_tp);
        let request = PlanRequest {
            exact_window,
            ..PlanRequest::new(0, 0, 3).pages("full", &[2, 7], &[4, 5])
        };
        let plan = pair.plan(&request).unwrap();
        assert_eq!(
            plan.sections()[0].packing(),
            wanted,
            "{src_tp} -> {dst_tp}, {exact_window}"
        );
    }
}

#[test]
fn offsets_use_all_64_bits() {
    // Pages of one token of one head: 4 bytes.
    let pair = pair(&Component::mha("full", 1, 1, [2, 2], DType::BF16), 1, 1, 1);
    let plan = |page: i64| pair.plan(&PlanRequest::new(0, 0, 1).pages("full", &[page], &[1]));
    assert_eq!(plan(1 << 61).unwrap().descriptors().unwrap()[0].src_off, 1 << 63);
    assert!(matches!(plan(1 << 62), Err(PlanError::Address { .. })));
}
