use std::collections::BTreeMap;

use stagewire_core::{Classify, ErrorClass};
use stagewire_kv::Incompatible;
use stagewire_transfer::RegisterError;

use super::RoomId;

/// Why a sender, a receiver or one of their rooms was refused. Nothing has moved, and everything else goes on.
///
/// What ends a room later is a [`Failure`](stagewire_core::Failure), as it may come from another process.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum KvError {
    #[error("the connector is closed; make another one")]
    Closed,
    #[error(transparent)]
    Incompatible(#[from] Incompatible),
    #[error("rank {rank} has {expected} buffers, and memory for {found} was given; `Engine::buffers` lists them")]
    BufferCount { rank: u32, found: usize, expected: usize },
    #[error("component {component:?}, layer {layer}, kv {kv}: {problem}")]
    Buffer {
        component: String,
        kv: u32,
        layer: u32,
        problem: String,
    },
    #[error("two buffers share byte {byte} of memory {memory}")]
    BufferOverlap { memory: usize, byte: u64 },
    #[error("the memory of the cache cannot be registered")]
    Register(#[source] Box<RegisterError>),
    #[error("these bytes are no handle of a sender: {problem}; run the same release on both sides")]
    Handle { problem: String },
    #[error("room {room} is open already; end it first, or take another number")]
    RoomOpen { room: u64 },
    #[error(
        "room {} has begun life {newest}, and life {} comes before that; take a later one", room.number, room.life
    )]
    Superseded { room: RoomId, newest: u64 },
    #[error("room {room}, chunk of tokens {lo} to {hi}: {problem}")]
    Chunk {
        room: u64,
        lo: u64,
        hi: u64,
        problem: String,
    },
    #[error(
        "room {room}: page tables of {seq_len} tokens have {entries} entries, and at most {most} may be; \
         see whether the length is right"
    )]
    Tokens {
        room: u64,
        seq_len: u64,
        entries: u64,
        most: u64,
    },
    #[error("room {room} has ended: {how}")]
    Ended { room: u64, how: String },
    #[error("room {room}: rank {rank} needs bytes of prefill's ranks {needed:?}, and handles of {given:?} were given")]
    Writers {
        room: u64,
        rank: u32,
        needed: Vec<u32>,
        given: Vec<u32>,
    },
    #[error("room {room}: the handles are of different engines, or of one rank twice")]
    Handles { room: u64 },
    #[error(
        "room {room}: page {page} of component {component:?} is still room {by}'s; wait until that one is released"
    )]
    PageInUse {
        room: u64,
        component: String,
        page: i64,
        by: u64,
    },
    #[error("room {room}: {component:?} is no component; there are {known}")]
    Component {
        room: u64,
        component: String,
        known: String,
    },
    #[error("room {room}: {nbytes} bytes go along with it, and at most {most} may")]
    Aux { room: u64, nbytes: usize, most: usize },
}

impl Classify for KvError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Incompatible(source) => source.class(),
            Self::Register(source) => source.class(),
            Self::BufferCount { .. }
            | Self::Buffer { .. }
            | Self::BufferOverlap { .. }
            | Self::Handle { .. }
            | Self::Chunk { .. }
            | Self::Tokens { .. }
            | Self::Writers { .. }
            | Self::Handles { .. }
            | Self::Component { .. }
            | Self::Aux { .. } => ErrorClass::Invalid,
            Self::RoomOpen { .. } | Self::Superseded { .. } | Self::PageInUse { .. } | Self::Ended { .. } => {
                ErrorClass::Conflict
            }
            Self::Closed => ErrorClass::Cancelled,
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::Closed => "kv.closed",
            Self::Incompatible(source) => source.reason(),
            Self::Register(source) => source.reason(),
            Self::BufferCount { .. } | Self::Buffer { .. } | Self::BufferOverlap { .. } => "kv.buffers",
            Self::Handle { .. } => "kv.handle",
            Self::RoomOpen { .. } => "kv.room_open",
            Self::Superseded { .. } => "kv.superseded",
            Self::Chunk { .. } => "kv.chunk",
            Self::Tokens { .. } => "kv.tokens",
            Self::Ended { .. } => "kv.room_ended",
            Self::Writers { .. } | Self::Handles { .. } => "kv.writers",
            Self::PageInUse { .. } => "kv.page_in_use",
            Self::Component { .. } => "kv.unknown_component",
            Self::Aux { .. } => "kv.aux",
        }
    }

    fn details(&self) -> BTreeMap<String, String> {
        let pairs = match self {
            Self::Incompatible(source) => return source.details(),
            Self::Register(source) => return source.details(),
            Self::BufferCount { rank, found, expected } => vec![
                ("rank", rank.to_string()),
                ("found", found.to_string()),
                ("expected", expected.to_string()),
            ],
            Self::Buffer {
                component, kv, layer, ..
            } => vec![
                ("component", component.clone()),
                ("kv", kv.to_string()),
                ("layer", layer.to_string()),
            ],
            Self::BufferOverlap { memory, byte } => vec![("memory", memory.to_string()), ("byte", byte.to_string())],
            Self::Closed | Self::Handle { .. } => vec![],
            Self::RoomOpen { room } | Self::Ended { room, .. } | Self::Handles { room } => {
                vec![("room", room.to_string())]
            }
            Self::Superseded { room, newest } => vec![
                ("room", room.number.to_string()),
                ("life", room.life.to_string()),
                ("newest", newest.to_string()),
            ],
            Self::Chunk { room, lo, hi, .. } => {
                vec![
                    ("room", room.to_string()),
                    ("lo", lo.to_string()),
                    ("hi", hi.to_string()),
                ]
            }
            Self::Tokens {
                room,
                seq_len,
                entries,
                most,
            } => vec![
                ("room", room.to_string()),
                ("seq_len", seq_len.to_string()),
                ("entries", entries.to_string()),
                ("most", most.to_string()),
            ],
            Self::Writers {
                room,
                rank,
                needed,
                given,
            } => vec![
                ("room", room.to_string()),
                ("rank", rank.to_string()),
                ("needed", format!("{needed:?}")),
                ("given", format!("{given:?}")),
            ],
            Self::PageInUse {
                room,
                component,
                page,
                by,
            } => vec![
                ("room", room.to_string()),
                ("component", component.clone()),
                ("page", page.to_string()),
                ("by", by.to_string()),
            ],
            Self::Component { room, component, known } => vec![
                ("room", room.to_string()),
                ("component", component.clone()),
                ("known", known.clone()),
            ],
            Self::Aux { room, nbytes, most } => vec![
                ("room", room.to_string()),
                ("nbytes", nbytes.to_string()),
                ("most", most.to_string()),
            ],
        };
        pairs
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value))
            .collect()
    }
}
