//! Stages of a job whose output may be another job's.

use std::sync::Arc;

use stagewire_core::{JobId, PayloadId, Timestamp, Token};

use super::{Job, JobState, Output, Phase, Shared, StageRun};
use crate::topology::{StageIndex, Topology};
use crate::{CacheKey, PayloadInfo};

/// What a stage of a job has to do with a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CacheUse {
    /// It has not begun; `awaiting` says whether it waits for the job that makes the same.
    Idle {
        key: CacheKey,
        stage: StageIndex,
        awaiting: bool,
    },
    /// It is offered or runs.
    Making { key: CacheKey },
    /// Its output is what is kept under the key.
    Using { key: CacheKey },
}

impl StageRun {
    /// Whether it has this payload for its output, which is kept for several jobs.
    pub(crate) fn shares(&self, kept: PayloadId) -> bool {
        matches!(&self.output, Output::Shared(shared) if shared.payload.id == kept)
    }
}

impl Job {
    /// The key of what this stage makes, where that is kept for others.
    pub(crate) fn cache_key(&self, stage: StageIndex) -> Option<CacheKey> {
        let name = &self.run(stage).name;
        let mut keys = self.terms.cache.iter();
        keys.find(|(keyed, _)| keyed == name).map(|(_, key)| *key)
    }

    /// What it has to do with its keys. Most jobs have none.
    pub(crate) fn cache_uses(&self, topology: &Topology) -> Vec<CacheUse> {
        let keys = self.terms.cache.iter();
        let keyed = keys.filter_map(|(name, key)| Some((topology.find(name)?, *key)));
        keyed.filter_map(|(stage, key)| self.cache_use(stage, key)).collect()
    }

    fn cache_use(&self, stage: StageIndex, key: CacheKey) -> Option<CacheUse> {
        let run = self.run(stage);
        match &run.phase {
            Phase::Offered(_) | Phase::Running(_) => Some(CacheUse::Making { key }),
            Phase::Blocked { .. } | Phase::Queued { .. } => {
                (self.state == JobState::Active).then_some(CacheUse::Idle {
                    key,
                    stage,
                    awaiting: run.awaits.is_some(),
                })
            }
            Phase::Done { .. } | Phase::Cached { .. } => {
                matches!(run.output, Output::Shared(_)).then_some(CacheUse::Using { key })
            }
        }
    }

    /// Leaves the output of a stage that is done to all jobs that would make the same.
    pub(super) fn share(&mut self, token: Token) -> Option<()> {
        let stage = self.find(token)?;
        let run = &mut self.stages[stage.get()];
        match &run.output {
            Output::Live(live) if live.token == token && live.payload.stored && run.phase.is_done() => {
                let payload = live.payload.clone();
                run.output = Output::Shared(Arc::new(Shared { payload, token }));
                Some(())
            }
            _ => None,
        }
    }

    /// Takes what another job has made, as the output of a stage that has not begun.
    pub(super) fn take_shared(
        &mut self,
        at: Timestamp,
        stage: StageIndex,
        payload: &PayloadInfo,
        token: Token,
    ) -> Option<()> {
        let active = self.state == JobState::Active && !self.skips(stage);
        let run = &mut self.stages[stage.get()];
        (active && run.phase.is_idle()).then(|| {
            run.phase = Phase::Cached { since: at };
            run.retry = None;
            let payload = payload.clone();
            run.output = Output::Shared(Arc::new(Shared { payload, token }));
        })
    }

    /// Needs the payload no more, which others may.
    pub(super) fn leave_shared(&mut self, stage: StageIndex, left: PayloadId) -> Option<()> {
        let run = &mut self.stages[stage.get()];
        match &run.output {
            Output::Shared(shared) if shared.payload.id == left => {
                run.output = Output::Gone {
                    payload: left,
                    sealed: true,
                };
                Some(())
            }
            _ => None,
        }
    }

    /// Waits for another job that makes the same.
    pub(super) fn await_other(&mut self, stage: StageIndex, by: JobId) -> Option<()> {
        let run = &mut self.stages[stage.get()];
        let waits = matches!(run.phase, Phase::Queued { .. }) && run.awaits.is_none();
        waits.then(|| run.awaits = Some(by))
    }
}
