use std::io;
use std::path::PathBuf;

use stagewire_core::{ByteCount, Classify, ErrorClass, PayloadId};
use stagewire_transfer::{AdoptError, RegisterError};

use crate::{JournalError, KeeperError, SpillFault};

/// Why a store was not opened. What its process before left stays as it is.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum OpenError {
    #[error("cannot {what} the store's data directory {}", dir.display())]
    Dir {
        what: &'static str,
        dir: PathBuf,
        source: io::Error,
    },
    #[error("the store's data directory {} is open to others: {problem}; it must be this user's alone, mode 0700", dir.display())]
    Insecure { dir: PathBuf, problem: String },
    #[error("another store{} uses the data directory {}", of(*pid), dir.display())]
    InUse { dir: PathBuf, pid: Option<u32> },
    #[error("another store{} serves the run directory {}; stop that one, or use another directory", of(*pid), dir.display())]
    Served { dir: PathBuf, pid: Option<u32> },
    #[error(transparent)]
    Index(#[from] JournalError),
    #[error(transparent)]
    Keeper(#[from] KeeperError),
    #[error(transparent)]
    Spill(#[from] SpillFault),
    #[error("the store before left {files} payloads in files; give this one the same spill directory")]
    NoSpill { files: usize },
    #[error("the store before left {held} of payloads, this one may hold {limit}; give it as much as it had")]
    Smaller { held: ByteCount, limit: ByteCount },
    #[error("the memory that the keeper has is not what the store's index says")]
    Adopt(#[from] AdoptError),
    #[error(
        "the store's index says that payload {payload} has parts of {parts:?} bytes, and where they are for others"
    )]
    Parts { payload: PayloadId, parts: Vec<u64> },
    #[error(
        "payload {payload} of the store before was written by another version: {problem}; let that version serve it, or \
         remove the data directory if nobody needs its payloads"
    )]
    Label { payload: PayloadId, problem: String },
    #[error("payload {payload} of the store before cannot be offered to other processes")]
    Register { payload: PayloadId, source: RegisterError },
}

/// Who has what this store wants, for people.
fn of(pid: Option<u32>) -> String {
    pid.map(|pid| format!(" (process {pid})")).unwrap_or_default()
}

impl Classify for OpenError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Dir { .. } => ErrorClass::Unavailable,
            Self::Insecure { .. } => ErrorClass::Denied,
            Self::InUse { .. } | Self::Served { .. } => ErrorClass::Conflict,
            Self::Index(source) => source.class(),
            Self::Keeper(source) => source.class(),
            Self::Spill(source) => source.class(),
            Self::Smaller { .. } | Self::NoSpill { .. } => ErrorClass::Invalid,
            Self::Adopt(source) => source.class(),
            Self::Parts { .. } => ErrorClass::Corrupt,
            Self::Label { .. } => ErrorClass::Unsupported,
            Self::Register { source, .. } => source.class(),
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::Dir { .. } | Self::Insecure { .. } => "store.data_dir",
            Self::InUse { .. } | Self::Served { .. } => "store.in_use",
            Self::Index(source) => source.reason(),
            Self::Keeper(source) => source.reason(),
            Self::Spill(source) => source.reason(),
            Self::Smaller { .. } => "store.smaller",
            Self::NoSpill { .. } => "store.no_spill",
            Self::Adopt(source) => source.reason(),
            Self::Parts { .. } => "store.index_corrupt",
            Self::Label { .. } => "store.label",
            Self::Register { source, .. } => source.reason(),
        }
    }
}

/// Why a store could not leave everything to the next process.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LeaveError {
    /// Its index could not be written: what was deleted last may be there again.
    #[error("the store's index is not on the disk: what was deleted last may come back")]
    Index(#[from] JournalError),
    /// There is no keeper: what is in memory ends with this process.
    #[error("nobody keeps the store's memory: its payloads end with this process, apart from those in files")]
    Keeper(#[from] KeeperError),
}

impl Classify for LeaveError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Index(source) => source.class(),
            Self::Keeper(source) => source.class(),
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::Index(source) => source.reason(),
            Self::Keeper(source) => source.reason(),
        }
    }
}
