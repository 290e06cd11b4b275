use std::sync::Arc;
use std::time::Duration;

use stagewire_core::{Attempt, Failure, Handover, Incarnation, JobId, Member, PayloadId, Progress, StageName, Token};

use crate::{Checkpoint, Choice, Event, OutputSpec, PayloadInfo};

/// What follows from an input.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Decision {
    /// What to [`apply`](crate::Sched::apply), in this order; the durable ones also to the journal.
    pub events: Vec<Event>,
    /// What to do once the durable events are safe, in this order.
    pub effects: Vec<Effect>,
    /// The job that a submission made or found.
    pub job: Option<JobId>,
}

/// Something to do outside. A lost effect does no harm: deadlines and the worker's next attachment make up for it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are what the sentence above them names")]
pub enum Effect {
    /// Offer an attempt to a worker.
    Offer(Box<Offer>),
    /// Tell the worker that the attempt may run.
    Grant { worker: Incarnation, token: Token },
    /// Ask the worker to stop the attempt at its next step boundary, with a checkpoint.
    Yield {
        worker: Incarnation,
        token: Token,
        failure: Failure,
    },
    /// Tell the worker to stop the attempt, or to forget the offer.
    CancelAttempt {
        worker: Incarnation,
        token: Token,
        failure: Failure,
    },
    /// Tell the holder that nobody needs the payload.
    Release { holder: Holder, payload: PayloadId },
    /// Tell the worker that its completion was accepted.
    Accepted { worker: Incarnation, token: Token },
    /// Tell the worker that its message came too late; the attempt must stop if it has not.
    Refused {
        worker: Incarnation,
        token: Token,
        failure: Failure,
    },
    /// Tell the worker that no more offers will come. It ends what it runs, which is taken from it after that time; moves
    /// the payloads that it still holds to the store, and leaves.
    Drain {
        worker: Incarnation,
        within: Option<Duration>,
    },
    /// End the worker's stream, and its process where that is in the server's power: it did not stop an attempt in
    /// time. It is already counted as lost.
    Evict { worker: Incarnation, failure: Failure },
    /// Tell those who watch the job.
    Job(JobNotice),
    /// Write down why the offer of this decision went where it did.
    Chosen(Box<Choice>),
}

/// An attempt that a worker may take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    /// The worker.
    pub worker: Incarnation,
    /// The right to act for the attempt, once granted.
    pub token: Token,
    /// The stage.
    pub stage: StageName,
    /// Parameters of the job: a JSON object.
    pub params: Arc<str>,
    /// One for each stage that this one consumes from, in the order of the edges; none for those that the job skips.
    pub inputs: Vec<OfferInput>,
    /// How to hand over the output.
    pub output: OutputSpec,
    /// How long the offer stands.
    pub answer_within: Duration,
    /// Whether it may hand over checkpoints.
    pub checkpoints: bool,
    /// Where it goes on; `None` is the beginning.
    pub checkpoint: Option<Checkpoint>,
    /// The worker's place in its group. Ranks above 0 are granted at once what they are offered, and hand nothing over.
    pub member: Option<Member>,
}

/// One input of an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OfferInput {
    /// Stage that made it.
    pub stage: StageName,
    /// The payload.
    pub payload: PayloadInfo,
}

/// Who holds the bytes of a payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Holder {
    /// The worker that published it.
    Worker(Incarnation),
    /// The store.
    Store,
}

/// Something that those who watch a job may want to know. Time is that of the decision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobNotice {
    /// The job.
    pub job: JobId,
    /// The stage, unless it concerns the whole job.
    pub stage: Option<StageName>,
    /// The attempt, where there is one.
    pub attempt: Option<Attempt>,
    /// The worker, where there is one.
    pub worker: Option<Incarnation>,
    /// What happened.
    pub kind: NoticeKind,
}

/// What happened to a job.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are what the sentence above them names")]
pub enum NoticeKind {
    /// The job was accepted.
    Submitted,
    /// The dead letter has a new life: what was said of how it ended does not hold any more.
    Redriven,
    /// The stage has all it needs and waits for a worker.
    Queued,
    /// The stage was offered to a worker.
    Offered,
    /// A worker runs the stage.
    Running,
    /// The attempt has come so far.
    Progress(Progress),
    /// The attempt's output exists; consumers of a stream may start.
    Published {
        payload: PayloadId,
        nbytes: u64,
        chunks: u32,
        stored: bool,
    },
    /// The next attempt of the stage goes on from here, whatever becomes of this one.
    Checkpointed {
        payload: PayloadId,
        nbytes: u64,
        stored: bool,
        progress: Progress,
    },
    /// The attempt was asked to stop at its next step boundary.
    Yielding(Failure),
    /// It has stopped there, and the stage waits for a worker again.
    Yielded(Failure),
    /// The stage is done: this payload is kept, which another job has made, and which it would make, too.
    Cached {
        payload: PayloadId,
        nbytes: u64,
        chunks: u32,
    },
    /// The stage is done, having received these chunks. No attempt where it was skipped.
    StageDone { handovers: Vec<Handover> },
    /// The stage has to run again, or its offer ended; what it showed of its output is retracted.
    Requeued { failure: Option<Failure> },
    /// The job was asked to stop.
    Cancelling,
    /// The job has ended well.
    Succeeded,
    /// The job has ended badly.
    Failed(Failure),
    /// The job has ended because somebody asked for it.
    Cancelled,
    /// The ended job was forgotten: what is kept of it, artefacts included, may go.
    Forgotten,
}
