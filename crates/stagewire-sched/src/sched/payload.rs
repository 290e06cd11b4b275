use stagewire_core::{Incarnation, PayloadId, Timestamp, Token};

use super::Sched;
use super::attempt::{Standing, superseded};
use super::plan::{JobPlan, Plan};
use crate::{Decision, Effect, Event, Holder, PayloadInfo, Refusal};

impl Sched {
    pub(super) fn published(
        &self,
        now: Timestamp,
        worker: Incarnation,
        token: Token,
        payload: PayloadInfo,
    ) -> Result<Decision, Refusal> {
        let mut plan = Plan::new(self, now);
        let shared = || self.cache.key_of(payload.id).map(|_| token.job);
        let owner = self.payload_owner(payload.id).map(|(job, _)| job).or_else(shared);
        match self.standing(worker, token)? {
            Standing::Running(stage, _) => {
                let name = self.topology.name(stage);
                if self.topology.consumers(stage).is_empty() {
                    return Err(Refusal::NoConsumer {
                        job: token.job,
                        stage: name.clone(),
                        payload: payload.id,
                    });
                }
                let live = self.jobs.get(&token.job).and_then(|job| job.run(stage).output.live());
                match (live, owner) {
                    // Said twice, as it should after the stream was lost.
                    (Some(live), _) if live.id == payload.id => (),
                    (Some(live), _) => {
                        return Err(Refusal::PublishedTwice {
                            token,
                            published: live.id,
                            payload: payload.id,
                        });
                    }
                    (None, Some(job)) => {
                        return Err(Refusal::PayloadInUse {
                            payload: payload.id,
                            job,
                        });
                    }
                    (None, None) => {
                        let event = Event::Published { token, payload };
                        if self.topology.streams(stage) {
                            plan.change(token.job, |job| job.push(event));
                        } else {
                            plan.begin(token, stage, worker, event);
                        }
                    }
                }
            }
            Standing::Following(_) => {
                let payload = payload.id;
                return Err(Refusal::NotRankZero { worker, token, payload });
            }
            Standing::Done if payload.stored && self.is_held(worker, token, payload.id) => {
                plan.change(token.job, |job| job.push(Event::PayloadMoved { token, payload }));
            }
            // Said twice, and released in the meantime.
            Standing::Done => self.let_go(&mut plan, worker, &payload),
            Standing::Stopping => {
                let failure = superseded(worker, token);
                plan.effect(Effect::Refused { worker, token, failure });
                self.let_go(&mut plan, worker, &payload);
            }
        }
        Ok(plan.decision)
    }

    /// Whether the worker holds this payload, which it made with this token.
    fn is_held(&self, worker: Incarnation, token: Token, payload: PayloadId) -> bool {
        let run = self.find(token).map(|(job, stage)| job.run(stage));
        run.is_some_and(|run| {
            run.output.holder() == Some(Holder::Worker(worker))
                && run.output.live().is_some_and(|live| live.id == payload)
        })
    }

    pub(super) fn payload_lost(&self, now: Timestamp, payload: PayloadId) -> Decision {
        let mut plan = Plan::new(self, now);
        if let Some((job, _)) = self.payload_owner(payload) {
            plan.change(job, |job| job.lose_payload(payload));
        }
        self.lose_shared(&mut plan, payload);
        plan.decision
    }

    /// Releases what a worker brought back and nobody has published, once none of the attempts that it brought back can
    /// publish it, or hand it in as a result, any more.
    pub(super) fn settle_holdings(&self) -> Option<Decision> {
        let (worker, known) = self.index.unclaimed.iter().find_map(|worker| {
            let known = self.workers.get(worker)?;
            let open = known.claimed.iter().any(|token| self.may_publish(*token));
            (!open).then_some((*worker, known))
        })?;
        let holder = Holder::Worker(worker);
        let release = |payload: &PayloadId| Effect::Release {
            holder,
            payload: *payload,
        };
        Some(Decision {
            events: vec![Event::HoldingsSettled { worker }],
            effects: known.unclaimed.iter().map(release).collect(),
            job: None,
        })
    }

    /// Whether the attempt runs and has neither published nor, in a last stage, handed in its result.
    fn may_publish(&self, token: Token) -> bool {
        let run = self
            .jobs
            .get(&token.job)
            .and_then(|job| Some(job.run(job.running(token)?)));
        run.is_some_and(|run| run.output.live().is_none())
    }
}

impl JobPlan<'_, '_> {
    /// The payload's bytes are gone. Nothing happens where it is not live.
    pub(super) fn lose_payload(&mut self, payload: PayloadId) {
        let is_it = |run: &&crate::StageRun| run.holder_of(payload).is_some();
        if let Some(run) = self.job().stages.iter().find(is_it) {
            let event = Event::PayloadLost {
                job: self.job().id,
                stage: run.name.clone(),
                payload,
            };
            self.push(event);
        }
    }
}
