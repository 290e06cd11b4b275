//! Full layers chunk by chunk, the window once, at the end.

use stagewire_core::{Classify, DType};
use stagewire_kv::{Component, Engine, Geometry, Pair, PlanRequest, PlannedRecord, handshake};

const PAGE: u32 = 4;

fn pair(window: u64) -> Pair {
    let full = Component::mha("full", 2, 2, [4, 4], DType::BF16);
    let swa = Component {
        window: Some(window),
        ..Component::mha("swa", 2, 2, [4, 4], DType::BF16)
    };
    let engine = |tp| Engine::new(Geometry::new(tp, PAGE, vec![full.clone(), swa.clone()])).unwrap();
    handshake(&engine(1), &engine(2)).unwrap()
}

fn request<'a>(seq_len: u64, src: &'a [i64], dst: &'a [i64]) -> PlanRequest<'a> {
    PlanRequest::new(0, 1, seq_len)
        .pages("full", src, dst)
        .pages("swa", src, dst)
}

/// No page of the destination is in two of these lists, so their rows together are what moves.
fn rows(records: Vec<PlannedRecord>) -> Vec<[u64; 4]> {
    let each = |planned: PlannedRecord| {
        let at = [planned.component, planned.src_layer, planned.dst_layer, planned.kv].map(u64::from);
        let place = at.iter().fold(0, |place, part| place * 8 + part);
        let rows = planned.record.row_offsets().collect::<Vec<_>>();
        rows.into_iter()
            .map(move |(src, dst)| [place, dst, src, planned.record.width])
    };
    let mut rows: Vec<_> = records.into_iter().flat_map(each).collect();
    rows.sort_unstable();
    rows
}

#[test]
fn chunks_of_the_full_layers_and_then_the_whole_window_are_the_whole() {
    for (seq_len, window) in [(40_u64, 7), (37, 7), (40, 100), (38, 0), (5, 4)] {
        let pair = pair(window);
        let table: Vec<i64> = (1..=i64::try_from(seq_len.div_ceil(u64::from(PAGE))).unwrap()).collect();
        let scattered: Vec<i64> = table.iter().map(|page| page * 2).collect();
        for step in [3, 4, 11, 16, 64] {
            let request = request(seq_len, &scattered, &table);
            let mut found = Vec::new();
            for lo in (0..seq_len).step_by(step) {
                let mut chunk = request.clone();
                chunk.components = Some(vec!["full"]);
                chunk.tokens = Some((lo, seq_len.min(lo + step as u64)));
                found.extend(pair.plan(&chunk).unwrap().records().unwrap());
            }
            let mut last = request.clone();
            last.components = Some(vec!["swa"]);
            found.extend(pair.plan(&last).unwrap().records().unwrap());
            let whole = pair.plan(&request).unwrap().records().unwrap();
            assert_eq!(
                rows(found),
                rows(whole),
                "{seq_len} tokens, window {window}, step {step}"
            );
        }
    }
}

/// A page of the prefix that has left the window may be used again; one that is still in it may not.
#[test]
fn evicted_pages_of_the_prefix_may_be_used_again() {
    let pair = pair(3);
    let (full, reused) = ([1, 2, 3], [6, 5, 6]);
    let request = |prefix: u64, window: &'static [i64]| {
        let mut request = PlanRequest::new(0, 1, 10).pages("full", &full, &full);
        request = request.pages("swa", &full, window);
        request.prefix.insert("swa", prefix);
        request
    };
    for prefix in [0, 4, 8] {
        pair.plan(&request(prefix, &[6, 5, 6])).unwrap();
        pair.plan(&request(prefix, &[-1, 5, 6])).unwrap();
        let error = pair.plan(&request(prefix, &[-1, 6, 6])).unwrap_err();
        assert_eq!(
            (error.reason(), error.details()["logical"].as_str()),
            ("kv.written_twice", "[1, 2]")
        );
    }
    // The full layers keep all of it.
    let mut kept = PlanRequest::new(0, 1, 10)
        .pages("full", &full, &reused)
        .pages("swa", &full, &full);
    kept.prefix.insert("full", 8);
    assert_eq!(pair.plan(&kept).unwrap_err().reason(), "kv.written_twice");
}

#[test]
fn needed_pages_are_those_of_the_window() {
    let with = |window| Component {
        window,
        ..Component::mha("swa", 2, 2, [4, 4], DType::BF16)
    };
    assert_eq!(with(Some(127)).pages(64, 8192), 126..128);
    assert_eq!(with(Some(127)).pages(64, 300), 2..5);
    assert_eq!(with(Some(500)).pages(64, 300), 0..5);
    assert_eq!(with(None).pages(64, 300), 0..5);
    assert_eq!(with(None).pages(64, 0), 0..0);
}
