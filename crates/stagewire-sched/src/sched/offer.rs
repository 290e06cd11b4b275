use std::sync::Arc;

use stagewire_core::{ErrorClass, Failure, Incarnation, JobId, Timestamp, Token};

use super::Sched;
use super::plan::Plan;
use crate::job::{Job, Phase};
use crate::queue::Rank;
use crate::share::{Heads, Turn};
use crate::topology::{ClassIndex, StageIndex};
use crate::worker::Worker;
use crate::{Candidate, Choice, Contender, Decision, Effect, Event, Offer, OfferEnd, OfferInput, Refusal, TurnOf};

impl Sched {
    /// One offer, or a batch of them, if some stage has work, a worker and a credit. Stages near the end come first: they
    /// set payloads free.
    pub(super) fn dispatch(&self, now: Timestamp) -> Option<Decision> {
        if self.draining {
            return None;
        }
        let stages = self.topology.upstream_first().iter().rev();
        let (stage, rank, turn) = stages.copied().find_map(|stage| {
            if self.index.queues[stage.get()].free.is_empty() {
                return None;
            }
            let (rank, turn) = self.next_job(stage)?;
            Some((stage, rank, turn))
        })?;
        if let Some(awaits) = self.await_maker(now, stage, &rank) {
            return Some(awaits);
        }
        let (candidates, chosen) = self.route(stage, &rank)?;
        let Candidate { worker, used, .. } = candidates[chosen];
        let companions = self.companions(stage, &rank, worker);
        let batch = u32::try_from(1 + companions.len()).ok()?;
        let along = companions.into_iter().filter_map(|other| {
            let only = self.candidate(stage, &other, self.source(stage, other.job), used, worker)?;
            Some((other, TurnOf::Along(rank.job), vec![only], 0))
        });
        let mut plan = Plan::new(self, now);
        for (rank, turn, candidates, chosen) in std::iter::once((rank, turn, candidates, chosen)).chain(along) {
            let job = self.jobs.get(&rank.job)?;
            let token = Token {
                epoch: self.epoch,
                job: job.id,
                attempt: job.next_attempt(),
            };
            plan.effect(self.offer(job, stage, worker, token));
            let event = Event::Offered {
                token,
                stage: self.topology.name(stage).clone(),
                worker,
                price: self.estimates[stage.get()].predict(rank.shape),
                nbytes: self.predict_bytes(stage, rank.shape),
                batch,
                steps: candidates[chosen].steps,
            };
            plan.begin(token, stage, worker, event);
            plan.effect(Effect::Chosen(Box::new(Choice {
                token,
                stage: self.topology.name(stage).clone(),
                turn,
                candidates,
                chosen,
            })));
        }
        Some(plan.decision)
    }

    /// The job that the stage takes next, if it may take one, and why that one.
    fn next_job(&self, stage: StageIndex) -> Option<(Rank, TurnOf)> {
        let oldest = || Some((self.stuck_job(stage)?, TurnOf::Oldest));
        if !self.has_credit(stage) {
            return oldest().filter(|_| self.topology.has_joins());
        }
        let (rank, contenders, chosen) = self.first_job(stage)?;
        if self.has_bytes(stage, &rank) {
            Some((rank, TurnOf::Class { contenders, chosen }))
        } else {
            // What is held drains as long as anything runs of a job that holds some, and what stops gives its bytes back.
            let drains = self.index.going > 0 || self.index.stopping_bytes > 0;
            oldest().filter(|_| !drains)
        }
    }

    /// The job that comes first at the stage, as the policy has it, and the classes that it was chosen from.
    pub(super) fn first_job(&self, stage: StageIndex) -> Option<(Rank, Vec<Contender>, usize)> {
        let heads = self.heads(stage)?;
        let (classes, queue) = (self.topology.classes(), &self.index.queues[stage.get()]);
        let contender = |turn: Turn| {
            let first = queue.first(ClassIndex::new(turn.class))?;
            Some(Contender {
                class: classes[turn.class].name.clone(),
                job: first.job,
                due: first.due,
                predicted: heads[turn.class]?,
                turns: turn.turns.unsigned_abs(),
                owed: !turn.in_turn,
                turn,
            })
        };
        let turns = self.shares[stage.get()].turns(classes, &heads);
        let mut contenders: Vec<Contender> = turns.filter_map(contender).collect();
        contenders.sort_unstable_by_key(|one| one.turn);
        let last = contenders.len().checked_sub(1)?;
        let chosen = self
            .policy
            .ordering
            .next(self.topology.name(stage), &contenders)
            .min(last);
        let first = *queue.first(ClassIndex::new(contenders[chosen].turn.class))?;
        Some((first, contenders, chosen))
    }

    /// The job that comes first in a fair share of the stage, and the turn in which it does.
    pub(super) fn turn(&self, stage: StageIndex) -> Option<(Rank, Turn, Heads)> {
        let heads = self.heads(stage)?;
        let turn = self.shares[stage.get()].next(self.topology.classes(), &heads)?;
        let first = self.index.queues[stage.get()].first(ClassIndex::new(turn.class))?;
        Some((*first, turn, heads))
    }

    /// What the first job of each class is predicted to take; `None` where nothing waits.
    fn heads(&self, stage: StageIndex) -> Option<Heads> {
        let queue = &self.index.queues[stage.get()];
        if queue.since.is_empty() {
            return None;
        }
        let mut heads = Heads::default();
        for class in self.topology.class_indices() {
            let first = queue.first(class).filter(|first| self.may_begin(first));
            heads[class.get()] = first.map(|first| self.estimates[stage.get()].predict(first.shape));
        }
        Some(heads)
    }

    /// Whether the job may be dispatched: while the pipeline is paused, those that have begun.
    pub(super) const fn may_begin(&self, rank: &Rank) -> bool {
        !(self.paused && rank.new)
    }

    /// Whether the stage may make another payload.
    pub(super) fn has_credit(&self, stage: StageIndex) -> bool {
        self.credits(stage) > 0
    }

    /// Payloads that the stage may make besides those that are held.
    pub(super) fn credits(&self, stage: StageIndex) -> usize {
        if self.topology.consumers(stage).is_empty() {
            return usize::MAX;
        }
        let held = self.index.queues[stage.get()].held;
        self.topology.spec(stage).max_held.saturating_sub(held) as usize
    }

    /// The oldest job that can go on to its end, where it waits for nothing but a credit of this stage.
    ///
    /// Where paths join, jobs could wait for each other's credits for ever: one holds a payload on the left path and waits
    /// for the right one, another the other way round. So the oldest of those that hold any needs none once nothing of it
    /// runs. With it going on to its end, the next one becomes the oldest, and so on. The price is one payload above the
    /// bound. Without joins the bound of payloads is strict: every held one then waits for stages further down only. That
    /// of bytes is not where outputs turn out larger than any before.
    ///
    /// A job that does not go on, be it that it has not begun while the pipeline is paused or that a stage of it has no
    /// worker, is passed over: else all would wait with it. One that waits to be tried again is not, as that ends.
    fn stuck_job(&self, stage: StageIndex) -> Option<Rank> {
        let mut holding = self.index.holding.iter().filter_map(|(_, job)| self.jobs.get(job));
        let job = holding.find(|job| self.goes_on(job))?;
        let idle = job.stages.iter().all(|run| run.phase.worker().is_none());
        match job.run(stage).phase {
            // It goes on when that other job has.
            Phase::Queued { .. } if job.run(stage).awaits.is_some() => None,
            Phase::Queued { again, .. } if idle => Some(Rank::new(again, job, job.has_begun(&self.topology))),
            _ => None,
        }
    }

    /// Whether the job can go on to its end: it may be dispatched, and there are workers for all that it still needs.
    fn goes_on(&self, job: &Job) -> bool {
        let manned = |stage: StageIndex| {
            let needed = !job.run(stage).phase.is_done();
            !needed || self.index.queues[stage.get()].pool.workers > 0
        };
        (!self.paused || job.has_begun(&self.topology)) && self.topology.indices().all(manned)
    }

    fn offer(&self, job: &Job, stage: StageIndex, worker: Incarnation, token: Token) -> Effect {
        let inputs = job.links(&self.topology, stage);
        let name = self.topology.name(stage);
        let member = self.workers.get(&worker).and_then(Worker::member).cloned();
        let hands_over = member.as_ref().is_none_or(|member| member.rank == 0);
        Effect::Offer(Box::new(Offer {
            worker,
            token,
            stage: name.clone(),
            params: job.params.clone(),
            inputs: inputs
                .filter_map(|link| {
                    let producer = job.run(link.from);
                    Some(OfferInput {
                        stage: producer.name.clone(),
                        payload: producer.output.live()?.clone(),
                    })
                })
                .collect(),
            output: self.topology.output(name).filter(|_| hands_over).unwrap_or_default(),
            answer_within: self.limits.offer,
            checkpoints: hands_over && self.topology.spec(stage).checkpoint,
            checkpoint: job.run(stage).checkpoint().cloned(),
            member,
        }))
    }

    pub(super) fn accept(&self, now: Timestamp, worker: Incarnation, token: Token) -> Result<Decision, Refusal> {
        let known = self.attached(worker)?;
        let mut plan = Plan::new(self, now);
        match self.phase_of(worker, token) {
            Some((stage, Phase::Offered(offer))) => {
                let Some(ranks) = self.followers(known) else {
                    let end = OfferEnd::Withdrawn;
                    plan.change(token.job, |job| job.push(Event::OfferEnded { token, end }));
                    return Ok(plan.decision);
                };
                let event = Event::AttemptGranted {
                    token,
                    stage: self.topology.name(stage).clone(),
                    worker,
                    batch: offer.batch,
                    nbytes: offer.nbytes,
                    ranks: ranks.clone(),
                    name: Arc::clone(&known.name),
                    saved: offer.resumed.map_or(0, |resumed| resumed.done),
                };
                plan.effect(Effect::Grant { worker, token });
                if let Some(job) = self.jobs.get(&token.job) {
                    for worker in ranks {
                        plan.effect(self.offer(job, stage, worker, token));
                        plan.effect(Effect::Grant { worker, token });
                    }
                }
                plan.begin(token, stage, worker, event);
            }
            // Said twice; perhaps the grant got lost.
            Some((_, Phase::Running(_))) => plan.effect(Effect::Grant { worker, token }),
            _ => return Err(Refusal::Stale { worker, token }),
        }
        Ok(plan.decision)
    }

    /// The worker does not take the offer. That costs the job nothing, unless it is the job that cannot be run: any other
    /// worker would say the same.
    pub(super) fn decline(
        &self,
        now: Timestamp,
        worker: Incarnation,
        token: Token,
        failure: Failure,
    ) -> Result<Decision, Refusal> {
        self.attached(worker)?;
        let mut plan = Plan::new(self, now);
        match self.phase_of(worker, token) {
            Some((_, Phase::Offered(_))) => (),
            // Its rank 0 was granted it.
            Some((_, Phase::Running(attempt))) if attempt.worker != worker => {
                plan.change(token.job, |job| job.lose_rank(worker, token, &failure));
                return Ok(plan.decision);
            }
            _ => return Err(Refusal::Stale { worker, token }),
        }
        plan.change(token.job, |job| {
            let end = OfferEnd::Declined(failure.clone());
            job.push(Event::OfferEnded { token, end });
            if matches!(failure.class, ErrorClass::Invalid | ErrorClass::Unsupported) {
                job.doom(failure);
            }
        });
        Ok(plan.decision)
    }

    pub(super) fn offer_unanswered(&self, now: Timestamp, job: JobId, stage: StageIndex) -> Decision {
        let phase = self.jobs.get(&job).map(|job| &job.run(stage).phase);
        match phase {
            Some(Phase::Offered(offer)) => {
                let (token, end) = (offer.token, OfferEnd::Unanswered);
                let mut plan = Plan::new(self, now);
                plan.change(job, |job| job.push(Event::OfferEnded { token, end }));
                plan.decision
            }
            _ => Decision::default(),
        }
    }

    /// The phase that this token stands for, where it is this worker's.
    pub(super) fn phase_of(&self, worker: Incarnation, token: Token) -> Option<(StageIndex, &Phase)> {
        let (job, stage) = self.find(token)?;
        let phase = &job.run(stage).phase;
        let fits = match phase {
            Phase::Running(attempt) => attempt.is_run_by(worker),
            _ => phase.worker() == Some(worker),
        };
        fits.then_some((stage, phase))
    }
}
