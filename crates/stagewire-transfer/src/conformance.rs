//! What every transport must do, as checks that any backend can run, also one outside this crate.
//!
//! Implement [`Backend`], then call [`run`] and look at the outcomes, or [`assert_conforms`] in a test. The checks use
//! two sides in one process and only the public traits. What needs real processes (death, a stopped peer) is the
//! backend's own to test.
//!
//! ```
//! # async fn example(backend: &dyn stagewire_transfer::conformance::Backend) {
//! for outcome in stagewire_transfer::conformance::run(backend).await {
//!     println!("{}: {:?} {:?}", outcome.check, outcome.result, outcome.skipped);
//! }
//! # }
//! ```

mod bytes;
mod flow;
mod lifetime;
mod push;
mod refusal;

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::future::BoxFuture;
use stagewire_core::{ByteCount, Classify, ErrorClass, Peer, RegionRef};
use tokio::time::timeout;

use crate::{Abilities, ConnectOptions, Memory, Pinned, Region, RegisterOptions, Remote, TransferOptions, Transport};

/// A transport under test.
#[async_trait]
pub trait Backend: Send + Sync {
    /// Makes one more, independent side.
    async fn side(&self) -> Result<Side, Violation>;

    /// How many bytes its sides allow in flight with one peer, where that can be set: then it should be no more than some
    /// MiB. See [`Host::limit_in_flight`](crate::Host::limit_in_flight).
    fn in_flight_limit(&self) -> Option<ByteCount> {
        None
    }
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
    /// Why it was not run, where it was not: then `result` says nothing.
    pub skipped: Option<&'static str>,
}

/// The longest time that one check may take.
const LIMIT: Duration = Duration::from_secs(60);

type Checked = Result<(), Violation>;
type Run = for<'a> fn(&'a Pair) -> BoxFuture<'a, Checked>;

/// One rule.
struct Check {
    name: &'static str,
    needs: Needs,
    run: Run,
}

/// To which transports a rule applies.
#[derive(Clone, Copy)]
enum Needs {
    Nothing,
    /// A third side.
    Others,
    Map,
    Push,
    NoPush,
    Checked,
    CheckedPush,
    HostOnly,
    Limit,
}

impl Needs {
    /// Why a rule does not apply.
    fn missing(self, abilities: Abilities, limited: bool) -> Option<&'static str> {
        let Abilities {
            map,
            push,
            checked,
            device,
            ..
        } = abilities;
        let (applies, why) = match self {
            Self::Nothing | Self::Others => (true, ""),
            Self::Map => (map, "it cannot map"),
            Self::Push | Self::CheckedPush if !push => (false, "it cannot push"),
            Self::Push => (true, ""),
            Self::NoPush => (!push, "it can push"),
            Self::Checked | Self::CheckedPush => (checked, "its owners do not check access"),
            Self::HostOnly => (!device, "it reaches devices"),
            Self::Limit => (limited, "its bytes in flight cannot be limited"),
        };
        (!applies).then_some(why)
    }
}

/// Owner and reader, connected.
struct Pair {
    owner: Side,
    reader: Side,
    remote: Arc<dyn Remote>,
    /// Where the check needs another reader.
    other: Option<Side>,
    in_flight_limit: Option<ByteCount>,
}

/// Names of functions become names of checks.
macro_rules! checks {
    ($($needs:ident: $module:ident::$name:ident),* $(,)?) => {
        &[$(Check {
            name: stringify!($name),
            needs: Needs::$needs,
            run: |pair| Box::pin($module::$name(pair)),
        }),*]
    };
}

const CHECKS: &[Check] = checks![
    Nothing: bytes::whole_regions_arrive_exactly,
    Nothing: bytes::strided_chunks_arrive_exactly,
    Nothing: bytes::random_records_arrive_exactly,
    Nothing: bytes::a_batch_of_5000_records_arrives_exactly,
    Nothing: bytes::many_pulls_at_once_arrive_exactly,
    Nothing: bytes::a_mapping_shows_the_bytes_or_the_error_says_what_instead,
    Checked: refusal::a_wrong_capability_is_denied,
    Checked: refusal::a_stale_generation_is_not_found,
    Nothing: refusal::an_unknown_region_is_not_found,
    Nothing: refusal::a_wrong_length_is_invalid,
    Nothing: refusal::a_region_of_another_transport_is_invalid,
    Nothing: refusal::records_outside_source_or_target_write_nothing,
    Nothing: refusal::overlapping_records_write_nothing,
    Nothing: refusal::bytes_are_written_once_between_resets,
    Nothing: refusal::a_foreign_incarnation_is_refused,
    Nothing: refusal::a_peer_without_the_transport_is_unsupported,
    Nothing: refusal::empty_and_device_memory_is_not_registered,
    Nothing: refusal::memory_that_is_not_mapped_is_not_registered,
    Nothing: refusal::a_batch_above_the_row_limit_is_refused,
    HostOnly: refusal::a_target_on_a_device_is_refused,
    Others: refusal::what_is_refused_disturbs_no_other_peer,
    Nothing: lifetime::a_released_region_takes_no_new_pins,
    Nothing: lifetime::pins_keep_memory_until_the_last_one_ends,
    Map: lifetime::mappings_keep_memory_until_the_last_one_ends,
    Nothing: lifetime::dropped_pins_leave_nothing_behind,
    Nothing: lifetime::dropped_pulls_leave_nothing_behind,
    Nothing: lifetime::release_never_races_a_pull,
    Nothing: flow::a_pull_without_time_is_late_or_exact,
    Nothing: flow::transfers_are_counted,
    Limit: flow::a_full_budget_pushes_back,
    Limit: flow::who_waits_too_long_is_told_so,
    Push: push::pushed_bytes_land_exactly,
    Push: push::strided_pushes_land_exactly,
    Push: push::what_was_pushed_is_pulled,
    CheckedPush: push::a_push_into_a_read_only_region_is_denied,
    Push: push::pushes_outside_source_or_region_write_nothing,
    Push: push::dropped_pushes_leave_nothing_behind,
    Push: push::memory_that_peers_write_is_registered_once,
    NoPush: push::a_transport_without_push_says_what_instead,
];

/// Runs all checks, each with two fresh sides.
pub async fn run(backend: &dyn Backend) -> Vec<Outcome> {
    let mut outcomes = Vec::new();
    for check in CHECKS {
        let outcome = timeout(LIMIT, async {
            let pair = Pair::new(backend, check.needs).await?;
            let abilities = pair.reader.transport.abilities();
            if let Some(why) = check.needs.missing(abilities, pair.in_flight_limit.is_some()) {
                return Ok(Some(why));
            }
            (check.run)(&pair).await.map(|()| None)
        });
        let late = || Err(Violation(format!("not done within {LIMIT:?}")));
        let outcome = outcome.await.unwrap_or_else(|_| late());
        outcomes.push(Outcome {
            check: check.name,
            skipped: *outcome.as_ref().unwrap_or(&None),
            result: outcome.map(drop),
        });
    }
    outcomes
}

/// Runs all checks, and says on standard error which do not apply.
///
/// # Panics
/// Where one failed, with all that failed.
#[expect(clippy::print_stderr, reason = "a skip must be visible")]
pub async fn assert_conforms(backend: &dyn Backend) {
    let outcomes = run(backend).await;
    for outcome in &outcomes {
        if let Some(why) = outcome.skipped {
            eprintln!("skipped: {}: {why}", outcome.check);
        }
    }
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
    async fn new(backend: &dyn Backend, needs: Needs) -> Result<Self, Violation> {
        let (owner, reader) = (backend.side().await?, backend.side().await?);
        let remote = reader.transport.connect(&owner.peer, ConnectOptions::default()).await;
        let remote = remote.map_err(|error| Violation(format!("two sides do not connect: {error}")))?;
        let other = match needs {
            Needs::Others => Some(backend.side().await?),
            _ => None,
        };
        Ok(Self {
            owner,
            reader,
            remote,
            other,
            in_flight_limit: backend.in_flight_limit(),
        })
    }

    fn in_flight_limit(&self) -> Result<u64, Violation> {
        let limit = self.in_flight_limit.ok_or_else(|| violation("no limit"))?;
        Ok(limit.0)
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

fn violation(error: impl fmt::Display) -> Violation {
    Violation(error.to_string())
}

/// Expects an error of this class and reason.
fn is(error: &dyn Classify, class: ErrorClass, reason: &str) -> Checked {
    let (found_class, found_reason) = (error.class(), error.reason());
    ensure!(
        (found_class, found_reason) == (class, reason),
        "expected {class}: {reason}, found {found_class}: {found_reason}: {error}"
    );
    Ok(())
}

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
