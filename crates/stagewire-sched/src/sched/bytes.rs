//! Credits in bytes: what outputs may take all together, wherever they are, so that each of them can go to the store.
//!
//! An output is reserved when its attempt is offered, in the size that the last outputs of its shape have had, or that
//! the stage says; once it is published it is held, in the size that it has; once it is released it is free again. What
//! an attempt that was superseded had set aside or published stays reserved until it has stopped: its worker may have
//! it that long. A stage is dispatched where what is free is enough for its output and for one more of each stage
//! further down, in the largest size that was seen lately: all or nothing. So no stage takes what those after it need
//! to go on, and what is held always drains: in a chain nothing waits for bytes for ever. Where paths join, or outputs
//! turn out larger than any before, they might: so once nothing runs of the jobs that hold anything, so that nothing
//! becomes free by itself, the oldest of them that can go on to its end needs no bytes, at the price of going above the
//! bound by its outputs.
//!
//! What a job holds itself is not in its own way: on its own it can always go on. Where its input and its output do not
//! fit together that, too, goes above the bound, with nobody else's beside them.

use stagewire_core::ByteCount;

use super::Sched;
use crate::Refusal;
use crate::job::Job;
use crate::queue::Rank;
use crate::topology::StageIndex;

/// Where nothing is known of a stage's outputs, they are taken to need this part of all bytes, divided by the stages.
const UNKNOWN: u64 = 4;

/// What outputs may take, and what they take: `free + reserved + held = advertised + over`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ByteCredit {
    /// What they may take.
    pub advertised: ByteCount,
    /// What is left of it.
    pub free: ByteCount,
    /// Set aside for outputs that are being made, also by attempts that were told to stop and have not yet.
    pub reserved: ByteCount,
    /// Taken by outputs that are published and not released.
    pub held: ByteCount,
    /// Taken above what is advertised.
    pub over: ByteCount,
}

impl Sched {
    /// The credit in bytes; `None` where there is no bound.
    pub fn byte_credit(&self) -> Option<ByteCredit> {
        let advertised = self.limits.payload_bytes?.0;
        let (reserved, held) = (self.reserved_bytes(), self.held_bytes());
        let taken = self.taken_bytes();
        Some(ByteCredit {
            advertised: ByteCount(advertised),
            free: ByteCount(advertised.saturating_sub(taken)),
            reserved: ByteCount(reserved),
            held: ByteCount(held),
            over: ByteCount(taken.saturating_sub(advertised)),
        })
    }

    fn reserved_bytes(&self) -> u64 {
        self.index.reserved_bytes.saturating_add(self.index.stopping_bytes)
    }

    fn held_bytes(&self) -> u64 {
        self.index.held_bytes.saturating_add(self.cache.used_bytes())
    }

    /// What is reserved or held.
    pub(super) fn taken_bytes(&self) -> u64 {
        self.reserved_bytes().saturating_add(self.held_bytes())
    }

    /// Bytes that the output of this stage will probably have; 0 for a last stage.
    pub(super) fn predict_bytes(&self, stage: StageIndex, shape: u64) -> u64 {
        if self.topology.consumers(stage).is_empty() {
            return 0;
        }
        let known = self.volumes[stage.get()].most_of(shape);
        known.unwrap_or_else(|| self.unknown_bytes(stage))
    }

    /// What the output of a shape that was not seen yet is taken to have.
    fn unknown_bytes(&self, stage: StageIndex) -> u64 {
        let said = self.topology.spec(stage).max_payload.map(|said| said.0);
        let share = || {
            let stages = self.topology.stages().len() as u64;
            self.limits.payload_bytes.map_or(0, |all| all.0 / (UNKNOWN * stages))
        };
        said.or_else(|| self.volumes[stage.get()].most()).unwrap_or_else(share)
    }

    /// What the stages further down need to make one output each.
    fn bytes_below(&self, stage: StageIndex) -> u64 {
        let below = self.topology.below(stage).iter();
        let most = |stage: &StageIndex| {
            let known = self.volumes[stage.get()].most().unwrap_or_default();
            known.max(self.unknown_bytes(*stage))
        };
        below
            .filter(|stage| !self.topology.consumers(**stage).is_empty())
            .fold(0, |sum, stage| sum.saturating_add(most(stage)))
    }

    /// What must be free for this job to be dispatched to the stage; no more than there is beside what it holds itself.
    pub(super) fn bytes_needed(&self, stage: StageIndex, rank: &Rank) -> u64 {
        let needed = self
            .predict_bytes(stage, rank.shape)
            .saturating_add(self.bytes_below(stage));
        let own = self.jobs.get(&rank.job).map_or(0, Job::held_bytes);
        let most = |all: ByteCount| needed.min(all.0.saturating_sub(own));
        self.limits.payload_bytes.map_or(0, most)
    }

    /// Whether there are bytes for the output of this job. A last stage needs none.
    pub(super) fn has_bytes(&self, stage: StageIndex, rank: &Rank) -> bool {
        self.byte_places(stage, rank) > 0
    }

    /// How many outputs like that of this job there are bytes for.
    pub(super) fn byte_places(&self, stage: StageIndex, rank: &Rank) -> usize {
        let Some(credit) = self
            .byte_credit()
            .filter(|_| !self.topology.consumers(stage).is_empty())
        else {
            return usize::MAX;
        };
        let (needed, each) = (self.bytes_needed(stage, rank), self.predict_bytes(stage, rank.shape));
        let Some(left) = credit.free.0.checked_sub(needed) else {
            return 0;
        };
        let more = left.checked_div(each).unwrap_or(u64::MAX);
        usize::try_from(more).map_or(usize::MAX, |more| more.saturating_add(1))
    }

    /// A job whose outputs were never small enough for all the bytes that there are is not taken: it would go above the
    /// bound each time. Shape 0 is that of jobs of which nothing is known.
    ///
    /// # Errors
    /// [`Refusal::PayloadBytes`].
    pub(super) fn check_bytes(&self, shape: u64) -> Result<(), Refusal> {
        let Some(limit) = self.limits.payload_bytes.filter(|_| shape != 0) else {
            return Ok(());
        };
        for stage in self.topology.indices() {
            let least = self.volumes[stage.get()].least_of(shape);
            if let Some(least) = least.filter(|least| *least > limit.0) {
                return Err(Refusal::PayloadBytes {
                    stage: self.topology.name(stage).clone(),
                    nbytes: ByteCount(least),
                    limit,
                });
            }
        }
        Ok(())
    }
}
