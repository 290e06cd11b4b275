//! The ranks of a random world, with real memory.

use std::time::Duration;

use stagewire_connector::Connector;
use stagewire_connector::kv::{
    CacheMemory, ChunkSpec, KvError, Receiver, ReceiverOptions, RoomSpec, Sender, SenderHandle, SenderOptions,
    SenderRoom,
};
use stagewire_kv::{Engine, Geometry, Kind};
use stagewire_transfer::{Memory, Target};

use super::pages::Pages;
use crate::kv_memory::{Key, Memory as Oracle};
use crate::world::World;

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
pub(crate) fn senders(connector: &Connector, world: &World, oracle: &Oracle<'_>, arena: bool) -> Vec<Sender> {
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
        Sender::new(connector, engine(&world.prefill), rank, cache, SenderOptions::default()).expect("a sender")
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
pub(crate) fn receivers(connector: &Connector, world: &World, oracle: &Oracle<'_>) -> Vec<DecodeRank> {
    let rank = |rank| {
        let keys = keys(&world.decode, rank);
        let pages: Vec<(Key, Pages)> = keys.iter().map(|key| (*key, Pages::new(&oracle.dst[key].0))).collect();
        let targets: Vec<Target> = pages.iter().map(|(_, pages)| pages.target()).collect();
        let cache = CacheMemory::one_each(targets);
        let options = ReceiverOptions::default();
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
