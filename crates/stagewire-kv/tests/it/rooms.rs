//! What is wrong with one room is an error of that room, before anything moves, and never a shorter transfer.

use stagewire_core::{Classify, DType, ErrorClass};
use stagewire_kv::{Component, Engine, Geometry, Kind, Layout, Pair, PlanRequest, handshake};

fn paired(component: &Component, tp: u32) -> Pair {
    let engine = || {
        let geometry = Geometry {
            num_pages: [(component.name.clone(), 10)].into(),
            ..Geometry::new(tp, 4, vec![component.clone()])
        };
        Engine::new(geometry).unwrap()
    };
    handshake(&engine(), &engine()).unwrap()
}

fn pair() -> Pair {
    paired(&Component::mha("full", 2, 2, [4, 4], DType::BF16), 1)
}

fn request<'a>(src: &'a [i64], dst: &'a [i64]) -> PlanRequest<'a> {
    PlanRequest::new(0, 0, 10).pages("full", src, dst)
}

#[track_caller]
fn fails(request: &PlanRequest<'_>, reason: &str) {
    let pair = pair();
    let error = pair.plan(request).unwrap_err();
    assert_eq!(error.reason(), reason, "{error}");
    // The pair goes on.
    pair.plan(&self::request(&[1, 2, 3], &[1, 2, 3])).unwrap();
}

#[test]
fn page_lists() {
    fails(&request(&[1, 2], &[1, 2, 3]), "kv.table_length");
    fails(&request(&[1, 2, 3], &[1, 2]), "kv.table_length");
    fails(&request(&[1, 2], &[1, 2]), "kv.table_length");
    fails(&request(&[1, 2, 3, 4], &[1, 2, 3, 4]), "kv.table_length");
    for bad in [0, -1, -7, i64::MIN] {
        fails(&request(&[1, bad, 3], &[1, 2, 3]), "kv.not_resident");
        fails(&request(&[1, 2, 3], &[1, 2, bad]), "kv.not_resident");
    }
    fails(&request(&[10, 2, 3], &[1, 2, 3]), "kv.past_pool");
    fails(&request(&[1, 2, 3], &[1, 2, i64::MAX]), "kv.past_pool");
    fails(&request(&[1, 2, 3], &[1, 2, 1]), "kv.written_twice");
    fails(&PlanRequest::new(0, 0, 10), "kv.no_table");
    fails(
        &request(&[1, 2, 3], &[1, 2, 3]).pages("other", &[], &[]),
        "kv.unknown_component",
    );
}

#[test]
fn prefixes_and_chunks() {
    let table = [1, 2, 3];
    for prefix in [1, 3, 10, 12, 100] {
        let mut request = request(&table, &table);
        request.prefix.insert("full", prefix);
        fails(&request, "kv.prefix");
    }
    for tokens in [(3, 2), (0, 11), (11, 12)] {
        let mut request = request(&table, &table);
        request.tokens = Some(tokens);
        fails(&request, "kv.tokens");
    }
    let mut request = request(&table, &table);
    request.components = Some(vec!["other"]);
    fails(&request, "kv.unknown_component");
}

#[test]
fn a_page_of_the_prefix_is_never_written() {
    let mut request = request(&[1, 2, 3], &[5, 6, 5]);
    request.prefix.insert("full", 4);
    fails(&request, "kv.written_twice");
}

/// Two logical pages in one page are a fault, whichever chunk brings the other one.
#[test]
fn a_page_of_another_chunk_is_never_written() {
    for tokens in [(0, 4), (8, 10)] {
        let mut request = request(&[1, 2, 3], &[5, 6, 5]);
        request.tokens = Some(tokens);
        let error = pair().plan(&request).unwrap_err();
        assert_eq!(
            (error.reason(), error.details()["logical"].as_str()),
            ("kv.written_twice", "[0, 2]")
        );
        // Between them.
        request.tokens = Some((4, 8));
        pair().plan(&request).unwrap();
    }
    // What has left the window is nobody's.
    let component = Component {
        window: Some(3),
        ..Component::mha("full", 2, 2, [4, 4], DType::BF16)
    };
    paired(&component, 1).plan(&request(&[1, 2, 3], &[6, 5, 6])).unwrap();
}

/// Nothing overflows on the way to the last page whose bytes have offsets.
#[test]
fn the_last_page_there_can_be() {
    let mut planned = 0;
    for (layout, heads, tokens, dim) in [Layout::Nhd, Layout::Hnd]
        .into_iter()
        .flat_map(|layout| (1..=4).map(move |heads| (layout, heads)))
        .flat_map(|(layout, heads)| (1..=4).map(move |tokens| (layout, heads, tokens)))
        .flat_map(|(layout, heads, tokens)| (1..=4).map(move |dim| (layout, heads, tokens, dim)))
    {
        for (src_tp, dst_tp) in [(1, 1), (1, heads), (heads, 1)] {
            let component = Component {
                layout,
                ..Component::mha("full", 1, heads, [dim, dim], DType::U8)
            };
            let engine = |tp| Engine::new(Geometry::new(tp, tokens, vec![component.clone()])).unwrap();
            let pair = handshake(&engine(src_tp), &engine(dst_tp)).unwrap();
            let last = |tp| {
                let page = u64::from(heads / tp * tokens * dim);
                i64::try_from(u64::MAX / page - 1).unwrap_or(i64::MAX)
            };
            let (src, dst) = (last(src_tp), last(dst_tp));
            let tables = [
                [[src, 1], [1, dst]],
                [[src, 1], [dst, 1]],
                [[src - 1, src], [dst - 1, dst]],
            ];
            for (route, [src, dst]) in pair
                .routes()
                .into_iter()
                .flat_map(|route| tables.map(|tables| (route, tables)))
            {
                for exact_window in [false, true] {
                    let request = PlanRequest {
                        exact_window,
                        ..PlanRequest::new(route.0, route.1, u64::from(2 * tokens) - u64::from(tokens > 1))
                    };
                    let plan = pair.plan(&request.pages("full", &src, &dst)).unwrap();
                    assert_eq!(plan.descriptors().unwrap().len(), plan.descriptor_count());
                    planned += 1;
                }
            }
        }
    }
    assert!(planned > 1000, "{planned}");
}

#[test]
fn more_bytes_than_can_be_counted() {
    let component = Component::mha("full", 65_536, 1, [u32::MAX, u32::MAX], DType::F64);
    let engine = Engine::new(Geometry::new(1, 1 << 20, vec![component])).unwrap();
    let table: Vec<i64> = (1..=100).collect();
    let request = PlanRequest::new(0, 0, 100 << 20).pages("full", &table, &table);
    let plan = handshake(&engine, &engine).unwrap().plan(&request).unwrap();
    assert_eq!(plan.nbytes(), u64::MAX);
}

/// Pages whose rows no memory holds, of 2^49 bytes and more, are an error, not the end of the process.
#[test]
fn more_rows_than_memory_holds() {
    let component = Component::mha("full", 65_536, 2, [1, 1], DType::U8);
    let engine = |tp| Engine::new(Geometry::new(tp, 1 << 20, vec![component.clone()])).unwrap();
    let table: Vec<i64> = (1..=128).collect();
    let request = PlanRequest::new(0, 0, 128 << 20).pages("full", &table, &table);
    let plan = handshake(&engine(1), &engine(2)).unwrap().plan(&request).unwrap();
    let error = plan.descriptors().unwrap_err();
    let entries = (2_u64 << 27 << 16).to_string();
    assert_eq!((error.class(), error.reason()), (ErrorClass::Exhausted, "kv.memory"));
    assert_eq!(error.details()["entries"], entries, "{error}");
    assert!(error.to_string().contains(&entries));
    assert_eq!(plan.records().unwrap().len(), 2 * 65_536);
}

/// What a message says stands in the details too.
#[test]
fn errors_have_their_values() {
    let unknown = Geometry {
        num_pages: [("other".to_owned(), 1)].into(),
        ..Geometry::new(1, 4, vec![Component::mha("full", 2, 2, [4, 4], DType::BF16)])
    };
    let many = Geometry::new(4097, 4, unknown.components.clone());
    let no_layers = Geometry::new(1, 4, vec![Component::mha("full", 0, 2, [4, 4], DType::BF16)]);
    for (geometry, key, value) in [
        (unknown, "known", "full"),
        (many, "most", "4096"),
        (no_layers, "expected", "1 to 65536"),
    ] {
        let error = Engine::new(geometry).unwrap_err();
        assert_eq!(error.details()[key], value, "{error}");
        assert!(error.to_string().contains(value), "{error}");
    }
    let component = Component::mha("full", 1, 1, [2, 2], DType::BF16);
    let engine = Engine::new(Geometry::new(1, 4, vec![component])).unwrap();
    let request = PlanRequest::new(0, 0, 1).pages("full", &[i64::MAX], &[1]);
    let error = handshake(&engine, &engine).unwrap().plan(&request).unwrap_err();
    assert_eq!(
        (error.reason(), error.details()["page_bytes"].as_str()),
        ("kv.address", "16")
    );
}

#[test]
fn pages_that_are_not_needed_may_be_missing() {
    let mut request = request(&[-1, 2, 3], &[-1, 5, 6]);
    request.prefix.insert("full", 4);
    assert_eq!(pair().plan(&request).unwrap().nbytes(), 2 * 4 * 16 * 2 * 2);
    // A chunk needs its own pages only.
    let mut request = self::request(&[1, 2, -1], &[7, 8, -1]);
    request.tokens = Some((0, 8));
    assert_eq!(pair().plan(&request).unwrap().record_count(), 4);
}

#[test]
fn nothing_to_move_is_an_empty_plan() {
    let table = [-1, -1];
    let mut request = PlanRequest::new(0, 0, 8).pages("full", &table, &table);
    request.prefix.insert("full", 8);
    let plan = pair().plan(&request).unwrap();
    assert_eq!(
        (
            plan.nbytes(),
            plan.records().unwrap().len(),
            plan.descriptors().unwrap().len()
        ),
        (0, 0, 0)
    );
    let plan = pair().plan(&PlanRequest::new(0, 0, 0).pages("full", &[], &[])).unwrap();
    assert_eq!(plan.nbytes(), 0);
}

#[test]
fn parts_of_pages_that_cannot_be_cut() {
    let component = Component {
        layout: Layout::Vectorized5d,
        ..Component::mha("full", 2, 2, [4, 4], DType::BF16)
    };
    let pair = paired(&component, 1);
    let whole = request(&[1, 2, 3], &[1, 2, 3]);
    assert_eq!(pair.plan(&whole).unwrap().record_count(), 4);
    let exact = PlanRequest {
        exact_window: true,
        ..whole
    };
    assert_eq!(pair.plan(&exact).unwrap_err().reason(), "kv.exact");
}

#[test]
fn state_moves_with_the_last_chunk_as_one_page() {
    let component = Component {
        kind: Kind::Mamba,
        ..Component::mha("full", 2, 2, [4, 3], DType::BF16)
    };
    let pair = paired(&component, 2);
    let plan = pair
        .plan(&PlanRequest::new(1, 1, 10).pages("full", &[3], &[7]))
        .unwrap();
    let rows: Vec<_> = plan
        .descriptors()
        .unwrap()
        .iter()
        .map(|d| (d.kv, d.src_off, d.dst_off, d.nbytes))
        .collect();
    assert_eq!(rows, [(0, 24, 56, 8), (0, 24, 56, 8), (1, 18, 42, 6), (1, 18, 42, 6)]);
    let mut first = PlanRequest::new(1, 1, 10).pages("full", &[3], &[7]);
    first.tokens = Some((0, 8));
    assert_eq!(pair.plan(&first).unwrap().nbytes(), 0);
    first.tokens = Some((10, 10));
    assert_eq!(pair.plan(&first).unwrap().nbytes(), 0);
    first.tokens = Some((8, 10));
    assert_eq!(pair.plan(&first).unwrap().nbytes(), plan.nbytes());
}

#[test]
fn page_major_pools_have_one_buffer_and_scales_their_own() {
    let component = Component {
        layout: Layout::PageMajor,
        ..Component::mha("full", 3, 2, [4, 2], DType::BF16)
    };
    let plan = paired(&component, 2).plan(&request(&[1, 2, 3], &[4, 5, 6])).unwrap();
    // A page is 3 layers of 4 tokens of one head of 6 elements.
    let page = 3 * 4 * 6 * 2;
    let rows: Vec<_> = plan
        .descriptors()
        .unwrap()
        .iter()
        .map(|d| (d.src_off, d.dst_off, d.nbytes))
        .collect();
    assert_eq!(rows, [(page, 4 * page, 3 * page)]);
    let scaled = Component {
        scales: Some(2),
        ..Component::mha("full", 1, 2, [4, 2], DType::F8E4M3)
    };
    let plan = paired(&scaled, 2).plan(&request(&[1, 2, 3], &[4, 5, 6])).unwrap();
    let rows: Vec<_> = plan.descriptors().unwrap().iter().map(|d| (d.kv, d.nbytes)).collect();
    assert_eq!(rows, [(0, 48), (1, 24), (2, 24), (3, 12)]);
}

#[test]
fn pipeline_stages_send_their_own_layers() {
    let component = Component::mha("full", 4, 2, [4, 4], DType::BF16);
    let geometry = Geometry::new(2, 4, vec![component]);
    let prefill = Engine::new(Geometry {
        pp_size: 2,
        ..geometry.clone()
    });
    let pair = handshake(&prefill.unwrap(), &Engine::new(geometry).unwrap()).unwrap();
    assert_eq!(pair.routes(), [(0, 0), (1, 1), (2, 0), (3, 1)]);
    assert_eq!(pair.writers(1), [1, 3]);
    let table = [1, 2, 3];
    let plan = pair
        .plan(&PlanRequest::new(3, 1, 10).pages("full", &table, &table))
        .unwrap();
    let layers: Vec<_> = plan
        .records()
        .unwrap()
        .iter()
        .map(|r| (r.src_layer, r.dst_layer))
        .collect();
    assert_eq!(layers, [(0, 2), (1, 3), (0, 2), (1, 3)]);
}

/// By id, layers of one component can go to another stage than those of the other; heads go where layers do.
#[test]
fn slices_are_what_moves() {
    let full = Component {
        layer_ids: Some(vec![0, 1]),
        ..Component::mha("full", 2, 2, [4, 4], DType::BF16)
    };
    let swa = Component {
        window: Some(3),
        ..Component::mha("swa", 2, 2, [4, 4], DType::BF16)
    };
    let turned = Component {
        layer_ids: Some(vec![1, 0]),
        ..full.clone()
    };
    let engine = |components| {
        let geometry = Geometry {
            pp_size: 2,
            ..Geometry::new(2, 4, components)
        };
        Engine::new(geometry).unwrap()
    };
    let pair = handshake(&engine(vec![full, swa.clone()]), &engine(vec![turned, swa])).unwrap();
    assert_eq!(pair.routes().len(), 8);
    let table = [1, 2, 3];
    for (src, dst) in pair.routes() {
        let request = PlanRequest::new(src, dst, 10)
            .pages("full", &table, &table)
            .pages("swa", &table, &table);
        for section in pair.plan(&request).unwrap().sections() {
            let slice = pair.slice(section.name(), src, dst);
            assert_eq!(
                slice.is_some(),
                section.nbytes() > 0,
                "{} {src} -> {dst}",
                section.name()
            );
        }
        assert_eq!(pair.slice("full", src, dst).is_some(), src / 2 != dst / 2);
        assert_eq!(pair.slice("swa", src, dst).is_some(), src / 2 == dst / 2);
    }
    assert_eq!(pair.slice("other", 0, 0), None);
}
