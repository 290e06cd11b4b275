use std::collections::BTreeMap;

use stagewire_core::{ErrorClass, Failure, Incarnation, JobId, PayloadId, StageName, Timestamp, Token};

use super::Sched;
use super::plan::{JobPlan, Plan};
use crate::worker::{Slot, Worker};
use crate::{Decision, Effect, Event, Holder, Loss, OfferEnd};

impl Sched {
    /// A worker's process is gone, and what it ran and held with it.
    pub(super) fn worker_lost(&self, now: Timestamp, worker: Incarnation) -> Decision {
        match self.workers.get(&worker) {
            Some(known) => self.lose_worker(now, known, "its process ended"),
            None => Decision::default(),
        }
    }

    /// A worker has been away for too long.
    pub(super) fn worker_away_too_long(&self, now: Timestamp, worker: Incarnation) -> Decision {
        match self.workers.get(&worker) {
            Some(known) => self.lose_worker(now, known, &format!("it was away for {:?}", self.limits.linger)),
            None => Decision::default(),
        }
    }

    /// A worker did not stop an attempt in time: who knows what it does.
    pub(super) fn evict(&self, now: Timestamp, worker: Incarnation, token: Token) -> Decision {
        let Some(known) = self.workers.get(&worker) else {
            return Decision::default();
        };
        let mut decision = self.lose_worker(now, known, "it did not stop in time and was given up");
        let stop = self.limits.stop;
        let message = format!("worker {worker} did not stop attempt {token} within {stop:?} and is given up");
        let failure = Failure::new(ErrorClass::Deadline, "worker.not_stopping", message);
        decision.effects.push(Effect::Evict { worker, failure });
        decision
    }

    fn lose_worker(&self, now: Timestamp, worker: &Worker, why: &str) -> Decision {
        let incarnation = worker.incarnation;
        let loss = match worker.info {
            Some(_) => Loss::WorkerLost,
            None => Loss::Unclaimed,
        };
        let mut plan = Plan::without(self, now, incarnation);
        for (job, belongings) in self.belongings(worker) {
            plan.change(job, |job| {
                job.end_slots(incarnation, &belongings.slots, |token| Event::AttemptLost {
                    token,
                    worker: incarnation,
                    loss,
                    failure: lost_with(worker, token, why),
                });
                for payload in belongings.payloads {
                    job.lose_payload(payload);
                }
            });
        }
        self.stop_forgotten(&mut plan, worker);
        plan.push(Event::WorkerLost { worker: incarnation });
        plan.decision
    }

    /// What the worker runs, stops and holds, by job.
    pub(super) fn belongings(&self, worker: &Worker) -> BTreeMap<JobId, Belongings> {
        let mut belongings = BTreeMap::<JobId, Belongings>::new();
        for (token, slot) in worker.slots.iter() {
            if self.jobs.contains_key(&token.job) {
                belongings.entry(token.job).or_default().slots.push((*token, *slot));
            }
        }
        for payload in self.index.payloads_of(Holder::Worker(worker.incarnation)) {
            if let Some((job, _)) = self.index.payloads.get(&payload) {
                belongings.entry(*job).or_default().payloads.push(payload);
            }
        }
        belongings
    }

    /// Takes it for stopped what the worker was told to stop for jobs that are forgotten by now.
    pub(super) fn stop_forgotten(&self, plan: &mut Plan<'_>, worker: &Worker) {
        for token in worker.tokens(Slot::is_stopping) {
            if !self.jobs.contains_key(&token.job) {
                plan.stopped(worker.incarnation, token);
            }
        }
    }
}

/// What a worker has to do with one job.
#[derive(Debug, Default)]
pub(super) struct Belongings {
    pub(super) slots: Vec<(Token, Slot)>,
    pub(super) payloads: Vec<PayloadId>,
}

impl JobPlan<'_, '_> {
    /// Ends all that a worker was offered, runs or stops for this job; its running attempts with this event.
    pub(super) fn end_slots(&mut self, worker: Incarnation, slots: &[(Token, Slot)], running: impl Fn(Token) -> Event) {
        for (token, slot) in slots.iter().copied() {
            let event = match slot {
                Slot::Reserved => Event::OfferEnded {
                    token,
                    end: OfferEnd::Withdrawn,
                },
                Slot::Running => running(token),
                Slot::Stopping { .. } => Event::AttemptStopped { worker, token },
            };
            // The other ranks of a group are told to stop; this one is not there to be told.
            let gone = matches!(event, Event::AttemptLost { .. }) && self.job().is_of_group(token);
            self.push(event);
            if gone {
                self.rank_stopped(worker, token);
            }
        }
    }
}

fn lost_with(worker: &Worker, token: Token, why: &str) -> Failure {
    let name = worker.info.as_ref().map_or("", |info| &info.name);
    let (incarnation, stage): (_, &StageName) = (worker.incarnation, &worker.stage);
    let message = format!("worker {name} {incarnation} of stage {stage} was lost with attempt {token}: {why}");
    Failure::new(ErrorClass::Unavailable, "worker.lost", message)
}
