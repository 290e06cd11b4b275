use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::{Capability, Classify, ErrorClass, Incarnation, Manifest, PayloadId, SchemaError, StageName};

/// How a payload gets to its consumer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TransferMode {
    /// The consumer pulls from the producer's memory.
    P2p,
    /// The store pulled from the producer; the consumer pulls from the store.
    Store,
}

impl fmt::Display for TransferMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::P2p => "p2p",
            Self::Store => "store",
        })
    }
}

impl FromStr for TransferMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "p2p" => Ok(Self::P2p),
            "store" => Ok(Self::Store),
            other => Err(format!("unknown transfer mode {other:?}; it is p2p or store")),
        }
    }
}

/// A process on this host, safe against reuse of its pid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ProcessRef {
    /// The pid.
    pub pid: u32,
    /// When it started, in clock ticks since boot: field 22 of `/proc/PID/stat`.
    pub started: u64,
}

/// Where one transport of a peer listens. What the address says is the transport's own affair.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransportAddress {
    /// Name of the transport, such as `shm` or `tcp`.
    pub transport: String,
    /// The transport's own, versioned description of how to reach it.
    pub address: Vec<u8>,
}

/// A process that holds payloads, as others reach it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peer {
    /// Which life of that process.
    pub incarnation: Incarnation,
    /// The process.
    pub process: ProcessRef,
    /// Path of its payload socket, where consumers learn which chunks are visible.
    pub socket: String,
    /// Its transports.
    pub transports: Vec<TransportAddress>,
}

/// Memory of a peer that a transport may read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionRef {
    /// Transport that it is registered with.
    pub transport: String,
    /// Number of the region at its owner.
    pub region: u64,
    /// Which registration under that number.
    pub generation: u64,
    /// The right to read it.
    pub capability: Capability,
    /// Bytes.
    pub len: u64,
}

/// What travels in a queue in place of the payload: small, serialisable, no pickle.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handle {
    /// The payload.
    pub payload: PayloadId,
    /// The request that it belongs to, as the producer names it.
    pub request: String,
    /// Stage that produced it.
    pub stage: StageName,
    /// What it is.
    pub manifest: Manifest,
    /// Straight from the producer, or through a store.
    pub mode: TransferMode,
    /// Who holds the bytes.
    pub holder: Peer,
    /// The right to consume it.
    pub capability: Capability,
    /// One region per tensor, in the order of [`Manifest::tensors`].
    pub regions: Vec<RegionRef>,
}

/// Why bytes are not a handle.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum HandleError {
    #[error("these {len} bytes are not a Stagewire handle")]
    NotAHandle { len: usize },
    #[error("the handle has version {found}; this build reads version {expected}")]
    Version { found: u16, expected: u16 },
    #[error("the handle is truncated or damaged: its checksum is {found:016x}, its bytes give {computed:016x}")]
    Checksum { found: u64, computed: u64 },
    #[error("the handle does not decode: {error}")]
    Malformed { error: String },
    #[error("the handle names {regions} regions for {tensors} tensors")]
    RegionCount { regions: usize, tensors: usize },
    #[error("region {index} of the handle has {found} bytes, its tensor {expected}")]
    RegionSize { index: usize, found: u64, expected: u64 },
    #[error("the handle's manifest is not allowed")]
    Manifest(#[source] SchemaError),
}

impl Classify for HandleError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Version { .. } => ErrorClass::Unsupported,
            Self::Checksum { .. } => ErrorClass::Corrupt,
            _ => ErrorClass::Invalid,
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::Version { .. } => "handle.version",
            _ => "handle.malformed",
        }
    }
}

const MAGIC: [u8; 4] = *b"SWH\n";
const VERSION: u16 = 1;
const HEADER: usize = MAGIC.len() + size_of::<u16>() + size_of::<u64>();

impl Handle {
    /// Encodes: magic, version (u16 LE), xxh3-64 of the rest (u64 LE), postcard.
    ///
    /// # Panics
    /// Never: all parts of a handle can be encoded.
    pub fn to_bytes(&self) -> Vec<u8> {
        let body = postcard::to_stdvec(self).expect("a handle has nothing that postcard cannot encode");
        let mut bytes = Vec::with_capacity(HEADER + body.len());
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&xxh3_64(&body).to_le_bytes());
        bytes.extend_from_slice(&body);
        bytes
    }

    /// Decodes and checks what [`Handle::to_bytes`] made. The checksum finds damage, not forgery: that is what
    /// the capabilities are for.
    ///
    /// # Errors
    /// [`HandleError`]; never a panic, whatever the bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, HandleError> {
        let not_a_handle = HandleError::NotAHandle { len: bytes.len() };
        let rest = bytes.strip_prefix(&MAGIC).ok_or(not_a_handle.clone())?;
        let (version, rest) = rest.split_first_chunk().ok_or(not_a_handle.clone())?;
        let found = u16::from_le_bytes(*version);
        if found != VERSION {
            return Err(HandleError::Version {
                found,
                expected: VERSION,
            });
        }
        let (checksum, body) = rest.split_first_chunk().ok_or(not_a_handle)?;
        let (found, computed) = (u64::from_le_bytes(*checksum), xxh3_64(body));
        if found != computed {
            return Err(HandleError::Checksum { found, computed });
        }
        let handle: Self = postcard::from_bytes(body).map_err(|error| HandleError::Malformed {
            error: error.to_string(),
        })?;
        handle.check()?;
        Ok(handle)
    }

    fn check(&self) -> Result<(), HandleError> {
        self.manifest.check().map_err(HandleError::Manifest)?;
        let (regions, tensors) = (self.regions.len(), self.manifest.tensors().count());
        if regions != tensors {
            return Err(HandleError::RegionCount { regions, tensors });
        }
        for (index, (region, tensor)) in self.regions.iter().zip(self.manifest.tensors()).enumerate() {
            let (found, expected) = (region.len, tensor.nbytes().0);
            if found != expected {
                return Err(HandleError::RegionSize { index, found, expected });
            }
        }
        Ok(())
    }
}
