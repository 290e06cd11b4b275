use std::collections::BTreeSet;

use stagewire_core::{ErrorClass, Failure, Incarnation, PayloadId, Timestamp, Token};

use super::Sched;
use super::attempt::superseded;
use super::plan::Plan;
use crate::job::Phase;
use crate::topology::StageKind;
use crate::worker::Slot;
use crate::{Decision, Effect, Event, Holder, Loss, Refusal, WorkerInfo};

impl Sched {
    /// A worker's stream is up. What it says that it runs and holds is compared with what is known: the attempts that are
    /// valid go on, and so do the payloads; the rest is stopped, released, or counted as lost.
    pub(super) fn worker_attached(
        &self,
        now: Timestamp,
        info: WorkerInfo,
        running: Vec<Token>,
        holding: &[PayloadId],
    ) -> Result<Decision, Refusal> {
        let incarnation = info.incarnation;
        let running: BTreeSet<Token> = running.into_iter().collect();
        self.admit(&info, running.len())?;
        let mut plan = Plan::new(self, now);
        self.end_what_is_missing(&mut plan, incarnation, &running, holding);
        let (mut claimed, mut stale) = (Vec::new(), Vec::new());
        for token in running {
            let phase = plan
                .job(token.job)
                .and_then(|job| Some(&job.run(job.find(token)?).phase));
            match phase {
                Some(Phase::Running(attempt)) if attempt.is_run_by(incarnation) => claimed.push(token),
                Some(Phase::Done { .. }) => plan.effect(Effect::Accepted {
                    worker: incarnation,
                    token,
                }),
                _ => {
                    let failure = superseded(incarnation, token);
                    plan.effect(Effect::CancelAttempt {
                        worker: incarnation,
                        token,
                        failure,
                    });
                    stale.push(token);
                }
            }
        }
        let unclaimed = self.unclaimed(&mut plan, incarnation, holding);
        let known = self.workers.get(&incarnation);
        let leaves = known.filter(|known| known.draining);
        if self.draining || leaves.is_some() {
            let within = known.and_then(|known| known.drain_by).map(|until| until.since(now));
            plan.effect(Effect::Drain {
                worker: incarnation,
                within,
            });
        }
        let asked = leaves.map(|_| claimed.clone()).unwrap_or_default();
        plan.push(Event::WorkerAttached {
            worker: info,
            claimed,
            stale,
            unclaimed,
        });
        // It may not have heard.
        for token in asked {
            self.ask_one_to_leave(&mut plan, incarnation, token);
        }
        Ok(plan.decision)
    }

    fn admit(&self, info: &WorkerInfo, running: usize) -> Result<(), Refusal> {
        let (worker, slots, limit) = (info.incarnation, info.slots, self.limits.max_slots);
        let Some(stage) = self.topology.find(&info.stage) else {
            return Err(Refusal::UnknownStage {
                worker,
                stage: info.stage.clone(),
                known: self.topology.names(),
            });
        };
        if !(1..=limit).contains(&slots) {
            return Err(Refusal::Slots { worker, slots, limit });
        }
        let max_batch = info.max_batch;
        let batches = max_batch > 1 && (slots > 1 || self.topology.spec(stage).kind != StageKind::WorkQueue);
        if max_batch == 0 || batches {
            return Err(Refusal::Batch {
                worker,
                stage: info.stage.clone(),
                max_batch,
                slots,
            });
        }
        self.admit_member(info, stage)?;
        let slots = info.places();
        if slots > limit {
            return Err(Refusal::Slots { worker, slots, limit });
        }
        if running > slots as usize {
            return Err(Refusal::TooManyRunning { worker, running, slots });
        }
        match self.workers.get(&worker) {
            Some(known) if known.stage != info.stage || known.info.as_ref().is_some_and(|old| old.differs(info)) => {
                Err(Refusal::WorkerChanged {
                    worker,
                    stage: known.stage.clone(),
                    slots: known.advertised(),
                })
            }
            _ => Ok(()),
        }
    }

    /// Ends what the worker should run, stop or hold and does not.
    fn end_what_is_missing(
        &self,
        plan: &mut Plan<'_>,
        worker: Incarnation,
        running: &BTreeSet<Token>,
        holding: &[PayloadId],
    ) {
        let Some(known) = self.workers.get(&worker) else { return };
        let holding: BTreeSet<PayloadId> = holding.iter().copied().collect();
        for (job, mut belongings) in self.belongings(known) {
            let gone = |slot: &(Token, Slot)| slot.1 == Slot::Reserved || !running.contains(&slot.0);
            belongings.slots.retain(gone);
            belongings.payloads.retain(|payload| !holding.contains(payload));
            plan.change(job, |job| {
                job.end_slots(worker, &belongings.slots, |token| {
                    let message = format!("worker {worker} came back without attempt {token}");
                    Event::AttemptLost {
                        token,
                        worker,
                        loss: Loss::NotRunning,
                        failure: Failure::new(ErrorClass::Unavailable, "attempt.not_running", message),
                    }
                });
                for payload in belongings.payloads {
                    job.lose_payload(payload);
                }
            });
        }
        for token in known.tokens(Slot::is_stopping) {
            if !self.jobs.contains_key(&token.job) && !running.contains(&token) {
                plan.stopped(worker, token);
            }
        }
    }

    /// Payloads that the worker holds and that are nobody's output: one of its attempts may be about to publish them.
    fn unclaimed(&self, plan: &mut Plan<'_>, worker: Incarnation, holding: &[PayloadId]) -> Vec<PayloadId> {
        let mut unclaimed = Vec::new();
        for payload in holding.iter().copied() {
            let holder = self
                .index
                .payloads
                .get(&payload)
                .and_then(|(job, stage)| plan.job(*job)?.run(*stage).holder_of(payload));
            match holder {
                None => unclaimed.push(payload),
                Some(holder) if holder == Holder::Worker(worker) => (),
                // Somebody else holds it now; this copy is in nobody's way.
                Some(_) => plan.effect(Effect::Release {
                    holder: Holder::Worker(worker),
                    payload,
                }),
            }
        }
        unclaimed
    }

    /// A worker's stream broke: its offers are void, what it runs and holds is kept for a while.
    pub(super) fn worker_away(&self, now: Timestamp, worker: Incarnation) -> Decision {
        let mut plan = Plan::without(self, now, worker);
        if let Ok(known) = self.attached(worker) {
            for (job, mut belongings) in self.belongings(known) {
                belongings.slots.retain(|slot| slot.1 != Slot::Running);
                plan.change(job, |job| {
                    job.end_slots(worker, &belongings.slots, |token| Event::AttemptStopped {
                        worker,
                        token,
                    });
                });
            }
            self.stop_forgotten(&mut plan, known);
            plan.push(Event::WorkerAway { worker });
        }
        plan.decision
    }
}
