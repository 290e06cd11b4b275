use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use stagewire_core::{ByteCount, Classify, ErrorClass, Failure, PayloadId};
use stagewire_transfer::{ArenaError, RegisterError, TargetError};

use crate::{Digest, Fenced, JournalError, KeeperError, SpillFault, Usage};

/// Why a store did not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum StoreError {
    #[error("the store is shutting down; ask again once it runs")]
    Closed,
    #[error("payload {payload} is in the store already ({}); it was not written again", if *sealed { "sealed" } else { "being written" })]
    Exists { payload: PayloadId, sealed: bool },
    #[error("the store has no payload {payload}: it was deleted, or never came")]
    NotFound { payload: PayloadId },
    #[error("payload {payload} is still being written; it can be read once it is sealed")]
    NotSealed { payload: PayloadId },
    #[error("payload {payload} was refused by the store")]
    Fenced { payload: PayloadId, source: Fenced },
    #[error("payload {payload} of {wanted} is larger than the whole store ({limit}); raise store-bytes")]
    TooLarge {
        payload: PayloadId,
        wanted: ByteCount,
        limit: ByteCount,
    },
    #[error("the store had no room for the {wanted} of payload {payload} within {waited:?}: {usage}")]
    Exhausted {
        payload: PayloadId,
        wanted: ByteCount,
        waited: Duration,
        usage: Box<Usage>,
    },
    #[error("the store ({}) could not reserve {wanted} within {waited:?}: {usage}", usage.limit)]
    Unreserved {
        wanted: ByteCount,
        waited: Duration,
        usage: Box<Usage>,
    },
    #[error("the arena has no room for the {wanted} of payload {payload}")]
    Arena {
        payload: PayloadId,
        wanted: ByteCount,
        source: ArenaError,
    },
    #[error("payload {payload} cannot be offered to other processes")]
    Register { payload: PayloadId, source: RegisterError },
    #[error("payload {payload} could not be written into the store's index")]
    Index { payload: PayloadId, source: JournalError },
    #[error("the keeper did not take the memory of payload {payload}")]
    Keeper { payload: PayloadId, source: KeeperError },
    #[error("payload {payload} has {parts} parts; there is no part {part}")]
    NoSuchPart {
        payload: PayloadId,
        part: usize,
        parts: usize,
    },
    #[error("part {part} of payload {payload} is still being copied into; wait for the copy")]
    Busy { payload: PayloadId, part: usize },
    #[error("part {part} of payload {payload} is not complete; it was not sealed")]
    Unwritten { payload: PayloadId, part: usize },
    #[error("payload {payload} has {parts} parts; {destinations} destinations were given")]
    Destinations {
        payload: PayloadId,
        parts: usize,
        destinations: usize,
    },
    #[error("the {store} store failed: {failure}")]
    Backend {
        payload: PayloadId,
        store: &'static str,
        failure: Failure,
    },
    #[error("payload {payload} could not be read back from its file")]
    Spill { payload: PayloadId, source: SpillFault },
    #[error("the file {} of payload {payload} was changed or lost bytes: written with digest {written}, read with {found}; make it again", file.display())]
    Corrupt {
        payload: PayloadId,
        file: PathBuf,
        written: Digest,
        found: Digest,
    },
    #[error("part {part} of payload {payload} ({wanted}) cannot be copied into its destination ({found})")]
    Target {
        payload: PayloadId,
        part: usize,
        wanted: ByteCount,
        found: ByteCount,
        source: TargetError,
    },
}

impl Classify for StoreError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Closed => ErrorClass::Unavailable,
            Self::Exists { .. } | Self::Busy { .. } | Self::Unwritten { .. } => ErrorClass::Conflict,
            Self::NotFound { .. } | Self::NotSealed { .. } => ErrorClass::NotFound,
            Self::Fenced { source, .. } => source.class(),
            Self::TooLarge { .. } | Self::NoSuchPart { .. } | Self::Destinations { .. } => ErrorClass::Invalid,
            Self::Exhausted { .. } | Self::Unreserved { .. } => ErrorClass::Exhausted,
            Self::Target { source, .. } => source.class(),
            Self::Spill { source, .. } => source.class(),
            Self::Corrupt { .. } => ErrorClass::Corrupt,
            Self::Backend { failure, .. } => failure.class,
            Self::Arena { source, .. } => source.class(),
            Self::Register { source, .. } => source.class(),
            Self::Index { source, .. } => source.class(),
            Self::Keeper { source, .. } => source.class(),
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::Closed => "store.closed",
            Self::Exists { .. } => "store.exists",
            Self::NotFound { .. } => "store.not_found",
            Self::NotSealed { .. } => "store.not_sealed",
            Self::Fenced { source, .. } => source.reason(),
            Self::TooLarge { .. } => "store.too_large",
            Self::Exhausted { .. } | Self::Unreserved { .. } => "credit.store_bytes",
            Self::Arena { source, .. } => source.reason(),
            Self::Register { source, .. } => source.reason(),
            Self::Index { source, .. } => source.reason(),
            Self::Keeper { source, .. } => source.reason(),
            Self::NoSuchPart { .. } => "store.no_such_part",
            Self::Busy { .. } => "store.busy",
            Self::Unwritten { .. } => "store.unwritten",
            Self::Destinations { .. } => "store.destinations",
            Self::Target { source, .. } => source.reason(),
            Self::Spill { source, .. } => source.reason(),
            Self::Corrupt { .. } => "spill.corrupt",
            Self::Backend { .. } => "store.backend",
        }
    }

    fn details(&self) -> BTreeMap<String, String> {
        let mut details = BTreeMap::new();
        let mut put = |name: &str, value: String| details.insert(name.to_owned(), value);
        if let Self::Exhausted { wanted, usage, .. } | Self::Unreserved { wanted, usage, .. } = self {
            put("wanted_bytes", wanted.0.to_string());
            put("used_bytes", usage.used().0.to_string());
            put("limit_bytes", usage.limit.0.to_string());
            if !usage.readers.is_empty() {
                let readers = usage.readers.iter().map(ToString::to_string);
                put("readers", readers.collect::<Vec<_>>().join("; "));
            }
        }
        if let Self::Corrupt {
            file, written, found, ..
        } = self
        {
            put("file", file.display().to_string());
            put("written_digest", written.to_string());
            put("found_digest", found.to_string());
        }
        if let Some(payload) = self.payload() {
            put("payload", payload.to_string());
        }
        if let Self::Backend { failure, .. } = self {
            details.extend(failure.details.clone());
        }
        details
    }
}

impl StoreError {
    /// The payload that the error is about, if it is about one.
    pub const fn payload(&self) -> Option<PayloadId> {
        match self {
            Self::Closed | Self::Unreserved { .. } => None,
            Self::Exists { payload, .. }
            | Self::NotFound { payload }
            | Self::NotSealed { payload }
            | Self::Fenced { payload, .. }
            | Self::TooLarge { payload, .. }
            | Self::Exhausted { payload, .. }
            | Self::Arena { payload, .. }
            | Self::Register { payload, .. }
            | Self::Index { payload, .. }
            | Self::Keeper { payload, .. }
            | Self::NoSuchPart { payload, .. }
            | Self::Busy { payload, .. }
            | Self::Unwritten { payload, .. }
            | Self::Destinations { payload, .. }
            | Self::Target { payload, .. }
            | Self::Spill { payload, .. }
            | Self::Backend { payload, .. }
            | Self::Corrupt { payload, .. } => Some(*payload),
        }
    }
}
