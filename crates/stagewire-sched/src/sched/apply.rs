use std::collections::BTreeMap;
use std::time::Duration;

use stagewire_core::{Epoch, Failure, Incarnation, JobId, PayloadId, StageName, Timestamp, Token};

use super::Sched;
use crate::index::{JobMark, WorkerMark};
use crate::job::{Job, Phase, StageSet};
use crate::share::Shares;
use crate::timers::Timer;
use crate::topology::StageIndex;
use crate::worker::{LinkState, Slot, Worker};
use crate::{Checkpoint, EndedAttempt, Event, Holder, Limits, Loss, OfferEnd, Preemptor, Topology, WorkerInfo};

/// What there is to settle about an attempt that ends.
struct Account {
    worker: Incarnation,
    /// The other ranks of its group.
    ranks: Vec<Incarnation>,
    stage: StageIndex,
    /// Position of its class.
    class: usize,
    shape: u64,
    price: Option<Duration>,
    took: Option<Duration>,
    /// Bytes that were set aside for its output.
    reserved: u64,
    /// Bytes of what it has published.
    nbytes: Option<u64>,
    /// It has done all of the stage.
    whole: bool,
}

impl Account {
    /// Of the attempt, or the offer, that ends: what its class has paid for it and what it took. An offer takes nothing.
    fn of(job: &Job, at: Timestamp, token: Token) -> Option<Self> {
        let stage = job.find(token)?;
        let (worker, ranks, price, took, reserved, whole) = match &job.run(stage).phase {
            Phase::Offered(offer) => (offer.worker, Vec::new(), Some(offer.price), None, offer.nbytes, false),
            Phase::Running(attempt) => {
                let took = at.since(attempt.since) / attempt.batch.max(1);
                let (ranks, whole) = (attempt.ranks.clone(), attempt.begun_at() == 0);
                (attempt.worker, ranks, attempt.price, Some(took), attempt.nbytes, whole)
            }
            Phase::Blocked { .. } | Phase::Queued { .. } | Phase::Done { .. } | Phase::Cached { .. } => return None,
        };
        Some(Self {
            worker,
            ranks,
            stage,
            class: job.class.get(),
            shape: job.terms.shape,
            price,
            took,
            reserved,
            nbytes: job.run(stage).output.live().map(|payload| payload.nbytes.0),
            whole,
        })
    }
}

impl Sched {
    /// Makes an event true. Returns false, and changes nothing, where it does not fit the state.
    pub(super) fn change(&mut self, at: Timestamp, event: &Event) -> bool {
        match event {
            Event::Restarted { epoch } => self.restart(at, *epoch),
            Event::JobSubmitted {
                job,
                params,
                key,
                terms,
            } => {
                let known = self.jobs.contains_key(job);
                let taken = key.as_ref().is_some_and(|key| self.keys.contains_key(&key.key));
                if known || taken {
                    return false;
                }
                let (number, key) = (self.next_number, key.as_ref());
                let new = Job::new(&self.topology, *job, number, params, key, terms, at);
                self.insert_job(new);
                true
            }
            Event::JobRedriven { job } => self.begin_again(at, *job, event),
            Event::JobForgotten { job } => self.forget(*job),
            Event::WorkerAttached {
                worker,
                claimed,
                stale,
                unclaimed,
            } => self.attach(at, worker, claimed, stale, unclaimed),
            Event::WorkerAway { worker } => self.part(at, *worker, at + self.limits.linger),
            Event::WorkerLost { worker } => self.lose(at, *worker),
            Event::WorkerResumed { worker } => self.update_worker(*worker, |worker| worker.paused_until = None),
            Event::HoldingsSettled { worker } => self.update_worker(*worker, |worker| {
                worker.unclaimed.clear();
                worker.claimed.clear();
            }),
            Event::WorkerDraining { worker, until } => self.update_worker(*worker, |worker| {
                worker.draining = true;
                worker.drain_by = *until;
            }),
            Event::Draining => !std::mem::replace(&mut self.draining, true),
            Event::Paused => !std::mem::replace(&mut self.paused, true),
            Event::Resumed => std::mem::replace(&mut self.paused, false),
            Event::AttemptStopped { worker, token } => {
                let stopping = self.slot(*worker, *token).is_some_and(Slot::is_stopping);
                stopping && self.set_slot(*worker, *token, None)
            }
            Event::Offered {
                token,
                stage,
                worker,
                price,
                ..
            } => self.begin_offer(at, event, *token, stage, *worker, *price),
            Event::OfferEnded { token, end } => self.end_offer(at, *token, end, event),
            Event::AttemptGranted {
                token,
                stage,
                worker,
                ranks,
                ..
            } => {
                let fits = self.change_job(at, token.job, event);
                if fits {
                    for worker in std::iter::once(worker).chain(ranks) {
                        if !self.set_slot(*worker, *token, Some(Slot::Running)) {
                            self.ensure_worker(*worker, stage);
                            self.set_slot(*worker, *token, Some(Slot::Running));
                        }
                    }
                }
                fits
            }
            Event::Published { token, payload } => {
                let fits = !self.index.payloads.contains_key(&payload.id) && self.change_job(at, token.job, event);
                if fits && let Some((job, stage)) = self.find(*token) {
                    let worker = job.run(stage).phase.worker();
                    // Nearly always there is none.
                    if let Some(worker) = worker.filter(|_| !self.index.unclaimed.is_empty()) {
                        self.update_worker(worker, |worker| _ = worker.unclaimed.remove(&payload.id));
                    }
                }
                fits
            }
            Event::AttemptCompleted { token, .. } | Event::AttemptFailed { token, .. } => {
                self.end_attempt(at, *token, event, false)
            }
            Event::AttemptLost { token, loss, .. } => self.end_attempt(at, *token, event, loss.keeps_slot()),
            Event::AttemptFenced { token, .. } => self.end_attempt(at, *token, event, true),
            Event::AttemptYielded { token, by, .. } => self.yield_attempt(at, *token, by.as_ref(), event),
            Event::Checkpointed { token, payload, .. } => self.keep_checkpoint(at, *token, payload.id, event),
            Event::Yielding { token, .. } => self.change_job(at, token.job, event),
            Event::OutputShared { token } => self.share_output(at, *token, event),
            Event::StageCached {
                job, stage, payload, ..
            } => {
                let stage = self.topology.find(stage);
                let key = stage.and_then(|stage| self.cache_key(*job, stage));
                let kept = key.and_then(|key| self.cache.get(key));
                kept.is_some_and(|kept| kept.payload.id == payload.id) && self.change_job(at, *job, event)
            }
            Event::CacheDropped { payload } => self.cache.remove(*payload),
            Event::PayloadMoved { token, .. } => {
                let from = self
                    .find(*token)
                    .and_then(|(job, stage)| job.run(stage).output.holder());
                let fits = self.change_job(at, token.job, event);
                if fits && let Some(Holder::Worker(worker)) = from {
                    self.drop_ghost(worker);
                }
                fits
            }
            Event::PayloadLost { job, stage, payload } | Event::PayloadReleased { job, stage, payload } => {
                let mut holder = None;
                let fits = self.update_job(*job, event, |topology, limits, job| {
                    holder = job.stage(stage).and_then(|run| run.holder_of(*payload));
                    job.apply(topology, limits, at, event)
                });
                if fits && let Some(Holder::Worker(worker)) = holder {
                    self.drop_ghost(worker);
                }
                fits
            }
            Event::StageReopened { job, .. }
            | Event::StageSkipped { job, .. }
            | Event::SharedLeft { job, .. }
            | Event::Awaits { job, .. }
            | Event::AwaitEnded { job, .. }
            | Event::RetryDue { job, .. }
            | Event::DeadLetterDiscarded { job, .. }
            | Event::JobCancelling { job }
            | Event::JobEnded { job, .. } => self.change_job(at, *job, event),
            Event::Renewed { token, .. } => self.renew_attempt(at, *token, event),
        }
    }

    pub(super) fn insert_job(&mut self, mut job: Job) {
        job.class = self.topology.class_index(&job.terms.class);
        job.skipped = StageSet::of(&self.topology, &job.terms.skip);
        self.next_number = self.next_number.max(job.number.saturating_add(1));
        if let Some(key) = &job.key {
            self.keys.insert(key.key.clone(), job.id);
        }
        let mark = self.whole_mark(&job);
        self.index.move_job(None, Some(&mark));
        self.cache.move_job(job.id, &[], &job.cache_uses(&self.topology));
        self.jobs.insert(job.id, job);
    }

    /// What the index holds of a job in all its stages.
    pub(super) fn whole_mark(&self, job: &Job) -> JobMark {
        let all = StageSet::all(&self.topology);
        JobMark::of(&self.topology, &self.limits, job, all, Vec::new())
    }

    fn forget(&mut self, job: JobId) -> bool {
        if self.jobs.get(&job).is_none_or(|job| job.ended().is_none() || job.dead) {
            return false;
        }
        if let Some(job) = self.jobs.remove(&job) {
            let mark = self.whole_mark(&job);
            self.index.move_job(Some(&mark), None);
            self.cache.move_job(job.id, &job.cache_uses(&self.topology), &[]);
            if let Some(key) = &job.key {
                self.keys.remove(&key.key);
            }
        }
        true
    }

    /// A job that is redriven stands behind those that wait already.
    fn begin_again(&mut self, at: Timestamp, job: JobId, event: &Event) -> bool {
        let number = self.next_number;
        let begins = self.update_job(job, event, |topology, limits, job| {
            let begins = job.apply(topology, limits, at, event);
            job.number = if begins { number } else { job.number };
            begins
        });
        self.next_number += u64::from(begins);
        begins
    }

    fn change_job(&mut self, at: Timestamp, job: JobId, event: &Event) -> bool {
        self.update_job(job, event, |topology, limits, job| {
            job.apply(topology, limits, at, event)
        })
    }

    /// Changes a job as the event says.
    fn update_job(
        &mut self,
        job: JobId,
        event: &Event,
        change: impl FnOnce(&Topology, &Limits, &mut Job) -> bool,
    ) -> bool {
        let touched = |topology: &Topology, job: &Job| job.touched(topology, event);
        self.update_stages(job, touched, change)
    }

    /// Changes a job in these stages at most.
    fn update_stages(
        &mut self,
        job: JobId,
        touched: impl FnOnce(&Topology, &Job) -> StageSet,
        change: impl FnOnce(&Topology, &Limits, &mut Job) -> bool,
    ) -> bool {
        let Some(job) = self.jobs.get_mut(&job) else {
            return false;
        };
        let [spare, other] = std::mem::take(&mut self.spare.0);
        let touched = touched(&self.topology, job);
        let before = JobMark::of(&self.topology, &self.limits, job, touched, spare);
        let used = job.cache_uses(&self.topology);
        let changed = change(&self.topology, &self.limits, job);
        let after = JobMark::of(&self.topology, &self.limits, job, touched, other);
        if changed {
            self.index.move_job(Some(&before), Some(&after));
            self.cache.move_job(job.id, &used, &job.cache_uses(&self.topology));
        }
        self.spare.0 = [before.stages, after.stages];
        changed
    }

    /// Changes no more than the deadline of a stage, as most events do, so that nothing else is looked at.
    fn renew_attempt(&mut self, at: Timestamp, token: Token, event: &Event) -> bool {
        let Some(job) = self.jobs.get_mut(&token.job) else {
            return false;
        };
        let Some(stage) = job.running(token) else { return false };
        let before = job.deadline(stage);
        let yieldable = job.yieldable(&self.topology, stage);
        let fits = job.apply(&self.topology, &self.limits, at, event);
        let timer = Timer::Attempt(token.job, stage);
        self.index.timers.clear(before, timer);
        self.index.timers.set(job.deadline(stage), timer);
        let after = job.yieldable(&self.topology, stage);
        if yieldable != after {
            let of_stage = &mut self.index.queues[stage.get()].yieldable;
            yieldable.map(|since| of_stage.remove(&(job.class, since, job.id)));
            after.map(|since| of_stage.insert((job.class, since, job.id)));
        }
        fits
    }

    pub(super) fn update_worker(&mut self, worker: Incarnation, change: impl FnOnce(&mut Worker)) -> bool {
        let known = self.change_worker(worker, change);
        self.regroup(worker);
        known
    }

    /// The same, but for what follows for its group.
    pub(super) fn change_worker(&mut self, worker: Incarnation, change: impl FnOnce(&mut Worker)) -> bool {
        let Some(worker) = self.workers.get_mut(&worker) else {
            return false;
        };
        let before = WorkerMark::of(worker);
        change(worker);
        let after = WorkerMark::of(worker);
        self.index.move_worker(Some(before), Some(after));
        true
    }

    fn slot(&self, worker: Incarnation, token: Token) -> Option<Slot> {
        self.workers.get(&worker)?.slots.get(&token).copied()
    }

    /// Who was offered, or runs, the attempt.
    fn worker_of(&self, token: Token) -> Option<Incarnation> {
        let (job, stage) = self.find(token)?;
        job.run(stage).phase.worker()
    }

    /// Uses a slot of the worker for the token, or frees it.
    pub(super) fn set_slot(&mut self, incarnation: Incarnation, token: Token, slot: Option<Slot>) -> bool {
        let Some(worker) = self.workers.get_mut(&incarnation) else {
            return false;
        };
        let mark = WorkerMark::of(worker);
        let before = worker.set_slot(token, slot);
        self.index.move_worker(Some(mark), Some(WorkerMark::of(worker)));
        let (ghost, grouped) = (worker.info.is_none(), worker.member().is_some());
        let timers = &mut self.index.timers;
        timers.clear_stop(before.and_then(Slot::stop_deadline), incarnation, token);
        timers.set_stop(slot.and_then(Slot::stop_deadline), incarnation, token);
        let stopping = |slot: Option<Slot>| slot.is_some_and(Slot::is_stopping);
        match (stopping(before), stopping(slot)) {
            (false, true) => *self.stopping.entry(token.job).or_default() += 1,
            (true, false) => self.count_stopped(token.job),
            _ => (),
        }
        if ghost {
            self.drop_ghost(incarnation);
        }
        if grouped {
            self.regroup(incarnation);
        }
        true
    }

    fn count_stopped(&mut self, job: JobId) {
        if let Some(count) = self.stopping.get_mut(&job) {
            *count -= 1;
            if *count == 0 {
                self.stopping.remove(&job);
            }
        }
    }

    /// Takes the price of the offer from the job's class: in its turn, unless the job did not wait for that.
    fn begin_offer(
        &mut self,
        at: Timestamp,
        event: &Event,
        token: Token,
        stage: &StageName,
        worker: Incarnation,
        price: Duration,
    ) -> bool {
        let takes = |worker: &Worker| worker.takes_offers() && worker.free() > 0 && worker.stage == *stage;
        let Some(stage) = self
            .topology
            .find(stage)
            .filter(|_| self.workers.get(&worker).is_some_and(takes))
        else {
            return false;
        };
        let turn = self.turn(stage).filter(|(rank, ..)| rank.job == token.job);
        if !self.change_job(at, token.job, event) {
            return false;
        }
        match turn {
            Some((_, turn, heads)) => self.shares[stage.get()].pay(self.topology.classes(), &heads, turn),
            None => {
                let class = self.class_of(token.job);
                self.shares[stage.get()].charge(class, price);
            }
        }
        self.set_slot(worker, token, Some(Slot::Reserved))
    }

    /// Position of the job's class.
    fn class_of(&self, job: JobId) -> usize {
        self.jobs.get(&job).map_or(0, |job| job.class.get())
    }

    /// Corrects what the class has paid, and learns from an attempt that was completed.
    fn settle_account(&mut self, account: &Account, completed: bool) {
        if let Some(price) = account.price {
            self.shares[account.stage.get()].correct(account.class, price, account.took);
        }
        if let Some(took) = account.took.filter(|_| completed && account.whole) {
            self.estimates[account.stage.get()].learn(account.shape, took);
        }
        if let Some(nbytes) = account.nbytes.filter(|_| completed) {
            self.volumes[account.stage.get()].learn(account.shape, nbytes);
        }
    }

    fn end_offer(&mut self, at: Timestamp, token: Token, end: &OfferEnd, event: &Event) -> bool {
        let mut account = None;
        let fits = self.update_job(token.job, event, |topology, limits, job| {
            account = Account::of(job, at, token);
            job.apply(topology, limits, at, event)
        });
        if !fits {
            return false;
        }
        if let Some(account) = account {
            let incarnation = account.worker;
            self.settle_account(&account, false);
            self.set_slot(incarnation, token, None);
            if *end != OfferEnd::Withdrawn {
                let declined = match end {
                    OfferEnd::Declined(failure) => Some(failure.clone()),
                    OfferEnd::Unanswered | OfferEnd::Withdrawn => None,
                };
                self.pause_worker(at, incarnation, declined);
            }
        }
        true
    }

    /// The worker does not take what it is offered: it gets nothing for a while, which doubles.
    fn pause_worker(&mut self, at: Timestamp, worker: Incarnation, declined: Option<Failure>) {
        let limits = self.limits;
        self.update_worker(worker, |worker| {
            worker.declined = declined.map(Box::new);
            worker.misses = worker.misses.saturating_add(1);
            worker.paused_until = Some(at + limits.pause_after(worker.misses));
        });
    }

    /// Ends a running attempt. Where the worker may still be at it, its slot stays in use until it says otherwise; a worker
    /// that cannot be reached says so when it comes back.
    fn end_attempt(&mut self, at: Timestamp, token: Token, event: &Event, keeps_slot: bool) -> bool {
        let mut account = None;
        let fits = self.update_job(token.job, event, |topology, limits, job| {
            account = Account::of(job, at, token);
            let ended = EndedAttempt::of(job, at, token, event);
            let fits = job.apply(topology, limits, at, event);
            if let Some(ended) = ended.filter(|_| fits) {
                job.attempts.push(ended);
            }
            fits
        });
        if !fits {
            return false;
        }
        if let Some(account) = account {
            let completed = matches!(event, Event::AttemptCompleted { .. });
            self.settle_account(&account, completed);
            // What ends on one rank of a group has yet to end on the others.
            let keeps_slot = keeps_slot || (!account.ranks.is_empty() && !completed);
            let until = at + self.limits.stop;
            let leader = account.worker;
            // It is rank 0 that makes the output.
            let output = account.nbytes.unwrap_or(account.reserved);
            for worker in std::iter::once(leader).chain(account.ranks) {
                let keeps_slot = keeps_slot && self.workers.get(&worker).is_some_and(Worker::is_attached);
                let nbytes = if worker == leader { output } else { 0 };
                let stopping = Slot::Stopping { until, nbytes };
                self.set_slot(worker, token, keeps_slot.then_some(stopping));
            }
            match event {
                Event::AttemptLost {
                    worker,
                    loss: Loss::NotRunning,
                    failure,
                    ..
                } if *worker != leader && self.workers.get(&leader).is_some_and(Worker::is_attached) => {
                    self.pause_worker(at, leader, Some(failure.clone()));
                }
                _ => (),
            }
        }
        true
    }

    /// Ends an attempt that has stopped at a step boundary. The class that it made way for starts a job in its place, unless
    /// the worker leaves: then it has another one asked.
    fn yield_attempt(&mut self, at: Timestamp, token: Token, by: Option<&Preemptor>, event: &Event) -> bool {
        let found = self.find(token).map(|(job, stage)| (stage, job.workers_of(token)));
        let fits = self.end_attempt(at, token, event, false);
        if let Some(((stage, workers), by)) = found.zip(by).filter(|_| fits) {
            let stays = |worker| self.workers.get(worker).is_some_and(Worker::stays);
            let waits = |job: &Job| matches!(job.run(stage).phase, Phase::Queued { .. });
            if workers.iter().all(stays) && self.jobs.get(&by.job).is_some_and(waits) {
                self.shares[stage.get()].owe(self.topology.class_index(&by.class).get());
            }
        }
        fits
    }

    /// Takes a checkpoint in place of the one before.
    fn keep_checkpoint(&mut self, at: Timestamp, token: Token, payload: PayloadId, event: &Event) -> bool {
        let Some((job, stage)) = self.find(token) else {
            return false;
        };
        let run = job.run(stage);
        let (before, worker) = (run.checkpoint().map(Checkpoint::holder), run.phase.worker());
        let fits = !self.index.payloads.contains_key(&payload) && self.change_job(at, token.job, event);
        if fits {
            if let Some(worker) = worker.filter(|_| !self.index.unclaimed.is_empty()) {
                self.update_worker(worker, |worker| _ = worker.unclaimed.remove(&payload));
            }
            if let Some(Holder::Worker(worker)) = before {
                self.drop_ghost(worker);
            }
        }
        fits
    }

    /// Keeps what an attempt has made for other jobs.
    fn share_output(&mut self, at: Timestamp, token: Token, event: &Event) -> bool {
        let found = self.find(token).and_then(|(job, stage)| {
            let payload = job.run(stage).output.own()?.clone();
            Some((job.cache_key(stage)?, payload))
        });
        let Some((key, payload)) = found else { return false };
        let id = payload.id;
        let fits = self.cache.insert(key, payload, token);
        let shared = fits && self.change_job(at, token.job, event);
        if fits && !shared {
            self.cache.remove(id);
        }
        shared
    }

    /// Makes room for what an unknown worker runs or holds: after a restart, until it attaches.
    pub(super) fn ensure_worker(&mut self, worker: Incarnation, stage: &StageName) {
        if !self.workers.contains_key(&worker) {
            let ghost = Worker::ghost(worker, stage.clone(), self.topology.find(stage), Timestamp(u64::MAX));
            self.index.move_worker(None, Some(WorkerMark::of(&ghost)));
            self.workers.insert(worker, ghost);
        }
    }

    /// Forgets a worker that never attached, once it neither runs nor holds anything.
    fn drop_ghost(&mut self, worker: Incarnation) {
        let Some(known) = self.workers.get(&worker) else { return };
        let holds = || self.index.payloads_of(Holder::Worker(worker)).next().is_some();
        if known.info.is_none() && known.slots.is_empty() && !holds() {
            let mark = WorkerMark::of(known);
            self.index.move_worker(Some(mark), None);
            self.workers.remove(&worker);
        }
    }

    fn attach(
        &mut self,
        at: Timestamp,
        info: &WorkerInfo,
        claimed: &[Token],
        stale: &[Token],
        unclaimed: &[PayloadId],
    ) -> bool {
        let incarnation = info.incarnation;
        let fits = |known: &Worker| {
            let same = known.info.as_ref().is_none_or(|old| !old.differs(info));
            let more = stale.iter().filter(|token| known.slots.get(token).is_none()).count();
            known.stage == info.stage && same && known.slots.len() + more <= info.places() as usize
        };
        if self.topology.find(&info.stage).is_none() || !self.workers.get(&incarnation).is_none_or(fits) {
            return false;
        }
        self.ensure_worker(incarnation, &info.stage);
        self.update_worker(incarnation, |worker| {
            worker.name = info.name.as_str().into();
            worker.info = Some(info.clone());
            worker.link = LinkState::Attached;
            worker.paused_until = None;
            worker.misses = 0;
            worker.unclaimed = unclaimed.iter().copied().collect();
            worker.claimed = claimed.iter().copied().collect();
        });
        self.join(incarnation);
        let until = at + self.limits.stop;
        for token in stale {
            if self.worker_of(*token) != Some(incarnation) {
                let nbytes = self.stale_bytes(incarnation, *token);
                self.set_slot(incarnation, *token, Some(Slot::Stopping { until, nbytes }));
            }
        }
        for token in claimed {
            self.update_stages(token.job, StageSet::of_token(*token), |topology, limits, job| {
                job.resume(topology, limits, incarnation, *token, at);
                true
            });
        }
        true
    }

    /// Bytes that an attempt may take which the worker has brought back in vain: what it had is not known any more.
    fn stale_bytes(&self, worker: Incarnation, token: Token) -> u64 {
        let shape = self.jobs.get(&token.job).map_or(0, |job| job.terms.shape);
        let known = self.workers.get(&worker).filter(|known| known.makes_outputs());
        let stage = known.and_then(|known| known.place);
        stage.map_or(0, |stage| self.predict_bytes(stage, shape))
    }

    /// The worker cannot be reached, until then at the longest. Its offers are void, and what it was told to stop is
    /// judged when it comes back.
    fn part(&mut self, at: Timestamp, worker: Incarnation, until: Timestamp) -> bool {
        let Some(known) = self.workers.get(&worker) else {
            return false;
        };
        for (token, slot) in known.slots.clone().iter() {
            let token = *token;
            match slot {
                Slot::Reserved => {
                    let end = OfferEnd::Withdrawn;
                    let event = Event::OfferEnded {
                        token,
                        end: end.clone(),
                    };
                    self.end_offer(at, token, &end, &event);
                }
                Slot::Running => {
                    self.update_stages(token.job, StageSet::of_token(token), |_, _, job| {
                        job.hold(worker, token, until);
                        true
                    });
                }
                Slot::Stopping { .. } => _ = self.set_slot(worker, token, None),
            }
        }
        self.update_worker(worker, |worker| {
            worker.link = LinkState::Away { until };
            worker.paused_until = None;
            worker.unclaimed.clear();
            worker.claimed.clear();
        })
    }

    /// The worker is gone. Should anything still refer to it, that waits for its return, in vain.
    fn lose(&mut self, at: Timestamp, worker: Incarnation) -> bool {
        if !self.part(at, worker, Timestamp(u64::MAX)) {
            return false;
        }
        self.part_from_group(worker);
        self.update_worker(worker, |worker| {
            worker.info = None;
            worker.whole = false;
        });
        self.drop_ghost(worker);
        true
    }

    fn restart(&mut self, at: Timestamp, epoch: Epoch) -> bool {
        if epoch <= self.epoch {
            return false;
        }
        self.epoch = epoch;
        self.draining = false;
        self.groups.clear();
        for shares in &mut self.shares {
            *shares = Shares::new(self.topology.classes().len());
        }
        let workers: Vec<Incarnation> = self.workers.values().map(|worker| worker.incarnation).collect();
        for worker in workers {
            self.part(at, worker, at + self.limits.linger);
            self.update_worker(worker, |worker| {
                worker.info = None;
                worker.whole = false;
                worker.draining = false;
                worker.drain_by = None;
            });
            self.drop_ghost(worker);
        }
        debug_assert!(
            self.stopping == BTreeMap::new(),
            "a restart forgets who was told to stop"
        );
        true
    }
}
