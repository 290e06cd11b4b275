use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use stagewire_core::{
    ByteCount, Epoch, Failure, Handover, Incarnation, JobId, Member, PayloadId, Progress, StageName, Token,
};

use crate::{CacheKey, Discard, Holder, Place};

/// Something that happened outside. [`Sched::decide`](crate::Sched::decide) says what follows from it.
///
/// What comes from a worker names that worker, so that nobody can act for another one's attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// The server has replayed its journal and starts to work in this epoch, one higher than the last.
    Restarted {
        /// The new epoch.
        epoch: Epoch,
        /// Payloads that the store still has.
        stored: BTreeSet<PayloadId>,
    },
    /// Somebody wants a job done. The id that counts is [`Decision::job`](crate::Decision::job): with a known key
    /// it is the job of the first submission.
    Submit {
        /// Id for the job, never used before.
        job: JobId,
        /// Parameters: a JSON object that the server has checked.
        params: Arc<str>,
        /// Makes the submission repeatable.
        key: Option<IdempotencyKey>,
        /// How urgent it is.
        urgency: Urgency,
    },
    /// Somebody does not want the job any more.
    Cancel {
        /// The job.
        job: JobId,
    },
    /// Somebody wants a dead letter tried again.
    Redrive {
        /// The job.
        job: JobId,
    },
    /// A dead letter is not to be kept any longer.
    Discard {
        /// The job.
        job: JobId,
        /// Why.
        why: Discard,
    },
    /// A worker's stream is up: for the first time, or again.
    WorkerAttached {
        /// The worker.
        worker: WorkerInfo,
        /// Attempts that it still runs, from before its stream was lost; those that ended without an answer included.
        running: Vec<Token>,
        /// Payloads whose bytes it still holds.
        holding: Vec<PayloadId>,
    },
    /// A worker's stream broke, but its process may live.
    WorkerAway {
        /// The worker.
        worker: Incarnation,
    },
    /// A worker's process is gone, and what it held with it.
    WorkerLost {
        /// The worker.
        worker: Incarnation,
    },
    /// A worker takes an offer.
    Accept {
        /// The worker.
        worker: Incarnation,
        /// The offer.
        token: Token,
    },
    /// A worker does not take an offer.
    Decline {
        /// The worker.
        worker: Incarnation,
        /// The offer.
        token: Token,
        /// Why not.
        failure: Failure,
    },
    /// A worker is still at it.
    Renew {
        /// The worker.
        worker: Incarnation,
        /// The attempt.
        token: Token,
        /// Grows with each report of progress, from 1 on; a repeated report is not progress.
        sequence: u64,
        /// How far it has come.
        progress: Option<Progress>,
    },
    /// The attempt's payload exists and its first chunk is visible.
    Published {
        /// The worker.
        worker: Incarnation,
        /// The attempt.
        token: Token,
        /// The payload.
        payload: PayloadInfo,
    },
    /// Every chunk is visible and the stage function has returned.
    Completed {
        /// The worker.
        worker: Incarnation,
        /// The attempt.
        token: Token,
        /// The result of a last stage, already safe; ignored for other stages.
        result: Option<ResultInfo>,
        /// The chunks as the attempt received them.
        handovers: Vec<Handover>,
    },
    /// The attempt ended without an output.
    Failed {
        /// The worker.
        worker: Incarnation,
        /// The attempt.
        token: Token,
        /// Why.
        failure: Failure,
        /// The input that could not be read because its holder is gone: then nobody is to blame.
        lost: Option<PayloadId>,
    },
    /// The attempt goes on, and what it has made so far can be gone on from.
    Checkpointed {
        /// The worker.
        worker: Incarnation,
        /// The attempt.
        token: Token,
        /// The payload.
        payload: PayloadInfo,
        /// How far it had come. One that has come no further than the last is let go of.
        progress: Progress,
    },
    /// The attempt has stopped at a step boundary, as it was asked to.
    Yielded {
        /// The worker.
        worker: Incarnation,
        /// The attempt.
        token: Token,
        /// Where the next one goes on; without it that is the last checkpoint, or the beginning.
        payload: Option<PayloadInfo>,
        /// How far it had come.
        progress: Progress,
    },
    /// An attempt that was told to stop has stopped.
    Stopped {
        /// The worker.
        worker: Incarnation,
        /// The attempt.
        token: Token,
    },
    /// The bytes of this payload are gone, though its holder may live.
    PayloadLost {
        /// The payload.
        payload: PayloadId,
    },
    /// No new attempts, and for [`DrainScope::All`] no new jobs; what runs goes on.
    Drain {
        /// Where.
        scope: DrainScope,
        /// What runs after that time is taken from its workers and queued again; `None` lets it end. Of no effect for
        /// [`DrainScope::All`].
        within: Option<Duration>,
    },
    /// Jobs that have begun go on, the others wait, until [`Input::Resume`]; also across a restart.
    Pause,
    /// Jobs begin again.
    Resume,
    /// Time has passed or something changed: do the next thing that is due. Call it until a decision has no events.
    Poll,
}

/// What a drain concerns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DrainScope {
    /// The whole pipeline.
    All,
    /// One worker, also where it is away.
    Worker(Incarnation),
    /// The workers that a stage has now, with those that are away and may come back. Others that attach later are new ones.
    Stage(StageName),
}

/// A client's name for a submission. The same key with the same hash means the same job, as long as that is remembered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdempotencyKey {
    /// The client's key.
    pub key: String,
    /// Hash of the request.
    pub hash: u64,
}

/// How urgent a submission is, and what it is like.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Urgency {
    /// Name of its class; `None` is [`Topology::default_class`](crate::Topology::default_class).
    pub class: Option<String>,
    /// It is dropped where it has not begun so long after it was submitted; `None` leaves that to its class.
    pub queue_deadline: Option<Duration>,
    /// Jobs of the same shape are predicted to take the same time in a stage.
    pub shape: u64,
    /// Stages that need not run for it, because what they would make is given otherwise, or is not wanted. What only such
    /// stages would read need not run either. Those that read from them go without that input.
    pub skip: Vec<StageName>,
    /// What the output of a stage depends on, where it is kept for other jobs with the same key, or taken from them.
    pub cache: Vec<(StageName, CacheKey)>,
}

/// What was agreed about a job when it was submitted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Terms {
    /// Its class. Should the pipeline not have that any more, it is treated as one of the default class.
    pub class: StageName,
    /// It is dropped where it has not begun so long after it was submitted.
    pub queue_deadline: Option<Duration>,
    /// Jobs of the same shape are predicted to take the same time in a stage.
    pub shape: u64,
    /// Stages that do not run for it. Those that the pipeline does not have any more are of no effect.
    pub skip: Vec<StageName>,
    /// Keys of what its stages make. Those of stages that the pipeline does not have any more are of no effect.
    pub cache: Vec<(StageName, CacheKey)>,
}

/// One life of one worker process, as it presents itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerInfo {
    /// Which life.
    pub incarnation: Incarnation,
    /// The stage that it serves.
    pub stage: StageName,
    /// Attempts that it runs at once, or batches of them.
    pub slots: u32,
    /// Attempts of the same shape that it runs together: 1, or more at a work queue and with one slot.
    pub max_batch: u32,
    /// Its name for people; need not be unique.
    pub name: String,
    /// Its place in a group that runs every attempt together, for a worker of one slot at a stage of kind admission.
    pub member: Option<Member>,
    /// Where it is.
    pub place: Place,
}

impl WorkerInfo {
    /// Whether it offers other capacity than before, which the same life of a worker cannot.
    pub(crate) fn differs(&self, other: &Self) -> bool {
        self.slots != other.slots || self.max_batch != other.max_batch || self.member != other.member
    }

    /// Attempts that it may have at the same time.
    pub(crate) const fn places(&self) -> u32 {
        self.slots.saturating_mul(self.max_batch)
    }
}

/// A published payload.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PayloadInfo {
    /// The payload.
    pub id: PayloadId,
    /// Bytes of all its tensors.
    pub nbytes: ByteCount,
    /// Number of its chunks.
    pub chunks: u32,
    /// Whether the store holds it, or the worker that published it.
    pub stored: bool,
    /// How consumers reach it.
    pub handle: HandleBytes,
}

impl PayloadInfo {
    /// Who holds its bytes, where this worker has published it.
    pub(crate) const fn holder(&self, worker: Incarnation) -> Holder {
        if self.stored {
            Holder::Store
        } else {
            Holder::Worker(worker)
        }
    }
}

/// An encoded [`Handle`](stagewire_core::Handle), passed on unread. It carries capabilities, so `Debug` hides it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct HandleBytes(Arc<[u8]>);

impl HandleBytes {
    /// The encoded handle.
    pub fn as_slice(&self) -> &[u8] {
        &self.0
    }
}

impl From<Vec<u8>> for HandleBytes {
    fn from(bytes: Vec<u8>) -> Self {
        Self(bytes.into())
    }
}

impl fmt::Debug for HandleBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HandleBytes({} bytes, redacted)", self.0.len())
    }
}

/// What a last stage made.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ResultInfo {
    /// The files, already safe.
    pub artefacts: Vec<ArtefactInfo>,
    /// What the stage says about them: a JSON object, or empty.
    pub info: String,
}

/// One file of a result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArtefactInfo {
    /// The server's id, which is also where the file is kept.
    pub id: String,
    /// Name that the stage gave it, such as `video.mp4`.
    pub name: String,
    /// Its media type, such as `video/mp4`.
    pub media_type: String,
    /// Its size.
    pub nbytes: ByteCount,
}
