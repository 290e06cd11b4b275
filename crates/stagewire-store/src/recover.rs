//! Opening a store that survives its process.

mod error;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use stagewire_core::{ByteCount, PayloadId, Token};

pub use error::{LeaveError, OpenError};

use crate::{KeeperCommand, Share, SpillOptions, TokenGate};

/// How a [`HostStore`](crate::HostStore) is opened.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct StoreOptions {
    /// Most bytes, in whole pages for each part.
    pub limit: ByteCount,
    /// Who may write and delete.
    pub gate: Arc<TokenGate>,
    /// How it survives its process; `None` where it need not.
    pub durable: Option<DurableOptions>,
    /// Where held objects go when memory is short; `None` where they stay.
    pub spill: Option<SpillOptions>,
}

impl StoreOptions {
    /// A store that ends with its process.
    pub const fn new(limit: ByteCount, gate: Arc<TokenGate>) -> Self {
        Self {
            limit,
            gate,
            durable: None,
            spill: None,
        }
    }
}

/// Where a store keeps what its next process needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DurableOptions {
    /// Its data directory, for this store alone. Made where it is missing, mode 0700.
    pub dir: PathBuf,
    /// How to start the process that keeps its memory.
    pub keeper: KeeperCommand,
}

/// What came over from the process before.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Recovery {
    /// The objects, all sealed.
    pub survivors: Vec<Survivor>,
    /// Those that are read where they lay in memory.
    pub adopted: Share,
    /// Those that were copied, because little else in their segment was still in use.
    pub moved: Share,
    /// Those that are in files.
    pub files: Share,
    /// Those whose memory is gone, because the keeper had died, too, or whose file is. After a loss of power there may be
    /// some among them that had been deleted: deletes of what is in memory are not synced.
    pub lost: Share,
    /// Those whose time was over.
    pub expired: Share,
    /// Bytes at the end of the index that were torn, and are gone.
    pub torn_bytes: u64,
    /// How long it took.
    pub took: Duration,
}

/// An object that survived.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Survivor {
    /// Its key.
    pub payload: PayloadId,
    /// Attempt that wrote it.
    pub token: Option<Token>,
    /// What was left of its time to live, if it has one.
    pub expires: Option<Duration>,
    /// [`NewObject::label`](crate::NewObject::label).
    pub label: Vec<u8>,
}
