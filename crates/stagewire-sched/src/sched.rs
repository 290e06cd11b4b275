use std::collections::BTreeMap;

use stagewire_core::{Epoch, Incarnation, JobId, Timestamp};

use crate::{Counters, Decision, Event, Input, Job, Limits, Refusal, Topology, Waiting, Worker};

/// The scheduler of one pipeline.
#[derive(Debug, Clone)]
pub struct Sched {
    topology: Topology,
    limits: Limits,
    epoch: Epoch,
    jobs: BTreeMap<JobId, Job>,
    workers: BTreeMap<Incarnation, Worker>,
    counters: Counters,
}

impl Sched {
    /// A scheduler without jobs and workers. Replay the journal's events with [`Sched::apply`], then decide
    /// [`Input::Restarted`].
    pub fn new(topology: Topology, limits: Limits) -> Self {
        Self {
            topology,
            limits,
            epoch: Epoch::default(),
            jobs: BTreeMap::new(),
            workers: BTreeMap::new(),
            counters: Counters::default(),
        }
    }

    /// What follows from an input. Reads only.
    ///
    /// # Errors
    /// [`Refusal`] where the input contradicts the state; then nothing follows.
    pub fn decide(&self, now: Timestamp, input: Input) -> Result<Decision, Refusal> {
        let _ = (now, input);
        Ok(Decision::default())
    }

    /// Makes a decided event true. Total: an event that does not fit the state does nothing.
    pub fn apply(&mut self, at: Timestamp, event: &Event) {
        let _ = (at, event);
    }

    /// When to decide [`Input::Poll`] next, if nothing happens before, and what will be due.
    pub fn poll_timeout(&self) -> Option<(Timestamp, &'static str)> {
        None
    }

    /// The pipeline.
    pub const fn topology(&self) -> &Topology {
        &self.topology
    }

    /// The limits.
    pub const fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The epoch that offers are made in.
    pub const fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The job of this id.
    pub fn job(&self, job: JobId) -> Option<&Job> {
        self.jobs.get(&job)
    }

    /// All jobs that are remembered, by id.
    pub fn jobs(&self) -> impl DoubleEndedIterator<Item = &Job> {
        self.jobs.values()
    }

    /// All workers that are attached or may come back, by incarnation.
    pub fn workers(&self) -> impl Iterator<Item = &Worker> {
        self.workers.values()
    }

    /// Why the job has not ended: one entry for each stage that is not done. Empty for a job that has ended or is unknown.
    pub fn explain(&self, now: Timestamp, job: JobId) -> Vec<Waiting> {
        let _ = (now, job);
        Vec::new()
    }

    /// What has happened so far.
    pub const fn counters(&self) -> Counters {
        self.counters
    }

    /// Proves the guarantees from the state. Takes time in proportion to it: for tests and debug builds.
    ///
    /// # Errors
    /// What does not hold.
    pub fn check(&self) -> Result<(), String> {
        Ok(())
    }
}
