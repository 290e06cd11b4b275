use std::collections::BTreeMap;
use std::time::Duration;

use stagewire_core::{ByteCount, Classify, Epoch, ErrorClass, Incarnation, JobId, Member, PayloadId, StageName, Token};

/// Why an input changes nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum Refusal {
    #[error("epoch {epoch} is not above the current epoch {current}; is another server working on this journal?", epoch = .epoch.0, current = .current.0)]
    Epoch { epoch: Epoch, current: Epoch },
    #[error("job {job} does not exist, or was forgotten")]
    UnknownJob { job: JobId },
    #[error("job {job} exists already")]
    DuplicateJob { job: JobId },
    #[error("idempotency key {key:?} was used for job {job} with another request; use a new key")]
    KeyConflict { key: String, job: JobId },
    #[error("{queued} jobs wait or run and {limit} are allowed; try again later")]
    QueueFull { queued: usize, limit: usize },
    #[error(
        "the parameters of this job have {nbytes}, those of jobs that wait or run {queued}, and {limit} are allowed; \
         try again later"
    )]
    QueueBytes {
        nbytes: ByteCount,
        queued: ByteCount,
        limit: ByteCount,
    },
    #[error(
        "there is no class {class:?}; this pipeline has {}", names(.known)
    )]
    UnknownClass { class: String, known: Vec<StageName> },
    #[error("a queue deadline of {deadline:?} is not possible; it must be {least:?} to {most:?}, or left out")]
    QueueDeadline {
        deadline: Duration,
        least: Duration,
        most: Duration,
    },
    #[error(
        "a job is to skip stage {stage}, which the pipeline does not have; it has {}", names(.known)
    )]
    UnknownSkip { stage: StageName, known: Vec<StageName> },
    #[error(
        "the job would skip every last stage ({}), so there is nothing that it could make; ask for one of their results",
        names(.skip)
    )]
    NothingToDo { skip: Vec<StageName> },
    #[error(
        "outputs of stage {stage} have had at least {nbytes} for parameters like these, and all outputs together may \
         take {limit}; ask for something smaller, or raise \"store-bytes\" in [server]"
    )]
    PayloadBytes {
        stage: StageName,
        nbytes: ByteCount,
        limit: ByteCount,
    },
    #[error("the server is draining and takes no new jobs; try again once it has restarted")]
    Draining,
    #[error("job {job} has already {state}")]
    JobEnded { job: JobId, state: &'static str },
    #[error(
        "job {job} is no dead letter: it is {state}, or was discarded; only a dead letter can be redriven or discarded"
    )]
    NotDead { job: JobId, state: &'static str },
    #[error("worker {worker} serves stage {stage}, which the pipeline does not have; it has {}", names(.known))]
    UnknownStage {
        worker: Incarnation,
        stage: StageName,
        known: Vec<StageName>,
    },
    #[error(
        "there is no stage {stage}; this pipeline has {}", names(.known)
    )]
    NoStage { stage: StageName, known: Vec<StageName> },
    #[error("worker {worker} advertises {slots} slots; it must be 1 to {limit}")]
    Slots {
        worker: Incarnation,
        slots: u32,
        limit: u32,
    },
    #[error(
        "worker {worker} of stage {stage} is to run batches of {max_batch} in {slots} slots; batches have at least one \
         item, and more only at a work queue and with one slot: start more workers instead"
    )]
    Batch {
        worker: Incarnation,
        stage: StageName,
        max_batch: u32,
        slots: u32,
    },
    #[error(
        "worker {worker} of stage {stage} is to be rank {rank} of {world} of group {group}; a group has 1 to {most} ranks, \
         counted from 0, each with one slot, at a stage of kind admission", rank = .member.rank, world = .member.world,
        group = .member.group
    )]
    Member {
        worker: Incarnation,
        stage: StageName,
        member: Member,
        most: u32,
    },
    #[error(
        "worker {worker} of stage {stage} cannot be rank {mine} of {asked} of group {group}: worker {other} is rank {rank} of \
         {world}; end that one, or name another group", mine = .member.rank, asked = .member.world, group = .member.group
    )]
    RankTaken {
        worker: Incarnation,
        stage: StageName,
        member: Member,
        other: Incarnation,
        rank: u32,
        world: u32,
    },
    #[error(
        "worker {worker} is not rank 0 of its group, and publishes {payload} for attempt {token}; rank 0 publishes for all"
    )]
    NotRankZero {
        worker: Incarnation,
        token: Token,
        payload: PayloadId,
    },
    #[error("worker {worker} says that it runs {running} attempts, with {slots} slots")]
    TooManyRunning {
        worker: Incarnation,
        running: usize,
        slots: u32,
    },
    #[error(
        "worker {worker} attached as stage {stage} with {slots} slots before and now differs; \
         a worker that changes needs a new incarnation"
    )]
    WorkerChanged {
        worker: Incarnation,
        stage: StageName,
        slots: u32,
    },
    #[error("worker {worker} is not attached; attach before sending anything else")]
    UnknownWorker { worker: Incarnation },
    #[error("token {token} is not valid for worker {worker}: the attempt was superseded, or was never this worker's")]
    Stale { worker: Incarnation, token: Token },
    #[error("stage {stage} of job {job} is a last stage, so nobody consumes payload {payload}; send a result")]
    NoConsumer {
        job: JobId,
        stage: StageName,
        payload: PayloadId,
    },
    #[error("attempt {token} has already published payload {published}, and now {payload}; an attempt publishes once")]
    PublishedTwice {
        token: Token,
        published: PayloadId,
        payload: PayloadId,
    },
    #[error("payload {payload} is already known as the output of job {job}; every publication needs its own id")]
    PayloadInUse { payload: PayloadId, job: JobId },
}

impl Classify for Refusal {
    fn class(&self) -> ErrorClass {
        match self {
            Self::UnknownJob { .. } | Self::UnknownStage { .. } | Self::UnknownSkip { .. } | Self::NoStage { .. } => {
                ErrorClass::NotFound
            }
            Self::Epoch { .. }
            | Self::DuplicateJob { .. }
            | Self::KeyConflict { .. }
            | Self::JobEnded { .. }
            | Self::RankTaken { .. }
            | Self::NotDead { .. }
            | Self::WorkerChanged { .. }
            | Self::PublishedTwice { .. }
            | Self::PayloadInUse { .. } => ErrorClass::Conflict,
            Self::QueueFull { .. } | Self::QueueBytes { .. } => ErrorClass::Exhausted,
            Self::Draining => ErrorClass::Unavailable,
            Self::UnknownWorker { .. } | Self::Stale { .. } => ErrorClass::Fenced,
            Self::UnknownClass { .. }
            | Self::NothingToDo { .. }
            | Self::QueueDeadline { .. }
            | Self::PayloadBytes { .. }
            | Self::Slots { .. }
            | Self::Batch { .. }
            | Self::Member { .. }
            | Self::NotRankZero { .. }
            | Self::TooManyRunning { .. }
            | Self::NoConsumer { .. } => ErrorClass::Invalid,
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::Epoch { .. } => "server.epoch",
            Self::UnknownJob { .. } => "job.unknown",
            Self::DuplicateJob { .. } => "job.duplicate",
            Self::KeyConflict { .. } => "job.key_conflict",
            Self::QueueFull { .. } | Self::QueueBytes { .. } => "queue.full",
            Self::UnknownClass { .. } => "class.unknown",
            Self::QueueDeadline { .. } => "job.deadline",
            Self::PayloadBytes { .. } => "credit.payload_bytes",
            Self::Draining => "server.draining",
            Self::JobEnded { .. } => "job.ended",
            Self::NotDead { .. } => "job.not_dead",
            Self::UnknownStage { .. } | Self::UnknownSkip { .. } | Self::NoStage { .. } => "stage.unknown",
            Self::NothingToDo { .. } => "job.nothing_to_do",
            Self::Slots { .. } | Self::TooManyRunning { .. } => "worker.slots",
            Self::Batch { .. } => "worker.batch",
            Self::Member { .. } => "worker.rank",
            Self::RankTaken { .. } => "worker.rank_taken",
            Self::NotRankZero { .. } => "payload.rank",
            Self::WorkerChanged { .. } => "worker.changed",
            Self::UnknownWorker { .. } => "worker.unknown",
            Self::Stale { .. } => "attempt.superseded",
            Self::NoConsumer { .. } => "payload.no_consumer",
            Self::PublishedTwice { .. } => "payload.published_twice",
            Self::PayloadInUse { .. } => "payload.in_use",
        }
    }

    fn details(&self) -> BTreeMap<String, String> {
        let pairs: Vec<(&str, String)> = match self {
            Self::Epoch { epoch, current } => vec![("epoch", epoch.0.to_string()), ("current", current.0.to_string())],
            Self::UnknownJob { job } | Self::DuplicateJob { job } => vec![("job", job.to_string())],
            Self::KeyConflict { key, job } => vec![("key", key.clone()), ("job", job.to_string())],
            Self::QueueFull { queued, limit } => vec![("queued", queued.to_string()), ("limit", limit.to_string())],
            Self::QueueBytes { nbytes, queued, limit } => vec![
                ("nbytes", nbytes.0.to_string()),
                ("queued_bytes", queued.0.to_string()),
                ("limit_bytes", limit.0.to_string()),
            ],
            Self::UnknownClass { class, known } => {
                vec![("class", class.clone()), ("known", names(known))]
            }
            Self::UnknownSkip { stage, known } => vec![("stage", stage.to_string()), ("known", names(known))],
            Self::NothingToDo { skip } => vec![("skip", names(skip))],
            Self::QueueDeadline { deadline, least, most } => vec![
                ("deadline", format!("{deadline:?}")),
                ("least", format!("{least:?}")),
                ("most", format!("{most:?}")),
            ],
            Self::PayloadBytes { stage, nbytes, limit } => vec![
                ("stage", stage.to_string()),
                ("nbytes", nbytes.0.to_string()),
                ("limit_bytes", limit.0.to_string()),
            ],
            Self::Draining => vec![],
            Self::JobEnded { job, state } | Self::NotDead { job, state } => {
                vec![("job", job.to_string()), ("state", (*state).to_owned())]
            }
            Self::UnknownStage { worker, stage, .. } => {
                vec![("worker", worker.to_string()), ("stage", stage.to_string())]
            }
            Self::NoStage { stage, known } => vec![("stage", stage.to_string()), ("known", names(known))],
            Self::Slots { worker, slots, limit } => vec![
                ("worker", worker.to_string()),
                ("slots", slots.to_string()),
                ("limit", limit.to_string()),
            ],
            Self::Batch {
                worker,
                stage,
                max_batch,
                slots,
            } => vec![
                ("worker", worker.to_string()),
                ("stage", stage.to_string()),
                ("max_batch", max_batch.to_string()),
                ("slots", slots.to_string()),
            ],
            Self::Member {
                worker, stage, member, ..
            } => vec![
                ("worker", worker.to_string()),
                ("stage", stage.to_string()),
                ("group", member.group.to_string()),
                ("rank", member.rank.to_string()),
                ("world", member.world.to_string()),
            ],
            Self::RankTaken {
                worker,
                stage,
                member,
                other,
                ..
            } => vec![
                ("worker", worker.to_string()),
                ("stage", stage.to_string()),
                ("group", member.group.to_string()),
                ("rank", member.rank.to_string()),
                ("other", other.to_string()),
            ],
            Self::NotRankZero { worker, token, payload } => vec![
                ("worker", worker.to_string()),
                ("token", token.to_string()),
                ("payload", payload.to_string()),
            ],
            Self::TooManyRunning { worker, running, slots } => vec![
                ("worker", worker.to_string()),
                ("running", running.to_string()),
                ("slots", slots.to_string()),
            ],
            Self::WorkerChanged { worker, stage, slots } => vec![
                ("worker", worker.to_string()),
                ("stage", stage.to_string()),
                ("slots", slots.to_string()),
            ],
            Self::UnknownWorker { worker } => vec![("worker", worker.to_string())],
            Self::Stale { worker, token } => vec![("worker", worker.to_string()), ("token", token.to_string())],
            Self::NoConsumer { job, stage, payload } => vec![
                ("job", job.to_string()),
                ("stage", stage.to_string()),
                ("payload", payload.to_string()),
            ],
            Self::PublishedTwice {
                token,
                published,
                payload,
            } => vec![
                ("token", token.to_string()),
                ("published", published.to_string()),
                ("payload", payload.to_string()),
            ],
            Self::PayloadInUse { payload, job } => vec![("payload", payload.to_string()), ("job", job.to_string())],
        };
        pairs
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value))
            .collect()
    }
}

fn names(names: &[StageName]) -> String {
    names.iter().map(StageName::as_str).collect::<Vec<_>>().join(", ")
}
