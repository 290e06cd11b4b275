//! Numbers that are kept up to date, so that whoever asks need not look at all jobs and workers.

use stagewire_core::Timestamp;

use crate::{JobState, Phase};

/// How a stage does, over all jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StageTally {
    /// Jobs that have not ended, by the phase of this stage, in the order of [`Phase::NAMES`].
    pub phases: [u64; Phase::NAMES.len()],
    /// Since when the one that has waited longest waits for a worker.
    pub oldest: Option<Timestamp>,
    /// Payloads that are published and not released.
    pub payloads: u64,
    /// Bytes of those.
    pub payload_bytes: u64,
}

/// Jobs that are remembered, by state, in the order of [`JobState::NAMES`].
pub type JobTally = [u64; JobState::NAMES.len()];

/// What the workers of a stage have, all together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Pool {
    /// Workers that can be reached and are not draining. The slots are theirs.
    pub(crate) workers: u32,
    /// Workers that may come back.
    pub(crate) away: u32,
    /// Workers that can be reached and are draining.
    pub(crate) draining: u32,
    pub(crate) advertised: u32,
    pub(crate) running: u32,
    pub(crate) reserved: u32,
    pub(crate) stopping: u32,
    /// Free ones of workers that get no offers for now.
    pub(crate) paused: u32,
}

impl Pool {
    pub(crate) const fn add(&mut self, other: Self) {
        self.workers += other.workers;
        self.away += other.away;
        self.draining += other.draining;
        self.advertised += other.advertised;
        self.running += other.running;
        self.reserved += other.reserved;
        self.stopping += other.stopping;
        self.paused += other.paused;
    }

    pub(crate) const fn subtract(&mut self, other: Self) {
        self.workers -= other.workers;
        self.away -= other.away;
        self.draining -= other.draining;
        self.advertised -= other.advertised;
        self.running -= other.running;
        self.reserved -= other.reserved;
        self.stopping -= other.stopping;
        self.paused -= other.paused;
    }
}
