//! Checkpoints of a job's stages: where the next attempt goes on.

use serde::{Deserialize, Serialize};
use stagewire_core::{ByteCount, Failure, Incarnation, JobId, PayloadId, Progress, StageName, Timestamp, Token};

use super::{Job, JobState, Output, Phase, Running, StageRun};
use crate::topology::{ClassIndex, StageIndex, Topology};
use crate::{AttemptEnd, Holder, PayloadInfo};

/// How often the attempts of a stage are preempted in one life of its job: after that they run to their end.
pub(crate) const MAX_PREEMPTIONS: u32 = 3;

/// What an attempt had made by a step boundary. Another one goes on from there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checkpoint {
    /// The state of the stage function.
    pub payload: PayloadInfo,
    /// The attempt that made it.
    pub token: Token,
    /// Who ran that attempt.
    pub worker: Incarnation,
    /// How far it had come.
    pub progress: Progress,
}

impl Checkpoint {
    /// Who holds its bytes.
    pub const fn holder(&self) -> Holder {
        self.payload.holder(self.worker)
    }
}

/// Where an attempt has gone on, or will.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Resumed {
    pub(crate) payload: PayloadId,
    /// Steps that were done by then.
    pub(crate) done: u64,
}

/// The job that an attempt makes way for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Preemptor {
    /// The job.
    pub job: JobId,
    /// Its class.
    pub class: StageName,
}

/// An attempt was asked to yield. That is forgotten with the stream on which it was said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Asked {
    pub(crate) by: Option<Preemptor>,
    pub(crate) failure: Failure,
}

impl Running {
    /// Steps that were done when it began.
    pub(crate) fn begun_at(&self) -> u64 {
        self.resumed.map_or(0, |resumed| resumed.done)
    }

    /// Why it was asked to stop at its next step boundary, where it was.
    pub fn yields(&self) -> Option<&Failure> {
        self.asked.as_deref().map(|asked| &asked.failure)
    }

    /// Whether something would be lost with it and something is left to do: it has come further than where it began, and
    /// does not end with its next step anyway.
    fn is_midway(&self) -> bool {
        self.progress.as_ref().is_some_and(|progress| {
            let ends = progress.total > 0 && progress.done.saturating_add(1) >= progress.total;
            progress.done > self.begun_at() && !ends
        })
    }
}

impl StageRun {
    /// Where the next attempt goes on; `None` is the beginning.
    pub fn checkpoint(&self) -> Option<&Checkpoint> {
        self.checkpoint.as_deref()
    }

    /// How often its attempts made way for jobs of other classes, in the present life of the job.
    pub const fn preemptions(&self) -> u32 {
        self.preemptions
    }

    /// Who holds this payload, where it is the output or the checkpoint of the stage.
    pub(crate) fn holder_of(&self, payload: PayloadId) -> Option<Holder> {
        let output = || self.output.holder().filter(|_| self.has_output(payload));
        let checkpoint = self.checkpoint().filter(|kept| kept.payload.id == payload);
        checkpoint.map(Checkpoint::holder).or_else(output)
    }

    fn has_output(&self, payload: PayloadId) -> bool {
        self.output.live().is_some_and(|live| live.id == payload)
    }

    /// What is held of it: its output and its checkpoint.
    pub(crate) fn payloads(&self) -> impl Iterator<Item = (&PayloadInfo, Token, Holder)> {
        let output = match &self.output {
            Output::Live(live) => Some((&live.payload, live.token, live.holder())),
            Output::Shared(shared) => Some((&shared.payload, shared.token, Holder::Store)),
            Output::None | Output::Gone { .. } => None,
        };
        let checkpoint = self.checkpoint().map(|kept| (&kept.payload, kept.token, kept.holder()));
        output.into_iter().chain(checkpoint)
    }

    /// Bytes of its checkpoint.
    pub(crate) fn checkpoint_bytes(&self) -> ByteCount {
        self.checkpoint().map_or(ByteCount(0), |kept| kept.payload.nbytes)
    }

    /// Where an attempt would go on now.
    pub(super) fn resumable(&self) -> Option<Resumed> {
        self.checkpoint().map(|kept| Resumed {
            payload: kept.payload.id,
            done: kept.progress.done,
        })
    }
}

impl Job {
    /// The attempt that runs has come so far.
    pub(super) fn keep_checkpoint(&mut self, token: Token, payload: &PayloadInfo, progress: &Progress) -> Option<()> {
        let stage = self.running(token)?;
        let run = &mut self.stages[stage.get()];
        let known = run.checkpoint().map(|kept| kept.progress.done);
        if known.is_some_and(|known| known >= progress.done) {
            return None;
        }
        run.checkpoint = Some(Box::new(Checkpoint {
            payload: payload.clone(),
            token,
            worker: run.phase.worker()?,
            progress: progress.clone(),
        }));
        Some(())
    }

    /// The attempt that runs was asked to yield.
    pub(super) fn ask(&mut self, token: Token, by: Option<&Preemptor>, failure: &Failure) -> Option<()> {
        let stage = self.running(token)?;
        let asked = Asked {
            by: by.cloned(),
            failure: failure.clone(),
        };
        self.attempt_mut(stage)?.asked = Some(Box::new(asked));
        Some(())
    }

    /// Since when an attempt runs that may be preempted.
    pub(crate) fn yieldable(&self, topology: &Topology, stage: StageIndex) -> Option<Timestamp> {
        let run = self.run(stage);
        let Phase::Running(attempt) = &run.phase else {
            return None;
        };
        let takes_checkpoints = topology.spec(stage).checkpoint && run.output.live().is_none();
        let may_yield = self.state == JobState::Active && run.preemptions < MAX_PREEMPTIONS;
        let yields = takes_checkpoints && may_yield && attempt.asked.is_none() && attempt.is_midway();
        yields.then_some(attempt.since)
    }

    /// Why the attempt that runs should yield, or the last one has, where that was how it ended.
    pub(crate) fn yields(&self, stage: StageIndex) -> Option<&Failure> {
        let run = self.run(stage);
        match &run.phase {
            Phase::Running(attempt) => attempt.yields(),
            Phase::Blocked { .. } | Phase::Queued { .. } | Phase::Offered(_) => {
                let last = self.attempts.iter().rev().find(|ended| ended.stage == run.name)?;
                match &last.end {
                    AttemptEnd::Yielded(failure) => Some(failure),
                    _ => None,
                }
            }
            Phase::Done { .. } | Phase::Cached { .. } => None,
        }
    }

    /// The class for whose sake the attempt that runs was asked to yield.
    pub(crate) fn yields_to(&self, topology: &Topology, stage: StageIndex) -> Option<ClassIndex> {
        match &self.run(stage).phase {
            Phase::Running(attempt) => {
                let by = attempt.asked.as_ref()?.by.as_ref()?;
                Some(topology.class_index(&by.class))
            }
            _ => None,
        }
    }
}
