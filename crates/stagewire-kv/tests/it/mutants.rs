//! The oracle finds the faults that planners of this kind have had: a naive planner, right at first, then with one each.

use stagewire_kv::{Component, Descriptor, Layout};

use crate::memory::{Memory, head_bytes, heads_of, place};
use crate::world::World;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    /// Replicas hold the heads 0 1 0 1 instead of 0 0 1 1.
    ModuloHeads,
    /// V's pages have the length of K's.
    StrideOfK,
    /// The window's tokens are looked up in the table of the full layers.
    FullPages,
    /// The window's page list begins at its first token, not at that token's page.
    UnalignedWindow,
    /// Of lists of pages, the last is left out.
    TruncatedList,
    /// What decode holds already is written again.
    IgnoredPrefix,
}

/// One descriptor for each head of each token. `None` where the fault hits nothing.
fn plan(world: &World, fault: Fault) -> Vec<((u32, u32), Descriptor)> {
    let mut all = Vec::new();
    for (index, component) in world.prefill.components.iter().enumerate() {
        for dst_rank in 0..world.decode.tp_size {
            let heads = heads_of(component, world.decode.tp_size, dst_rank);
            for (local, &head) in heads.iter().enumerate() {
                let head = match fault {
                    Fault::ModuloHeads if world.decode.tp_size > component.kv_heads => dst_rank % component.kv_heads,
                    _ => head,
                };
                let holds = |rank: &u32| heads_of(component, world.prefill.tp_size, *rank).contains(&head);
                let src_rank = (0..world.prefill.tp_size).find(holds).unwrap();
                let held = heads_of(component, world.prefill.tp_size, src_rank);
                let src = (held.len(), held.iter().position(|&own| own == head).unwrap());
                for at in tokens(world, index, fault) {
                    all.extend(
                        rows(world, index, at, src, (heads.len(), local), fault).map(|row| ((src_rank, dst_rank), row)),
                    );
                }
            }
        }
    }
    all
}

/// (Page at the source, page at the destination, token inside of the page) of every needed token.
fn tokens(world: &World, index: usize, fault: Fault) -> Vec<(usize, usize, usize)> {
    let (component, room) = (&world.prefill.components[index], &world.rooms[index]);
    let size = u64::from(world.prefill.page_size);
    let prefix = if fault == Fault::IgnoredPrefix { 0 } else { room.prefix };
    let first = component
        .window
        .map_or(0, |window| world.seq_len.saturating_sub(window));
    let (mut start, mut end) = (first.max(prefix), world.seq_len);
    if start >= end {
        return Vec::new();
    }
    if !world.exact {
        (start, end) = (start / size * size, end.next_multiple_of(size));
    }
    let tables = match fault {
        Fault::FullPages => &world.rooms[0],
        _ => room,
    };
    let last = end.div_ceil(size) - 1;
    let token = |token: u64| {
        let (logical, slot) = match fault {
            // Every page after the first is read as if it began where the first token is.
            Fault::UnalignedWindow => (start / size + (token - start) / size, (token - start) % size),
            _ => (token / size, token % size),
        };
        if fault == Fault::TruncatedList && logical == last {
            return None;
        }
        let page = |table: &[i64]| usize::try_from(*table.get(usize::try_from(logical).unwrap())?).ok();
        Some((page(&tables.src)?, page(&tables.dst)?, usize::try_from(slot).unwrap()))
    };
    let start = if fault == Fault::UnalignedWindow {
        first.max(prefix)
    } else {
        start
    };
    (start..end).filter_map(token).collect()
}

fn rows(
    world: &World,
    index: usize,
    (src_page, dst_page, token): (usize, usize, usize),
    src: (usize, usize),
    dst: (usize, usize),
    fault: Fault,
) -> impl Iterator<Item = Descriptor> {
    let (from, to) = (&world.prefill.components[index], &world.decode.components[index]);
    let tokens = world.prefill.page_size as usize;
    let pairs = (0..to.layers).map(|layer| (source_layer(from, to, layer), layer));
    let kinds = (0..2).filter(|&kv| head_bytes(from, kv) > 0);
    let all = kinds.flat_map(move |kv| pairs.clone().map(move |layers| (kv, layers)));
    let (layout, k) = (from.layout, head_bytes(from, 0));
    all.map(move |(kv, (src_layer, dst_layer))| {
        let bytes = head_bytes(from, kv);
        let offset = |page: usize, (heads, head): (usize, usize)| {
            let mut at = place(layout, heads, tokens, bytes, (page, token, head));
            if fault == Fault::StrideOfK && kv == 1 {
                at = at - page * tokens * heads * bytes + page * tokens * heads * k;
            }
            at as u64
        };
        Descriptor {
            component: u32::try_from(index).unwrap(),
            src_layer,
            dst_layer,
            kv,
            src_off: offset(src_page, src),
            dst_off: offset(dst_page, dst),
            nbytes: bytes as u64,
        }
    })
}

fn source_layer(from: &Component, to: &Component, layer: u32) -> u32 {
    match (&from.layer_ids, &to.layer_ids) {
        (Some(from), Some(to)) => {
            let found = from.iter().position(|id| *id == to[layer as usize]);
            u32::try_from(found.unwrap()).unwrap()
        }
        _ => layer,
    }
}

fn is_right(world: &World, fault: Fault) -> bool {
    let mut memory = Memory::new(world);
    let copied = plan(world, fault)
        .iter()
        .try_for_each(|(route, row)| memory.copy(*route, row));
    copied.and_then(|()| memory.check()).is_ok()
}

/// Worlds in which something moves and every fault of the list can be seen in some. The naive planner knows no stages.
fn worlds() -> impl Iterator<Item = World> {
    let all = (0..120).map(World::roll);
    all.filter(|world| world.prefill.pp_size == 1)
}

#[test]
fn the_planner_without_a_fault_is_right() {
    for world in worlds() {
        assert!(is_right(&world, Fault::None), "{world:?}");
    }
}

#[test]
fn every_fault_is_found() {
    let faults = [
        Fault::ModuloHeads,
        Fault::StrideOfK,
        Fault::FullPages,
        Fault::UnalignedWindow,
        Fault::TruncatedList,
        Fault::IgnoredPrefix,
    ];
    for fault in faults {
        let changed = worlds().filter(|world| plan(world, fault) != plan(world, Fault::None));
        let (mut found, mut missed) = (0, 0);
        for world in changed {
            if is_right(&world, fault) {
                missed += 1;
            } else {
                found += 1;
            }
        }
        assert!(
            found >= 3,
            "{fault:?} changed too few of the plans to judge the oracle: {found}"
        );
        assert_eq!(missed, 0, "{fault:?} went unseen");
    }
}

#[test]
fn layouts_of_equal_size_are_told_apart() {
    let mut world = worlds().find(|world| {
        let component = &world.prefill.components[0];
        component.layout == Layout::Nhd
            && component.kv_heads > world.prefill.tp_size
            && world.prefill.page_size > 1
            && world.seq_len > world.rooms[0].prefix
    });
    let world = world.as_mut().unwrap();
    let right = plan(world, Fault::None);
    world.prefill.components[0].layout = Layout::Hnd;
    let mut memory = Memory::new(world);
    let copied = right.iter().try_for_each(|(route, row)| memory.copy(*route, row));
    assert!(copied.and_then(|()| memory.check()).is_err());
}
