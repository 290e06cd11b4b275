use std::time::Duration;

use stagewire_core::{ErrorClass, Failure, Incarnation, Timestamp};

use super::Sched;
use super::plan::Plan;
use crate::worker::Worker;
use crate::{Decision, DrainScope, Effect, Event, Refusal};

impl Sched {
    /// No more offers. Said again it changes a deadline that it names; workers are told again, as they may not have heard.
    pub(super) fn drain(
        &self,
        now: Timestamp,
        scope: DrainScope,
        within: Option<Duration>,
    ) -> Result<Decision, Refusal> {
        let mut plan = Plan::new(self, now);
        match scope {
            DrainScope::All if !self.draining => {
                plan.push(Event::Draining);
                let attached = self.workers.values().filter(|worker| worker.is_attached());
                attached.for_each(|worker| plan.effect(tell(now, worker, None)));
            }
            DrainScope::All => (),
            DrainScope::Worker(worker) => {
                let known = self.workers.get(&worker).ok_or(Refusal::UnknownWorker { worker })?;
                self.drain_worker(now, known, within, &mut plan);
            }
            DrainScope::Stage(stage) => {
                let Some(place) = self.topology.find(&stage) else {
                    let known = self.topology.names();
                    return Err(Refusal::NoStage { stage, known });
                };
                let pool = self.workers.values();
                for worker in pool.filter(|worker| worker.place == Some(place)) {
                    self.drain_worker(now, worker, within, &mut plan);
                }
            }
        }
        Ok(plan.decision)
    }

    fn drain_worker(&self, now: Timestamp, known: &Worker, within: Option<Duration>, plan: &mut Plan<'_>) {
        let until = within.map(|within| now + within).or(known.drain_by);
        if !known.draining || until != known.drain_by {
            let worker = known.incarnation;
            plan.push(Event::WorkerDraining { worker, until });
        }
        // One that is away is told once it is back.
        if known.is_attached() {
            plan.effect(tell(now, known, until));
            self.ask_to_leave(plan, known);
        }
    }

    /// The worker has had its time: what it still runs goes back to its queue, at no cost to the job.
    pub(super) fn drain_overdue(&self, now: Timestamp, worker: Incarnation) -> Decision {
        let mut plan = Plan::new(self, now);
        let Some(known) = self.workers.get(&worker) else {
            return plan.decision;
        };
        for (job, mut belongings) in self.belongings(known) {
            belongings.slots.retain(|slot| !slot.1.is_stopping());
            plan.change(job, |job| {
                job.end_slots(worker, &belongings.slots, |token| {
                    let message = format!(
                        "worker {worker} of stage {} drains, and attempt {token} did not end within the time for that: it \
                         runs again on another worker",
                        known.stage
                    );
                    Event::AttemptFenced {
                        token,
                        failure: Failure::new(ErrorClass::Fenced, "attempt.drained", message),
                    }
                });
            });
        }
        plan.push(Event::WorkerDraining { worker, until: None });
        plan.decision
    }
}

fn tell(now: Timestamp, worker: &Worker, until: Option<Timestamp>) -> Effect {
    Effect::Drain {
        worker: worker.incarnation,
        within: until.map(|until| until.since(now)),
    }
}
