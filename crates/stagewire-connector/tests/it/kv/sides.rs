//! The ranks of a random world, with real memory.

use std::time::Duration;

use stagewire_connector::Connector;
use stagewire_connector::kv::{
    CacheMemory, ChunkSpec, Heartbeat, KvError, Receiver, ReceiverOptions, RoomSpec, Sender, SenderHandle,
    SenderOptions, SenderRoom,
};
use stagewire_core::DType;
use stagewire_kv::{Component, Engine, Geometry, Kind};
use stagewire_transfer::{Memory, Target};

use super::pages::Pages;
use crate::kv_memory::{Key, Memory as Oracle};
use crate::world::{Room, World};

/// Stands for [`halves`] where a seed is expected.
pub(crate) const HALVES: u64 = u64::MAX;

/// The world of a seed. Its chunks have tokens, but for that of an empty sequence.
pub(crate) fn world(seed: u64) -> World {
    if seed == HALVES {
        return halves();
    }
    let mut world = World::roll(seed);
    world.chunks.dedup();
    if world.chunks.len() == 1 {
        world.chunks.push(world.seq_len);
    }
    world
}

/// Two ranks of prefill with half of the heads each, one of decode; full layers and a window, two chunks.
fn halves() -> World {
    let full = Component::mha("full", 2, 4, [8, 4], DType::BF16);
    let swa = Component {
        window: Some(5),
        ..Component::mha("swa", 2, 2, [8, 8], DType::U8)
    };
    let mut prefill = Geometry::new(2, 4, vec![full, swa]);
    for name in ["full", "swa"] {
        prefill.num_pages.insert(name.to_owned(), 9);
    }
    let decode = Geometry {
        tp_size: 1,
        ..prefill.clone()
    };
    let room = |src: [i64; 4], dst: [i64; 4]| Room {
        prefix: 0,
        src: src.to_vec(),
        dst: dst.to_vec(),
    };
    World {
        prefill,
        decode,
        seq_len: 16,
        exact: false,
        chunks: vec![0, 8, 16],
        rooms: vec![room([5, 6, 8, 1], [1, 2, 3, 7]), room([-1, -1, 3, 4], [-1, -1, 2, 1])],
    }
}

pub(crate) fn engine(geometry: &Geometry) -> Engine {
    Engine::new(geometry.clone()).expect("a geometry")
}

fn ranks(geometry: &Geometry) -> u32 {
    geometry.tp_size * geometry.pp_size
}

/// The keys of a rank's buffers, in the order in which an engine lists them.
fn keys(geometry: &Geometry, rank: u32) -> Vec<Key> {
    let buffers = engine(geometry).buffers(rank).expect("it splits");
    let key = |buffer: &stagewire_kv::RankBuffer| (rank, buffer.component as usize, buffer.layer, buffer.kv);
    buffers.iter().map(key).collect()
}

/// Every rank of prefill, with the bytes that the oracle has for it.
pub(crate) fn senders(
    connector: &Connector,
    world: &World,
    oracle: &Oracle<'_>,
    arena: bool,
    heartbeat: Heartbeat,
) -> Vec<Sender> {
    let options = SenderOptions {
        heartbeat,
        ..SenderOptions::default()
    };
    let sender = |rank| {
        let memory = |key: &Key| -> Memory {
            let bytes = &oracle.src[key];
            if arena {
                let mut extent = connector.host().arena().allocate(bytes.len() as u64).expect("room");
                extent.copy_from_slice(bytes);
                extent.freeze().into()
            } else {
                Pages::new(bytes).memory()
            }
        };
        let memories: Vec<Memory> = keys(&world.prefill, rank).iter().map(memory).collect();
        let cache = CacheMemory::one_each(memories);
        Sender::new(connector, engine(&world.prefill), rank, cache, options.clone()).expect("a sender")
    };
    (0..ranks(&world.prefill)).map(sender).collect()
}

/// Announces a room of the world, chunk by chunk.
pub(crate) fn announce(room: &SenderRoom, world: &World) -> Result<(), KvError> {
    for two in world.chunks.windows(2) {
        room.send(chunk(world, two[0], two[1]))?;
    }
    Ok(())
}

/// One chunk of the world; the last one where it ends the sequence and no other follows.
pub(crate) fn chunk(world: &World, lo: u64, hi: u64) -> ChunkSpec {
    let page = u64::from(world.prefill.page_size);
    let last = hi == world.seq_len && world.chunks[world.chunks.len() - 2] == lo;
    let mut spec = ChunkSpec::new(lo..hi);
    if last {
        spec = spec.last().aux(world.seq_len.to_le_bytes());
    }
    for (component, room) in world.prefill.components.iter().zip(&world.rooms) {
        let logical = match component.window.is_some() || component.kind == Kind::Mamba {
            true if last => component.pages(world.prefill.page_size, world.seq_len),
            true => continue,
            false if lo == hi => continue,
            false => lo / page..hi.div_ceil(page),
        };
        let range = usize::try_from(logical.start).expect("small")..usize::try_from(logical.end).expect("small");
        spec = spec.pages(&component.name, &room.src[range]);
    }
    spec
}

/// One rank of decode.
pub(crate) struct DecodeRank {
    pub(crate) receiver: Receiver,
    pages: Vec<(Key, Pages)>,
}

/// Every rank of decode, full of noise.
pub(crate) fn receivers(
    connector: &Connector,
    world: &World,
    oracle: &Oracle<'_>,
    heartbeat: Heartbeat,
) -> Vec<DecodeRank> {
    let rank = |rank| {
        let keys = keys(&world.decode, rank);
        let pages: Vec<(Key, Pages)> = keys.iter().map(|key| (*key, Pages::new(&oracle.dst[key].0))).collect();
        let targets: Vec<Target> = pages.iter().map(|(_, pages)| pages.target()).collect();
        let cache = CacheMemory::one_each(targets);
        let options = ReceiverOptions {
            heartbeat,
            ..ReceiverOptions::default()
        };
        let receiver = Receiver::new(connector, engine(&world.decode), rank, cache, options).expect("a receiver");
        DecodeRank { receiver, pages }
    };
    (0..ranks(&world.decode)).map(rank).collect()
}

/// What decode wants of a world.
pub(crate) fn wants(room: u64, world: &World, handles: &[SenderHandle]) -> RoomSpec {
    let mut spec = RoomSpec::new(room, handles, world.seq_len).within(Duration::from_secs(20));
    spec.exact_window = world.exact;
    for (component, room) in world.decode.components.iter().zip(&world.rooms) {
        spec = spec
            .pages(&component.name, room.dst.clone())
            .prefix(&component.name, room.prefix);
    }
    spec
}

/// As before the first room.
pub(crate) fn reset(ranks: &[DecodeRank], oracle: &Oracle<'_>) {
    for (key, pages) in ranks.iter().flat_map(|rank| &rank.pages) {
        pages.write(0, &oracle.dst[key].0);
    }
}

/// Every byte is the right one, or untouched.
pub(crate) fn check(ranks: &[DecodeRank], oracle: &Oracle<'_>) -> Result<(), String> {
    let expected = oracle.expected();
    for (key, pages) in ranks.iter().flat_map(|rank| &rank.pages) {
        let found = pages.read();
        let wanted = &expected[key];
        if let Some(at) = found
            .iter()
            .zip(wanted)
            .position(|(found, (wanted, _))| found != wanted)
        {
            return Err(format!("{key:?} byte {at} is {}, not {}", found[at], wanted[at].0));
        }
    }
    Ok(())
}
