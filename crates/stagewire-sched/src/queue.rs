use std::collections::BTreeSet;

use stagewire_core::{Incarnation, JobId};

/// Place of a job in the queue of a stage: those that have been tried before first, then the older first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    fresh: bool,
    number: u64,
    pub(crate) job: JobId,
}

impl Rank {
    pub(crate) const fn new(again: bool, number: u64, job: JobId) -> Self {
        Self {
            fresh: !again,
            number,
            job,
        }
    }
}

/// What waits for a stage, who could do it, and how many of its payloads are held.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Queue {
    /// Jobs that only lack a worker, or a credit.
    pub(crate) ready: BTreeSet<Rank>,
    /// Workers that take offers and have a free slot, by the number of slots they use: the least busy first.
    pub(crate) free: BTreeSet<(u32, Incarnation)>,
    /// Jobs whose payload of this stage is held or being made.
    pub(crate) held: u32,
}

impl Queue {
    /// Number of jobs that come before this rank.
    pub(crate) fn ahead(&self, rank: Rank) -> usize {
        self.ready.range(..rank).count()
    }
}
