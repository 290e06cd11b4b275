use std::collections::BTreeSet;
use std::fmt;

use stagewire_core::{Incarnation, JobId, PayloadId, Timestamp};
use uuid::Uuid;

use crate::by_id::Lookup;
use crate::job::{Job, Phase, StageSet};
use crate::queue::{Queue, Rank};
use crate::ranked::Ranked;
use crate::tally::Pool;
use crate::timers::{Timer, Timers};
use crate::topology::{ClassIndex, StageIndex, Topology};
use crate::worker::Worker;
use crate::{Holder, JobTally, Limits, Place};

/// Everything that is looked up by another key than a job's or worker's id. It holds nothing that does not follow from
/// jobs and workers, and is kept up to date by comparing their marks before and after a change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Index {
    /// One for each stage.
    pub(crate) queues: Vec<Queue>,
    pub(crate) timers: Timers,
    /// Where a live payload belongs.
    pub(crate) payloads: Lookup<PayloadId, (JobId, StageIndex)>,
    /// Live payloads by who holds them.
    held_by: BTreeSet<(Holder, PayloadId)>,
    /// Jobs that have not ended, the oldest first.
    pub(crate) active: Ranked<(u64, JobId)>,
    /// Those of them that hold a credit, a checkpoint or what is kept for several jobs, the oldest first.
    pub(crate) holding: BTreeSet<(u64, JobId)>,
    /// How many of those are offered or run.
    pub(crate) going: usize,
    /// Bytes of the parameters of jobs that have not ended.
    pub(crate) active_bytes: u64,
    /// Jobs that are remembered, by state.
    pub(crate) states: JobTally,
    /// Dead letters, the first to die first.
    pub(crate) dead: BTreeSet<(Timestamp, JobId)>,
    /// Other jobs that have ended, the first to end first.
    pub(crate) ended: BTreeSet<(Timestamp, JobId)>,
    /// Workers with payloads that are not published yet.
    pub(crate) unclaimed: BTreeSet<Incarnation>,
    /// Bytes that are set aside for outputs that are being made.
    pub(crate) reserved_bytes: u64,
    /// Bytes that superseded attempts may take until they have stopped.
    pub(crate) stopping_bytes: u64,
    /// Bytes of live payloads.
    pub(crate) held_bytes: u64,
}

/// What the index holds of one stage of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StageMark {
    /// Where it waits: whether it has run before, and since when.
    queued: Option<(bool, Timestamp)>,
    /// Whether the job has begun, where it waits.
    begun: bool,
    deadline: Option<(Timestamp, Due)>,
    payload: Option<(PayloadId, Holder, u64)>,
    checkpoint: Option<(PayloadId, Holder, u64)>,
    /// Since when an attempt runs that may be preempted.
    yieldable: Option<Timestamp>,
    /// The class for whose sake it was asked to yield.
    yields_to: Option<ClassIndex>,
    credit: bool,
    /// Bytes that are set aside for its output.
    reserved: u64,
    /// Its phase, unless the job has ended.
    phase: Option<usize>,
}

/// What is due of a stage of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Due {
    Offer,
    Attempt,
    Retry,
}

impl Due {
    const fn timer(self, job: JobId, stage: StageIndex) -> Timer {
        match self {
            Self::Offer => Timer::Offer(job, stage),
            Self::Attempt => Timer::Attempt(job, stage),
            Self::Retry => Timer::Retry(job, stage),
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
    state: usize,
    ended: Option<Timestamp>,
    /// Where it is a dead letter.
    died: Option<Timestamp>,
    cancel: Option<Timestamp>,
    drop: Option<Timestamp>,
    /// Where it holds a credit, a checkpoint or what is kept for several jobs: whether it is offered or runs.
    holds: Option<bool>,
    /// The stages that are looked at; the others stay as they are.
    touched: StageSet,
    pub(crate) stages: Vec<StageMark>,
}

/// What the index holds of a worker, its slots' deadlines apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WorkerMark {
    worker: Incarnation,
    stage: Option<StageIndex>,
    at: Place,
    /// Slots that it uses, where it takes offers and has a free one.
    free: Option<u32>,
    pool: Pool,
    paused: Option<Timestamp>,
    away: Option<Timestamp>,
    resume: Option<Timestamp>,
    drain: Option<Timestamp>,
    unclaimed: bool,
    /// Bytes that superseded attempts may take.
    stopping: u64,
}

/// Room for marks, kept for reuse: it is no part of the state.
#[derive(Clone, Default)]
pub(crate) struct Spare(pub(crate) [Vec<StageMark>; 2]);

impl fmt::Debug for Spare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Spare")
    }
}

impl JobMark {
    /// `room` is taken for the room that it has.
    pub(crate) fn of(topology: &Topology, limits: &Limits, job: &Job, touched: StageSet, room: Vec<StageMark>) -> Self {
        let begun = job.has_begun(topology);
        let mut stages = room;
        stages.clear();
        stages.extend(touched.iter().map(|stage| StageMark::of(topology, job, stage, begun)));
        let at_work = || job.stages.iter().any(|run| run.phase.worker().is_some());
        Self {
            job: job.id,
            number: job.number,
            class: job.class,
            rank: Rank::new(false, job, begun),
            nbytes: job.params.len() as u64,
            state: job.state.position(),
            ended: job.ended(),
            died: job.died(),
            cancel: job.cancel_deadline(limits),
            drop: job.drop_deadline(begun),
            holds: job.holds(topology).then(at_work),
            touched,
            stages,
        }
    }
}

impl StageMark {
    const NOTHING: Self = Self {
        queued: None,
        begun: false,
        deadline: None,
        payload: None,
        checkpoint: None,
        yieldable: None,
        yields_to: None,
        credit: false,
        reserved: 0,
        phase: None,
    };

    /// Most stages of most jobs wait for inputs or are done: there is nothing to look up about those.
    fn of(topology: &Topology, job: &Job, stage: StageIndex, begun: bool) -> Self {
        let run = job.run(stage);
        let mut mark = Self {
            phase: job.ended().is_none().then(|| run.phase.position()),
            ..Self::NOTHING
        };
        let mut making = None;
        match &run.phase {
            // One that waits for another job is as if it were not there.
            Phase::Queued { .. } if run.awaits.is_some() => {}
            Phase::Queued { again, since } => {
                mark.queued = Some((*again, *since));
                mark.begun = begun;
            }
            Phase::Offered(offer) => {
                mark.deadline = Some((offer.deadline, Due::Offer));
                making = Some(offer.nbytes);
            }
            Phase::Running(attempt) => {
                mark.deadline = Some((attempt.deadline, Due::Attempt));
                mark.yieldable = job.yieldable(topology, stage);
                mark.yields_to = job.yields_to(topology, stage);
                making = Some(attempt.nbytes);
            }
            Phase::Blocked { .. } | Phase::Done { .. } | Phase::Cached { .. } => {
                mark.deadline = job.retry_at(stage).map(|at| (at, Due::Retry));
            }
        }
        let live = run.output.own();
        if let (Some(payload), Some(holder)) = (live, run.output.holder()) {
            mark.payload = Some((payload.id, holder, payload.nbytes.0));
        }
        if let Some(kept) = run.checkpoint() {
            mark.checkpoint = Some((kept.payload.id, kept.holder(), kept.payload.nbytes.0));
        }
        mark.credit = run.takes_credit() && !topology.consumers(stage).is_empty();
        mark.reserved = making.filter(|_| live.is_none()).unwrap_or_default();
        mark
    }
}

impl WorkerMark {
    pub(crate) fn of(worker: &Worker) -> Self {
        let takes_offers = worker.takes_offers() && worker.has_room();
        Self {
            worker: worker.incarnation,
            stage: worker.place,
            at: worker.at(),
            free: takes_offers.then(|| worker.used()),
            pool: worker.pool(),
            paused: worker.paused_until.filter(|_| worker.pool().paused > 0),
            away: worker.away_until(),
            resume: worker.paused_until,
            drain: worker.drain_by,
            unclaimed: !worker.unclaimed.is_empty(),
            stopping: worker.stopping_bytes(),
        }
    }
}

impl Index {
    pub(crate) fn new(topology: &Topology) -> Self {
        Self {
            queues: topology.indices().map(|stage| Queue::new(topology, stage)).collect(),
            timers: Timers::default(),
            payloads: Lookup::new(),
            held_by: BTreeSet::new(),
            active: Ranked::default(),
            holding: BTreeSet::new(),
            going: 0,
            active_bytes: 0,
            states: JobTally::default(),
            dead: BTreeSet::new(),
            ended: BTreeSet::new(),
            unclaimed: BTreeSet::new(),
            reserved_bytes: 0,
            stopping_bytes: 0,
            held_bytes: 0,
        }
    }

    /// Moves a job from one mark to another of the same stages; `None` is a job that does not exist.
    pub(crate) fn move_job<'a>(&mut self, before: Option<&'a JobMark>, after: Option<&'a JobMark>) {
        let Some(job) = after.or(before) else { return };
        for (position, stage) in job.touched.iter().enumerate() {
            let mark = |job: Option<&'a JobMark>| job.map_or(&StageMark::NOTHING, |job| &job.stages[position]);
            let (old, new) = (mark(before), mark(after));
            if old != new {
                self.move_stage(job, stage, old, new);
            }
        }
        let holds = |mark: Option<&JobMark>| mark.and_then(|mark| Some((mark.number, mark.job, mark.holds?)));
        if holds(before) != holds(after) {
            if let Some((number, job, goes)) = holds(before) {
                self.holding.remove(&(number, job));
                self.going -= usize::from(goes);
            }
            if let Some((number, job, goes)) = holds(after) {
                self.holding.insert((number, job));
                self.going += usize::from(goes);
            }
        }
        let whole =
            |mark: Option<&JobMark>| mark.map(|mark| (mark.state, mark.ended, mark.died, mark.cancel, mark.drop));
        if whole(before) == whole(after) {
            return;
        }
        if let Some(mark) = before {
            self.states[mark.state] -= 1;
            self.timers.clear(mark.cancel, Timer::Cancel(mark.job));
            self.timers.clear(mark.drop, Timer::Drop(mark.job));
            match (mark.died, mark.ended) {
                (Some(at), _) => _ = self.dead.remove(&(at, mark.job)),
                (None, Some(at)) => _ = self.ended.remove(&(at, mark.job)),
                (None, None) => {
                    self.active.remove(&(mark.number, mark.job));
                    self.active_bytes -= mark.nbytes;
                }
            }
        }
        if let Some(mark) = after {
            self.states[mark.state] += 1;
            self.timers.set(mark.cancel, Timer::Cancel(mark.job));
            self.timers.set(mark.drop, Timer::Drop(mark.job));
            match (mark.died, mark.ended) {
                (Some(at), _) => _ = self.dead.insert((at, mark.job)),
                (None, Some(at)) => _ = self.ended.insert((at, mark.job)),
                (None, None) => {
                    self.active.insert((mark.number, mark.job));
                    self.active_bytes += mark.nbytes;
                }
            }
        }
    }

    /// Looks at nothing but what differs: each look-up has its price.
    fn move_stage(&mut self, job: &JobMark, stage: StageIndex, old: &StageMark, new: &StageMark) {
        let queue = &mut self.queues[stage.get()];
        if (old.queued, old.begun) != (new.queued, new.begun) {
            if let Some((again, since)) = old.queued {
                queue.remove(job.class, &job.rank.tried(again, old.begun));
                queue.since.remove(&(since, job.number));
            }
            if let Some((again, since)) = new.queued {
                queue.insert(job.class, job.rank.tried(again, new.begun));
                queue.since.insert((since, job.number));
            }
        }
        if let Some(phase) = old.phase {
            queue.tally.phases[phase] -= 1;
        }
        if let Some(phase) = new.phase {
            queue.tally.phases[phase] += 1;
        }
        queue.held += u32::from(new.credit);
        queue.held -= u32::from(old.credit);
        self.reserved_bytes += new.reserved;
        self.reserved_bytes -= old.reserved;
        if old.deadline != new.deadline {
            if let Some((deadline, due)) = old.deadline {
                self.timers.clear(Some(deadline), due.timer(job.job, stage));
            }
            if let Some((deadline, due)) = new.deadline {
                self.timers.set(Some(deadline), due.timer(job.job, stage));
            }
        }
        if old.payload != new.payload {
            self.move_payload(job.job, stage, old.payload, new.payload);
        }
        if old.checkpoint != new.checkpoint {
            self.move_payload(job.job, stage, old.checkpoint, new.checkpoint);
        }
        if (old.yieldable, old.yields_to) != (new.yieldable, new.yields_to) {
            let queue = &mut self.queues[stage.get()];
            if let Some(since) = old.yieldable {
                queue.yieldable.remove(&(job.class, since, job.job));
            }
            if let Some(since) = new.yieldable {
                queue.yieldable.insert((job.class, since, job.job));
            }
            if let Some(class) = old.yields_to {
                queue.yielding[class.get()] -= 1;
            }
            if let Some(class) = new.yields_to {
                queue.yielding[class.get()] += 1;
            }
        }
    }

    fn move_payload(
        &mut self,
        job: JobId,
        stage: StageIndex,
        old: Option<(PayloadId, Holder, u64)>,
        new: Option<(PayloadId, Holder, u64)>,
    ) {
        let tally = &mut self.queues[stage.get()].tally;
        if let Some((payload, holder, nbytes)) = old {
            tally.payloads -= 1;
            tally.payload_bytes -= nbytes;
            self.held_bytes -= nbytes;
            self.payloads.remove(&payload);
            self.held_by.remove(&(holder, payload));
        }
        if let Some((payload, holder, nbytes)) = new {
            tally.payloads += 1;
            tally.payload_bytes += nbytes;
            self.held_bytes += nbytes;
            self.payloads.insert(payload, (job, stage));
            self.held_by.insert((holder, payload));
        }
    }

    /// Moves a worker from one mark to another; `None` is a worker that does not exist.
    pub(crate) fn move_worker(&mut self, before: Option<WorkerMark>, after: Option<WorkerMark>) {
        if before == after {
            return;
        }
        if let Some(mark) = before {
            if let Some(stage) = mark.stage {
                let queue = &mut self.queues[stage.get()];
                queue.pool.subtract(mark.pool);
                if let Some(used) = mark.free {
                    queue.clear_free(mark.at, used, mark.worker);
                }
                if let Some(until) = mark.paused {
                    queue.paused.remove(&(until, mark.worker));
                }
            }
            self.stopping_bytes -= mark.stopping;
            self.timers.clear(mark.away, Timer::Away(mark.worker));
            self.timers.clear(mark.resume, Timer::Resume(mark.worker));
            self.timers.clear(mark.drain, Timer::Drain(mark.worker));
            if mark.unclaimed {
                self.unclaimed.remove(&mark.worker);
            }
        }
        if let Some(mark) = after {
            if let Some(stage) = mark.stage {
                let queue = &mut self.queues[stage.get()];
                queue.pool.add(mark.pool);
                if let Some(used) = mark.free {
                    queue.set_free(mark.at, used, mark.worker);
                }
                if let Some(until) = mark.paused {
                    queue.paused.insert((until, mark.worker));
                }
            }
            self.stopping_bytes += mark.stopping;
            self.timers.set(mark.away, Timer::Away(mark.worker));
            self.timers.set(mark.resume, Timer::Resume(mark.worker));
            self.timers.set(mark.drain, Timer::Drain(mark.worker));
            if mark.unclaimed {
                self.unclaimed.insert(mark.worker);
            }
        }
    }

    /// Live payloads of a holder.
    pub(crate) fn payloads_of(&self, holder: Holder) -> impl Iterator<Item = PayloadId> {
        let all = (holder, PayloadId(Uuid::nil()))..=(holder, PayloadId(Uuid::max()));
        self.held_by.range(all).map(|(_, payload)| *payload)
    }
}
