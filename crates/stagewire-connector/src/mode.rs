use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};

use stagewire_core::{Classify, ErrorClass, Lease, TransferMode};

use crate::Owner;

/// How a payload is to get to its consumer. As text: `p2p`, `store`, `auto`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Mode {
    /// From the producer's memory, which must stay until the payload ends.
    #[default]
    P2p,
    /// Through the store: the producer may forget the payload, and end, once it is there.
    Store,
    /// By liveness, never by size: from the producer's memory where the consumer is known and alive, else through the
    /// store where there is one. When that consumer is lost before it was done, the payload moves to the store, where room
    /// for it was reserved.
    Auto,
}

/// Names in the order of the variants.
const MODES: [(Mode, &str); 3] = [(Mode::P2p, "p2p"), (Mode::Store, "store"), (Mode::Auto, "auto")];

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(MODES[*self as usize].1)
    }
}

impl FromStr for Mode {
    type Err = ModeError;

    fn from_str(text: &str) -> Result<Self, ModeError> {
        let found = MODES.iter().find(|(_, name)| *name == text);
        found
            .map(|(mode, _)| *mode)
            .ok_or_else(|| ModeError { text: text.to_owned() })
    }
}

/// Text that names no mode.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown transfer mode {text:?}; it is one of p2p, store, auto")]
pub struct ModeError {
    /// What was given.
    pub text: String,
}

impl Classify for ModeError {
    fn class(&self) -> ErrorClass {
        ErrorClass::Invalid
    }

    fn reason(&self) -> &'static str {
        "publish.mode"
    }
}

/// Why a payload goes the way it goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ModeReason {
    /// The producer asked for it.
    Requested,
    /// The consumer is known and alive.
    ConsumerAlive,
    /// Nobody knows who will consume it.
    ConsumerUnknown,
    /// Its consumer is no more.
    ConsumerLost,
    /// There is no store.
    NoStore,
    /// Only stores keep payloads of its lease.
    Lease,
}

impl ModeReason {
    /// Every reason.
    pub const ALL: [Self; 6] = [
        Self::Requested,
        Self::ConsumerAlive,
        Self::ConsumerUnknown,
        Self::ConsumerLost,
        Self::NoStore,
        Self::Lease,
    ];

    /// As it stands in metrics: `consumer_unknown`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Requested => "requested",
            Self::ConsumerAlive => "consumer_alive",
            Self::ConsumerUnknown => "consumer_unknown",
            Self::ConsumerLost => "consumer_lost",
            Self::NoStore => "no_store",
            Self::Lease => "lease",
        }
    }
}

/// How many payloads went one way for one reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModeCount {
    /// The way.
    pub mode: TransferMode,
    /// Why.
    pub reason: ModeReason,
    /// Payloads so far.
    pub count: u64,
}

const WAYS: [TransferMode; 2] = [TransferMode::P2p, TransferMode::Store];

/// Counts payloads by way and reason.
#[derive(Debug, Default)]
pub(crate) struct ModeCounters {
    counts: [[AtomicU64; ModeReason::ALL.len()]; WAYS.len()],
    unreserved: AtomicU64,
}

impl ModeCounters {
    fn of(&self, (mode, reason): (TransferMode, ModeReason)) -> &AtomicU64 {
        &self.counts[mode as usize][reason as usize]
    }

    pub(crate) fn add(&self, mode: TransferMode, reason: ModeReason) {
        self.of((mode, reason)).fetch_add(1, Ordering::Relaxed);
    }

    /// A payload goes another way than before.
    pub(crate) fn change(&self, from: (TransferMode, ModeReason), to: (TransferMode, ModeReason)) {
        self.of(from).fetch_sub(1, Ordering::Relaxed);
        self.of(to).fetch_add(1, Ordering::Relaxed);
    }

    /// A payload that is to be able to fall back has no room to fall into.
    pub(crate) fn add_unreserved(&self) {
        self.unreserved.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn unreserved(&self) -> u64 {
        self.unreserved.load(Ordering::Relaxed)
    }

    /// Those that are not 0.
    pub(crate) fn counts(&self) -> Vec<ModeCount> {
        let all = WAYS
            .into_iter()
            .flat_map(|mode| ModeReason::ALL.map(|reason| (mode, reason)));
        let counts = all.map(|(mode, reason)| ModeCount {
            mode,
            reason,
            count: self.of((mode, reason)).load(Ordering::Relaxed),
        });
        counts.filter(|count| count.count > 0).collect()
    }
}

/// Why a payload cannot go the way that was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoWay {
    /// It needs a store, and there is none.
    NoStore,
    /// Only stores keep it, and it is to stay with its producer.
    StoresOnly,
}

/// Decides the way of a payload. `alive` says whether its consumer is; `None` where nobody knows who that will be.
pub(crate) fn decide(
    mode: Mode,
    owner: Owner,
    alive: Option<bool>,
    store: bool,
) -> Result<(TransferMode, ModeReason), NoWay> {
    use TransferMode::{P2p, Store};
    let cached = owner == Owner::Lease(Lease::Cached);
    match mode {
        Mode::P2p if cached => Err(NoWay::StoresOnly),
        Mode::P2p => Ok((P2p, ModeReason::Requested)),
        Mode::Store | Mode::Auto if !store && (cached || mode == Mode::Store) => Err(NoWay::NoStore),
        Mode::Store => Ok((Store, ModeReason::Requested)),
        Mode::Auto if cached => Ok((Store, ModeReason::Lease)),
        Mode::Auto => Ok(match alive {
            Some(true) => (P2p, ModeReason::ConsumerAlive),
            _ if !store => (P2p, ModeReason::NoStore),
            Some(false) => (Store, ModeReason::ConsumerLost),
            None => (Store, ModeReason::ConsumerUnknown),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_way_is_decided_by_liveness() {
        use TransferMode::{P2p, Store};
        let plain = Owner::Lease(Lease::DeleteOnConsume);
        let cached = Owner::Lease(Lease::Cached);
        for (mode, owner, alive, store, expected) in [
            (Mode::P2p, plain, None, true, Ok((P2p, ModeReason::Requested))),
            (Mode::P2p, cached, Some(true), true, Err(NoWay::StoresOnly)),
            (Mode::Store, plain, Some(true), true, Ok((Store, ModeReason::Requested))),
            (Mode::Store, plain, None, false, Err(NoWay::NoStore)),
            (
                Mode::Auto,
                plain,
                Some(true),
                true,
                Ok((P2p, ModeReason::ConsumerAlive)),
            ),
            (
                Mode::Auto,
                plain,
                Some(true),
                false,
                Ok((P2p, ModeReason::ConsumerAlive)),
            ),
            (
                Mode::Auto,
                plain,
                Some(false),
                true,
                Ok((Store, ModeReason::ConsumerLost)),
            ),
            (Mode::Auto, plain, None, true, Ok((Store, ModeReason::ConsumerUnknown))),
            (Mode::Auto, plain, Some(false), false, Ok((P2p, ModeReason::NoStore))),
            (Mode::Auto, plain, None, false, Ok((P2p, ModeReason::NoStore))),
            (Mode::Auto, cached, Some(true), true, Ok((Store, ModeReason::Lease))),
            (Mode::Auto, cached, None, false, Err(NoWay::NoStore)),
        ] {
            let found = decide(mode, owner, alive, store);
            assert_eq!(found, expected, "{mode} {owner:?} {alive:?} {store}");
        }
    }

    #[test]
    fn modes_are_written_as_they_are_read() {
        for (mode, name) in MODES {
            assert_eq!((name.parse(), mode.to_string().as_str()), (Ok(mode), name));
        }
        let error = "P2P".parse::<Mode>().expect_err("no mode");
        assert_eq!((error.class(), error.reason()), (ErrorClass::Invalid, "publish.mode"));
    }

    #[test]
    fn payloads_are_counted_by_way_and_reason() {
        let counters = ModeCounters::default();
        counters.add(TransferMode::Store, ModeReason::ConsumerLost);
        let direct = (TransferMode::P2p, ModeReason::ConsumerAlive);
        counters.add(direct.0, direct.1);
        counters.change(direct, (TransferMode::Store, ModeReason::ConsumerLost));
        let expected = ModeCount {
            mode: TransferMode::Store,
            reason: ModeReason::ConsumerLost,
            count: 2,
        };
        assert_eq!(counters.counts(), [expected]);
        assert!(
            ModeReason::ALL
                .iter()
                .enumerate()
                .all(|(at, reason)| *reason as usize == at)
        );
    }
}
