use std::path::PathBuf;

use stagewire_core::{ByteCount, Peer, StageName};
use stagewire_transfer::{HostStats, NetworkOptions};

use crate::ModeCount;

/// How memory outside the arena is offered to consumers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Borrowing {
    /// Consumers read it where it is, by cross-memory attach; where the kernel forbids that, it is copied once into
    /// the arena; where that has no room, it is sent over `tcp`.
    #[default]
    Auto,
    /// It is always copied once into the arena.
    Never,
    /// It is always sent over `tcp`, also to consumers on this host.
    Tcp,
}

/// Who a connector is and what it may use.
#[derive(Debug, Clone)]
pub struct ConnectorOptions {
    /// Run directory: its `peers/` holds the sockets. Made where it is missing, mode 0700.
    pub run_dir: PathBuf,
    /// Stage that publishes.
    pub role: StageName,
    /// Most bytes of shared memory.
    pub arena_limit: ByteCount,
    /// How memory outside the arena is offered.
    pub borrow: Borrowing,
    /// Who keeps payloads of mode `store`.
    pub store: Option<Peer>,
    /// Where consumers for which the kernel forbids cross-memory attach pull over `tcp`.
    pub network: NetworkOptions,
}

impl ConnectorOptions {
    /// Options with an arena of 1 GiB, borrowing where it works, no store, and `tcp` on the loopback
    /// interface.
    pub fn new(run_dir: impl Into<PathBuf>, role: StageName) -> Self {
        Self {
            run_dir: run_dir.into(),
            role,
            arena_limit: ByteCount(1 << 30),
            borrow: Borrowing::default(),
            store: None,
            network: NetworkOptions::default(),
        }
    }
}

/// Numbers of one connector.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ConnectorStats {
    /// Payloads held.
    pub live_payloads: u64,
    /// Their bytes.
    pub live_bytes: u64,
    /// Payloads ever published.
    pub published: u64,
    /// Payloads that were released by name.
    pub released: u64,
    /// Payloads that were deleted because a consumer had consumed them.
    pub consumed: u64,
    /// Payloads that moved to a store.
    pub moved: u64,
    /// Payloads whose time was over, because nobody consumed them or their lease said so.
    pub expired: u64,
    /// Payloads that their producer gave up.
    pub failed: u64,
    /// Consumers that were refused because another one was at a payload that is deleted on consume.
    pub claims_refused: u64,
    /// Consumers that exist.
    pub consumers: u64,
    /// Payloads by the way they went, and why; those that fell back to the store count there once more.
    pub modes: Vec<ModeCount>,
    /// Connections to holders of payloads.
    pub links: u64,
    /// Bytes ever copied into the arena because they could not be read where they were.
    pub staged_bytes: u64,
    /// Numbers of the transports: regions, pins, segments.
    pub host: HostStats,
}
