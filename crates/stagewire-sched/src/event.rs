use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use stagewire_core::{Epoch, Failure, Handover, Incarnation, JobId, PayloadId, Progress, StageName, Timestamp, Token};

use crate::{Discard, IdempotencyKey, Outcome, PayloadInfo, Preemptor, ResultInfo, Terms, WorkerInfo};

/// A fact: something that was decided. State changes by events and by nothing else.
///
/// Durable events are journaled before anything of their decision becomes known, and rebuild the state after a restart.
/// Volatile ones concern offers and streams, which do not outlive the server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the fields are what the sentence above them names")]
pub enum Event {
    // Durable. Journals hold these by position: new variants go to the end.
    /// The server works in this epoch from here on; all offers and streams of before are void.
    Restarted { epoch: Epoch },
    /// A job exists.
    JobSubmitted {
        job: JobId,
        params: Arc<str>,
        key: Option<IdempotencyKey>,
        terms: Terms,
    },
    /// The job will be cancelled once its attempts have stopped.
    JobCancelling { job: JobId },
    /// The job has reached its terminal state.
    JobEnded { job: JobId, outcome: Outcome },
    /// Nobody will ask for the ended job any more.
    JobForgotten { job: JobId },
    /// The attempt may run, in a batch of so many, on the worker and the other ranks of its group.
    /// `nbytes` are set aside for its output.
    AttemptGranted {
        token: Token,
        stage: StageName,
        worker: Incarnation,
        batch: u32,
        ranks: Vec<Incarnation>,
        nbytes: u64,
        /// The worker's name for people.
        name: Arc<str>,
        /// Steps that it need not do, as it goes on from a checkpoint.
        saved: u64,
    },
    /// The attempt has published its output.
    Published { token: Token, payload: PayloadInfo },
    /// The attempt's output is accepted: its stage is done.
    AttemptCompleted {
        token: Token,
        result: Option<ResultInfo>,
        handovers: Vec<Handover>,
    },
    /// The attempt failed; that counts against the stage, which is tried again at that time, if at all.
    AttemptFailed {
        token: Token,
        failure: Failure,
        retry: Option<Timestamp>,
    },
    /// The attempt is lost with this worker, its own or another rank of that one's group; that does not count against the
    /// stage.
    AttemptLost {
        token: Token,
        worker: Incarnation,
        loss: Loss,
        failure: Failure,
    },
    /// The attempt was revoked: nobody needs its output, or what it reads will never be complete.
    AttemptFenced { token: Token, failure: Failure },
    /// The bytes of the payload are gone, though somebody may need them.
    PayloadLost {
        job: JobId,
        stage: StageName,
        payload: PayloadId,
    },
    /// Nobody needs the payload any more.
    PayloadReleased {
        job: JobId,
        stage: StageName,
        payload: PayloadId,
    },
    /// The stage was done, but its output is needed again and gone.
    StageReopened { job: JobId, stage: StageName },
    /// Nobody needs this stage's output, so it need not run.
    StageSkipped { job: JobId, stage: StageName },
    /// The stage has waited for long enough after a failure.
    RetryDue { job: JobId, stage: StageName },
    /// The payload went from the memory of the worker that published it to the store.
    PayloadMoved { token: Token, payload: PayloadInfo },
    /// Only jobs that have begun go on, until the pipeline is resumed.
    Paused,
    /// Jobs begin again.
    Resumed,
    /// The dead letter has a new life.
    JobRedriven { job: JobId },
    /// The dead letter is a job that has failed, like others.
    DeadLetterDiscarded { job: JobId, why: Discard },
    /// The attempt goes on, and the next one of its stage goes on from here; the checkpoint before is of no use any more.
    Checkpointed {
        token: Token,
        payload: PayloadInfo,
        progress: Progress,
    },
    /// The attempt has stopped at a step boundary, and its stage goes back into its queue. `by` is the job that it made way
    /// for, where it was preempted.
    AttemptYielded {
        token: Token,
        by: Option<Preemptor>,
        failure: Failure,
    },
    /// What the attempt has made is kept for all jobs that would make the same, and none of its own job's any more.
    OutputShared { token: Token },
    /// The stage is done: this payload is kept, which an attempt of another job has made, and which it would make, too.
    StageCached {
        job: JobId,
        stage: StageName,
        payload: PayloadInfo,
        token: Token,
    },
    /// The job does not need this payload any more, which is kept for others.
    SharedLeft {
        job: JobId,
        stage: StageName,
        payload: PayloadId,
    },
    /// The payload is not kept any longer, which no job needs.
    CacheDropped { payload: PayloadId },

    // Volatile.
    /// The worker's stream is up. `claimed` attempts go on, `stale` ones were told to stop, and `unclaimed` payloads
    /// may yet be published by a claimed attempt.
    WorkerAttached {
        worker: WorkerInfo,
        claimed: Vec<Token>,
        stale: Vec<Token>,
        unclaimed: Vec<PayloadId>,
    },
    /// The worker's stream broke.
    WorkerAway { worker: Incarnation },
    /// The worker is gone.
    WorkerLost { worker: Incarnation },
    /// The worker gets offers again after a pause.
    WorkerResumed { worker: Incarnation },
    /// The worker's unclaimed payloads were released.
    HoldingsSettled { worker: Incarnation },
    /// The worker gets no more offers; what it runs at that time ends.
    WorkerDraining {
        worker: Incarnation,
        until: Option<Timestamp>,
    },
    /// No worker gets offers any more, and no job is accepted.
    Draining,
    /// The attempt was offered, in a batch of so many. Its class pays the price, which is what the attempt is predicted to
    /// take; `nbytes` is what its output is, and `steps` is how far the worker is from what it reads, where that counts.
    Offered {
        token: Token,
        stage: StageName,
        worker: Incarnation,
        price: Duration,
        nbytes: u64,
        batch: u32,
        steps: Option<u32>,
    },
    /// The offer ended without a grant.
    OfferEnded { token: Token, end: OfferEnd },
    /// The worker is still at it.
    Renewed {
        token: Token,
        sequence: u64,
        progress: Option<Progress>,
    },
    /// The attempt was asked to yield, for this job where it is preempted.
    Yielding {
        token: Token,
        by: Option<Preemptor>,
        failure: Failure,
    },
    /// The stage waits, as this other job makes what it would.
    Awaits { job: JobId, stage: StageName, by: JobId },
    /// The stage does not wait for another job any more, and takes its turn.
    AwaitEnded { job: JobId, stage: StageName },
    /// An attempt that was superseded has stopped: its slot is free.
    AttemptStopped { worker: Incarnation, token: Token },
}

/// Why an attempt was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Loss {
    /// Its worker died, or stayed away too long.
    WorkerLost,
    /// Its worker did not come back after a restart of the server.
    Unclaimed,
    /// Its worker came back without it: the grant never arrived.
    NotRunning,
    /// Its grant was not renewed.
    GrantExpired,
    /// It was renewed, but made no progress.
    NoProgress,
    /// Its worker stopped it unasked.
    Stopped,
    /// It could not read an input whose holder is gone.
    InputLost,
}

impl Loss {
    /// The loss in words: `worker_lost`, `unclaimed`, `not_running`, `grant_expired`, `no_progress`, `stopped` or
    /// `input_lost`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::WorkerLost => "worker_lost",
            Self::Unclaimed => "unclaimed",
            Self::NotRunning => "not_running",
            Self::GrantExpired => "grant_expired",
            Self::NoProgress => "no_progress",
            Self::Stopped => "stopped",
            Self::InputLost => "input_lost",
        }
    }

    /// Whether the worker may still be running the attempt, so that its slot is not free yet.
    pub const fn keeps_slot(self) -> bool {
        matches!(self, Self::GrantExpired | Self::NoProgress)
    }
}

/// How an offer ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum OfferEnd {
    /// The worker declined, for this reason.
    Declined(Failure),
    /// The worker did not answer in time.
    Unanswered,
    /// The worker's stream broke, or what was offered is not there any more.
    Withdrawn,
}

impl Event {
    /// Whether the event must be journaled. Replaying these alone rebuilds the durable state.
    pub const fn is_durable(&self) -> bool {
        !matches!(
            self,
            Self::WorkerAttached { .. }
                | Self::WorkerAway { .. }
                | Self::WorkerLost { .. }
                | Self::WorkerResumed { .. }
                | Self::HoldingsSettled { .. }
                | Self::WorkerDraining { .. }
                | Self::Draining
                | Self::Offered { .. }
                | Self::OfferEnded { .. }
                | Self::Renewed { .. }
                | Self::Yielding { .. }
                | Self::Awaits { .. }
                | Self::AwaitEnded { .. }
                | Self::AttemptStopped { .. }
        )
    }

    /// The job that the event changes, if it changes one.
    pub const fn job(&self) -> Option<JobId> {
        match self {
            Self::JobSubmitted { job, .. }
            | Self::JobCancelling { job }
            | Self::JobEnded { job, .. }
            | Self::JobForgotten { job }
            | Self::PayloadLost { job, .. }
            | Self::PayloadReleased { job, .. }
            | Self::StageReopened { job, .. }
            | Self::StageSkipped { job, .. }
            | Self::StageCached { job, .. }
            | Self::SharedLeft { job, .. }
            | Self::Awaits { job, .. }
            | Self::AwaitEnded { job, .. }
            | Self::RetryDue { job, .. }
            | Self::JobRedriven { job }
            | Self::DeadLetterDiscarded { job, .. } => Some(*job),
            Self::AttemptGranted { token, .. }
            | Self::Published { token, .. }
            | Self::AttemptCompleted { token, .. }
            | Self::AttemptFailed { token, .. }
            | Self::AttemptLost { token, .. }
            | Self::AttemptFenced { token, .. }
            | Self::PayloadMoved { token, .. }
            | Self::OutputShared { token }
            | Self::Checkpointed { token, .. }
            | Self::AttemptYielded { token, .. }
            | Self::Yielding { token, .. }
            | Self::Offered { token, .. }
            | Self::OfferEnded { token, .. }
            | Self::Renewed { token, .. } => Some(token.job),
            _ => None,
        }
    }
}
