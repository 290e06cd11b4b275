use std::collections::BTreeMap;
use std::io;
use std::time::Duration;

use stagewire_core::{Classify, Device, ErrorClass, Incarnation, RecordError};

use super::TargetError;

/// Why a pin, pull, push or map ended without success. No byte of a pull's destination counts as written.
///
/// A batch ends as one: what is wrong with one record fails all of them, and [`TransferError::record`] says which it was.
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
    #[error("record {index} of the batch: {error}")]
    Record {
        index: usize,
        #[source]
        error: RecordError,
    },
    #[error("region {region} of peer {peer} is read-only: it was not registered from `Memory::Writable`")]
    ReadOnly { peer: Incarnation, region: u64 },
    #[error(
        "whether {bytes} bytes were written into region {region} of peer {peer} (pid {pid}) is unknown: {how}; \
         they may still be written until that region is released"
    )]
    InDoubt {
        peer: Incarnation,
        pid: u32,
        region: u64,
        bytes: u64,
        how: String,
    },
    #[error(
        "bytes of region {region} of peer {peer} arrived changed, in record {record} of the batch or, in the same frame, \
         right behind it: their digest is {found:016x}, sent was {expected:016x}"
    )]
    Digest {
        peer: Incarnation,
        region: u64,
        record: usize,
        expected: u64,
        found: u64,
    },
    #[error(
        "bytes of a push into region {region} of peer {peer} arrived changed, in record {record} of the batch or, in the \
         same frame, right behind it; nothing was written"
    )]
    Corrupt {
        peer: Incarnation,
        region: u64,
        record: usize,
    },
    #[error(
        "{transport} moves host memory only, this is on {device}; nixl and mooncake-engine reach devices, or copy it to the host"
    )]
    Device { transport: &'static str, device: Device },
    #[error("peer {peer} has {held} {what} and takes {most} at most: let go of some, or raise its `NetworkLimits`")]
    Full {
        peer: Incarnation,
        what: &'static str,
        held: u64,
        most: u64,
    },
    #[error(
        "peer {peer} gave a push into region {region} up after {after:?}: from its turn on, it gets 10 s and another one \
         for each 4 MiB; nothing was written"
    )]
    TooSlow {
        peer: Incarnation,
        region: u64,
        after: Duration,
    },
    #[error("records {first} and {second} of the batch both write destination byte {byte}")]
    Overlap { byte: u64, first: usize, second: usize },
    #[error("the batch has {rows} rows, at most {max} are allowed; use several batches, or fewer, wider rows")]
    TooManyRows { rows: u64, max: u64 },
    #[error("the destination cannot take these records")]
    Target(#[from] TargetError),
    #[error(
        "peer {peer} (pid {pid}) cannot be read at byte {offset} of region {region}, for record {record} of the batch: it \
         registered memory that is not mapped"
    )]
    Unreadable {
        peer: Incarnation,
        pid: u32,
        region: u64,
        record: usize,
        offset: u64,
    },
    #[error("{transport} cannot {ability}; {instead}")]
    Unsupported {
        transport: &'static str,
        ability: &'static str,
        instead: &'static str,
    },
    #[error("{transport} cannot {what} for region {region} of peer {peer}{}: {problem}", of_batch(*record))]
    Backend {
        transport: &'static str,
        peer: Incarnation,
        region: u64,
        what: &'static str,
        /// Where the backend says which it was; NIXL does not.
        record: Option<usize>,
        problem: String,
    },
    #[error(
        "the engine failed {failures} times within {within:?} to reach segment {segment} of peer {peer}, which lives: {advice}"
    )]
    EngineStuck {
        peer: Incarnation,
        segment: String,
        failures: u32,
        within: Duration,
        advice: String,
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

impl TransferError {
    /// The record of the batch that the error is about, by its index; the first where it is about several. `None` where it
    /// is about the batch as a whole, as when the peer is lost.
    pub fn record(&self) -> Option<usize> {
        match self {
            Self::Record { index, .. } => Some(*index),
            Self::Digest { record, .. }
            | Self::Corrupt { record, .. }
            | Self::Unreadable { record, .. }
            | Self::Overlap { first: record, .. } => Some(*record),
            Self::Backend { record, .. } => *record,
            _ => None,
        }
    }
}

fn of_batch(record: Option<usize>) -> String {
    record.map_or_else(String::new, |record| format!(", in record {record} of the batch"))
}

impl Classify for TransferError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::PeerLost { .. }
            | Self::Io { .. }
            | Self::InDoubt { .. }
            | Self::Backend { .. }
            | Self::EngineStuck { .. } => ErrorClass::Unavailable,
            Self::Full { .. } => ErrorClass::Exhausted,
            Self::Deadline { .. } | Self::TooSlow { .. } => ErrorClass::Deadline,
            Self::UnknownRegion { .. } | Self::Released { .. } | Self::Generation { .. } => ErrorClass::NotFound,
            Self::Capability { .. } | Self::ReadOnly { .. } => ErrorClass::Denied,
            Self::Length { .. } | Self::Transport { .. } | Self::Overlap { .. } | Self::TooManyRows { .. } => {
                ErrorClass::Invalid
            }
            Self::Record { error, .. } => error.class(),
            Self::Digest { .. } | Self::Corrupt { .. } => ErrorClass::Corrupt,
            Self::Target(error) => error.class(),
            Self::Unreadable { .. } => ErrorClass::Internal,
            Self::Unsupported { .. } | Self::Device { .. } => ErrorClass::Unsupported,
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
            Self::Record { error, .. } => error.reason(),
            Self::ReadOnly { .. } => "transfer.read_only",
            Self::InDoubt { .. } => "transfer.in_doubt",
            Self::Digest { .. } | Self::Corrupt { .. } => "transfer.digest",
            Self::Device { .. } => "transfer.device",
            Self::Backend { .. } => "transfer.backend",
            Self::EngineStuck { .. } => "transfer.engine_stuck",
            Self::Full { .. } => "transfer.full",
            Self::TooSlow { .. } => "transfer.too_slow",
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
            Self::PeerLost { peer, .. } | Self::EngineStuck { peer, .. } | Self::Full { peer, .. } => {
                (Some(peer), None)
            }
            Self::Deadline { peer, region, .. }
            | Self::UnknownRegion { peer, region }
            | Self::Released { peer, region }
            | Self::Generation { peer, region, .. }
            | Self::Capability { peer, region }
            | Self::Length { peer, region, .. }
            | Self::Transport { peer, region, .. }
            | Self::Unreadable { peer, region, .. }
            | Self::ReadOnly { peer, region }
            | Self::InDoubt { peer, region, .. }
            | Self::Digest { peer, region, .. }
            | Self::Corrupt { peer, region, .. }
            | Self::Backend { peer, region, .. }
            | Self::TooSlow { peer, region, .. }
            | Self::Io { peer, region, .. } => (Some(peer), Some(region)),
            _ => (None, None),
        };
        let details = [
            ("peer", peer.map(ToString::to_string)),
            ("region", region.map(ToString::to_string)),
            ("record", self.record().map(|record| record.to_string())),
        ];
        let given = details
            .into_iter()
            .filter_map(|(name, value)| Some((name.to_owned(), value?)));
        given.collect()
    }
}
