use std::collections::{BTreeMap, BTreeSet};

use smallvec::SmallVec;
use stagewire_core::{Incarnation, JobId, PayloadId, Timestamp};

use crate::job::{Job, Phase};
use crate::queue::{Queue, Rank};
use crate::timers::{Timer, Timers};
use crate::topology::{ClassIndex, StageIndex, Topology};
use crate::worker::Worker;
use crate::{Holder, Limits};

/// Everything that is looked up by another key than a job's or worker's id. It holds nothing that does not follow from
/// jobs and workers, and is kept up to date by comparing their marks before and after a change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Index {
    /// One for each stage.
    pub(crate) queues: Vec<Queue>,
    pub(crate) timers: Timers,
    /// Where a live payload belongs.
    pub(crate) payloads: BTreeMap<PayloadId, (JobId, StageIndex)>,
    /// Live payloads by who holds them.
    pub(crate) held_by: BTreeMap<Holder, BTreeSet<PayloadId>>,
    /// Jobs that have not ended, the oldest first.
    pub(crate) active: BTreeSet<(u64, JobId)>,
    /// Bytes of their parameters.
    pub(crate) active_bytes: u64,
    /// Jobs that have ended, the first to end first.
    pub(crate) ended: BTreeSet<(Timestamp, JobId)>,
    /// Workers with payloads that are not published yet.
    pub(crate) unclaimed: BTreeSet<Incarnation>,
}

/// What the index holds of one stage of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct StageMark {
    /// Where it waits: whether it has run before.
    queued: Option<bool>,
    deadline: Option<(Timestamp, Due)>,
    payload: Option<(PayloadId, Holder)>,
    credit: bool,
}

/// What is due of a stage of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Due {
    Offer,
    Attempt,
}

impl Due {
    const fn timer(self, job: JobId, stage: StageIndex) -> Timer {
        match self {
            Self::Offer => Timer::Offer(job, stage),
            Self::Attempt => Timer::Attempt(job, stage),
        }
    }
}

/// What the index holds of a job.
#[derive(Debug)]
pub(crate) struct JobMark {
    job: JobId,
    number: u64,
    class: ClassIndex,
    /// Its place in a queue, if it has not run before.
    rank: Rank,
    nbytes: u64,
    ended: Option<Timestamp>,
    cancel: Option<Timestamp>,
    drop: Option<Timestamp>,
    stages: SmallVec<[StageMark; 4]>,
}

/// What the index holds of a worker, its slots' deadlines apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WorkerMark {
    worker: Incarnation,
    free: Option<(StageIndex, u32)>,
    away: Option<Timestamp>,
    resume: Option<Timestamp>,
    unclaimed: bool,
}

impl JobMark {
    pub(crate) fn of(topology: &Topology, limits: &Limits, job: &Job) -> Self {
        let mark = |stage: StageIndex| {
            let run = job.run(stage);
            let (queued, deadline) = match &run.phase {
                Phase::Queued { again, .. } => (Some(*again), None),
                Phase::Offered(offer) => (None, Some((offer.deadline, Due::Offer))),
                Phase::Running(attempt) => (None, Some((attempt.deadline, Due::Attempt))),
                Phase::Blocked { .. } | Phase::Done { .. } => (None, None),
            };
            let live = run.output.live().map(|payload| payload.id);
            let making = matches!(run.phase, Phase::Offered(_) | Phase::Running(_));
            StageMark {
                queued,
                deadline,
                payload: live.zip(run.output.holder()),
                credit: (making || live.is_some()) && !topology.consumers(stage).is_empty(),
            }
        };
        Self {
            job: job.id,
            number: job.number,
            class: topology.class_index(&job.terms.class),
            rank: Rank::new(false, job),
            nbytes: job.params.len() as u64,
            ended: job.ended(),
            cancel: job.cancel_deadline(limits),
            drop: job.drop_deadline(topology),
            stages: topology.indices().map(mark).collect(),
        }
    }
}

impl WorkerMark {
    pub(crate) fn of(topology: &Topology, worker: &Worker) -> Self {
        let takes_offers = worker.takes_offers() && worker.free() > 0;
        Self {
            worker: worker.incarnation,
            free: topology
                .find(&worker.stage)
                .filter(|_| takes_offers)
                .map(|stage| (stage, worker.used())),
            away: worker.away_until(),
            resume: worker.paused_until,
            unclaimed: !worker.unclaimed.is_empty(),
        }
    }
}

impl Index {
    pub(crate) fn new(topology: &Topology) -> Self {
        Self {
            queues: vec![Queue::new(topology); topology.stages().len()],
            timers: Timers::default(),
            payloads: BTreeMap::new(),
            held_by: BTreeMap::new(),
            active: BTreeSet::new(),
            active_bytes: 0,
            ended: BTreeSet::new(),
            unclaimed: BTreeSet::new(),
        }
    }

    /// Moves a job from one mark to another; `None` is a job that does not exist.
    pub(crate) fn move_job(&mut self, before: Option<&JobMark>, after: Option<&JobMark>) {
        let stages = |mark: Option<&JobMark>| mark.map_or(0, |mark| mark.stages.len());
        for position in 0..stages(before).max(stages(after)) {
            let old = before.and_then(|mark| Some((mark, mark.stages.get(position)?)));
            let new = after.and_then(|mark| Some((mark, mark.stages.get(position)?)));
            if old.map(|(_, stage)| stage) == new.map(|(_, stage)| stage) {
                continue;
            }
            let stage = StageIndex::new(position);
            if let Some((job, mark)) = old {
                self.remove_stage(job, stage, *mark);
            }
            if let Some((job, mark)) = new {
                self.insert_stage(job, stage, *mark);
            }
        }
        let whole = |mark: Option<&JobMark>| mark.map(|mark| (mark.ended, mark.cancel, mark.drop));
        if whole(before) == whole(after) {
            return;
        }
        if let Some(mark) = before {
            self.timers.clear(mark.cancel, Timer::Cancel(mark.job));
            self.timers.clear(mark.drop, Timer::Drop(mark.job));
            match mark.ended {
                Some(at) => _ = self.ended.remove(&(at, mark.job)),
                None => {
                    self.active.remove(&(mark.number, mark.job));
                    self.active_bytes -= mark.nbytes;
                }
            }
        }
        if let Some(mark) = after {
            self.timers.set(mark.cancel, Timer::Cancel(mark.job));
            self.timers.set(mark.drop, Timer::Drop(mark.job));
            match mark.ended {
                Some(at) => _ = self.ended.insert((at, mark.job)),
                None => {
                    self.active.insert((mark.number, mark.job));
                    self.active_bytes += mark.nbytes;
                }
            }
        }
    }

    fn remove_stage(&mut self, job: &JobMark, stage: StageIndex, mark: StageMark) {
        let queue = &mut self.queues[stage.get()];
        if let Some(again) = mark.queued {
            queue.remove(job.class, &job.rank.tried(again));
        }
        queue.held -= u32::from(mark.credit);
        if let Some((deadline, due)) = mark.deadline {
            self.timers.clear(Some(deadline), due.timer(job.job, stage));
        }
        if let Some((payload, holder)) = mark.payload {
            self.payloads.remove(&payload);
            if let Some(held) = self.held_by.get_mut(&holder) {
                held.remove(&payload);
                if held.is_empty() {
                    self.held_by.remove(&holder);
                }
            }
        }
    }

    fn insert_stage(&mut self, job: &JobMark, stage: StageIndex, mark: StageMark) {
        let queue = &mut self.queues[stage.get()];
        if let Some(again) = mark.queued {
            queue.insert(job.class, job.rank.tried(again));
        }
        queue.held += u32::from(mark.credit);
        if let Some((deadline, due)) = mark.deadline {
            self.timers.set(Some(deadline), due.timer(job.job, stage));
        }
        if let Some((payload, holder)) = mark.payload {
            self.payloads.insert(payload, (job.job, stage));
            self.held_by.entry(holder).or_default().insert(payload);
        }
    }

    /// Moves a worker from one mark to another; `None` is a worker that does not exist.
    pub(crate) fn move_worker(&mut self, before: Option<WorkerMark>, after: Option<WorkerMark>) {
        if before == after {
            return;
        }
        if let Some(mark) = before {
            if let Some((stage, used)) = mark.free {
                self.queues[stage.get()].free.remove(&(used, mark.worker));
            }
            self.timers.clear(mark.away, Timer::Away(mark.worker));
            self.timers.clear(mark.resume, Timer::Resume(mark.worker));
            if mark.unclaimed {
                self.unclaimed.remove(&mark.worker);
            }
        }
        if let Some(mark) = after {
            if let Some((stage, used)) = mark.free {
                self.queues[stage.get()].free.insert((used, mark.worker));
            }
            self.timers.set(mark.away, Timer::Away(mark.worker));
            self.timers.set(mark.resume, Timer::Resume(mark.worker));
            if mark.unclaimed {
                self.unclaimed.insert(mark.worker);
            }
        }
    }

    /// Live payloads of a holder.
    pub(crate) fn payloads_of(&self, holder: Holder) -> impl Iterator<Item = PayloadId> {
        self.held_by.get(&holder).into_iter().flatten().copied()
    }
}
