use stagewire_core::{Failure, Handover, Incarnation, JobId, PayloadId, Timestamp, Token};

use super::Sched;
use crate::job::{Job, JobState, Outcome, Phase};
use crate::topology::StageIndex;
use crate::{Decision, Effect, Event, Holder, JobNotice, NoticeKind, OfferEnd, PayloadInfo};

/// A decision in the making: it applies events to copies of the jobs that they change, and so sees what follows.
pub(super) struct Plan<'a> {
    sched: &'a Sched,
    now: Timestamp,
    /// A worker that cannot be told anything any more.
    unreachable: Option<Incarnation>,
    /// The store died with the last epoch.
    restarted: bool,
    /// Jobs as the plan leaves them, by id.
    #[expect(
        clippy::vec_box,
        reason = "a draft is large: it is made in its place and stays there"
    )]
    jobs: Vec<Box<Draft>>,
    pub(super) decision: Decision,
}

/// A job as a plan leaves it.
struct Draft {
    job: Job,
    /// How many of its superseded attempts have not stopped.
    stopping: u32,
}

/// The part of a plan that changes one job.
pub(super) struct JobPlan<'p, 'a> {
    plan: &'p mut Plan<'a>,
    draft: Box<Draft>,
    doom: Option<Failure>,
    handovers: Vec<(StageIndex, Vec<Handover>)>,
    /// Attempts that have yielded.
    yielded: Vec<Token>,
}

impl<'a> Plan<'a> {
    pub(super) fn new(sched: &'a Sched, now: Timestamp) -> Self {
        Self {
            sched,
            now,
            unreachable: None,
            restarted: false,
            jobs: Vec::new(),
            decision: Decision::default(),
        }
    }

    /// A plan in which this worker is beyond reach.
    pub(super) fn without(sched: &'a Sched, now: Timestamp, worker: Incarnation) -> Self {
        Self {
            unreachable: Some(worker),
            ..Self::new(sched, now)
        }
    }

    /// A plan in which nobody can be reached, and nothing that the store held is there.
    pub(super) fn after_restart(sched: &'a Sched, now: Timestamp) -> Self {
        Self {
            restarted: true,
            ..Self::new(sched, now)
        }
    }

    /// The job as the plan leaves it.
    pub(super) fn job(&self, job: JobId) -> Option<&Job> {
        match self.draft_of(job) {
            Ok(at) => Some(&self.jobs[at].job),
            Err(_) => self.sched.jobs.get(&job),
        }
    }

    /// Adds an event that changes no job.
    pub(super) fn push(&mut self, event: Event) {
        self.decision.events.push(event);
    }

    pub(super) fn effect(&mut self, effect: Effect) {
        self.decision.effects.push(effect);
    }

    /// Changes a job, and adds all that follows for it. Nothing happens where the job does not exist.
    pub(super) fn change(&mut self, job: JobId, change: impl FnOnce(&mut JobPlan<'_, 'a>)) {
        let sched = self.sched;
        if let Ok(at) = self.draft_of(job) {
            let known = self.jobs.remove(at);
            let (draft, stopping) = (known.job.clone(), known.stopping);
            self.work_on(draft, stopping, Some(&known.job), change);
        } else if let Some(before) = sched.jobs.get(&job) {
            let stopping = sched.stopping.get(&job).copied().filter(|_| !self.restarted);
            self.work_on(before.clone(), stopping.unwrap_or_default(), Some(before), change);
        }
    }

    /// Where the plan has this job, or would have it.
    fn draft_of(&self, job: JobId) -> Result<usize, usize> {
        self.jobs.binary_search_by_key(&job, |draft| draft.job.id)
    }

    /// Adds an event that begins something in one stage: an offer, a grant, or an output that nobody may read yet. Nothing
    /// follows from it for the job, so it is not copied to see.
    pub(super) fn begin(&mut self, token: Token, stage: StageIndex, worker: Incarnation, event: Event) {
        let kind = match &event {
            Event::AttemptGranted { .. } => NoticeKind::Running,
            Event::Published { payload, .. } => NoticeKind::published(payload),
            _ => NoticeKind::Offered,
        };
        #[cfg(debug_assertions)]
        let all = {
            let mut plan = Plan::new(self.sched, self.now);
            plan.change(token.job, |job| job.push(event.clone()));
            plan.decision
        };
        #[cfg(debug_assertions)]
        let (told, begun) = (self.decision.events.len(), self.decision.effects.len());
        self.push(event);
        self.effect(Effect::Job(JobNotice {
            job: token.job,
            stage: Some(self.sched.topology.name(stage).clone()),
            attempt: Some(token.attempt),
            worker: Some(worker),
            kind,
        }));
        #[cfg(debug_assertions)]
        assert_eq!(
            (&self.decision.events[told..], &self.decision.effects[begun..]),
            (&all.events[..], &all.effects[..]),
            "something follows"
        );
    }

    /// A superseded attempt has stopped.
    pub(super) fn stopped(&mut self, worker: Incarnation, token: Token) {
        let event = Event::AttemptStopped { worker, token };
        if self.job(token.job).is_some() {
            self.change(token.job, |job| job.push(event));
        } else {
            self.push(event);
        }
    }

    /// Makes a job, with what follows for it.
    pub(super) fn create(&mut self, job: Job, event: Event) {
        self.push(event);
        self.decision.job = Some(job.id);
        self.notice_job(job.id, NoticeKind::Submitted);
        self.work_on(job, 0, None, |_| ());
    }

    fn work_on(&mut self, job: Job, stopping: u32, before: Option<&Job>, change: impl FnOnce(&mut JobPlan<'_, 'a>)) {
        let mut work = JobPlan {
            plan: self,
            draft: Box::new(Draft { job, stopping }),
            doom: None,
            handovers: Vec::new(),
            yielded: Vec::new(),
        };
        change(&mut work);
        work.settle();
        work.tell(before);
        let draft = work.draft;
        if let Err(at) = self.draft_of(draft.job.id) {
            self.jobs.insert(at, draft);
        }
    }

    fn notice_job(&mut self, job: JobId, kind: NoticeKind) {
        self.effect(Effect::Job(JobNotice {
            job,
            stage: None,
            attempt: None,
            worker: None,
            kind,
        }));
    }

    fn notice_stage(&mut self, job: JobId, stage: StageIndex, phase: &Phase, kind: NoticeKind) {
        self.effect(Effect::Job(JobNotice {
            job,
            stage: Some(self.sched.topology.name(stage).clone()),
            attempt: phase.token().map(|token| token.attempt),
            worker: phase.worker(),
            kind,
        }));
    }

    fn can_reach(&self, worker: Incarnation) -> bool {
        let attached = self.sched.attached(worker).is_ok();
        attached && !self.restarted && self.unreachable != Some(worker)
    }

    pub(super) fn release(&mut self, holder: Holder, payload: PayloadId) {
        let reach = match holder {
            Holder::Worker(worker) => self.can_reach(worker),
            Holder::Store => !self.restarted,
        };
        if reach {
            self.effect(Effect::Release { holder, payload });
        }
    }
}

impl JobPlan<'_, '_> {
    pub(super) const fn sched(&self) -> &Sched {
        self.plan.sched
    }

    /// The job as it is after the events so far.
    pub(super) fn job(&self) -> &Job {
        &self.draft.job
    }

    pub(super) fn effect(&mut self, effect: Effect) {
        self.plan.effect(effect);
    }

    /// Nothing can save the job.
    pub(super) fn doom(&mut self, failure: Failure) {
        self.doom = Some(failure);
    }

    /// The attempt that runs has failed.
    pub(super) fn fail_attempt(&mut self, token: Token, failure: Failure) {
        let retry = self.draft.job.running(token).and_then(|stage| {
            let spec = self.plan.sched.topology.spec(stage);
            let failures = self.draft.job.run(stage).failures().saturating_add(1);
            (failures < spec.max_attempts).then(|| self.plan.now + spec.backoff.after(failures, token))
        });
        self.distrust(token);
        self.push(Event::AttemptFailed { token, failure, retry });
    }

    /// Whoever was told to stop is not waited for any longer.
    pub(super) fn stop_waiting(&mut self) {
        self.draft.stopping = 0;
    }

    /// Adds an event of this job, with what has to be done because of it. An event that does not fit is left out.
    pub(super) fn push(&mut self, event: Event) {
        if matches!(event, Event::AttemptStopped { .. }) {
            self.draft.stopping = self.draft.stopping.saturating_sub(1);
            self.plan.push(event);
            return;
        }
        let before = self.plan.decision.effects.len();
        self.consequences(&event);
        let sched = self.plan.sched;
        let fits = self
            .draft
            .job
            .apply(&sched.topology, &sched.limits, self.plan.now, &event);
        debug_assert!(
            fits,
            "decided an event that does not fit: {event:?} on {:?}",
            self.draft.job
        );
        if fits {
            self.plan.push(event);
        } else {
            self.plan.decision.effects.truncate(before);
        }
    }

    fn consequences(&mut self, event: &Event) {
        match event {
            Event::OfferEnded {
                token,
                end: OfferEnd::Withdrawn,
            } => {
                let message = format!("the offer {token} was withdrawn: what it needs is gone, or its job has ended");
                let failure = Failure::new(stagewire_core::ErrorClass::Fenced, "offer.withdrawn", message);
                self.cancel_attempt(*token, &failure);
            }
            Event::AttemptCompleted { token, handovers, .. } => {
                for worker in self.draft.job.workers_of(*token) {
                    self.plan.effect(Effect::Accepted { worker, token: *token });
                }
                if !handovers.is_empty() {
                    self.handovers
                        .extend(self.draft.job.find(*token).map(|stage| (stage, handovers.clone())));
                }
            }
            Event::AttemptFailed { token, failure, .. } => {
                self.void(*token);
                if self.draft.job.is_of_group(*token) {
                    self.cancel_attempt(*token, failure);
                    self.count_stopping(*token);
                }
            }
            Event::AttemptLost {
                token, loss, failure, ..
            } => {
                self.void(*token);
                if loss.keeps_slot() || self.draft.job.is_of_group(*token) {
                    self.cancel_attempt(*token, failure);
                    self.count_stopping(*token);
                }
            }
            Event::Checkpointed {
                token,
                payload,
                progress,
            } => {
                let Some(stage) = self.draft.job.find(*token) else {
                    return;
                };
                let run = self.draft.job.run(stage);
                if let Some(kept) = run.checkpoint() {
                    self.plan.release(kept.holder(), kept.payload.id);
                }
                let kind = NoticeKind::Checkpointed {
                    payload: payload.id,
                    nbytes: payload.nbytes.0,
                    stored: payload.stored,
                    progress: progress.clone(),
                };
                self.plan
                    .notice_stage(self.draft.job.id, stage, &self.draft.job.run(stage).phase, kind);
            }
            Event::AttemptYielded { token, failure, .. } => {
                self.void(*token);
                self.yielded.push(*token);
                if self.draft.job.is_of_group(*token) {
                    // Rank 0 has stopped.
                    for worker in self.draft.job.workers_of(*token).split_off(1) {
                        self.cancel_on(worker, *token, failure);
                    }
                    self.count_stopping(*token);
                }
            }
            Event::AttemptFenced { token, failure } => {
                self.void(*token);
                self.cancel_attempt(*token, failure);
                self.count_stopping(*token);
            }
            Event::Published { token, payload } => {
                let kind = NoticeKind::published(payload);
                if let Some(stage) = self.draft.job.find(*token) {
                    self.plan
                        .notice_stage(self.draft.job.id, stage, &self.draft.job.run(stage).phase, kind);
                }
            }
            // The worker asks the store to take it until it hears that this is known.
            Event::PayloadMoved { token, payload } => {
                let job = &self.draft.job;
                if let Some(worker) = job.find(*token).and_then(|stage| job.run(stage).output.worker()) {
                    self.plan.release(Holder::Worker(worker), payload.id);
                }
            }
            Event::PayloadLost { stage, payload, .. } | Event::PayloadReleased { stage, payload, .. } => {
                let run = self.draft.job.stage(stage);
                // What several jobs use goes with the last of them.
                let run = run.filter(|run| !run.shares(*payload));
                if let Some(holder) = run.and_then(|run| run.holder_of(*payload)) {
                    self.plan.release(holder, *payload);
                }
            }
            Event::JobRedriven { .. } => self.plan.notice_job(self.draft.job.id, NoticeKind::Redriven),
            Event::JobCancelling { .. } => self.plan.notice_job(self.draft.job.id, NoticeKind::Cancelling),
            _ => (),
        }
    }

    /// An attempt ends without an output: what it published is of no use to anybody.
    fn void(&mut self, token: Token) {
        if let Some(run) = self.draft.job.running(token).map(|stage| self.draft.job.run(stage))
            && let (Some(holder), Some(payload)) = (run.output.holder(), run.output.live())
        {
            self.plan.release(holder, payload.id);
        }
    }

    fn cancel_attempt(&mut self, token: Token, failure: &Failure) {
        for worker in self.draft.job.workers_of(token) {
            self.cancel_on(worker, token, failure);
        }
    }

    fn cancel_on(&mut self, worker: Incarnation, token: Token, failure: &Failure) {
        if self.plan.can_reach(worker) {
            let failure = failure.clone();
            self.plan.effect(Effect::CancelAttempt { worker, token, failure });
        }
    }

    fn count_stopping(&mut self, token: Token) {
        for worker in self.draft.job.workers_of(token) {
            self.draft.stopping += u32::from(self.is_attached(worker));
        }
    }

    /// Whether the worker's slots stay in use until it says that it has stopped.
    pub(super) fn is_attached(&self, worker: Incarnation) -> bool {
        self.plan.sched.attached(worker).is_ok() && !self.plan.restarted
    }

    /// Adds all that follows for the job from its own state.
    fn settle(&mut self) {
        let sched = self.plan.sched;
        while let Some(event) = match &self.doom {
            Some(failure) if self.draft.job.ended().is_none() => Some(self.draft.job.fail(failure.clone())),
            _ => self
                .draft
                .job
                .next_step(&sched.topology, &sched.limits, self.draft.stopping),
        } {
            self.push(event);
        }
    }

    /// Tells those who watch the job what became of it, in comparison with before.
    fn tell(&mut self, before: Option<&Job>) {
        // Stages of such a job do not go back to any queue: it has said that it ends, and says how.
        let ending = self.draft.job.state != JobState::Active;
        for stage in self.plan.sched.topology.indices() {
            let run = self.draft.job.run(stage);
            let old = before.map(|job| &job.run(stage).phase);
            if old.is_some_and(|old| old.position() == run.phase.position() && old.token() == run.phase.token()) {
                continue;
            }
            let (phase, kind) = match (old, &run.phase) {
                (_, new @ Phase::Cached { .. }) => {
                    let kept = run.output.live();
                    let cached = kept.map_or(NoticeKind::StageDone { handovers: Vec::new() }, NoticeKind::cached);
                    (new, cached)
                }
                (_, new @ Phase::Done { .. }) => {
                    let handovers = self.handovers_of(stage);
                    (old.unwrap_or(new), NoticeKind::StageDone { handovers })
                }
                _ if ending => continue,
                (_, new @ Phase::Running(_)) => (new, NoticeKind::Running),
                (_, new @ Phase::Offered(_)) => (new, NoticeKind::Offered),
                (
                    Some(old @ (Phase::Offered(_) | Phase::Running(_) | Phase::Done { .. } | Phase::Cached { .. })),
                    _,
                ) => {
                    let failure = run.last_failure().cloned();
                    let yielded = old.token().is_some_and(|token| self.yielded.contains(&token));
                    let kind = match failure {
                        Some(failure) if yielded => NoticeKind::Yielded(failure),
                        failure => NoticeKind::Requeued { failure },
                    };
                    (old, kind)
                }
                (_, new @ Phase::Queued { .. }) => (new, NoticeKind::Queued),
                (_, Phase::Blocked { .. }) => continue,
            };
            self.plan.notice_stage(self.draft.job.id, stage, phase, kind);
        }
        if before.is_none_or(|job| job.ended().is_none())
            && let JobState::Ended { outcome, .. } = &self.draft.job.state
        {
            let kind = match outcome {
                Outcome::Succeeded => NoticeKind::Succeeded,
                Outcome::Failed(failure) => NoticeKind::Failed(failure.clone()),
                Outcome::Cancelled => NoticeKind::Cancelled,
            };
            self.plan.notice_job(self.draft.job.id, kind);
        }
    }

    fn handovers_of(&self, stage: StageIndex) -> Vec<Handover> {
        let of_stage = self.handovers.iter().find(|handovers| handovers.0 == stage);
        of_stage.map(|handovers| handovers.1.clone()).unwrap_or_default()
    }
}

impl NoticeKind {
    const fn cached(payload: &PayloadInfo) -> Self {
        Self::Cached {
            payload: payload.id,
            nbytes: payload.nbytes.0,
            chunks: payload.chunks,
        }
    }

    const fn published(payload: &PayloadInfo) -> Self {
        Self::Published {
            payload: payload.id,
            nbytes: payload.nbytes.0,
            chunks: payload.chunks,
            stored: payload.stored,
        }
    }
}
