use std::path::PathBuf;

use stagewire_core::{ByteCount, Peer, StageName};
use stagewire_transfer::decorate::ThrottleOptions;
use stagewire_transfer::{HostStats, NetworkOptions};

use crate::{Carrier, ModeCount};

/// Who a connector is and what it may use.
#[derive(Debug, Clone)]
pub struct ConnectorOptions {
    /// Run directory: its `peers/` holds the sockets. Made where it is missing, mode 0700.
    pub run_dir: PathBuf,
    /// Stage that publishes.
    pub role: StageName,
    /// Most bytes of shared memory.
    pub arena_limit: ByteCount,
    /// What carries the bytes, the preferred one first. A payload's memory is offered by the first that takes it as it is;
    /// what none takes is copied once into the arena, if `shm` is among them. A consumer reads by what a payload is offered
    /// by, else over `tcp`, as far as both sides name it.
    pub transports: Vec<Carrier>,
    /// Who keeps payloads of mode `store`.
    pub store: Option<Peer>,
    /// How processes of other hosts reach this one, which they may where it has a token, and those of this host for which
    /// the kernel forbids cross-memory attach.
    pub network: NetworkOptions,
    /// How slow each transport is where this connector reads, for tests and benchmarks. The default holds nothing back.
    pub throttle: ThrottleOptions,
}

impl ConnectorOptions {
    /// Options with an arena of 1 GiB, `shm`, `cma` and `tcp`, no store, and a network of the loopback interface.
    pub fn new(run_dir: impl Into<PathBuf>, role: StageName) -> Self {
        Self {
            run_dir: run_dir.into(),
            role,
            arena_limit: ByteCount(1 << 30),
            transports: Carrier::DEFAULT.to_vec(),
            store: None,
            network: NetworkOptions::default(),
            throttle: ThrottleOptions::default(),
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
    /// Payloads by the way they went, and why. One that falls back to the store is counted there from then on, and no
    /// more where it was.
    pub modes: Vec<ModeCount>,
    /// Payloads that are handed over directly without room in the store, because it kept none: they cannot fall back as
    /// long as it is full.
    pub unreserved: u64,
    /// Connections to holders of payloads.
    pub links: u64,
    /// Bytes ever copied into the arena because they could not be read where they were.
    pub staged_bytes: u64,
    /// Numbers of the transports: regions, pins, segments.
    pub host: HostStats,
}
