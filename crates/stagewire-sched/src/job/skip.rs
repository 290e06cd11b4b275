//! Stages that a job does not need: what they would make was given with it, or nobody wants it.

use stagewire_core::StageName;

use super::Job;
use crate::topology::{Link, StageIndex, Topology};

/// A set of stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct StageSet(u64);

impl StageSet {
    /// The stages of these names; names that the pipeline does not have any more are left out.
    pub(crate) fn of(topology: &Topology, names: &[StageName]) -> Self {
        names
            .iter()
            .filter_map(|name| topology.find(name))
            .fold(Self::default(), Self::with)
    }

    pub(crate) const fn with(self, stage: StageIndex) -> Self {
        Self(self.0 | 1 << stage.get())
    }

    pub(crate) const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    pub(crate) const fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub(crate) const fn has(self, stage: StageIndex) -> bool {
        self.0 & (1 << stage.get()) != 0
    }
}

impl Job {
    /// Whether the stage never runs for this job.
    pub(crate) const fn skips(&self, stage: StageIndex) -> bool {
        self.skipped.has(stage)
    }

    /// What an attempt of this stage reads: its inputs, but for those from stages that the job skips.
    pub(crate) fn links<'t>(
        &self,
        topology: &'t Topology,
        stage: StageIndex,
    ) -> impl Iterator<Item = &'t Link> + Clone + use<'t> {
        let skipped = self.skipped;
        topology
            .inputs(stage)
            .iter()
            .filter(move |link| !skipped.has(link.from))
    }
}
