//! What receivers and senders of caches say to each other, inside the payload protocol.
//!
//! The receiver asks, the sender answers. Every question can be asked twice, and none depends on an earlier one but the
//! greeting, which is asked again where the sender does not know the receiver any more.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use stagewire_core::{Capability, Failure, Peer, Record, RegionRef};
use stagewire_kv::Engine;
use uuid::Uuid;

use super::{KvError, RoomId};

/// Version of the handle and of everything below.
const VERSION: u16 = 2;

/// One life of a receiver.
pub(crate) type ReceiverId = Uuid;

/// How decode reaches one rank of prefill: what the two sides must exchange by their own means.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SenderHandle {
    pub(super) peer: Peer,
    pub(super) sender: u64,
    pub(super) right: Capability,
    pub(super) rank: u32,
    /// [`Engine::to_bytes`].
    pub(super) engine: Vec<u8>,
}

impl SenderHandle {
    /// The process.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// The rank, without the offset of data-parallel replicas.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// What prefill is.
    ///
    /// # Errors
    /// [`KvError::Incompatible`] where it speaks another version.
    pub fn engine(&self) -> Result<Engine, KvError> {
        Ok(Engine::from_bytes(&self.engine)?)
    }

    /// The form that crosses processes. It holds the right to read the cache.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = VERSION.to_le_bytes().to_vec();
        bytes.extend(encode(self));
        bytes
    }

    /// What [`SenderHandle::to_bytes`] made.
    ///
    /// # Errors
    /// [`KvError::Handle`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, KvError> {
        let wrong = |problem: String| KvError::Handle { problem };
        match bytes.split_first_chunk::<2>() {
            Some((version, body)) if u16::from_le_bytes(*version) == VERSION => {
                postcard::from_bytes(body).map_err(|error| wrong(error.to_string()))
            }
            Some((version, _)) => {
                let theirs = u16::from_le_bytes(*version);
                Err(wrong(format!("it has version {theirs}, this build {VERSION}")))
            }
            None => Err(wrong(format!("it has {} bytes", bytes.len()))),
        }
    }
}

/// A question to one sender.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Ask {
    pub(super) sender: u64,
    pub(super) right: Capability,
    pub(super) receiver: ReceiverId,
    pub(super) body: Body,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Body {
    Hello {
        rank: u32,
        engine: Vec<u8>,
    },
    Beat,
    /// What there is of a room beyond what was seen, once there is anything. Makes the attempt the room's reader.
    Room {
        room: RoomId,
        attempt: u64,
        seen: Option<Seen>,
    },
    /// Copies rows of a region into scratch, one after the other. Destination offsets are in the scratch.
    Gather {
        room: RoomId,
        attempt: u64,
        region: u32,
        records: Vec<Record>,
    },
    /// Scratch is not needed any more.
    Free {
        attempt: u64,
        id: u64,
    },
    /// Everything has come. Were the pages kept until now?
    Confirm {
        room: RoomId,
        attempt: u64,
        generation: u64,
    },
    /// The attempt reads nothing any more, and wants nothing any more.
    Leave {
        room: RoomId,
        attempt: u64,
        failure: Failure,
        /// Prefill has ended the room itself, or this rank has told of it before. Where it does not know the attempt, it must
        /// not take it for one of its next room of this number.
        told: bool,
    },
    /// The receiver ends, and asks nothing any more.
    Bye,
}

/// What somebody knows of a room.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Seen {
    pub(super) generation: u64,
    /// The first so many.
    pub(super) chunks: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Answer {
    Welcome(Welcome),
    /// To a greeting: the engines do not fit. To a question about a room or a confirmation: it has failed, or is another one.
    Refused(Failure),
    /// Greet first.
    Stranger,
    /// No such sender, or not the right to it.
    Gone,
    Beat,
    /// `None` where there is no such room yet, or one that others read.
    Room(Option<News>),
    Gathered {
        id: u64,
        region: RegionRef,
    },
    /// Nothing can be gathered: pull row by row.
    NoScratch,
    Freed,
    Confirmed,
    Left,
}

/// Where a sender's cache is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Welcome {
    /// How often it wants to hear of the receiver.
    pub(super) interval_ms: u64,
    pub(super) regions: Vec<RegionRef>,
    /// In the order of [`Engine::buffers`]: (region, first byte, bytes).
    pub(super) places: Vec<(u32, u64, u64)>,
}

/// What there is to know of a sender's room beyond what was seen; of a room that has failed, why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct News {
    /// What is known with it. There may be more, for which another question asks.
    pub(super) seen: Seen,
    pub(super) seq_len: u64,
    /// The last of those that are known with it.
    pub(super) chunks: Vec<Announced>,
    pub(super) failure: Option<Failure>,
}

/// A chunk as it was announced.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Announced {
    pub(super) tokens: (u64, u64),
    /// For each component of the engine, the pages that it has of these tokens.
    pub(super) pages: Vec<Vec<i64>>,
    pub(super) last: bool,
    pub(super) aux: Option<Vec<u8>>,
}

impl Announced {
    /// Entries of page tables, and as much again as one of them for what else there is.
    pub(super) fn entries(&self) -> u64 {
        self.pages.iter().map(|pages| pages.len() as u64).sum::<u64>() + 8
    }
}

pub(super) fn encode<T: Serialize>(message: &T) -> Vec<u8> {
    postcard::to_stdvec(message).expect("plain data always serialises")
}

pub(super) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, postcard::Error> {
    postcard::from_bytes(bytes)
}
