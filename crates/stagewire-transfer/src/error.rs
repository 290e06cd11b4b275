use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use stagewire_core::{ByteCount, Classify, Device, ErrorClass, Incarnation, RecordError};

/// Why a [`Host`](crate::Host) did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum StartError {
    #[error(
        "the path of the data socket has {len} bytes, {}; a Unix socket allows {max}: choose a shorter run directory",
        path.display()
    )]
    PathTooLong { path: PathBuf, len: usize, max: usize },
    #[error("{} is not a directory that only this user can enter: {problem}; use `chmod 700` or another directory", path.display())]
    Insecure { path: PathBuf, problem: String },
    #[error("the data socket {} is in use by a living process", path.display())]
    InUse { path: PathBuf },
    #[error("cannot {what} {}", path.display())]
    Io {
        what: &'static str,
        path: PathBuf,
        #[source]
        error: io::Error,
    },
}

impl Classify for StartError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::PathTooLong { .. } => ErrorClass::Invalid,
            Self::Insecure { .. } => ErrorClass::Denied,
            Self::InUse { .. } => ErrorClass::Conflict,
            Self::Io { .. } => ErrorClass::Unavailable,
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::PathTooLong { .. } => "socket.path_too_long",
            Self::Insecure { .. } => "socket.insecure_directory",
            Self::InUse { .. } => "socket.in_use",
            Self::Io { .. } => "socket.io",
        }
    }
}

/// Why the arena gave no memory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum ArenaError {
    #[error("an extent of 0 bytes cannot be allocated")]
    Empty,
    #[error(
        "the arena has no room for {requested}: {allocated} of {limit} are in use, the largest free range has {largest}; \
         raise arena-bytes or release payloads"
    )]
    Exhausted {
        requested: ByteCount,
        allocated: ByteCount,
        limit: ByteCount,
        largest: ByteCount,
    },
    #[error(
        "the arena would need {needed} of fresh memory, this machine has {available} available; \
         lower arena-bytes or free memory"
    )]
    Memory { needed: ByteCount, available: ByteCount },
    #[error("cannot {what} a shared-memory segment of {len}")]
    Segment {
        what: &'static str,
        len: ByteCount,
        #[source]
        error: io::Error,
    },
}

impl Classify for ArenaError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Empty => ErrorClass::Invalid,
            Self::Exhausted { .. } | Self::Memory { .. } => ErrorClass::Exhausted,
            Self::Segment { .. } => ErrorClass::Unavailable,
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::Empty => "arena.empty",
            Self::Exhausted { .. } => "arena.exhausted",
            Self::Memory { .. } => "arena.memory",
            Self::Segment { .. } => "arena.segment",
        }
    }
}

/// Why memory was not registered. The memory comes back with [`RegisterError::into_memory`].
#[derive(Debug, thiserror::Error)]
#[error("cannot register {} bytes with {transport}: {problem}", memory.len())]
pub struct RegisterError {
    transport: &'static str,
    problem: RegisterProblem,
    memory: crate::Memory,
}

/// What stands against a registration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum RegisterProblem {
    #[error("a region of 0 bytes cannot be pinned; describe it with `empty_region`")]
    Empty,
    #[error("the memory is not from this host's arena; copy it into an extent or use cma")]
    NotFromArena,
    #[error("it moves host memory only, this is on {device}; copy it to the host first")]
    Device { device: Device },
    #[error("this host was shut down")]
    ShutDown,
}

impl RegisterError {
    pub(crate) fn new(transport: &'static str, problem: RegisterProblem, memory: crate::Memory) -> Self {
        Self {
            transport,
            problem,
            memory,
        }
    }

    /// What stands against it.
    pub fn problem(&self) -> &RegisterProblem {
        &self.problem
    }

    /// The memory that was to be registered.
    pub fn into_memory(self) -> crate::Memory {
        self.memory
    }
}

impl Classify for RegisterError {
    fn class(&self) -> ErrorClass {
        match self.problem {
            RegisterProblem::Empty => ErrorClass::Invalid,
            RegisterProblem::NotFromArena | RegisterProblem::Device { .. } => ErrorClass::Unsupported,
            RegisterProblem::ShutDown => ErrorClass::Unavailable,
        }
    }

    fn reason(&self) -> &'static str {
        match self.problem {
            RegisterProblem::Empty => "register.empty",
            RegisterProblem::NotFromArena => "register.not_from_arena",
            RegisterProblem::Device { .. } => "register.device",
            RegisterProblem::ShutDown => "register.shut_down",
        }
    }
}

/// Why a peer could not be reached over a transport.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum ConnectError {
    #[error("peer {peer} offers no {transport}; it offers {offered:?}")]
    NotOffered {
        peer: Incarnation,
        transport: &'static str,
        offered: Vec<String>,
    },
    #[error("the {transport} address of peer {peer} does not decode: {problem}")]
    Address {
        peer: Incarnation,
        transport: &'static str,
        problem: String,
    },
    #[error(
        "peer {peer} is on another host or in another pid namespace; {transport} reaches only processes of this one"
    )]
    OtherHost { peer: Incarnation, transport: &'static str },
    #[error("peer {peer} is gone: {how}")]
    Gone { peer: Incarnation, how: String },
    #[error("at {path} another process answers: expected peer {expected}, found {found}")]
    Incarnation {
        path: String,
        expected: Incarnation,
        found: Incarnation,
    },
    #[error("peer {peer} speaks version {found} of the data protocol, this build version {expected}")]
    Version {
        peer: Incarnation,
        found: u16,
        expected: u16,
    },
    #[error("the process behind {path} runs as user {found}, this one as {expected}")]
    User { path: String, found: u32, expected: u32 },
    #[error("peer {peer} refuses: {problem}")]
    Refused { peer: Incarnation, problem: String },
    #[error("this process may not read the memory of peer {peer} (pid {pid}): {reason}")]
    Forbidden {
        peer: Incarnation,
        pid: u32,
        reason: String,
    },
    #[error("peer {peer} did not answer within {after:?}")]
    Deadline { peer: Incarnation, after: Duration },
    #[error("cannot {what} for peer {peer}")]
    Io {
        peer: Incarnation,
        what: &'static str,
        #[source]
        error: io::Error,
    },
}

impl Classify for ConnectError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::NotOffered { .. } | Self::OtherHost { .. } | Self::Version { .. } => ErrorClass::Unsupported,
            Self::Address { .. } => ErrorClass::Invalid,
            Self::Gone { .. } | Self::Incarnation { .. } | Self::Refused { .. } | Self::Io { .. } => {
                ErrorClass::Unavailable
            }
            Self::User { .. } | Self::Forbidden { .. } => ErrorClass::Denied,
            Self::Deadline { .. } => ErrorClass::Deadline,
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::NotOffered { .. } => "connect.not_offered",
            Self::Address { .. } => "connect.address",
            Self::OtherHost { .. } => "connect.other_host",
            Self::Gone { .. } => "peer.lost",
            Self::Incarnation { .. } => "peer.incarnation",
            Self::Version { .. } => "connect.version",
            Self::User { .. } => "connect.user",
            Self::Refused { .. } => "connect.refused",
            Self::Forbidden { .. } => "cma.forbidden",
            Self::Deadline { .. } => "connect.deadline",
            Self::Io { .. } => "connect.io",
        }
    }
}

/// Why a pin, pull or map ended without success. No byte of the destination counts as written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum TransferError {
    #[error("peer {peer} (pid {pid}) was lost: {how}")]
    PeerLost { peer: Incarnation, pid: u32, how: String },
    #[error("peer {peer} (pid {pid}) did not finish {what} of region {region} within {after:?}")]
    Deadline {
        peer: Incarnation,
        pid: u32,
        region: u64,
        what: &'static str,
        after: Duration,
    },
    #[error("peer {peer} has no region {region}")]
    UnknownRegion { peer: Incarnation, region: u64 },
    #[error("region {region} of peer {peer} was released")]
    Released { peer: Incarnation, region: u64 },
    #[error("region {region} of peer {peer} is at generation {current}, the reference names {wanted}")]
    Generation {
        peer: Incarnation,
        region: u64,
        wanted: u64,
        current: u64,
    },
    #[error("the capability for region {region} of peer {peer} is wrong")]
    Capability { peer: Incarnation, region: u64 },
    #[error("region {region} of peer {peer} has {found} bytes, the reference says {wanted}")]
    Length {
        peer: Incarnation,
        region: u64,
        wanted: u64,
        found: u64,
    },
    #[error("region {region} of peer {peer} is registered with {registered}, not with {used}")]
    Transport {
        peer: Incarnation,
        region: u64,
        registered: String,
        used: &'static str,
    },
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error("two records of the batch write destination byte {byte}")]
    Overlap { byte: u64 },
    #[error("the batch has {rows} rows, at most {max} are allowed; pull fewer, wider rows")]
    TooManyRows { rows: u64, max: u64 },
    #[error("the destination cannot take these records")]
    Target(#[from] TargetError),
    #[error(
        "peer {peer} (pid {pid}) cannot be read at byte {offset} of region {region}: it registered memory that is not mapped"
    )]
    Unreadable {
        peer: Incarnation,
        pid: u32,
        region: u64,
        offset: u64,
    },
    #[error("{transport} cannot {ability}; {instead}")]
    Unsupported {
        transport: &'static str,
        ability: &'static str,
        instead: &'static str,
    },
    #[error("cannot {what} for region {region} of peer {peer}")]
    Io {
        peer: Incarnation,
        region: u64,
        what: &'static str,
        #[source]
        error: io::Error,
    },
}

impl Classify for TransferError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::PeerLost { .. } | Self::Io { .. } => ErrorClass::Unavailable,
            Self::Deadline { .. } => ErrorClass::Deadline,
            Self::UnknownRegion { .. } | Self::Released { .. } | Self::Generation { .. } => ErrorClass::NotFound,
            Self::Capability { .. } => ErrorClass::Denied,
            Self::Length { .. } | Self::Transport { .. } | Self::Overlap { .. } | Self::TooManyRows { .. } => {
                ErrorClass::Invalid
            }
            Self::Record(error) => error.class(),
            Self::Target(error) => error.class(),
            Self::Unreadable { .. } => ErrorClass::Internal,
            Self::Unsupported { .. } => ErrorClass::Unsupported,
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::PeerLost { .. } => "peer.lost",
            Self::Deadline { .. } => "transfer.deadline",
            Self::UnknownRegion { .. } => "transfer.region_unknown",
            Self::Released { .. } => "transfer.region_released",
            Self::Generation { .. } => "transfer.generation",
            Self::Capability { .. } => "transfer.capability",
            Self::Length { .. } => "transfer.length",
            Self::Transport { .. } => "transfer.transport",
            Self::Record(error) => error.reason(),
            Self::Overlap { .. } => "transfer.overlap",
            Self::TooManyRows { .. } => "transfer.too_many_rows",
            Self::Target(error) => error.reason(),
            Self::Unreadable { .. } => "transfer.unreadable",
            Self::Unsupported { .. } => "transfer.unsupported",
            Self::Io { .. } => "transfer.io",
        }
    }

    fn details(&self) -> BTreeMap<String, String> {
        let (peer, region) = match self {
            Self::PeerLost { peer, .. } => (peer, None),
            Self::Deadline { peer, region, .. }
            | Self::UnknownRegion { peer, region }
            | Self::Released { peer, region }
            | Self::Generation { peer, region, .. }
            | Self::Capability { peer, region }
            | Self::Length { peer, region, .. }
            | Self::Transport { peer, region, .. }
            | Self::Unreadable { peer, region, .. }
            | Self::Io { peer, region, .. } => (peer, Some(region)),
            _ => return BTreeMap::new(),
        };
        let mut details = BTreeMap::from([("peer".to_owned(), peer.to_string())]);
        if let Some(region) = region {
            details.insert("region".to_owned(), region.to_string());
        }
        details
    }
}

/// Why bytes of a [`Target`](crate::Target) can be neither written nor shown now.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum TargetError {
    #[error("bytes {start} to {end} are outside the {len} bytes of the target")]
    OutOfBounds { start: u64, end: u64, len: u64 },
    #[error("a pull in flight writes bytes {start} to {end} of the target")]
    Busy { start: u64, end: u64 },
    #[error("bytes {start} to {end} of the target were already pulled; reset it before it is used again")]
    Written { start: u64, end: u64 },
    #[error("not all of bytes {start} to {end} of the target were pulled yet")]
    Unwritten { start: u64, end: u64 },
    #[error("cannot allocate {len} bytes of private memory")]
    Memory { len: u64 },
}

impl Classify for TargetError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::OutOfBounds { .. } => ErrorClass::Invalid,
            Self::Busy { .. } | Self::Written { .. } | Self::Unwritten { .. } => ErrorClass::Conflict,
            Self::Memory { .. } => ErrorClass::Exhausted,
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::OutOfBounds { .. } => "target.bounds",
            Self::Busy { .. } => "target.busy",
            Self::Written { .. } => "target.written",
            Self::Unwritten { .. } => "target.unwritten",
            Self::Memory { .. } => "target.memory",
        }
    }
}

/// Why this process cannot read the memory of others with `process_vm_readv`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cross-memory attach does not work here: {reason}")]
pub struct CmaUnavailable {
    pub(crate) reason: String,
}

impl CmaUnavailable {
    /// What forbids it, and what to change.
    pub fn reason_text(&self) -> &str {
        &self.reason
    }
}

impl Classify for CmaUnavailable {
    fn class(&self) -> ErrorClass {
        ErrorClass::Unsupported
    }

    fn reason(&self) -> &'static str {
        "cma.unavailable"
    }
}
