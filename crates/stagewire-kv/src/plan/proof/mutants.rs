//! The proof finds the faults that planners have had: the planner itself, with one fault each, is judged by what was asked
//! of it.

use std::collections::BTreeMap;

use stagewire_core::Record;

use super::prove;
use crate::pair::Place;
use crate::plan::rows::{Row, rows};
use crate::plan::{PlanError, PlanRequest, Section, section};
use crate::world::World;
use crate::{Engine, Geometry, HeadSlice, Kind, Layout, Pair, handshake};

/// A fault: in the geometry that the planner believes, in what the pair knows, in what it reads of the request, or in what
/// it made.
enum Fault {
    Geometry(fn(&mut Geometry)),
    Pair(fn(&mut Pair)),
    Request(fn(&mut PlanRequest<'_>, u64)),
    Section(fn(&mut Section)),
}

const FAULTS: [(&str, Fault); 27] = [
    ("replicas at decode hold heads modulo", Fault::Pair(modulo_at_decode)),
    ("replicas at prefill hold heads modulo", Fault::Pair(modulo_at_prefill)),
    ("V has the stride of K", Fault::Pair(stride_of_k)),
    ("full pages for the window", Fault::Request(full_pages)),
    (
        "the window begins at no page",
        Fault::Request(|request, _| request.exact_window = true),
    ),
    (
        "the window has no beginning",
        Fault::Pair(|pair| each(pair, |paired| paired.window = None)),
    ),
    (
        "the window is one token longer",
        Fault::Pair(|pair| each(pair, |paired| paired.window = paired.window.map(|w| w + 1))),
    ),
    (
        "the window is one token shorter",
        Fault::Pair(|pair| each(pair, |paired| paired.window = paired.window.map(|w| w.max(1) - 1))),
    ),
    ("lists of pages end early", Fault::Request(truncated)),
    (
        "the prefix is written again",
        Fault::Request(|request, _| request.prefix.clear()),
    ),
    (
        "the prefix of one is that of the other",
        Fault::Request(|request, _| {
            let longest = request.prefix.values().copied().max().unwrap_or(0);
            request.prefix.values_mut().for_each(|prefix| *prefix = longest);
        }),
    ),
    (
        "a chunk is the whole",
        Fault::Request(|request, _| request.tokens = None),
    ),
    (
        "a chunk is its neighbour",
        Fault::Request(|request, page| {
            request.tokens = request.tokens.map(|(lo, hi)| (lo, (hi + page).min(request.seq_len)));
        }),
    ),
    (
        "pages move whole",
        Fault::Request(|request, _| request.exact_window = false),
    ),
    (
        "the sides' tables are exchanged",
        Fault::Request(|request, _| std::mem::swap(&mut request.src_pages, &mut request.dst_pages)),
    ),
    (
        "the sides' heads are exchanged",
        Fault::Pair(|pair| each(pair, |paired| paired.heads = (paired.heads.1, paired.heads.0))),
    ),
    (
        "the source's heads begin at 0",
        Fault::Pair(|pair| slices(pair, |slice| slice.src_head_start = 0)),
    ),
    (
        "the destination's heads begin at 0",
        Fault::Pair(|pair| slices(pair, |slice| slice.dst_head_start = 0)),
    ),
    (
        "a head too few",
        Fault::Pair(|pair| slices(pair, |slice| slice.num_heads = slice.num_heads.max(2) - 1)),
    ),
    ("heads come from the next rank", Fault::Pair(next_rank)),
    (
        "layers are paired by place",
        Fault::Geometry(|geometry| {
            geometry
                .components
                .iter_mut()
                .for_each(|component| component.layer_ids = None);
        }),
    ),
    (
        "pages lie head after head",
        Fault::Geometry(|geometry| {
            geometry
                .components
                .iter_mut()
                .for_each(|component| component.layout = Layout::Hnd);
        }),
    ),
    (
        "pages lie token after token",
        Fault::Geometry(|geometry| {
            geometry
                .components
                .iter_mut()
                .for_each(|component| component.layout = Layout::Nhd);
        }),
    ),
    (
        "latents are split",
        Fault::Geometry(|geometry| {
            geometry
                .components
                .iter_mut()
                .for_each(|component| component.kind = Kind::Mha);
        }),
    ),
    (
        "layers move in reverse",
        Fault::Section(|section| {
            let sources: Vec<u32> = section.layers.iter().rev().map(|pair| pair.0).collect();
            section
                .layers
                .iter_mut()
                .zip(sources)
                .for_each(|(pair, src)| pair.0 = src);
        }),
    ),
    (
        "all layers but one are left out",
        Fault::Section(|section| section.layers.truncate(1)),
    ),
    (
        "a buffer is left out",
        Fault::Section(|section| drop(section.buffers.pop())),
    ),
];

fn each(pair: &mut Pair, change: impl FnMut(&mut crate::pair::Paired)) {
    pair.components.iter_mut().for_each(change);
}

fn slices(pair: &mut Pair, mut change: impl FnMut(&mut crate::HeadSlice)) {
    each(pair, |paired| paired.slices.iter_mut().flatten().for_each(&mut change));
}

/// Ranks hold the heads 0 1 0 1 instead of 0 0 1 1.
fn modulo_at_decode(pair: &mut Pair) {
    let geometry = pair.decode().geometry().clone();
    for (paired, component) in pair.components.iter_mut().zip(&geometry.components) {
        let replicas = geometry.tp_size / component.kv_heads;
        if component.kind == Kind::Mha && replicas > 1 {
            let right = paired.slices.clone();
            for (rank, slices) in (0..).zip(&mut paired.slices) {
                let head = rank % component.kv_heads;
                if head != rank / replicas {
                    slices.clone_from(&right[(head * replicas) as usize]);
                    slices.iter_mut().for_each(|slice| slice.dst_rank = rank);
                }
            }
        }
    }
}

fn modulo_at_prefill(pair: &mut Pair) {
    let geometry = pair.prefill().geometry().clone();
    for (paired, component) in pair.components.iter_mut().zip(&geometry.components) {
        let replicas = geometry.tp_size / component.kv_heads;
        if component.kind == Kind::Mha && replicas > 1 {
            for slice in paired.slices.iter_mut().flatten() {
                // Head 0 is on rank 0 either way, but another replica may write it.
                let head = slice.src_rank / replicas;
                slice.src_rank = if head == 0 { slice.src_rank } else { head };
            }
        }
    }
}

/// Where the next rank does not hold them too.
fn next_rank(pair: &mut Pair) {
    let geometry = pair.prefill().geometry().clone();
    for (paired, component) in pair.components.iter_mut().zip(&geometry.components) {
        if component.kind == Kind::Mha && geometry.tp_size <= component.kv_heads {
            for slice in paired.slices.iter_mut().flatten() {
                slice.src_rank = (slice.src_rank + 1) % geometry.tp_size;
            }
        }
    }
}

fn stride_of_k(pair: &mut Pair) {
    each(pair, |paired| {
        let k = paired.buffers.list[0].head;
        paired.buffers.list.iter_mut().for_each(|buffer| buffer.head = k);
    });
}

fn full_pages(request: &mut PlanRequest<'_>, _: u64) {
    for tables in [&mut request.src_pages, &mut request.dst_pages] {
        let full = tables["full"];
        tables.insert("swa", full);
    }
}

fn truncated(request: &mut PlanRequest<'_>, page: u64) {
    request.seq_len = request.seq_len.saturating_sub(1) / page * page;
    request.tokens = request
        .tokens
        .map(|(lo, hi)| (lo.min(request.seq_len), hi.min(request.seq_len)));
    for table in request.src_pages.values_mut().chain(request.dst_pages.values_mut()) {
        *table = &table[..table.len().saturating_sub(1)];
    }
}

/// What the planner with this fault makes of one component, and the choice of writers that it made.
fn planned(pair: &Pair, request: &PlanRequest<'_>, index: usize, fault: Option<&Fault>) -> Result<Section, PlanError> {
    let mut request = request.clone();
    if let Some(Fault::Request(change)) = fault {
        change(&mut request, pair.decode().geometry().page_size.into());
    }
    let places = (
        Place::of(request.src_rank, pair.prefill().geometry()),
        Place::of(request.dst_rank, pair.decode().geometry()),
    );
    let mut section = section(
        pair,
        u32::try_from(index).unwrap(),
        &pair.components[index],
        &request,
        places,
    )?;
    if let Some(Fault::Section(change)) = fault {
        change(&mut section);
    }
    Ok(section)
}

fn believed(world: &World, right: &Pair, fault: &Fault) -> Pair {
    match fault {
        Fault::Geometry(change) => {
            let mut world = world.clone();
            let swa = |geometry: &Geometry| geometry.components[1].window;
            change(&mut world.prefill);
            change(&mut world.decode);
            assert_eq!(swa(&world.prefill), right.components[1].window);
            let engine = |geometry: &Geometry| Engine::new(geometry.clone()).unwrap();
            handshake(&engine(&world.prefill), &engine(&world.decode)).unwrap_or_else(|_| right.clone())
        }
        Fault::Pair(change) => {
            let mut pair = right.clone();
            change(&mut pair);
            pair
        }
        _ => right.clone(),
    }
}

type Layers = Vec<(u32, u32)>;

/// Runs of bytes of each buffer, and its layers: what tells one plan from another.
fn moved(section: &Section) -> Vec<(u32, Layers, Vec<Row>)> {
    let buffers = section.buffers.iter();
    let all = buffers.map(|buffer| (buffer.kv, section.layers.clone(), rows(&buffer.records).unwrap()));
    all.filter(|(_, _, rows)| !rows.is_empty()).collect()
}

#[test]
fn every_fault_of_the_planner_is_found() {
    let mut found: BTreeMap<&str, u32> = BTreeMap::new();
    for world in (0..300).map(World::roll) {
        let right = world.pair();
        for (name, fault) in &FAULTS {
            let believed = believed(&world, &right, fault);
            for route in right.routes() {
                for (request, index) in world.requests(route).iter().flat_map(|r| [(r, 0), (r, 1)]) {
                    let wanted = planned(&right, request, index, None).unwrap();
                    // A planner that gives up harms nobody.
                    let Ok(section) = planned(&believed, request, index, Some(fault)) else {
                        continue;
                    };
                    let to = Place::of(request.dst_rank, &world.decode);
                    let proven = prove(
                        &right,
                        request,
                        &section,
                        &believed.components[index].slices[to.tp as usize],
                    );
                    if moved(&section) != moved(&wanted) {
                        assert!(proven.is_err(), "{name} went unseen in {world:?}: {section:?}");
                        *found.entry(name).or_default() += 1;
                    }
                }
            }
        }
    }
    for (name, _) in &FAULTS {
        let found = found.get(name).copied().unwrap_or(0);
        assert!(found >= 3, "{name} changed too few plans to judge the proof: {found}");
    }
}

/// Every component of every plan of some worlds: as it was planned, and who writes.
fn each_section(mut judge: impl FnMut(&Pair, &PlanRequest<'_>, Section, &[HeadSlice])) {
    for world in (0..60).map(World::roll) {
        let pair = world.pair();
        for (route, index) in pair.routes().into_iter().flat_map(|route| [(route, 0), (route, 1)]) {
            for request in world.requests(route) {
                let section = planned(&pair, &request, index, None).unwrap();
                let to = Place::of(request.dst_rank, pair.decode().geometry());
                judge(&pair, &request, section, &pair.components[index].slices[to.tp as usize]);
            }
        }
    }
}

#[test]
fn any_change_of_a_record_is_found() {
    let mut changes = 0;
    each_section(|pair, request, section, writers| {
        let mut fails = |buffer: usize, records: Vec<Record>| {
            let mut changed = section.clone();
            changed.buffers[buffer].records = records.into();
            let proven = prove(pair, request, &changed, writers);
            assert!(matches!(proven, Err(PlanError::Unproven { .. })), "{changed:?}");
            changes += 1;
        };
        for (place, buffer) in section.buffers.iter().enumerate() {
            for (index, record) in buffer.records.iter().enumerate() {
                let with = |record: Option<Record>| {
                    let mut records = buffer.records.to_vec();
                    records.splice(index..=index, record);
                    records
                };
                fails(place, with(None));
                fails(place, [&buffer.records[..=index], &buffer.records[index..]].concat());
                for field in 0..6 {
                    let mut changed = *record;
                    let fields = [
                        &mut changed.src_offset,
                        &mut changed.dst_offset,
                        &mut changed.width,
                        &mut changed.rows,
                        &mut changed.src_pitch,
                        &mut changed.dst_pitch,
                    ];
                    // A single row has no pitch.
                    if field < 4 || record.rows > 1 {
                        *fields.into_iter().nth(field).unwrap() += 1;
                        fails(place, with(Some(changed)));
                    }
                }
            }
        }
    });
    assert!(changes > 1000, "{changes}");
}

#[test]
fn a_record_past_a_pool_is_found() {
    let mut found = 0;
    each_section(|pair, request, section, writers| {
        let sides = [pair.prefill(), pair.decode()].map(|engine| engine.geometry().clone());
        for side in 0..2 {
            let mut sides = sides.clone();
            let table = [&request.src_pages, &request.dst_pages][side][section.name()];
            let last = table.iter().copied().max().unwrap_or(-1);
            sides[side]
                .num_pages
                .insert(section.name.clone(), u64::try_from(last).unwrap_or(0));
            let [prefill, decode] = sides.map(|geometry| Engine::new(geometry).unwrap());
            let smaller = handshake(&prefill, &decode).unwrap();
            let is_used = planned(&smaller, request, section.index as usize, None).is_err();
            assert_eq!(
                prove(&smaller, request, &section, writers).is_err(),
                is_used,
                "{section:?}"
            );
            found += u32::from(is_used);
        }
    });
    assert!(found > 50, "{found}");
}
