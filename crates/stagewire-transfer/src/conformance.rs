//! What every transport must do, as checks that any backend can run, also one outside this crate.
//!
//! Implement [`Backend`], then call [`run`] and look at the outcomes, or [`assert_conforms`] in a test. The checks use
//! two sides in one process and only the public traits. What needs real processes (death, a stopped peer) is the
//! backend's own to test.
//!
//! ```
//! # async fn example(backend: &dyn stagewire_transfer::conformance::Backend) {
//! for outcome in stagewire_transfer::conformance::run(backend).await {
//!     println!("{}: {:?}", outcome.check, outcome.result);
//! }
//! # }
//! ```

mod bytes;
mod lifetime;
mod refusal;

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::future::BoxFuture;
use stagewire_core::{Peer, RegionRef};
use tokio::time::timeout;

use crate::{ConnectOptions, Memory, Pinned, Region, RegisterOptions, Remote, TransferOptions, Transport};

/// A transport under test.
#[async_trait]
pub trait Backend: Send + Sync {
    /// Makes one more, independent side.
    async fn side(&self) -> Result<Side, Violation>;
}

/// Makes memory with the given bytes.
pub type MemoryMaker = Arc<dyn Fn(&[u8]) -> Memory + Send + Sync>;

/// One process's end of a transport.
#[derive(Clone)]
pub struct Side {
    /// The transport.
    pub transport: Arc<dyn Transport>,
    /// How others reach it.
    pub peer: Peer,
    /// Makes memory with these bytes that the transport can register.
    pub memory: MemoryMaker,
    /// Regions that still own their memory, those included that were released and wait for a pin to end.
    pub regions: Arc<dyn Fn() -> u64 + Send + Sync>,
    /// Whatever must live as long as the side.
    pub keep: Arc<dyn Any + Send + Sync>,
}

impl fmt::Debug for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Side")
            .field("transport", &self.transport)
            .finish_non_exhaustive()
    }
}

/// How a backend breaks the rules.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Violation(pub String);

/// Result of one check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// Name of the check.
    pub check: &'static str,
    /// What came of it.
    pub result: Result<(), Violation>,
}

/// The longest time that one check may take.
const LIMIT: Duration = Duration::from_secs(60);

type Checked = Result<(), Violation>;
type Check = for<'a> fn(&'a Pair) -> BoxFuture<'a, Checked>;

/// Owner and reader, connected.
struct Pair {
    owner: Side,
    reader: Side,
    remote: Arc<dyn Remote>,
}

/// Names of functions become names of checks.
macro_rules! checks {
    ($($module:ident::$name:ident),* $(,)?) => {
        &[$((stringify!($name), |pair| Box::pin($module::$name(pair)))),*]
    };
}

const CHECKS: &[(&str, Check)] = checks![
    bytes::whole_regions_arrive_exactly,
    bytes::strided_chunks_arrive_exactly,
    bytes::random_records_arrive_exactly,
    bytes::a_batch_of_5000_records_arrives_exactly,
    bytes::many_pulls_at_once_arrive_exactly,
    bytes::a_mapping_shows_the_bytes_or_the_error_says_what_instead,
    refusal::a_wrong_capability_is_denied,
    refusal::a_stale_generation_is_not_found,
    refusal::an_unknown_region_is_not_found,
    refusal::a_wrong_length_is_invalid,
    refusal::a_region_of_another_transport_is_invalid,
    refusal::records_outside_source_or_target_write_nothing,
    refusal::overlapping_records_write_nothing,
    refusal::bytes_are_written_once_between_resets,
    refusal::a_foreign_incarnation_is_refused,
    refusal::a_peer_without_the_transport_is_unsupported,
    refusal::empty_and_device_memory_is_not_registered,
    lifetime::a_released_region_takes_no_new_pins,
    lifetime::pins_keep_memory_until_the_last_one_ends,
    lifetime::mappings_keep_memory_until_the_last_one_ends,
    lifetime::dropped_pins_leave_nothing_behind,
    lifetime::dropped_pulls_leave_nothing_behind,
    lifetime::release_never_races_a_pull,
];

/// Runs all checks, each with two fresh sides.
pub async fn run(backend: &dyn Backend) -> Vec<Outcome> {
    let mut outcomes = Vec::new();
    for &(check, function) in CHECKS {
        let outcome = timeout(LIMIT, async {
            let pair = Pair::new(backend).await?;
            function(&pair).await
        });
        let late = || Err(Violation(format!("not done within {LIMIT:?}")));
        let result = outcome.await.unwrap_or_else(|_| late());
        outcomes.push(Outcome { check, result });
    }
    outcomes
}

/// Runs all checks.
///
/// # Panics
/// Where one failed, with all that failed.
pub async fn assert_conforms(backend: &dyn Backend) {
    let outcomes = run(backend).await;
    let failed = outcomes.iter().filter_map(|outcome| {
        let violation = outcome.result.as_ref().err()?;
        Some(format!("{}: {violation}", outcome.check))
    });
    let failed: Vec<String> = failed.collect();
    assert!(
        failed.is_empty(),
        "{} of {} checks failed:\n{}",
        failed.len(),
        outcomes.len(),
        failed.join("\n")
    );
}

impl Pair {
    async fn new(backend: &dyn Backend) -> Result<Self, Violation> {
        let (owner, reader) = (backend.side().await?, backend.side().await?);
        let remote = reader.transport.connect(&owner.peer, ConnectOptions::default()).await;
        let remote = remote.map_err(|error| Violation(format!("two sides do not connect: {error}")))?;
        Ok(Self { owner, reader, remote })
    }

    fn register(&self, bytes: &[u8]) -> Result<Region, Violation> {
        let memory = (self.owner.memory)(bytes);
        let region = self.owner.transport.register(memory, RegisterOptions::default());
        region.map_err(|error| Violation(format!("registering {} bytes: {error}", bytes.len())))
    }

    async fn pin(&self, region: &RegionRef) -> Result<Box<dyn Pinned>, Violation> {
        let pinned = self.remote.pin(region, TransferOptions::default()).await;
        pinned.map_err(|error| Violation(format!("pinning: {error}")))
    }

    /// Waits until the owner holds so many regions.
    async fn regions_become(&self, expected: u64) -> Checked {
        let reached = async {
            while (self.owner.regions)() != expected {
                tokio::task::yield_now().await;
            }
        };
        timeout(Duration::from_secs(10), reached).await.map_err(|_| {
            let found = (self.owner.regions)();
            Violation(format!("the owner still holds {found} regions, expected {expected}"))
        })
    }
}

/// Fails the check with a message unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err($crate::conformance::Violation(format!($($message)+)));
        }
    };
}
use ensure;

/// Bytes that differ from offset to offset and from seed to seed.
fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut random = Random(seed);
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        bytes.extend_from_slice(&random.next().to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// SplitMix64: the same numbers for the same seed, everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }
}
