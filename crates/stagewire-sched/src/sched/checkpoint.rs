//! Checkpoints: what a running attempt has made by a step boundary, so that the next one goes on from there.
//!
//! A stage of a job keeps the newest at most. It goes with the next offer, whatever ended the attempt before, and is let
//! go of once the stage is done or the job has ended. Its bytes count as held. Room for it is not set aside: a stage that
//! finds none goes on without. One that is lost costs what it would have saved; so does one from which an attempt has gone
//! on and failed before the next, as that may fail the same way each time.
//!
//! An attempt that was asked to yield stops at a step boundary of its choice, and its stage goes back into its queue at no
//! cost to the job. To ask is no more than that: an attempt that does not listen runs on.

use stagewire_core::{ErrorClass, Failure, Incarnation, Progress, Timestamp, Token};

use super::Sched;
use super::attempt::{Standing, superseded};
use super::plan::{JobPlan, Plan};
use crate::job::Phase;
use crate::topology::StageIndex;
use crate::worker::{Slot, Worker};
use crate::{Decision, Effect, Event, JobNotice, Loss, NoticeKind, PayloadInfo, Preemptor, Refusal};

impl Sched {
    pub(super) fn checkpointed(
        &self,
        now: Timestamp,
        worker: Incarnation,
        token: Token,
        payload: PayloadInfo,
        progress: Progress,
    ) -> Result<Decision, Refusal> {
        let mut plan = Plan::new(self, now);
        match self.standing(worker, token)? {
            Standing::Running(stage, _) if self.takes(stage, token, &payload) => {
                plan.change(token.job, |job| job.keep(worker, token, payload, progress));
            }
            Standing::Following(_) => {
                let payload = payload.id;
                return Err(Refusal::NotRankZero { worker, token, payload });
            }
            Standing::Running(..) | Standing::Done => self.let_go(&mut plan, worker, &payload),
            Standing::Stopping => {
                let failure = superseded(worker, token);
                plan.effect(Effect::Refused { worker, token, failure });
                self.let_go(&mut plan, worker, &payload);
            }
        }
        Ok(plan.decision)
    }

    pub(super) fn yielded(
        &self,
        now: Timestamp,
        worker: Incarnation,
        token: Token,
        payload: Option<PayloadInfo>,
        progress: Progress,
    ) -> Result<Decision, Refusal> {
        let mut plan = Plan::new(self, now);
        match self.standing(worker, token)? {
            Standing::Running(stage, attempt) => {
                let (asked, begun_at) = (attempt.asked.as_deref(), attempt.begun_at());
                let of_group = !attempt.ranks.is_empty();
                let (kept, other): (Option<_>, Option<_>) = match payload {
                    Some(payload) if self.takes(stage, token, &payload) => (Some(payload), None),
                    other => (None, other),
                };
                plan.change(token.job, |job| {
                    if let Some(payload) = kept {
                        job.keep(worker, token, payload, progress);
                    }
                    let done = job.job().run(stage).checkpoint().map(|kept| kept.progress.done);
                    let advanced = done.is_some_and(|done| done > begun_at);
                    job.push(match asked {
                        Some(asked) => Event::AttemptYielded {
                            token,
                            by: asked.by.clone(),
                            failure: asked.failure.clone(),
                        },
                        None if advanced => Event::AttemptYielded {
                            token,
                            by: None,
                            failure: yielded_unasked(worker, token),
                        },
                        // Else it could do so for ever.
                        None => Event::AttemptLost {
                            token,
                            worker,
                            loss: Loss::Stopped,
                            failure: yielded_unasked(worker, token),
                        },
                    });
                    if of_group {
                        job.rank_stopped(worker, token);
                    }
                });
                if let Some(payload) = other {
                    self.let_go(&mut plan, worker, &payload);
                }
                plan.effect(Effect::Accepted { worker, token });
            }
            // It is told to stop once rank 0 has yielded.
            Standing::Following(_) => (),
            Standing::Done => {
                payload
                    .iter()
                    .for_each(|payload| self.let_go(&mut plan, worker, payload));
                plan.effect(Effect::Accepted { worker, token });
            }
            Standing::Stopping => {
                payload
                    .iter()
                    .for_each(|payload| self.let_go(&mut plan, worker, payload));
                self.stop_late(&mut plan, worker, token, true);
            }
        }
        Ok(plan.decision)
    }

    /// Whether the payload may become the checkpoint of the stage: it takes some, and the payload is nothing else.
    fn takes(&self, stage: StageIndex, token: Token, payload: &PayloadInfo) -> bool {
        let known = self.index.payloads.get(&payload.id);
        let run = self.jobs.get(&token.job).map(|job| job.run(stage));
        let its_own = |run: &crate::StageRun| run.checkpoint().is_some_and(|kept| kept.payload.id == payload.id);
        self.topology.spec(stage).checkpoint && (known.is_none() || run.is_some_and(its_own))
    }

    /// Nobody keeps this payload, unless it is known for something else.
    pub(super) fn let_go(&self, plan: &mut Plan<'_>, worker: Incarnation, payload: &PayloadInfo) {
        if !self.needs_payload(payload.id) {
            plan.effect(Effect::Release {
                holder: payload.holder(worker),
                payload: payload.id,
            });
        }
    }

    /// Asks the attempt to yield, which its worker can hear.
    pub(super) fn ask(
        &self,
        plan: &mut Plan<'_>,
        stage: StageIndex,
        token: Token,
        by: Option<Preemptor>,
        failure: Failure,
    ) {
        let Some(worker) = self.jobs.get(&token.job).and_then(|job| job.run(stage).phase.worker()) else {
            return;
        };
        plan.change(token.job, |job| {
            job.push(Event::Yielding {
                token,
                by,
                failure: failure.clone(),
            });
        });
        plan.effect(Effect::Yield {
            worker,
            token,
            failure: failure.clone(),
        });
        plan.effect(Effect::Job(JobNotice {
            job: token.job,
            stage: Some(self.topology.name(stage).clone()),
            attempt: Some(token.attempt),
            worker: Some(worker),
            kind: NoticeKind::Yielding(failure),
        }));
    }

    /// Asks what this worker runs to yield, as it is to leave, unless that was asked already.
    pub(super) fn ask_to_leave(&self, plan: &mut Plan<'_>, worker: &Worker) {
        for token in worker.tokens(|slot| slot == Slot::Running) {
            // In this plan as well: another rank of the group may leave with it.
            let job = plan.job(token.job);
            if job.is_some_and(|job| job.running(token).is_some_and(|stage| job.yields(stage).is_none())) {
                self.ask_one_to_leave(plan, worker.incarnation, token);
            }
        }
    }

    /// Asks this attempt to yield, as the worker is to leave. Of a group rank 0 is asked.
    pub(super) fn ask_one_to_leave(&self, plan: &mut Plan<'_>, worker: Incarnation, token: Token) {
        let Some((job, stage)) = self.find(token) else { return };
        let Phase::Running(attempt) = &job.run(stage).phase else {
            return;
        };
        let hears = attempt.worker == worker || self.attached(attempt.worker).is_ok();
        if self.topology.spec(stage).checkpoint && hears {
            let message = format!(
                "worker {worker} of stage {} drains: attempt {token} should yield at its next step boundary, and goes on on \
                 another worker",
                self.topology.name(stage)
            );
            let failure = Failure::new(ErrorClass::Unavailable, "attempt.leaving", message);
            self.ask(plan, stage, token, None, failure);
        }
    }
}

impl JobPlan<'_, '_> {
    /// Takes a checkpoint of the attempt that runs. One that has come no further than the last is let go of.
    fn keep(&mut self, worker: Incarnation, token: Token, payload: PayloadInfo, progress: Progress) {
        let kept = self
            .job()
            .running(token)
            .and_then(|stage| self.job().run(stage).checkpoint());
        match kept {
            // Said twice, as it should after the stream was lost.
            Some(kept) if kept.payload.id == payload.id => (),
            Some(kept) if kept.progress.done >= progress.done => self.effect(Effect::Release {
                holder: payload.holder(worker),
                payload: payload.id,
            }),
            _ => self.push(Event::Checkpointed {
                token,
                payload,
                progress,
            }),
        }
    }

    /// The attempt that runs fails: where it got no further than the checkpoint from which it went on, the next one does not
    /// try that again.
    pub(super) fn distrust(&mut self, token: Token) {
        let Some(stage) = self.job().running(token) else { return };
        let run = self.job().run(stage);
        let resumed = match run.phase() {
            Phase::Running(attempt) => attempt.resumed.map(|resumed| resumed.payload),
            _ => None,
        };
        if let Some(kept) = run.checkpoint().filter(|kept| resumed == Some(kept.payload.id)) {
            let event = Event::PayloadReleased {
                job: token.job,
                stage: run.name.clone(),
                payload: kept.payload.id,
            };
            self.push(event);
        }
    }
}

fn yielded_unasked(worker: Incarnation, token: Token) -> Failure {
    let message = format!("worker {worker} yielded attempt {token} unasked");
    Failure::new(ErrorClass::Unavailable, "attempt.yielded", message)
}
