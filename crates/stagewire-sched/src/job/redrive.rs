use stagewire_core::Timestamp;

use super::{Job, JobState, Losses, StageRun};
use crate::topology::Topology;

impl Job {
    /// Gives a dead letter a new life, in which nothing has happened yet. What stays is what it was submitted with, its
    /// attempt log, and the count of its attempts, so that no token comes twice. Returns `None` for any other job.
    pub(super) fn begin_again(&mut self, topology: &Topology, at: Timestamp) -> Option<()> {
        self.dead_letter()?;
        self.state = JobState::Active;
        self.dead = false;
        self.entered = at;
        self.redrives = self.redrives.saturating_add(1);
        self.losses = Losses::default();
        self.victims.clear();
        self.stages = StageRun::all(topology, self.skipped, at);
        Some(())
    }
}
