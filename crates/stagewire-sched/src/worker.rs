mod slots;

use std::collections::BTreeSet;
use std::sync::Arc;

use stagewire_core::{Failure, Incarnation, Member, PayloadId, StageName, Timestamp, Token};

use crate::tally::Pool;
use crate::topology::StageIndex;
use crate::{Place, WorkerInfo};

pub use slots::Slots;

/// A worker as the scheduler sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Worker {
    pub(crate) incarnation: Incarnation,
    pub(crate) stage: StageName,
    /// Position of that stage.
    pub(crate) place: Option<StageIndex>,
    /// `None` where it has not attached since the server restarted.
    pub(crate) info: Option<WorkerInfo>,
    /// Its name for people, at hand for each attempt that it is granted.
    pub(crate) name: Arc<str>,
    pub(crate) link: LinkState,
    pub(crate) draining: bool,
    /// When what it runs is taken from it, while it drains.
    pub(crate) drain_by: Option<Timestamp>,
    pub(crate) paused_until: Option<Timestamp>,
    /// Offers in a row that it declined or did not answer.
    pub(crate) misses: u32,
    /// Why it declined the last of them, where it did.
    pub(crate) declined: Option<Box<Failure>>,
    pub(crate) slots: Slots,
    /// How many of them are used for what.
    uses: Uses,
    /// It leads a group whose other ranks are all there with nothing to do.
    pub(crate) whole: bool,
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
        /// Bytes that its output may take until then.
        nbytes: u64,
    },
}

/// Slots by what they are used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Uses {
    pub(crate) reserved: u32,
    pub(crate) running: u32,
    pub(crate) stopping: u32,
    /// Bytes of what is stopping.
    pub(crate) nbytes: u64,
}

impl Uses {
    const fn of(&mut self, slot: Slot) -> &mut u32 {
        match slot {
            Slot::Reserved => &mut self.reserved,
            Slot::Running => &mut self.running,
            Slot::Stopping { .. } => &mut self.stopping,
        }
    }

    const fn add(&mut self, slot: Slot) {
        *self.of(slot) += 1;
        self.nbytes += slot.nbytes();
    }

    const fn subtract(&mut self, slot: Slot) {
        *self.of(slot) -= 1;
        self.nbytes -= slot.nbytes();
    }
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

    /// When what it runs is taken from it, where it drains within a time and that is not over.
    pub const fn drain_by(&self) -> Option<Timestamp> {
        self.drain_by
    }

    /// Slots in use, by the token that uses them.
    pub const fn slots(&self) -> &Slots {
        &self.slots
    }

    /// Slots that it has; one with batches has one for each place in a batch. For a worker that has not attached since the
    /// server restarted, those that are in use.
    pub fn advertised(&self) -> u32 {
        match &self.info {
            Some(info) => info.places(),
            None => self.used(),
        }
    }

    /// Slots that are not in use.
    pub fn free(&self) -> u32 {
        self.advertised().saturating_sub(self.used())
    }

    /// Attempts that it runs together.
    pub(crate) fn max_batch(&self) -> u32 {
        self.info.as_ref().map_or(1, |info| info.max_batch)
    }

    /// Whether another attempt could begin: with batches, once the last one has ended as a whole.
    pub(crate) fn has_room(&self) -> bool {
        if self.max_batch() > 1 {
            self.slots.is_empty()
        } else {
            self.free() > 0
        }
    }

    /// Whether it may get offers, were a slot free.
    pub(crate) fn takes_offers(&self) -> bool {
        self.stays() && self.paused_until.is_none() && self.leads()
    }

    /// Whether it can be reached and does not leave.
    pub(crate) const fn stays(&self) -> bool {
        self.is_attached() && !self.draining
    }

    /// Where it is.
    pub(crate) fn at(&self) -> Place {
        self.info.as_ref().map(|info| info.place).unwrap_or_default()
    }

    /// Its place in a group, where it is in one.
    pub fn member(&self) -> Option<&Member> {
        self.info.as_ref()?.member.as_ref()
    }

    /// Whether it can be given work, now or once what it runs has ended: it is attached and not draining, and where it is in
    /// a group, it leads it and every rank is there.
    pub fn is_ready(&self) -> bool {
        self.stays() && (self.leads() || self.leads_what_runs())
    }

    /// Whether offers go to it: it is on its own, or leads a group with every rank there.
    fn leads(&self) -> bool {
        self.member().is_none_or(|_| self.whole)
    }

    /// Whether it publishes what its attempts make: of a group rank 0 does.
    pub(crate) fn makes_outputs(&self) -> bool {
        self.member().is_none_or(|member| member.rank == 0)
    }

    fn leads_what_runs(&self) -> bool {
        self.member().is_some() && self.makes_outputs() && !self.slots.is_empty()
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
    pub(crate) fn ghost(
        incarnation: Incarnation,
        stage: StageName,
        place: Option<StageIndex>,
        until: Timestamp,
    ) -> Self {
        Self {
            incarnation,
            stage,
            place,
            info: None,
            name: "".into(),
            link: LinkState::Away { until },
            draining: false,
            drain_by: None,
            paused_until: None,
            misses: 0,
            declined: None,
            slots: Slots::default(),
            uses: Uses {
                reserved: 0,
                running: 0,
                stopping: 0,
                nbytes: 0,
            },
            whole: false,
            unclaimed: BTreeSet::new(),
            claimed: BTreeSet::new(),
        }
    }

    /// Uses a slot for the token, or frees it; returns what it was used for before. A worker that runs an attempt has
    /// answered its offer.
    pub(crate) fn set_slot(&mut self, token: Token, slot: Option<Slot>) -> Option<Slot> {
        if slot == Some(Slot::Running) {
            self.misses = 0;
        }
        let before = self.slots.set(token, slot);
        if let Some(slot) = before {
            self.uses.subtract(slot);
        }
        if let Some(slot) = slot {
            self.uses.add(slot);
        }
        before
    }

    /// What it adds to the pool of its stage.
    pub(crate) fn pool(&self) -> Pool {
        if !self.is_attached() {
            return Pool {
                away: 1,
                ..Pool::default()
            };
        }
        if self.draining {
            return Pool {
                draining: 1,
                ..Pool::default()
            };
        }
        if !self.is_ready() {
            return Pool::default();
        }
        let Uses {
            reserved,
            running,
            stopping,
            nbytes: _,
        } = self.uses;
        Pool {
            workers: 1,
            away: 0,
            draining: 0,
            advertised: if self.has_room() {
                self.advertised()
            } else {
                self.used()
            },
            running,
            reserved,
            stopping,
            paused: self.paused_until.filter(|_| self.has_room()).map_or(0, |_| self.free()),
        }
    }

    /// Whether the counts say what the slots say.
    pub(crate) fn counts_add_up(&self) -> bool {
        let mut uses = Uses::default();
        self.slots.values().for_each(|slot| uses.add(*slot));
        uses == self.uses
    }

    /// Bytes that outputs of attempts may take that have not stopped yet.
    pub(crate) const fn stopping_bytes(&self) -> u64 {
        self.uses.nbytes
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
            Self::Stopping { until, .. } => Some(until),
            Self::Reserved | Self::Running => None,
        }
    }

    /// Bytes that its output may take though no job counts them any more.
    const fn nbytes(self) -> u64 {
        match self {
            Self::Stopping { nbytes, .. } => nbytes,
            Self::Reserved | Self::Running => 0,
        }
    }
}
