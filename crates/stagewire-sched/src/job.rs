mod apply;
mod cached;
mod checkpoint;
mod redrive;
mod settle;
mod skip;

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use stagewire_core::{Attempt, Failure, Incarnation, JobId, PayloadId, Progress, StageName, Timestamp, Token};

use crate::topology::{ClassIndex, Topology};
use crate::{AttemptLog, Holder, IdempotencyKey, PayloadInfo, ResultInfo, Terms};
pub(crate) use cached::CacheUse;
pub(crate) use checkpoint::{Asked, MAX_PREEMPTIONS, Resumed};
pub use checkpoint::{Checkpoint, Preemptor};
pub(crate) use skip::StageSet;

/// People count from 1.
pub(crate) const FIRST_ATTEMPT: u32 = 1;

/// Where a job is in its life.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum JobState {
    /// It waits or runs.
    Active,
    /// Somebody asked it to stop, and some of its attempts have not stopped yet.
    Cancelling {
        /// Since when.
        since: Timestamp,
    },
    /// It has ended.
    Ended {
        /// How.
        outcome: Outcome,
        /// When.
        at: Timestamp,
    },
}

/// How a job ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// Every stage is done.
    Succeeded,
    /// It will not be tried again.
    Failed(Failure),
    /// Somebody asked for it.
    Cancelled,
}

impl JobState {
    /// What [`JobState::name`] says of each.
    pub const NAMES: [&str; 5] = ["active", "cancelling", "succeeded", "failed", "cancelled"];

    /// The state in one word: `active`, `cancelling`, `succeeded`, `failed` or `cancelled`.
    pub const fn name(&self) -> &'static str {
        Self::NAMES[self.position()]
    }

    /// Its place in [`JobState::NAMES`].
    pub(crate) const fn position(&self) -> usize {
        match self {
            Self::Active => 0,
            Self::Cancelling { .. } => 1,
            Self::Ended { outcome, .. } => match outcome {
                Outcome::Succeeded => 2,
                Outcome::Failed(_) => 3,
                Outcome::Cancelled => 4,
            },
        }
    }
}

/// A job and all its stages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Job {
    pub(crate) id: JobId,
    /// Counts submissions; smaller is older.
    pub(crate) number: u64,
    pub(crate) params: Arc<str>,
    pub(crate) key: Option<IdempotencyKey>,
    pub(crate) submitted: Timestamp,
    /// When its present life began: when it was submitted, or redriven last.
    pub(crate) entered: Timestamp,
    /// How often it was redriven.
    pub(crate) redrives: u32,
    pub(crate) terms: Terms,
    /// Position of its class; follows from its name.
    #[serde(skip)]
    pub(crate) class: ClassIndex,
    /// Stages that never run for it; follows from their names.
    #[serde(skip)]
    pub(crate) skipped: StageSet,
    pub(crate) state: JobState,
    /// In the order of [`Topology::stages`](crate::Topology::stages).
    pub(crate) stages: Vec<StageRun>,
    pub(crate) next_attempt: u32,
    pub(crate) losses: Losses,
    /// Workers that died, or stayed away too long, while they ran it: each once.
    pub(crate) victims: Vec<Incarnation>,
    /// Whether it is kept as a dead letter.
    pub(crate) dead: bool,
    pub(crate) attempts: AttemptLog,
}

/// What went wrong with a job without counting as a failure of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Losses {
    /// Workers that died, or stayed away too long, while they ran it, each counted once.
    pub killed_workers: u32,
    /// Attempts that fell silent, or were stopped unasked.
    pub expired: u32,
    /// Inputs that a consumer could not read.
    pub lost_inputs: u32,
    /// Offers that no worker accepted, since the server started. They end no job: workers that do not take offers pause.
    pub unaccepted: u32,
}

/// One stage of one job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageRun {
    pub(crate) name: StageName,
    pub(crate) phase: Phase,
    pub(crate) output: Output,
    /// Where the next attempt goes on.
    pub(crate) checkpoint: Option<Box<Checkpoint>>,
    /// How often its attempts made way for jobs of other classes.
    pub(crate) preemptions: u32,
    pub(crate) failures: u32,
    /// It has failed, and is not tried again before then.
    pub(crate) retry: Option<Timestamp>,
    /// The job that makes the same, where this one waits for that.
    #[serde(skip)]
    pub(crate) awaits: Option<JobId>,
    pub(crate) last_failure: Option<Box<Failure>>,
    pub(crate) result: Option<Box<ResultInfo>>,
}

/// Where a stage of a job is. Few of many jobs are offered or run, and copies share what there is to say of those.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Phase {
    /// It waits for its inputs.
    Blocked {
        /// Since when.
        since: Timestamp,
        /// Whether it ran before.
        again: bool,
    },
    /// It waits for a worker.
    Queued {
        /// Since when.
        since: Timestamp,
        /// Whether it ran before; then it goes first.
        again: bool,
    },
    /// A worker has been asked.
    Offered(Arc<Offering>),
    /// A worker runs it.
    Running(Arc<Running>),
    /// It is done.
    Done {
        /// Since when.
        since: Timestamp,
        /// The attempt that did it; `None` where it was skipped, as nobody needs it to run.
        token: Option<Token>,
    },
    /// It is done: another job had made the same.
    Cached {
        /// Since when.
        since: Timestamp,
    },
}

/// An offer that is neither accepted nor declined.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offering {
    /// The right that comes with the grant.
    pub token: Token,
    /// Who was asked.
    pub worker: Incarnation,
    /// When.
    pub since: Timestamp,
    /// When the offer ends.
    pub deadline: Timestamp,
    /// Since when the stage has waited for a worker.
    pub queued: Timestamp,
    /// Whether it ran before.
    pub again: bool,
    /// What its class has paid for it.
    pub price: Duration,
    /// Attempts that were offered together, this one included.
    pub batch: u32,
    /// Bytes that are set aside for its output, until that is published.
    pub nbytes: u64,
    pub(crate) inputs: Vec<PayloadId>,
    /// Where it will go on.
    pub(crate) resumed: Option<Resumed>,
}

/// An attempt that was granted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Running {
    /// The right to act for it.
    pub token: Token,
    /// Who runs it.
    pub worker: Incarnation,
    /// That worker's name for people.
    pub name: Arc<str>,
    /// When it was granted.
    pub since: Timestamp,
    /// When it is lost unless it is renewed.
    pub deadline: Timestamp,
    /// How far it has come.
    pub progress: Option<Progress>,
    /// Number of its last report of progress.
    pub sequence: u64,
    /// When that came.
    pub progressed: Timestamp,
    /// What its class has paid for it; `None` where it was granted before the server restarted.
    pub price: Option<Duration>,
    /// Attempts that were offered together, this one included.
    pub batch: u32,
    /// The other ranks of its worker's group, which run it as well.
    pub ranks: Vec<Incarnation>,
    /// Bytes that are set aside for its output, until that is published.
    pub nbytes: u64,
    pub(crate) inputs: Vec<PayloadId>,
    /// Where it has gone on.
    pub(crate) resumed: Option<Resumed>,
    /// Why it should yield.
    #[serde(skip)]
    pub(crate) asked: Option<Box<Asked>>,
}

impl Running {
    /// Its worker, and the other ranks of that one's group.
    pub(crate) fn workers(&self) -> impl Iterator<Item = Incarnation> {
        std::iter::once(self.worker).chain(self.ranks.iter().copied())
    }

    /// Whether the worker runs it, at whatever rank.
    pub(crate) fn is_run_by(&self, worker: Incarnation) -> bool {
        self.workers().any(|other| other == worker)
    }
}

/// The output of a stage of a job. A last stage has none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Output {
    /// Not published.
    None,
    /// Published and not released. Sealed once the stage is done.
    Live(Arc<Live>),
    /// What is kept for all jobs that would make the same, of which this one still needs it. The store has it.
    Shared(Arc<Shared>),
    /// Released or lost.
    Gone {
        /// The payload.
        payload: PayloadId,
        /// Whether all its chunks were visible. Where they were, who has begun to read may go on.
        sealed: bool,
    },
}

/// An output that can be read. Few of many jobs have one, and copies share it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Live {
    /// The payload.
    pub payload: PayloadInfo,
    /// The attempt that published it.
    pub token: Token,
    /// Who ran that attempt.
    pub worker: Incarnation,
}

/// What several jobs may have for their output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shared {
    /// The payload.
    pub payload: PayloadInfo,
    /// The attempt that made it, perhaps one of another job.
    pub token: Token,
}

impl Live {
    /// Who holds its bytes.
    pub(crate) const fn holder(&self) -> Holder {
        self.payload.holder(self.worker)
    }
}

impl Output {
    /// The payload, while it can be read.
    pub fn live(&self) -> Option<&PayloadInfo> {
        match self {
            Self::Live(live) => Some(&live.payload),
            Self::Shared(shared) => Some(&shared.payload),
            Self::None | Self::Gone { .. } => None,
        }
    }

    /// The same, where it is no other job's.
    pub(crate) fn own(&self) -> Option<&PayloadInfo> {
        match self {
            Self::Live(live) => Some(&live.payload),
            Self::None | Self::Shared(_) | Self::Gone { .. } => None,
        }
    }

    /// The worker that published the payload, while it can be read.
    pub(crate) fn worker(&self) -> Option<Incarnation> {
        match self {
            Self::Live(live) => Some(live.worker),
            Self::None | Self::Shared(_) | Self::Gone { .. } => None,
        }
    }

    /// Who holds the payload, while it can be read.
    pub fn holder(&self) -> Option<Holder> {
        match self {
            Self::Live(live) => Some(live.holder()),
            Self::Shared(_) => Some(Holder::Store),
            Self::None | Self::Gone { .. } => None,
        }
    }
}

impl Phase {
    /// What [`Phase::name`] says of each.
    pub const NAMES: [&str; 7] = ["blocked", "queued", "offered", "running", "done", "skipped", "cached"];

    /// The phase in one word: `blocked`, `queued`, `offered`, `running`, `done`, `skipped` or `cached`.
    pub const fn name(&self) -> &'static str {
        Self::NAMES[self.position()]
    }

    /// Its place in [`Phase::NAMES`].
    pub(crate) const fn position(&self) -> usize {
        match self {
            Self::Blocked { .. } => 0,
            Self::Queued { .. } => 1,
            Self::Offered(_) => 2,
            Self::Running(_) => 3,
            Self::Done { token: Some(_), .. } => 4,
            Self::Done { token: None, .. } => 5,
            Self::Cached { .. } => 6,
        }
    }

    /// Since when.
    pub fn since(&self) -> Timestamp {
        match self {
            Self::Blocked { since, .. }
            | Self::Queued { since, .. }
            | Self::Done { since, .. }
            | Self::Cached { since } => *since,
            Self::Offered(offer) => offer.since,
            Self::Running(attempt) => attempt.since,
        }
    }

    /// The token of the offer, the attempt, or the attempt that did it.
    pub fn token(&self) -> Option<Token> {
        match self {
            Self::Blocked { .. } | Self::Queued { .. } | Self::Cached { .. } => None,
            Self::Offered(offer) => Some(offer.token),
            Self::Running(attempt) => Some(attempt.token),
            Self::Done { token, .. } => *token,
        }
    }

    /// The worker that was asked or that runs it.
    pub fn worker(&self) -> Option<Incarnation> {
        match self {
            Self::Offered(offer) => Some(offer.worker),
            Self::Running(attempt) => Some(attempt.worker),
            Self::Blocked { .. } | Self::Queued { .. } | Self::Done { .. } | Self::Cached { .. } => None,
        }
    }

    pub(crate) const fn is_done(&self) -> bool {
        matches!(self, Self::Done { .. } | Self::Cached { .. })
    }

    /// Waits for inputs or for a worker.
    pub(crate) const fn is_idle(&self) -> bool {
        matches!(self, Self::Blocked { .. } | Self::Queued { .. })
    }
}

impl StageRun {
    /// Whether its output is there, or is being made.
    pub(crate) fn takes_credit(&self) -> bool {
        self.phase.worker().is_some() || self.output.own().is_some()
    }

    /// Those of a job of which nothing has happened.
    pub(crate) fn all(topology: &Topology, skipped: StageSet, at: Timestamp) -> Vec<Self> {
        let run = |stage| Self {
            name: topology.name(stage).clone(),
            phase: if skipped.has(stage) {
                Phase::Done { since: at, token: None }
            } else {
                Phase::Blocked {
                    since: at,
                    again: false,
                }
            },
            output: Output::None,
            checkpoint: None,
            preemptions: 0,
            failures: 0,
            retry: None,
            awaits: None,
            last_failure: None,
            result: None,
        };
        topology.indices().map(run).collect()
    }

    /// Its name.
    pub const fn name(&self) -> &StageName {
        &self.name
    }

    /// Where it is.
    pub const fn phase(&self) -> &Phase {
        &self.phase
    }

    /// Its output.
    pub const fn output(&self) -> &Output {
        &self.output
    }

    /// How often its attempts failed; losses do not count.
    pub const fn failures(&self) -> u32 {
        self.failures
    }

    /// When it is tried again after a failure, while it waits for that.
    pub const fn retry(&self) -> Option<Timestamp> {
        self.retry
    }

    /// Why its last attempt ended, where that was not by completion.
    pub fn last_failure(&self) -> Option<&Failure> {
        self.last_failure.as_deref()
    }

    /// What it made, for a last stage that is done.
    pub fn result(&self) -> Option<&ResultInfo> {
        self.result.as_deref()
    }
}

impl Job {
    /// Its id.
    pub const fn id(&self) -> JobId {
        self.id
    }

    /// Its parameters: a JSON object.
    pub const fn params(&self) -> &Arc<str> {
        &self.params
    }

    /// The key that it was submitted with.
    pub const fn key(&self) -> Option<&IdempotencyKey> {
        self.key.as_ref()
    }

    /// When it was submitted.
    pub const fn submitted(&self) -> Timestamp {
        self.submitted
    }

    /// When its present life began: when it was submitted, or redriven last.
    pub const fn entered(&self) -> Timestamp {
        self.entered
    }

    /// How often it was redriven.
    pub const fn redrives(&self) -> u32 {
        self.redrives
    }

    /// What became of its attempts, those of earlier lives included.
    pub const fn attempts(&self) -> &AttemptLog {
        &self.attempts
    }

    /// What was agreed when it was submitted: its class, deadline and shape, and what it skips.
    pub const fn terms(&self) -> &Terms {
        &self.terms
    }

    /// When it is dropped, unless it has begun.
    pub fn due(&self) -> Option<Timestamp> {
        Some(self.entered + self.terms.queue_deadline?)
    }

    /// Where it is in its life.
    pub const fn state(&self) -> &JobState {
        &self.state
    }

    /// How it ended, if it has.
    pub const fn outcome(&self) -> Option<&Outcome> {
        match &self.state {
            JobState::Ended { outcome, .. } => Some(outcome),
            JobState::Active | JobState::Cancelling { .. } => None,
        }
    }

    /// When it ended, if it has.
    pub const fn ended(&self) -> Option<Timestamp> {
        match &self.state {
            JobState::Ended { at, .. } => Some(*at),
            JobState::Active | JobState::Cancelling { .. } => None,
        }
    }

    /// Its stages, in the order of [`Topology::stages`](crate::Topology::stages).
    pub fn stages(&self) -> &[StageRun] {
        &self.stages
    }

    /// The stage of this name.
    pub fn stage(&self, name: &StageName) -> Option<&StageRun> {
        self.stages.iter().find(|stage| stage.name == *name)
    }

    /// Results of its last stages that are done.
    pub fn results(&self) -> impl Iterator<Item = (&StageName, &ResultInfo)> {
        self.stages
            .iter()
            .filter_map(|stage| Some((&stage.name, stage.result.as_deref()?)))
    }

    /// What went wrong in its present life without counting as a failure.
    pub const fn losses(&self) -> Losses {
        self.losses
    }

    /// Whether it holds a credit, a checkpoint or what is kept for several jobs.
    pub(crate) fn holds(&self, topology: &Topology) -> bool {
        let mut runs = topology.indices().zip(&self.stages);
        runs.any(|(stage, run)| {
            let credit = run.takes_credit() && !topology.consumers(stage).is_empty();
            credit || run.checkpoint.is_some() || matches!(run.output, Output::Shared(_))
        })
    }

    /// Bytes of its outputs that are published and not released, and of its checkpoints.
    pub(crate) fn held_bytes(&self) -> u64 {
        let live = self.stages.iter().flat_map(StageRun::payloads);
        live.fold(0, |sum, (payload, ..)| sum.saturating_add(payload.nbytes.0))
    }

    /// The attempt that the next offer will have.
    pub(crate) const fn next_attempt(&self) -> Attempt {
        Attempt(self.next_attempt)
    }
}
