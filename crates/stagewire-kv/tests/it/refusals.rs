//! What the first handshake refuses, with both sides' values, and what it must not refuse.

use stagewire_core::{Classify, DType, ErrorClass};
use stagewire_kv::{Component, Engine, Geometry, GeometryError, Incompatible, Kind, Layout, handshake};

fn full() -> Component {
    Component::mha("full", 4, 8, [64, 64], DType::BF16)
}

fn swa() -> Component {
    Component {
        window: Some(127),
        ..Component::mha("swa", 4, 8, [64, 64], DType::BF16)
    }
}

fn geometry(tp: u32, components: &[Component]) -> Geometry {
    Geometry::new(tp, 64, components.to_vec())
}

fn refused(prefill: Geometry, decode: Geometry) -> Incompatible {
    let (prefill, decode) = (Engine::new(prefill).unwrap(), Engine::new(decode).unwrap());
    handshake(&prefill, &decode).unwrap_err()
}

/// Refused for this reason; both sides' values are in the details and in the message.
#[track_caller]
fn refuses(prefill: Geometry, decode: Geometry, reason: &str, values: [&str; 2]) {
    let refusal = refused(prefill, decode);
    assert_eq!((refusal.class(), refusal.reason()), (ErrorClass::Unsupported, reason));
    let (details, message) = (refusal.details(), refusal.to_string());
    for (side, value) in ["prefill", "decode"].into_iter().zip(values) {
        assert_eq!(details[side], value, "{details:?}");
        assert!(message.contains(value), "{message}");
    }
}

#[track_caller]
fn accepts(prefill: Geometry, decode: Geometry) {
    let (prefill, decode) = (Engine::new(prefill).unwrap(), Engine::new(decode).unwrap());
    let pair = handshake(&prefill, &decode).unwrap_or_else(|refusal| panic!("{refusal}"));
    assert!(!pair.routes().is_empty());
}

fn both(component: &Component, src_tp: u32, dst_tp: u32) -> (Geometry, Geometry) {
    let components = [component.clone()];
    (geometry(src_tp, &components), geometry(dst_tp, &components))
}

#[test]
fn page_size() {
    let decode = Geometry {
        page_size: 32,
        ..geometry(1, &[full()])
    };
    refuses(geometry(1, &[full()]), decode, "kv.page_size", ["64", "32"]);
}

#[test]
fn dtype_is_the_resolved_one() {
    let with = |dtype| Component { dtype, ..full() };
    let pair = |a, b| (geometry(1, &[with(a)]), geometry(1, &[with(b)]));
    let (prefill, decode) = pair(DType::BF16, DType::F16);
    refuses(
        prefill,
        decode,
        "kv.dtype",
        ["bfloat16 of 2 bytes", "float16 of 2 bytes"],
    );
    let (prefill, decode) = pair(DType::F8E4M3, DType::BF16);
    refuses(
        prefill,
        decode,
        "kv.dtype",
        ["float8_e4m3fn of 1 bytes", "bfloat16 of 2 bytes"],
    );
    let (prefill, decode) = pair(DType::F8E4M3, DType::F8E4M3);
    accepts(prefill, Geometry { tp_size: 4, ..decode });
}

#[test]
fn windows_at_unequal_tp_are_supported_but_not_over_pipeline_stages() {
    let components = [full(), swa()];
    accepts(geometry(1, &components), geometry(4, &components));
    accepts(geometry(4, &components), geometry(1, &components));
    let prefill = Geometry {
        pp_size: 2,
        ..geometry(1, &components)
    };
    refuses(
        prefill.clone(),
        geometry(4, &components),
        "kv.state_pipeline",
        ["2", "1"],
    );
    accepts(prefill.clone(), Geometry { tp_size: 1, ..prefill });
}

#[test]
fn layouts_whose_pages_cannot_be_cut() {
    for layout in [Layout::Vectorized5d, Layout::PageMajor] {
        for component in [Component { layout, ..full() }, Component { layout, ..swa() }] {
            let (prefill, decode) = both(&component, 1, 4);
            refuses(prefill, decode, "kv.layout_tp", ["1", "4"]);
            let (prefill, decode) = both(&component, 4, 4);
            accepts(prefill, decode);
        }
    }
}

/// Their pages move as they are, so layers in another order would land in each other's place.
#[test]
fn pages_of_all_layers_need_one_order_of_layers() {
    let ids = |ids: &[u32]| Component {
        layout: Layout::PageMajor,
        layer_ids: Some(ids.to_vec()),
        ..full()
    };
    let prefill = geometry(2, &[ids(&[0, 2, 4, 6])]);
    refuses(
        prefill.clone(),
        geometry(2, &[ids(&[0, 4, 2, 6])]),
        "kv.layers",
        ["[0, 2, 4, 6]", "[0, 4, 2, 6]"],
    );
    accepts(prefill.clone(), prefill);
}

#[test]
fn layouts_that_differ_at_equal_tp() {
    let decode = Component {
        layout: Layout::Vectorized5d,
        ..full()
    };
    refuses(
        geometry(2, &[full()]),
        geometry(2, &[decode]),
        "kv.layout",
        ["nhd", "vectorized_5d"],
    );
}

#[test]
fn head_major_slices_when_both_agree() {
    let hnd = Component {
        layout: Layout::Hnd,
        ..full()
    };
    let (prefill, decode) = both(&hnd, 1, 4);
    accepts(prefill.clone(), decode);
    refuses(prefill, geometry(4, &[full()]), "kv.layout", ["hnd", "nhd"]);
}

#[test]
fn block_scales_at_unequal_tp() {
    let scales = Component {
        kind: Kind::BlockScale,
        scales: Some(32),
        ..Component::mha("scales", 4, 8, [64, 64], DType::U8)
    };
    let windowed = Component {
        window: Some(127),
        ..scales.clone()
    };
    let scaled = Component {
        scales: Some(32),
        dtype: DType::F8E4M3,
        ..full()
    };
    for component in [scales, windowed, scaled] {
        let (prefill, decode) = both(&component, 2, 1);
        refuses(prefill, decode, "kv.block_scale", ["2", "1"]);
        let (prefill, decode) = both(&component, 2, 2);
        accepts(prefill, decode);
    }
}

#[test]
fn generic_state_at_unequal_tp() {
    let state = |kind| Component { kind, ..full() };
    for kind in [Kind::Mamba, Kind::Dsa] {
        let (prefill, decode) = both(&state(kind), 2, 1);
        refuses(prefill, decode, "kv.state", ["2", "1"]);
        let (prefill, decode) = both(&state(kind), 2, 2);
        accepts(prefill, decode);
    }
    // An index beside latents is replicated like them.
    let index = Component {
        kind: Kind::Dsa,
        ..Component::mha("index", 4, 1, [128, 0], DType::U8)
    };
    let components = [Component::mla("latent", 4, 576, DType::BF16), index.clone()];
    accepts(geometry(8, &components), geometry(2, &components));
    let prefill = Geometry {
        pp_size: 2,
        ..geometry(1, std::slice::from_ref(&index))
    };
    refuses(prefill, geometry(1, &[index]), "kv.state_pipeline", ["2", "1"]);
}

#[test]
fn latents_at_any_tp() {
    for (src, dst) in [(1, 8), (8, 1), (3, 5)] {
        let (prefill, decode) = both(&Component::mla("latent", 4, 576, DType::BF16), src, dst);
        accepts(prefill, decode);
    }
}

#[test]
fn pipeline_and_context_sizes() {
    let sized = |pp_size, cp_size| Geometry {
        pp_size,
        cp_size,
        ..geometry(1, &[full()])
    };
    refuses(sized(4, 1), sized(2, 1), "kv.pipeline", ["4", "2"]);
    refuses(sized(1, 1), sized(2, 1), "kv.pipeline", ["1", "2"]);
    refuses(sized(1, 1), sized(1, 2), "kv.context", ["1", "2"]);
    refuses(sized(3, 1), sized(1, 1), "kv.pipeline_split", ["3", "1"]);
    accepts(sized(2, 1), sized(1, 1));
    accepts(sized(4, 1), sized(4, 1));
}

#[test]
fn heads_that_do_not_split() {
    let six = Component { kv_heads: 6, ..full() };
    let (prefill, decode) = both(&six, 4, 2);
    refuses(prefill, decode, "kv.head_split", ["4", "2"]);
    let (prefill, decode) = both(&six, 2, 4);
    refuses(prefill, decode, "kv.head_split", ["2", "4"]);
    // Each size divides the heads, neither divides the other.
    let (prefill, decode) = both(&six, 2, 3);
    accepts(prefill, decode);
    // The window's heads count for the window.
    let swa = Component { kv_heads: 3, ..swa() };
    let components = [full(), swa];
    refuses(
        geometry(8, &components),
        geometry(1, &components),
        "kv.head_split",
        ["8", "1"],
    );
}

#[test]
fn keys_and_values_of_different_size() {
    let mimo = Component {
        v_dim: 128,
        k_dim: 192,
        ..full()
    };
    let (prefill, decode) = both(&mimo, 1, 4);
    accepts(prefill, decode);
}

#[test]
fn components_in_another_order_or_number() {
    let (prefill, decode) = (geometry(1, &[full(), swa()]), geometry(1, &[swa(), full()]));
    let shown = ["full (mha), swa (mha)", "swa (mha), full (mha)"];
    refuses(prefill.clone(), decode, "kv.components", shown);
    refuses(
        prefill.clone(),
        geometry(1, &[full()]),
        "kv.components",
        [shown[0], "full (mha)"],
    );
    let state = Component {
        kind: Kind::Dsa,
        ..swa()
    };
    refuses(
        prefill,
        geometry(1, &[full(), state]),
        "kv.components",
        [shown[0], "full (mha), swa (dsa)"],
    );
}

#[test]
fn different_models() {
    let change = |name: &str| {
        let mut changed = swa();
        match name {
            "heads" => changed.kv_heads = 4,
            "k" => changed.k_dim = 128,
            "v" => changed.v_dim = 128,
            "window" => changed.window = Some(128),
            _ => changed.layers = 5,
        }
        let refusal = refused(geometry(1, &[swa()]), geometry(1, &[changed]));
        // Two numbers alone would not say what differs.
        if let Some(field) = refusal.details().get("field") {
            assert!(field.to_lowercase().contains(name), "{field}");
            assert!(refusal.to_string().contains(field), "{refusal}");
        } else {
            assert_eq!(refusal.reason(), "kv.layers");
        }
        refusal.reason()
    };
    for name in ["heads", "k", "v", "window"] {
        assert_eq!(change(name), "kv.model");
    }
    assert_eq!(change("layers"), "kv.layers");
    let ids = |ids: &[u32]| Component {
        layer_ids: Some(ids.to_vec()),
        ..full()
    };
    refuses(
        geometry(1, &[ids(&[0, 2, 4, 6])]),
        geometry(1, &[ids(&[0, 2, 4, 7])]),
        "kv.layers",
        ["[0, 2, 4, 6]", "[0, 2, 4, 7]"],
    );
}

#[test]
fn pools_of_different_size_are_accepted() {
    let sized = |pages| Geometry {
        num_pages: [("full".to_owned(), pages)].into(),
        ..geometry(2, &[full()])
    };
    accepts(sized(100), sized(7));
}

#[test]
fn a_refused_pair_leaves_others_alone() {
    let prefill = Engine::new(geometry(2, &[full()])).unwrap();
    let other = Component { kv_heads: 4, ..full() };
    assert!(handshake(&prefill, &Engine::new(geometry(1, &[other])).unwrap()).is_err());
    assert!(handshake(&prefill, &Engine::new(geometry(1, &[full()])).unwrap()).is_ok());
}

#[test]
fn hellos_cross_processes() {
    let engine = Engine::new(Geometry {
        num_pages: [("swa".to_owned(), 64)].into(),
        ..geometry(4, &[full(), swa()])
    })
    .unwrap();
    let mut bytes = engine.to_bytes();
    assert_eq!(Engine::from_bytes(&bytes), Ok(engine));
    for len in 0..bytes.len() {
        assert!(Engine::from_bytes(&bytes[..len]).is_err(), "{len} bytes");
    }
    let longer = [bytes.as_slice(), &[0]].concat();
    assert_eq!(Engine::from_bytes(&longer).unwrap_err().reason(), "kv.hello");
    bytes[0] = 2;
    let refusal = Engine::from_bytes(&bytes).unwrap_err();
    assert_eq!(refusal, Incompatible::Version { ours: 1, theirs: 2 });
    assert_eq!(refusal.reason(), "kv.version");
}

#[test]
fn geometries_that_make_no_sense() {
    let wrong = |geometry: Geometry| Engine::new(geometry).unwrap_err();
    assert!(matches!(
        wrong(geometry(0, &[full()])),
        GeometryError::Size { field: "tp_size", .. }
    ));
    assert!(matches!(wrong(geometry(1, &[])), GeometryError::NoComponents));
    assert!(matches!(
        wrong(geometry(1, &[full(), full()])),
        GeometryError::SameName { .. }
    ));
    let changed = |change: fn(&mut Component)| {
        let mut component = full();
        change(&mut component);
        match wrong(geometry(1, &[component])) {
            GeometryError::Field { field, .. } => field,
            other => panic!("{other}"),
        }
    };
    assert_eq!(changed(|c| c.name.clear()), "name");
    assert_eq!(changed(|c| c.layers = 0), "layers");
    assert_eq!(changed(|c| c.kv_heads = 0), "kv_heads");
    assert_eq!(changed(|c| c.k_dim = 0), "k_dim");
    assert_eq!(changed(|c| c.layer_ids = Some(vec![1, 1, 2, 3])), "layer_ids");
    assert_eq!(changed(|c| c.layer_ids = Some(vec![1])), "layer_ids");
    assert_eq!(changed(|c| c.scales = Some(48)), "scales");
    let huge = Component {
        kv_heads: u32::MAX,
        k_dim: u32::MAX,
        ..full()
    };
    assert!(matches!(wrong(geometry(1, &[huge])), GeometryError::TooLarge { .. }));
    let unknown = Geometry {
        num_pages: [("other".to_owned(), 1)].into(),
        ..geometry(1, &[full()])
    };
    assert!(matches!(wrong(unknown), GeometryError::UnknownPool { .. }));
}
