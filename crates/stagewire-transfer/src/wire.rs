//! What two hosts say to each other on a data socket.
//!
//! One `SOCK_SEQPACKET` packet is one frame. Each side begins with a greeting: [`MAGIC`], the version (u16, little
//! endian), then postcard; so a reader of any version can tell a foreign one. All later frames are bare postcard:
//! [`Request`] from the reader of memory, [`Reply`] from its owner. The descriptor of a segment travels with the first
//! reply that names it.

mod socket;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use stagewire_core::{Capability, Incarnation, ProcessRef};

pub(crate) use socket::{Received, Socket};

/// Version of the frames and of the address.
pub(crate) const VERSION: u16 = 2;

const MAGIC: [u8; 4] = *b"SWD\n";

/// No frame is longer.
pub(crate) const MAX_FRAME: usize = 4096;

/// Segments that one [`Reply::Retired`] names at most.
pub(crate) const MAX_RETIRED: usize = 256;

/// How memory was registered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Kind {
    Shm,
    Cma,
    Tcp,
    Mooncake,
    Nixl,
    Engine,
}

impl Kind {
    pub(crate) const COUNT: usize = 6;

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Cma => "cma",
            Self::Tcp => "tcp",
            Self::Mooncake => "mooncake",
            Self::Nixl => "nixl",
            Self::Engine => "mooncake-engine",
        }
    }
}

/// How a host is reached, as it stands in [`TransportAddress`](stagewire_core::TransportAddress).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Address {
    pub(crate) host: String,
    pub(crate) socket: String,
}

/// The reader's greeting.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub(crate) expects: Incarnation,
    pub(crate) process: ProcessRef,
}

/// The owner's greeting.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Welcome {
    Open {
        process: ProcessRef,
        /// Address and value of a word by which cma is tried out.
        canary: (u64, u64),
    },
    /// Another incarnation listens here.
    Incarnation {
        found: Incarnation,
    },
    Refused {
        problem: String,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Request {
    Pin {
        request: u64,
        kind: Kind,
        region: u64,
        generation: u64,
        capability: Capability,
    },
    /// Asks whether the pin has been held until now.
    Confirm {
        request: u64,
        pin: u64,
    },
    Unpin {
        pin: u64,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Reply {
    Pinned {
        request: u64,
        pin: u64,
        place: Place,
        len: u64,
        writable: bool,
    },
    Confirmed {
        request: u64,
    },
    Refused {
        request: u64,
        refusal: Refusal,
    },
    /// These segments hold nothing any more and are never named again.
    Retired {
        segments: Vec<u64>,
    },
}

/// Where a pinned region is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Place {
    Segment {
        segment: u64,
        segment_len: u64,
        offset: u64,
    },
    /// An address in the owner's process, or one that stands for it.
    Address(u64),
    /// The owner itself reads and writes it; the pin's number says which.
    Served,
}

/// Why a request was refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Refusal {
    Unknown,
    Released,
    Generation { current: u64 },
    Capability,
    Registered { kind: Kind },
    NotHeld,
}

/// Why bytes are not what they should be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum WireError {
    #[error("{len} bytes that are not a greeting of a Stagewire data socket")]
    NotAGreeting { len: usize },
    #[error("version {found} of the data protocol, this build speaks {VERSION}")]
    Version { found: u16 },
    #[error("a frame that does not decode: {0}")]
    Malformed(postcard::Error),
    #[error("a frame with {0} bytes too many")]
    Trailing(usize),
}

pub(crate) fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    postcard::to_stdvec(value).expect("frames have nothing that postcard cannot encode")
}

pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, WireError> {
    let (value, rest) = postcard::take_from_bytes(bytes).map_err(WireError::Malformed)?;
    if rest.is_empty() {
        Ok(value)
    } else {
        Err(WireError::Trailing(rest.len()))
    }
}

/// Encodes with magic and version in front.
pub(crate) fn encode_versioned<T: Serialize>(value: &T) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&encode(value));
    bytes
}

/// Decodes what [`encode_versioned`] of this version made.
pub(crate) fn decode_versioned<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, WireError> {
    let rest = bytes.strip_prefix(&MAGIC).and_then(|rest| rest.split_first_chunk());
    let (version, rest) = rest.ok_or(WireError::NotAGreeting { len: bytes.len() })?;
    match u16::from_le_bytes(*version) {
        VERSION => decode(rest),
        found => Err(WireError::Version { found }),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_foreign_version_is_told_before_its_content() {
        let mut bytes = encode_versioned(&7_u64);
        assert_eq!(decode_versioned(&bytes), Ok(7_u64));
        bytes.push(0);
        assert_eq!(decode_versioned::<u64>(&bytes), Err(WireError::Trailing(1)));
        bytes[4] = 9;
        bytes.truncate(6);
        assert_eq!(decode_versioned::<u64>(&bytes), Err(WireError::Version { found: 9 }));
        assert_eq!(
            decode_versioned::<u64>(b"GET / HTTP/1.1"),
            Err(WireError::NotAGreeting { len: 14 })
        );
    }

    #[test]
    fn the_longest_frame_fits() {
        let segments = vec![u64::MAX; MAX_RETIRED];
        assert!(encode(&Reply::Retired { segments }).len() <= MAX_FRAME);
    }

    proptest! {
        #[test]
        fn any_bytes_decode_or_fail_but_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            let _ = decode::<Request>(&bytes);
            let _ = decode::<Reply>(&bytes);
            let _ = decode_versioned::<Hello>(&bytes);
            let _ = decode_versioned::<Welcome>(&bytes);
            let _ = decode_versioned::<Address>(&bytes);
        }
    }
}
