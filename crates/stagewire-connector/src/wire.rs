//! The payload protocol: length-delimited postcard, first a greeting from each side. On one host it goes over a Unix
//! socket, between hosts over a stream of the network, which has proved the token before.
//!
//! ```text
//! consumer                         holder
//! Hello ─────────────────────────▶
//!        ◀───────────────────────── Greeting
//! Watch(id, payload, capability) ─▶
//!        ◀───────────────────────── State(id) whenever it changes, of each chunk once, until it ends; or Refused(id)
//! Finish(id) | Leave(id) ─────────▶
//!        ◀───────────────────────── Finished(id), after Finish
//! Put(id, handle, bytes, token) ──▶
//!        ◀───────────────────────── Stored(id) | Refused(id)
//! Undo(payload, right) ───────────▶ where a payload that was complete is not to be kept after all
//! Reserve(id, bytes) ─────────────▶
//!        ◀───────────────────────── Reserved(id) | Refused(id); room for a put, until it, or Leave(id)
//! Release(id, payload, capability, token) ▶
//!        ◀───────────────────────── Finished(id) | Refused(id)
//! Kv(id, question) ───────────────▶
//!        ◀───────────────────────── Kv(id, answer)
//! ```

use std::ops::Range;

use bytes::Bytes;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use stagewire_core::{
    Capability, Failure, Incarnation, MAX_METADATA, Manifest, PayloadId, Peer, ProcessRef, RegionRef, Token,
};
use stagewire_transfer::empty_region;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::codec::{FramedRead, FramedWrite, LengthDelimitedCodec};

use crate::Owner;

/// Version of everything below; both sides refuse another one.
pub(crate) const VERSION: u16 = 7;
const MAGIC: [u8; 4] = *b"SWC\n";
/// A handle holds a manifest, whose metadata may be large; the rest of a frame is small.
const MAX_FRAME: usize = MAX_METADATA + (16 << 20);

/// Payloads of at most so many bytes go along with the put, and with the answer to who reads them from a store: to have the
/// other side pin and pull them takes further exchanges.
pub(crate) const SENT_ALONG: u64 = 64 << 10;

/// Who this process is, on the payload socket.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Me {
    pub(crate) incarnation: Incarnation,
    pub(crate) process: ProcessRef,
    pub(crate) uid: u32,
}

/// The first frame of who connects.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    magic: [u8; 4],
    version: u16,
    pub(crate) from: Incarnation,
    pub(crate) process: ProcessRef,
    pub(crate) to: Incarnation,
}

/// The first frame of who listens. Another version may add variants, not move these.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Greeting {
    Welcome,
    Version(u16),
    Incarnation(Incarnation),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Request {
    Watch {
        id: u32,
        payload: PayloadId,
        capability: Capability,
        /// The handle is one of another holder, or does not say where the bytes are: the consumer must be told.
        moved: bool,
        /// The consumer copies: where there are at most [`SENT_ALONG`] bytes and all are complete, it may be sent them at once.
        copies: bool,
    },
    /// The consumer has every byte that it wants.
    Finish { id: u32 },
    /// Whoever asked goes away: the consumer without having finished, a put that is under way, reserved room.
    Leave { id: u32 },
    /// Keeps room free for a put.
    Reserve { id: u32, nbytes: u64, wait_ms: u64 },
    /// Ends a payload by name.
    Release {
        id: u32,
        payload: PayloadId,
        capability: Capability,
        /// Of the attempt that put it: one that belongs to an orchestrator is not for everybody to end who may read it.
        token: Option<Token>,
    },
    Put {
        id: u32,
        /// `stagewire_core::Handle::to_bytes`. The payload keeps its capability, so that this handle finds it in the store.
        #[serde(with = "raw")]
        handle: Vec<u8>,
        bytes: PutBytes,
        /// With which the store pulls the payload from its producer, and with which that one undoes the put.
        right: Capability,
        token: Option<Token>,
        owner: Owner,
        /// How much of the payload's life is left; `None` where it does not expire.
        expires_ms: Option<u64>,
        wait_ms: u64,
        /// The id under which room was reserved for it.
        reserved: Option<u32>,
    },
    /// A question to a sender of caches: see `kv::protocol`.
    Kv {
        id: u32,
        #[serde(with = "raw")]
        body: Vec<u8>,
    },
    /// Takes back a put of a payload that was complete: its producer ended it before it heard of it. Has no answer.
    Undo { payload: PayloadId, right: Capability },
}

/// How the bytes of a put get to the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum PutBytes {
    /// All of them, tensor after tensor.
    Sent(#[serde(with = "raw")] Vec<u8>),
    /// All are complete at the producer, which lets the store copy them.
    Complete,
    /// The store consumes the payload as others do, and asks at the end whether it is to keep it.
    Consumed,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Reply {
    State {
        id: u32,
        state: State,
        /// All bytes of the payload, tensor after tensor; most often none.
        #[serde(with = "raw")]
        bytes: Vec<u8>,
    },
    Finished {
        id: u32,
    },
    Stored {
        id: u32,
        #[serde(with = "raw")]
        handle: Vec<u8>,
        /// The right of the put with which who asked takes it back where it does not want it any more. Of a payload that the
        /// store has consumed, that is settled.
        undo: Option<Capability>,
    },
    Reserved {
        id: u32,
    },
    Kv {
        id: u32,
        #[serde(with = "raw")]
        body: Vec<u8>,
    },
    Refused {
        id: u32,
        refusal: Refusal,
    },
}

impl Reply {
    pub(crate) const fn id(&self) -> u32 {
        match self {
            Self::State { id, .. }
            | Self::Finished { id }
            | Self::Stored { id, .. }
            | Self::Reserved { id }
            | Self::Kv { id, .. }
            | Self::Refused { id, .. } => *id,
        }
    }
}

/// What a consumer is told of a payload: of each chunk once.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct State {
    /// Chunks that became complete since the last of these.
    pub(crate) complete: Vec<Range<u32>>,
    /// Digest of each of them, where its producer wants them compared; else empty.
    pub(crate) digests: Vec<u64>,
    pub(crate) end: Option<End>,
    /// A store has it, and not the memory of its producer.
    pub(crate) stored: bool,
    /// Where its bytes are, where that is not what the handle says: it was brought back from a spill file, or its holder
    /// was started anew.
    pub(crate) regions: Option<Vec<RegionRef>>,
}

/// Regions that nobody has: where the bytes are is said once somebody asks for them.
pub(crate) fn nowhere(manifest: &Manifest) -> Vec<RegionRef> {
    let region = |len| RegionRef {
        len,
        ..empty_region("shm")
    };
    manifest.tensors().map(|tensor| region(tensor.nbytes().0)).collect()
}

/// Whether this is one of [`nowhere`] that has bytes.
pub(crate) const fn is_nowhere(region: &RegionRef) -> bool {
    region.region == u64::MAX && region.len > 0
}

/// Why a payload gets no more chunks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum End {
    Sealed,
    Failed(Failure),
    Released,
}

/// Why a holder does not do what it was asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Refusal {
    /// Never heard of this payload, or it was released long ago.
    Unknown,
    /// Nobody needed it any more.
    Released,
    /// It was not consumed in time.
    Expired,
    /// It was consumed, and deleted by that.
    Consumed,
    /// It went to a store.
    Moved(Peer),
    /// The capability is not this payload's.
    Denied,
    /// It is deleted on consume, and another consumer is at it.
    Claimed,
    /// This process keeps no store.
    NoStore,
    /// The producer gave up.
    Failed(Failure),
    /// A put that failed.
    Put(Failure),
    /// The payload is not for who asks to end.
    Fenced(Failure),
}

impl Hello {
    pub(crate) const fn new(me: Me, to: Incarnation) -> Self {
        Self {
            magic: MAGIC,
            version: VERSION,
            from: me.incarnation,
            process: me.process,
            to,
        }
    }

    /// Reads a hello of any version: `Err` holds the other side's version where it is not ours.
    pub(crate) fn decode(frame: &[u8]) -> Result<Result<Self, u16>, Malformed> {
        let ((magic, version), _) = postcard::take_from_bytes::<([u8; 4], u16)>(frame).map_err(Malformed::from)?;
        if magic != MAGIC {
            return Err(Malformed("it does not begin as a Stagewire connection does".to_owned()));
        }
        if version != VERSION {
            return Ok(Err(version));
        }
        decode(frame).map(Ok)
    }
}

/// A frame that is not what the protocol says.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("malformed frame: {0}")]
pub(crate) struct Malformed(String);

impl From<postcard::Error> for Malformed {
    fn from(error: postcard::Error) -> Self {
        Self(error.to_string())
    }
}

pub(crate) fn encode<T: Serialize>(message: &T) -> Bytes {
    postcard::to_stdvec(message)
        .expect("frames hold nothing that postcard cannot encode")
        .into()
}

/// Bytes of a frame's length, big-endian, as [`codec`] has it.
const HEAD: usize = 4;

/// A message as it goes over the socket, its length before it; `None` where it is too long.
pub(crate) fn frame<T: Serialize>(message: &T) -> Option<Bytes> {
    let mut room = Vec::with_capacity(1024);
    room.extend([0; HEAD]);
    let mut frame = postcard::to_extend(message, room).expect("frames hold nothing that postcard cannot encode");
    let len = frame.len() - HEAD;
    let head = u32::try_from(len).ok().filter(|_| len <= MAX_FRAME)?;
    frame[..HEAD].copy_from_slice(&head.to_be_bytes());
    Some(frame.into())
}

/// Whether these bytes begin with a whole frame.
pub(crate) fn begins_with_frame(bytes: &[u8]) -> bool {
    let whole = |(head, rest): (&[u8; HEAD], &[u8])| u32::from_be_bytes(*head) as usize <= rest.len();
    bytes.split_first_chunk().is_some_and(whole)
}

pub(crate) fn decode<T: DeserializeOwned>(frame: &[u8]) -> Result<T, Malformed> {
    postcard::from_bytes(frame).map_err(Malformed::from)
}

pub(crate) fn codec() -> LengthDelimitedCodec {
    LengthDelimitedCodec::builder().max_frame_length(MAX_FRAME).new_codec()
}

/// Bytes as one piece: serde takes them for a list of numbers by itself.
mod raw {
    use serde::de::{Error, Visitor};
    use serde::{Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(bytes)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
        deserializer.deserialize_byte_buf(Raw)
    }

    struct Raw;

    impl Visitor<'_> for Raw {
        type Value = Vec<u8>;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("bytes")
        }

        fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<Vec<u8>, E> {
            Ok(bytes.to_vec())
        }
    }
}

/// Bytes that are read at once: many small frames, or one that a payload has come along with.
const READ_AT_ONCE: usize = 64 << 10;

/// Frames from the other side, over either socket.
pub(crate) type Reader = FramedRead<Box<dyn AsyncRead + Send + Unpin>, LengthDelimitedCodec>;
/// Frames to the other side.
pub(crate) type Writer = FramedWrite<Box<dyn AsyncWrite + Send + Unpin>, LengthDelimitedCodec>;

pub(crate) fn framed(
    read: impl AsyncRead + Send + Unpin + 'static,
    write: impl AsyncWrite + Send + Unpin + 'static,
) -> (Reader, Writer) {
    let (read, write): (Box<dyn AsyncRead + Send + Unpin>, Box<dyn AsyncWrite + Send + Unpin>) =
        (Box::new(read), Box::new(write));
    let reader = FramedRead::with_capacity(read, codec(), READ_AT_ONCE);
    (reader, FramedWrite::new(write, codec()))
}

#[cfg(test)]
mod tests {
    use stagewire_core::{DType, Entry, EntryValue, PayloadKind, TensorSpec};

    use super::*;

    fn incarnation(id: u128) -> Incarnation {
        format!("{id:032x}").parse().expect("an id")
    }

    #[test]
    fn a_hello_of_another_version_is_told_apart_from_rubbish() {
        let me = Me {
            incarnation: incarnation(1),
            process: ProcessRef { pid: 7, started: 9 },
            uid: 0,
        };
        let hello = Hello::new(me, incarnation(2));
        assert_eq!(Hello::decode(&encode(&hello)), Ok(Ok(hello.clone())));
        let newer = Hello {
            version: 9,
            ..hello.clone()
        };
        let mut frame = encode(&newer).to_vec();
        frame.extend_from_slice(b"and more that this build does not know");
        assert_eq!(Hello::decode(&frame), Ok(Err(9)));
        assert!(Hello::decode(b"GET / HTTP/1.1").is_err());
        assert!(Hello::decode(&encode(&hello)[..9]).is_err());
    }

    #[test]
    fn an_empty_tensor_is_where_it_is_said_to_be() {
        let entry = |len: u64| Entry {
            name: len.to_string(),
            value: EntryValue::Tensor(TensorSpec::new(DType::U8, [len]).expect("small")),
        };
        let manifest = Manifest::new(PayloadKind::Latent, vec![entry(0), entry(4)]).expect("names differ");
        let told = nowhere(&manifest);
        assert_eq!(told.iter().map(is_nowhere).collect::<Vec<_>>(), [false, true]);
        assert_eq!(told[0], empty_region("shm"));
    }

    #[test]
    fn damaged_frames_are_errors_not_panics() {
        let frame = encode(&Request::Watch {
            id: 7,
            payload: "00000000-0000-0000-0000-000000000009".parse().expect("an id"),
            capability: Capability::from_random([3; 16]),
            moved: true,
            copies: false,
        });
        for len in 0..frame.len() {
            assert!(decode::<Request>(&frame[..len]).is_err(), "{len} bytes decoded");
        }
        assert!(decode::<Reply>(&[0xFF; 40]).is_err());
    }
}
