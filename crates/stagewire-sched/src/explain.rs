use std::time::Duration;

use stagewire_core::{ByteCount, Failure, Incarnation, JobId, Progress, StageName};

/// Why a stage of a job is not done yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waiting {
    /// The stage; `None` where the whole job waits.
    pub stage: Option<StageName>,
    /// The class of the job.
    pub class: StageName,
    /// For how long.
    pub waited: Duration,
    /// When the job is dropped, unless it has begun until then.
    pub dropped_in: Option<Duration>,
    /// How far it has come already: an attempt goes on from there.
    pub resumes: Option<Progress>,
    /// Why its last attempt has yielded, or the present one is asked to, where it has or is.
    pub yields: Option<Failure>,
    /// For what.
    pub cause: WaitCause,
}

/// Who else waits for a stage that a job waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    /// Jobs of its class that come first.
    pub ahead: usize,
    /// Jobs of other classes, which get their share in between.
    pub others: usize,
}

/// What a stage waits for, with the numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are what the sentence above them names")]
pub enum WaitCause {
    /// The output of these stages.
    Inputs { stages: Vec<StageName> },
    /// Time to pass: it has failed so often, with `limit` failures the job fails, and it is tried again after `within`.
    Backoff {
        failures: u32,
        limit: u32,
        within: Duration,
        failure: Option<Failure>,
    },
    /// A worker of the stage: none is attached that takes work. `away` ones may come back, `draining` ones leave.
    NoWorker { away: u32, draining: u32 },
    /// The other ranks of a group: `attached` of `world` are there, and nobody else serves the stage.
    Ranks {
        group: StageName,
        attached: u32,
        world: u32,
    },
    /// A free slot: of `advertised` ones `running` are used, `reserved` offered, `stopping` not yet freed by attempts that were told to stop, and `paused` belong to workers that
    /// declined an offer or did not answer it; `declined` says why the last of them did. `ahead` jobs of its class come first, and `others` wait in other classes, which get their
    /// share in between.
    Slot {
        ahead: usize,
        others: usize,
        advertised: u32,
        running: u32,
        reserved: u32,
        stopping: u32,
        paused: u32,
        declined: Option<Failure>,
    },
    /// Payloads of the stage to be released: `held` of `limit` are held. `ahead` and `others` as for a slot.
    Credit {
        ahead: usize,
        others: usize,
        held: u32,
        limit: u32,
    },
    /// Bytes for its output and those of the stages further down: `needed` by the job that comes first, of `free` ones.
    /// `reserved` are set aside for outputs that are being made, `held` are taken by those that are there, of `advertised`
    /// ones. `ahead` and `others` as for a slot.
    Bytes {
        ahead: usize,
        others: usize,
        needed: ByteCount,
        free: ByteCount,
        reserved: ByteCount,
        held: ByteCount,
        advertised: ByteCount,
    },
    /// Another job, which makes what it would: its stage is offered, or runs.
    SameWork { job: JobId },
    /// Nothing: it is offered at the next poll. `ahead` and `others` as for a slot.
    Dispatch { ahead: usize, others: usize },
    /// The pipeline to be resumed: the job has not begun. `ahead` and `others` as for a slot.
    Paused { ahead: usize, others: usize },
    /// The server to restart: it is draining.
    Draining,
    /// A worker's answer to the offer.
    Answer { worker: Incarnation, within: Duration },
    /// The attempt to end.
    Attempt {
        worker: Incarnation,
        progress: Option<Progress>,
        /// When it is lost, if nothing is heard.
        within: Duration,
    },
    /// Attempts that were told to stop.
    Stopping { attempts: u32, within: Duration },
}
