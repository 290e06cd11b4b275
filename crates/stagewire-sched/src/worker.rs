use std::collections::{BTreeMap, BTreeSet};

use stagewire_core::{Failure, Incarnation, PayloadId, StageName, Timestamp, Token};

use crate::WorkerInfo;

/// A worker as the scheduler sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Worker {
    pub(crate) incarnation: Incarnation,
    pub(crate) stage: StageName,
    /// `None` where it has not attached since the server restarted.
    pub(crate) info: Option<WorkerInfo>,
    pub(crate) link: LinkState,
    pub(crate) draining: bool,
    pub(crate) paused_until: Option<Timestamp>,
    /// Offers in a row that it declined or did not answer.
    pub(crate) misses: u32,
    /// Why it declined the last of them, where it did.
    pub(crate) declined: Option<Failure>,
    pub(crate) slots: BTreeMap<Token, Slot>,
    /// Payloads that it brought back and nobody has published.
    pub(crate) unclaimed: BTreeSet<PayloadId>,
    /// Attempts that it brought back and that may yet publish them.
    pub(crate) claimed: BTreeSet<Token>,
}

/// Whether a worker can be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkState {
    /// Its stream is up.
    Attached,
    /// Its stream is down; what it runs and holds is kept until then.
    Away {
        /// The deadline.
        until: Timestamp,
    },
}

/// What a slot is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slot {
    /// Offered, not yet granted.
    Reserved,
    /// A valid attempt runs.
    Running,
    /// A superseded attempt was told to stop and has not said that it did.
    Stopping {
        /// When the worker is given up.
        until: Timestamp,
    },
}

impl Worker {
    /// Which life of which process.
    pub const fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// The stage that it serves.
    pub const fn stage(&self) -> &StageName {
        &self.stage
    }

    /// How it presented itself; `None` where it has not attached since the server restarted.
    pub const fn info(&self) -> Option<&WorkerInfo> {
        self.info.as_ref()
    }

    /// Whether it can be reached.
    pub const fn link(&self) -> LinkState {
        self.link
    }

    /// Whether it gets no more offers.
    pub const fn is_draining(&self) -> bool {
        self.draining
    }

    /// Slots in use, by the token that uses them.
    pub const fn slots(&self) -> &BTreeMap<Token, Slot> {
        &self.slots
    }

    /// Slots that it has. For a worker that has not attached since the server restarted, those that are in use.
    pub fn advertised(&self) -> u32 {
        match &self.info {
            Some(info) => info.slots,
            None => self.used(),
        }
    }

    /// Slots that are not in use.
    pub fn free(&self) -> u32 {
        self.advertised().saturating_sub(self.used())
    }

    /// Whether it may get offers, were a slot free.
    pub(crate) fn takes_offers(&self) -> bool {
        self.is_attached() && !self.draining && self.paused_until.is_none()
    }

    pub(crate) const fn is_attached(&self) -> bool {
        matches!(self.link, LinkState::Attached)
    }

    pub(crate) const fn away_until(&self) -> Option<Timestamp> {
        match self.link {
            LinkState::Away { until } => Some(until),
            LinkState::Attached => None,
        }
    }

    /// A worker that is known only from what it runs and holds: it has not attached since the server restarted.
    pub(crate) const fn ghost(incarnation: Incarnation, stage: StageName, until: Timestamp) -> Self {
        Self {
            incarnation,
            stage,
            info: None,
            link: LinkState::Away { until },
            draining: false,
            paused_until: None,
            misses: 0,
            declined: None,
            slots: BTreeMap::new(),
            unclaimed: BTreeSet::new(),
            claimed: BTreeSet::new(),
        }
    }

    /// Tokens whose slot is in this use.
    pub(crate) fn tokens(&self, usage: impl Fn(Slot) -> bool) -> impl Iterator<Item = Token> {
        self.slots.iter().filter(move |slot| usage(*slot.1)).map(|slot| *slot.0)
    }

    pub(crate) fn used(&self) -> u32 {
        u32::try_from(self.slots.len()).unwrap_or(u32::MAX)
    }
}

impl Slot {
    pub(crate) const fn is_stopping(self) -> bool {
        matches!(self, Self::Stopping { .. })
    }

    pub(crate) const fn stop_deadline(self) -> Option<Timestamp> {
        match self {
            Self::Stopping { until } => Some(until),
            Self::Reserved | Self::Running => None,
        }
    }
}
