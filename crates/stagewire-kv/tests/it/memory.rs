//! The oracle: buffers full of noise, and what each byte of the destination must be afterwards.
//!
//! It knows the definition and nothing else: which rank holds which head, where a head of a token lies in a page, which
//! tokens are needed. No run, no record, no slice.

use std::collections::BTreeMap;

use stagewire_kv::{Component, Descriptor, Geometry, Kind, Layout};

use crate::world::{Room, World};

/// (rank, component, layer of the rank, kv).
pub(crate) type Key = (u32, usize, u32, u32);

/// All buffers of all destination ranks, and how often each byte was written.
pub(crate) struct Memory<'a> {
    world: &'a World,
    pub(crate) src: BTreeMap<Key, Vec<u8>>,
    pub(crate) dst: BTreeMap<Key, (Vec<u8>, Vec<u8>)>,
}

/// Heads that a rank holds, by the rule of `QKVParallelLinear`.
pub(crate) fn heads_of(component: &Component, tp: u32, rank: u32) -> Vec<u32> {
    let all = 0..component.kv_heads;
    if component.kind == Kind::Mla {
        return all.collect();
    }
    all.filter(|&head| {
        if tp <= component.kv_heads {
            u64::from(head) * u64::from(tp) / u64::from(component.kv_heads) == u64::from(rank)
        } else {
            head == rank * component.kv_heads / tp
        }
    })
    .collect()
}

/// Bytes of one head of one token.
pub(crate) fn head_bytes(component: &Component, kv: u32) -> usize {
    let dim = if kv == 0 { component.k_dim } else { component.v_dim };
    dim as usize * usize::try_from(component.dtype.size()).unwrap()
}

/// Where a head of a token begins.
pub(crate) fn place(layout: Layout, heads: usize, tokens: usize, bytes: usize, at: (usize, usize, usize)) -> usize {
    let (page, token, head) = at;
    let before = match layout {
        Layout::Hnd => page * heads * tokens + head * tokens + token,
        _ => page * tokens * heads + token * heads + head,
    };
    before * bytes
}

/// The layer of the model: stage `s` has the `s`-th equal part of them, and its ranks follow those of the stage before.
fn id(component: &Component, geometry: &Geometry, (rank, _, layer, _): Key) -> u32 {
    let stage = rank / geometry.tp_size;
    let layer = stage * (component.layers / geometry.pp_size) + layer;
    component.layer_ids.as_ref().map_or(layer, |ids| ids[layer as usize])
}

/// A byte of the cache: the same on every rank that holds the head.
fn value(layer: u32, kv: u32, page: usize, token: usize, head: u32, byte: usize) -> u8 {
    let parts = [layer as usize, kv as usize, page, token, head as usize, byte];
    let mixed = parts.iter().fold(0x9E37_79B9_7F4A_7C15_u64, |hash, &part| {
        (hash ^ part as u64).wrapping_mul(0x0000_0100_0000_01B3).rotate_left(23)
    });
    // Odd: noise is even, so a byte that was never written cannot look right.
    u8::try_from((mixed >> 40) & 0xFF).unwrap() | 1
}

fn noise(place: usize) -> u8 {
    u8::try_from((place * 37) % 256).unwrap() & !1
}

impl<'a> Memory<'a> {
    pub(crate) fn new(world: &'a World) -> Self {
        let mut memory = Self {
            world,
            src: BTreeMap::new(),
            dst: BTreeMap::new(),
        };
        each_buffer(&world.prefill, |key, component, heads, pages| {
            let tokens = world.prefill.page_size as usize;
            let bytes = head_bytes(component, key.3);
            let mut buffer = vec![0; pages * tokens * heads.len() * bytes];
            each_head(pages, tokens, heads, |page, token, local, head| {
                let at = place(component.layout, heads.len(), tokens, bytes, (page, token, local));
                for byte in 0..bytes {
                    buffer[at + byte] = value(id(component, &world.prefill, key), key.3, page, token, head, byte);
                }
            });
            memory.src.insert(key, buffer);
        });
        each_buffer(&world.decode, |key, component, heads, pages| {
            let len = pages * world.decode.page_size as usize * heads.len() * head_bytes(component, key.3);
            memory.dst.insert(key, ((0..len).map(noise).collect(), vec![0; len]));
        });
        memory
    }

    /// Copies, or says why that cannot be.
    pub(crate) fn copy(&mut self, (src_rank, dst_rank): (u32, u32), copy: &Descriptor) -> Result<(), String> {
        let component = copy.component as usize;
        let from = self.src.get(&(src_rank, component, copy.src_layer, copy.kv));
        let to = self.dst.get_mut(&(dst_rank, component, copy.dst_layer, copy.kv));
        let (Some(from), Some((to, written))) = (from, to) else {
            return Err(format!("{copy:?} names no buffer"));
        };
        let range = |offset: u64| {
            let offset = usize::try_from(offset).unwrap();
            offset..offset + usize::try_from(copy.nbytes).unwrap()
        };
        let (Some(from), Some(target)) = (from.get(range(copy.src_off)), to.get_mut(range(copy.dst_off))) else {
            return Err(format!("{copy:?} leaves its buffer"));
        };
        target.copy_from_slice(from);
        written[range(copy.dst_off)].iter_mut().for_each(|count| *count += 1);
        Ok(())
    }

    /// Every byte of every destination: the right one where it is needed, written once, and untouched elsewhere.
    pub(crate) fn check(&self) -> Result<(), String> {
        for (key, wanted) in self.expected() {
            let (buffer, written) = &self.dst[&key];
            let found = buffer.iter().copied().zip(written.iter().copied());
            let different = found.zip(&wanted).position(|(found, &wanted)| found != wanted);
            if let Some(at) = different {
                let (found, wanted) = ((buffer[at], written[at]), wanted[at]);
                return Err(format!(
                    "{key:?} byte {at}: (byte, writes) is {found:?}, not {wanted:?}"
                ));
            }
        }
        Ok(())
    }

    /// What each byte of each destination must be, and how often it must have been written.
    pub(crate) fn expected(&self) -> BTreeMap<Key, Vec<(u8, u8)>> {
        let world = self.world;
        let tokens = world.decode.page_size as usize;
        let mut all = BTreeMap::new();
        each_buffer(&world.decode, |key, component, heads, pages| {
            let room = &world.rooms[key.1];
            let bytes = head_bytes(component, key.3);
            let len = pages * tokens * heads.len() * bytes;
            let mut wanted: Vec<(u8, u8)> = (0..len).map(|at| (noise(at), 0)).collect();
            each_head(pages, tokens, heads, |page, token, local, head| {
                let at = place(component.layout, heads.len(), tokens, bytes, (page, token, local));
                let Some(src) = needed(world, component, room, page, token) else {
                    return;
                };
                for byte in 0..bytes {
                    let layer = id(component, &world.decode, key);
                    wanted[at + byte] = (value(layer, key.3, src, token, head, byte), 1);
                }
            });
            all.insert(key, wanted);
        });
        all
    }
}

/// The source's page, where this token of this destination page must be moved.
fn needed(world: &World, component: &Component, room: &Room, page: usize, token: usize) -> Option<usize> {
    let size = world.decode.page_size as usize;
    let is_needed = |token: usize| {
        let (token, seq_len) = (token as u64, world.seq_len);
        let in_window = component.window.is_none_or(|window| token + window >= seq_len);
        token < seq_len && token >= room.prefix && in_window
    };
    let logical = room.dst.iter().enumerate().position(|(logical, &id)| {
        let wanted = if world.exact {
            is_needed(logical * size + token)
        } else {
            (logical * size..(logical + 1) * size).any(is_needed)
        };
        wanted && id == i64::try_from(page).unwrap()
    })?;
    Some(usize::try_from(room.src[logical]).unwrap())
}

fn each_buffer(geometry: &Geometry, mut visit: impl FnMut(Key, &Component, &[u32], usize)) {
    for rank in 0..geometry.tp_size * geometry.pp_size {
        for (index, component) in geometry.components.iter().enumerate() {
            let heads = heads_of(component, geometry.tp_size, rank % geometry.tp_size);
            let pages = usize::try_from(geometry.num_pages[&component.name]).unwrap();
            for layer in 0..component.layers / geometry.pp_size {
                for kv in (0..2).filter(|&kv| head_bytes(component, kv) > 0) {
                    visit((rank, index, layer, kv), component, &heads, pages);
                }
            }
        }
    }
}

fn each_head(pages: usize, tokens: usize, heads: &[u32], mut visit: impl FnMut(usize, usize, usize, u32)) {
    for page in 0..pages {
        for token in 0..tokens {
            for (local, &head) in heads.iter().enumerate() {
                visit(page, token, local, head);
            }
        }
    }
}
