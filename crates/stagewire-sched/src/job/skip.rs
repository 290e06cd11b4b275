//! Stages that a job does not need: what they would make was given with it, or nobody wants it.

use stagewire_core::{StageName, Token};

use super::Job;
use crate::Event;
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

    /// The stage that a token stands for.
    pub(crate) fn of_token(token: Token) -> impl FnOnce(&Topology, &Job) -> Self {
        move |_, job| job.find(token).into_iter().fold(Self::default(), Self::with)
    }

    pub(crate) const fn with(self, stage: StageIndex) -> Self {
        Self(self.0 | 1 << stage.get())
    }

    pub(crate) fn all(topology: &Topology) -> Self {
        Self(u64::MAX >> (Topology::MAX_STAGES - topology.stages().len()))
    }

    /// In the order in which they are declared.
    pub(crate) fn iter(self) -> impl Iterator<Item = StageIndex> {
        let mut left = self.0;
        std::iter::from_fn(move || {
            let first = left.trailing_zeros();
            left &= left.wrapping_sub(1);
            (first < u64::BITS).then(|| StageIndex::new(first as usize))
        })
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
    /// The stages that an event may change: the one that it is about and those that read its output, which may become
    /// ready; all where the job as a whole may begin or end, as that counts in each of their queues.
    pub(crate) fn touched(&self, topology: &Topology, event: &Event) -> StageSet {
        let stage = match event {
            Event::AttemptGranted { .. } if !self.has_begun(topology) => None,
            Event::Offered { stage, .. }
            | Event::AttemptGranted { stage, .. }
            | Event::PayloadLost { stage, .. }
            | Event::PayloadReleased { stage, .. }
            | Event::SharedLeft { stage, .. }
            | Event::Awaits { stage, .. }
            | Event::AwaitEnded { stage, .. }
            | Event::RetryDue { stage, .. } => topology.find(stage),
            Event::OfferEnded { token, .. }
            | Event::Published { token, .. }
            | Event::AttemptCompleted { token, .. }
            | Event::AttemptFailed { token, .. }
            | Event::AttemptLost { token, .. }
            | Event::AttemptFenced { token, .. }
            | Event::AttemptYielded { token, .. }
            | Event::Checkpointed { token, .. }
            | Event::Yielding { token, .. }
            | Event::OutputShared { token }
            | Event::PayloadMoved { token, .. } => self.find(*token),
            _ => None,
        };
        let Some(stage) = stage else {
            return StageSet::all(topology);
        };
        let consumers = topology.consumers(stage).iter().copied();
        consumers.fold(StageSet::default().with(stage), StageSet::with)
    }

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
