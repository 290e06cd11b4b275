use stagewire_core::{
    Classify, ErrorClass, Failure, Handover, Incarnation, JobId, PayloadId, Progress, Timestamp, Token,
};

use super::Sched;
use super::plan::Plan;
use crate::job::{Phase, Running};
use crate::topology::StageIndex;
use crate::worker::Slot;
use crate::{Decision, Effect, Event, JobNotice, Loss, NoticeKind, Refusal, ResultInfo};

/// What a token is to the worker that presents it.
pub(super) enum Standing<'a> {
    /// The attempt is valid and runs.
    Running(StageIndex, &'a Running),
    /// The attempt is valid and runs, and the worker is not rank 0 of the group that runs it.
    Following(&'a Running),
    /// The attempt's output was accepted.
    Done,
    /// The attempt was superseded, and its slot waits for it to stop.
    Stopping,
}

impl Sched {
    /// What the token is to this worker.
    ///
    /// # Errors
    /// [`Refusal`] where the worker is not attached or the token is nothing to it.
    pub(super) fn standing(&self, worker: Incarnation, token: Token) -> Result<Standing<'_>, Refusal> {
        let known = self.attached(worker)?;
        let found = self.find(token).map(|(job, stage)| (stage, &job.run(stage).phase));
        let is_stopping = || known.slots.get(&token).copied().is_some_and(Slot::is_stopping);
        match found {
            Some((stage, Phase::Running(attempt))) if attempt.worker == worker => Ok(Standing::Running(stage, attempt)),
            Some((_, Phase::Running(attempt))) if attempt.is_run_by(worker) => Ok(Standing::Following(attempt)),
            _ if is_stopping() => Ok(Standing::Stopping),
            Some((stage, Phase::Done { .. })) if known.place == Some(stage) => Ok(Standing::Done),
            _ => Err(Refusal::Stale { worker, token }),
        }
    }

    pub(super) fn renew(
        &self,
        worker: Incarnation,
        token: Token,
        sequence: u64,
        progress: Option<Progress>,
    ) -> Result<Decision, Refusal> {
        match self.standing(worker, token)? {
            Standing::Running(stage, attempt) => {
                let news = progress.clone().filter(|_| sequence > attempt.sequence);
                let notice = news.map(|progress| {
                    Effect::Job(JobNotice {
                        job: token.job,
                        stage: Some(self.topology.name(stage).clone()),
                        attempt: Some(token.attempt),
                        worker: Some(worker),
                        kind: NoticeKind::Progress(progress),
                    })
                });
                Ok(Decision {
                    events: vec![Event::Renewed {
                        token,
                        sequence,
                        progress,
                    }],
                    effects: notice.into_iter().collect(),
                    job: None,
                })
            }
            // The message may have been on its way. How far a group is, its rank 0 says.
            Standing::Done | Standing::Following(_) => Ok(Decision::default()),
            // Said again with each renewal, until it hears.
            Standing::Stopping => Ok(Decision {
                effects: vec![Effect::CancelAttempt {
                    worker,
                    token,
                    failure: superseded(worker, token),
                }],
                ..Decision::default()
            }),
        }
    }

    pub(super) fn completed(
        &self,
        now: Timestamp,
        worker: Incarnation,
        token: Token,
        result: Option<ResultInfo>,
        handovers: Vec<Handover>,
    ) -> Result<Decision, Refusal> {
        let mut plan = Plan::new(self, now);
        match self.standing(worker, token)? {
            Standing::Running(stage, _) => plan.change(token.job, |job| {
                let last = self.topology.consumers(stage).is_empty();
                if last || job.job().run(stage).output.live().is_some() {
                    let result = result.filter(|_| last);
                    job.push(Event::AttemptCompleted {
                        token,
                        result,
                        handovers,
                    });
                    job.share(stage);
                } else {
                    let name = self.topology.name(stage);
                    let message = format!("stage {name} completed attempt {token} without having published its output");
                    let failure = Failure::new(ErrorClass::Internal, "payload.missing", message);
                    job.effect(Effect::Refused {
                        worker,
                        token,
                        failure: failure.clone(),
                    });
                    job.fail_attempt(token, failure);
                }
            }),
            // Said twice; perhaps the answer got lost.
            Standing::Done => plan.effect(Effect::Accepted { worker, token }),
            // Answered once rank 0 has completed, for all.
            Standing::Following(_) => (),
            Standing::Stopping => self.stop_late(&mut plan, worker, token, true),
        }
        Ok(plan.decision)
    }

    pub(super) fn failed(
        &self,
        now: Timestamp,
        worker: Incarnation,
        token: Token,
        failure: Failure,
        lost: Option<PayloadId>,
    ) -> Result<Decision, Refusal> {
        let mut plan = Plan::new(self, now);
        match self.standing(worker, token)? {
            Standing::Running(_, attempt) | Standing::Following(attempt) => {
                let of_group = !attempt.ranks.is_empty();
                let reads = |payload: &PayloadId| {
                    attempt.inputs.contains(payload)
                        || attempt.resumed.is_some_and(|resumed| resumed.payload == *payload)
                };
                let lost = lost.filter(reads);
                plan.change(token.job, |job| {
                    match lost {
                        Some(payload) => {
                            let loss = Loss::InputLost;
                            job.push(Event::AttemptLost {
                                token,
                                worker,
                                loss,
                                failure,
                            });
                            job.lose_payload(payload);
                        }
                        None if failure.class == ErrorClass::Cancelled => {
                            let loss = Loss::Stopped;
                            job.push(Event::AttemptLost {
                                token,
                                worker,
                                loss,
                                failure,
                            });
                        }
                        None => {
                            if !may_pass(failure.class) {
                                job.doom(failure.clone());
                            }
                            job.fail_attempt(token, failure);
                        }
                    }
                    if of_group {
                        job.rank_stopped(worker, token);
                    }
                });
                if let Some(payload) = lost {
                    self.lose_shared(&mut plan, payload);
                }
            }
            Standing::Done => (),
            Standing::Stopping => self.stop_late(&mut plan, worker, token, false),
        }
        Ok(plan.decision)
    }

    pub(super) fn stopped(&self, now: Timestamp, worker: Incarnation, token: Token) -> Result<Decision, Refusal> {
        let mut plan = Plan::new(self, now);
        match self.standing(worker, token) {
            Ok(Standing::Running(_, attempt) | Standing::Following(attempt)) => plan.change(token.job, |job| {
                let message = format!("worker {worker} stopped attempt {token} unasked");
                job.push(Event::AttemptLost {
                    token,
                    worker,
                    loss: Loss::Stopped,
                    failure: Failure::new(ErrorClass::Unavailable, "attempt.stopped", message),
                });
                if !attempt.ranks.is_empty() {
                    job.rank_stopped(worker, token);
                }
            }),
            Ok(Standing::Stopping) => self.stop_late(&mut plan, worker, token, false),
            // It has stopped what is long forgotten, or an offer that was taken back.
            Ok(Standing::Done) | Err(Refusal::Stale { .. }) => (),
            Err(refusal) => return Err(refusal),
        }
        Ok(plan.decision)
    }

    /// A superseded attempt has ended: nothing of it counts, but its slot is free.
    pub(super) fn stop_late(&self, plan: &mut Plan<'_>, worker: Incarnation, token: Token, refuse: bool) {
        if refuse {
            let failure = superseded(worker, token);
            plan.effect(Effect::Refused { worker, token, failure });
        }
        plan.stopped(worker, token);
    }

    /// The stage has waited for long enough since it failed.
    pub(super) fn retry(&self, now: Timestamp, job: JobId, stage: StageIndex) -> Decision {
        let mut plan = Plan::new(self, now);
        let stage = self.topology.name(stage).clone();
        plan.change(job, |plan| plan.push(Event::RetryDue { job, stage }));
        plan.decision
    }

    /// The grant ran out, or the attempt makes no progress.
    pub(super) fn attempt_expired(&self, now: Timestamp, job: JobId, stage: StageIndex) -> Decision {
        let mut plan = Plan::new(self, now);
        let Some(Phase::Running(attempt)) = self.jobs.get(&job).map(|job| &job.run(stage).phase) else {
            return plan.decision;
        };
        let (token, worker, name) = (attempt.token, attempt.worker, self.topology.name(stage));
        let no_progress = self.topology.spec(stage).no_progress;
        let (loss, failure) = if attempt.progressed + no_progress <= now {
            let message = format!(
                "attempt {token} of stage {name} on worker {worker} made no progress for {no_progress:?}; \
                 report progress more often, or raise \"no-progress\" of the stage"
            );
            let failure = Failure::new(ErrorClass::Deadline, "attempt.no_progress", message);
            (Loss::NoProgress, failure)
        } else {
            let grant = self.limits.grant;
            let message = format!(
                "worker {worker} did not renew attempt {token} of stage {name} for {grant:?}: its \
                 process hangs or is stopped; see its log"
            );
            let failure = Failure::new(ErrorClass::Deadline, "grant.expired", message);
            (Loss::GrantExpired, failure)
        };
        plan.change(job, |job| {
            job.push(Event::AttemptLost {
                token,
                worker,
                loss,
                failure,
            });
        });
        plan.decision
    }
}

/// Whether the same attempt may end otherwise another time.
const fn may_pass(class: ErrorClass) -> bool {
    !matches!(
        class,
        ErrorClass::Invalid
            | ErrorClass::NotFound
            | ErrorClass::Unsupported
            | ErrorClass::Denied
            | ErrorClass::Unauthenticated
    )
}

pub(super) fn superseded(worker: Incarnation, token: Token) -> Failure {
    Refusal::Stale { worker, token }.to_failure()
}
