mod affinity;
mod apply;
mod attach;
mod attempt;
mod batch;
mod bytes;
mod cache;
mod cancel;
mod check;
mod checkpoint;
mod dead;
mod drain;
mod explain;
mod group;
mod lost;
mod offer;
mod pause;
mod payload;
mod plan;
mod poll;
mod preempt;
mod restart;
mod snapshot;
mod submit;

use std::collections::BTreeMap;

use stagewire_core::{Epoch, Incarnation, JobId, PayloadId, StageName, Timestamp, Token};

use crate::by_id::ById;
use crate::cache::Cache;
use crate::estimate::Estimate;
use crate::index::{Index, Spare};
use crate::share::Shares;
use crate::topology::StageIndex;
use crate::volume::Volume;
use crate::{
    Counters, Decision, Event, Holder, Input, Job, JobTally, Limits, Output, PayloadInfo, Policy, Refusal, StageTally,
    Topology, Worker,
};

pub use bytes::ByteCredit;
pub use snapshot::{RestoreError, Snapshot};

/// The scheduler of one pipeline.
///
/// It keeps what it was told by events, and an index of that. The cost of an input does not grow with the number of
/// jobs, but for its logarithm.
#[derive(Debug, Clone)]
pub struct Sched {
    topology: Topology,
    limits: Limits,
    epoch: Epoch,
    /// No offers and no new jobs.
    draining: bool,
    /// Only jobs that have begun are dispatched.
    paused: bool,
    /// Number of the next job.
    next_number: u64,
    jobs: ById<JobId, Job>,
    keys: BTreeMap<String, JobId>,
    workers: ById<Incarnation, Worker>,
    /// Ranks that have attached, by stage and group.
    groups: BTreeMap<(StageIndex, StageName), BTreeMap<u32, Incarnation>>,
    /// How many slots are used by attempts of a job that were told to stop.
    stopping: BTreeMap<JobId, u32>,
    index: Index,
    spare: Spare,
    /// What is kept for jobs that would make the same.
    cache: Cache,
    /// How long attempts take, by stage.
    estimates: Vec<Estimate>,
    /// How large outputs are, by stage.
    volumes: Vec<Volume>,
    /// Who is next, by stage.
    shares: Vec<Shares>,
    /// Who chooses where the rules leave a choice.
    policy: Policy,
    counters: Counters,
}

impl Sched {
    /// A scheduler without jobs and workers. Replay the journal's events with [`Sched::apply`], then decide
    /// [`Input::Restarted`].
    pub fn new(topology: Topology, limits: Limits) -> Self {
        Self {
            index: Index::new(&topology),
            spare: Spare::default(),
            cache: Cache::default(),
            estimates: vec![Estimate::default(); topology.stages().len()],
            volumes: vec![Volume::default(); topology.stages().len()],
            shares: vec![Shares::new(topology.classes().len()); topology.stages().len()],
            policy: Policy::default(),
            topology,
            limits,
            epoch: Epoch::default(),
            draining: false,
            paused: false,
            next_number: 0,
            jobs: ById::new(),
            keys: BTreeMap::new(),
            workers: ById::new(),
            groups: BTreeMap::new(),
            stopping: BTreeMap::new(),
            counters: Counters::default(),
        }
    }

    /// The same, where another policy chooses from now on.
    #[must_use]
    pub fn with_policy(self, policy: Policy) -> Self {
        Self { policy, ..self }
    }

    /// What follows from an input. Reads only.
    ///
    /// # Errors
    /// [`Refusal`] where the input contradicts the state; then nothing follows. What a worker sends is refused with class
    /// `Fenced` where its attempt was superseded; send it a refusal, on which it stops the attempt and drops the payload.
    pub fn decide(&self, now: Timestamp, input: Input) -> Result<Decision, Refusal> {
        match input {
            Input::Restarted { epoch, stored } => self.restarted(now, epoch, &stored),
            Input::Submit {
                job,
                params,
                key,
                urgency,
            } => self.submit(now, job, params, key, urgency),
            Input::Cancel { job } => self.cancel(now, job),
            Input::Redrive { job } => self.redrive(now, job),
            Input::Discard { job, why } => self.discard(job, why),
            Input::WorkerAttached {
                worker,
                running,
                holding,
            } => self.worker_attached(now, worker, running, &holding),
            Input::WorkerAway { worker } => Ok(self.worker_away(now, worker)),
            Input::WorkerLost { worker } => Ok(self.worker_lost(now, worker)),
            Input::Accept { worker, token } => self.accept(now, worker, token),
            Input::Decline { worker, token, failure } => self.decline(now, worker, token, failure),
            Input::Renew {
                worker,
                token,
                sequence,
                progress,
            } => self.renew(worker, token, sequence, progress),
            Input::Published { worker, token, payload } => self.published(now, worker, token, payload),
            Input::Completed {
                worker,
                token,
                result,
                handovers,
            } => self.completed(now, worker, token, result, handovers),
            Input::Failed {
                worker,
                token,
                failure,
                lost,
            } => self.failed(now, worker, token, failure, lost),
            Input::Checkpointed {
                worker,
                token,
                payload,
                progress,
            } => self.checkpointed(now, worker, token, payload, progress),
            Input::Yielded {
                worker,
                token,
                payload,
                progress,
            } => self.yielded(now, worker, token, payload, progress),
            Input::Stopped { worker, token } => self.stopped(now, worker, token),
            Input::PayloadLost { payload } => Ok(self.payload_lost(now, payload)),
            Input::Drain { scope, within } => self.drain(now, scope, within),
            Input::Pause => Ok(self.pause(true)),
            Input::Resume => Ok(self.pause(false)),
            Input::Poll => Ok(self.poll(now)),
        }
    }

    /// Makes a decided event true. Total: an event that does not fit the state does nothing.
    pub fn apply(&mut self, at: Timestamp, event: &Event) {
        if self.change(at, event) {
            self.counters.count(event);
        }
    }

    /// When to decide [`Input::Poll`] next, if nothing happens before, and what will be due.
    pub fn poll_timeout(&self) -> Option<(Timestamp, &'static str)> {
        self.index.timers.first().map(|(at, due)| (at, due.name()))
    }

    /// The pipeline.
    pub const fn topology(&self) -> &Topology {
        &self.topology
    }

    /// The limits.
    pub const fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The epoch that offers are made in.
    pub const fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Whether there are no offers and no new jobs until the server restarts.
    pub const fn is_draining(&self) -> bool {
        self.draining
    }

    /// Whether only jobs that have begun go on.
    pub const fn is_paused(&self) -> bool {
        self.paused
    }

    /// The job of this id.
    pub fn job(&self, job: JobId) -> Option<&Job> {
        self.jobs.get(&job)
    }

    /// All jobs that are remembered, by id.
    pub fn jobs(&self) -> impl DoubleEndedIterator<Item = &Job> {
        self.jobs.values()
    }

    /// Number of jobs that have not ended.
    pub fn active_jobs(&self) -> usize {
        self.index.active.len()
    }

    /// The worker of this incarnation.
    pub fn worker(&self, worker: Incarnation) -> Option<&Worker> {
        self.workers.get(&worker)
    }

    /// All workers that are attached or may come back, by incarnation.
    pub fn workers(&self) -> impl Iterator<Item = &Worker> {
        self.workers.values()
    }

    /// Number of jobs that only lack a worker or a credit for this stage.
    pub fn queued(&self, stage: &StageName) -> usize {
        self.topology
            .find(stage)
            .map_or(0, |stage| self.index.queues[stage.get()].len())
    }

    /// Number of jobs of this class that only lack a worker or a credit for this stage.
    pub fn queued_of(&self, stage: &StageName, class: &StageName) -> usize {
        match (self.topology.find(stage), self.topology.class(class.as_str())) {
            (Some(stage), Some(_)) => self.index.queues[stage.get()].len_of(self.topology.class_index(class)),
            _ => 0,
        }
    }

    /// Number of payloads of this stage that are held or being made.
    pub fn held(&self, stage: &StageName) -> u32 {
        self.topology
            .find(stage)
            .map_or(0, |stage| self.index.queues[stage.get()].held)
    }

    /// How a stage does, over all jobs. Takes no longer the more jobs there are.
    pub fn tally(&self, stage: &StageName) -> Option<StageTally> {
        let queue = &self.index.queues[self.topology.find(stage)?.get()];
        Some(StageTally {
            oldest: queue.since.first().map(|(since, _)| *since),
            ..queue.tally
        })
    }

    /// Jobs that are remembered, by state. Takes no longer the more jobs there are.
    pub const fn job_tally(&self) -> JobTally {
        self.index.states
    }

    /// Number of payloads that are published and not released.
    pub fn live_payloads(&self) -> usize {
        self.index.payloads.len()
    }

    /// The job and stage whose output or checkpoint this payload is, while it can be read.
    fn payload_owner(&self, payload: PayloadId) -> Option<(JobId, &StageName)> {
        let (job, stage) = self.index.payloads.get(&payload)?;
        Some((*job, self.topology.name(*stage)))
    }

    /// The outputs whose bytes this worker holds, each with the attempt that made it.
    pub fn held_by(&self, worker: Incarnation) -> impl Iterator<Item = (Token, &PayloadInfo)> {
        let payloads = self.index.payloads_of(Holder::Worker(worker));
        payloads.filter_map(|payload| {
            let (job, stage) = self.index.payloads.get(&payload)?;
            match &self.jobs.get(job)?.run(*stage).output {
                Output::Live(live) if live.payload.id == payload => Some((live.token, &live.payload)),
                _ => None,
            }
        })
    }

    /// Whether somebody needs the payload, or may: a job, or whoever would make the same.
    pub fn needs_payload(&self, payload: PayloadId) -> bool {
        self.index.payloads.contains_key(&payload) || self.cache.key_of(payload).is_some()
    }

    /// Whether the attempt runs and its token is valid.
    ///
    /// A store asks before it takes a payload, and keeps one for as long as this holds or [`Sched::needs_payload`] says
    /// so: a worker may die between writing to the store and saying so.
    pub fn is_running(&self, token: Token) -> bool {
        self.jobs
            .get(&token.job)
            .is_some_and(|job| job.running(token).is_some())
    }

    /// What has happened so far.
    pub const fn counters(&self) -> Counters {
        self.counters
    }

    /// The worker, if its stream is up.
    fn attached(&self, worker: Incarnation) -> Result<&Worker, Refusal> {
        let known = self.workers.get(&worker).filter(|known| known.is_attached());
        known.ok_or(Refusal::UnknownWorker { worker })
    }

    /// The job and stage that was offered, runs or was done with this token.
    fn find(&self, token: Token) -> Option<(&Job, StageIndex)> {
        let job = self.jobs.get(&token.job)?;
        Some((job, job.find(token)?))
    }
}
