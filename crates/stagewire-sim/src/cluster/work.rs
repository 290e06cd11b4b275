//! Attempts, alone or in a batch: taken, begun, computed, stopped.

use std::time::Duration;

use stagewire_core::{ErrorClass, Failure, Incarnation, PayloadId, Timestamp, Token};
use stagewire_sched::{Input, OfferInput};

use super::fetch::Leg;
use super::{Cluster, Next, Place};

/// An attempt as its worker runs it.
#[derive(Debug)]
pub(super) struct Task {
    pub(super) token: Token,
    pub(super) inputs: Vec<OfferInput>,
    /// First chunks that it waits for: before it can begin to compute.
    pub(super) first: usize,
    /// Other parts that it waits for: before it can end.
    pub(super) rest: usize,
    /// Inputs of which the last chunk is not made yet.
    pub(super) unmade: Vec<PayloadId>,
    pub(super) service: Duration,
    pub(super) began: Timestamp,
    /// Its last chunk's part of the work is not done before.
    pub(super) least: Timestamp,
    pub(super) computing: bool,
    pub(super) computed: bool,
    pub(super) over: bool,
    pub(super) output: Option<PayloadId>,
    /// Steps that are done, those of the attempts before it included.
    pub(super) done: u64,
    /// From one step boundary to the next.
    pub(super) step: Duration,
    /// It was asked to stop at its next step boundary.
    pub(super) asked: bool,
    /// It has stopped there, and puts its checkpoint into the store.
    pub(super) yields: bool,
}

impl Task {
    pub(super) const fn token(&self) -> Token {
        self.token
    }
}

impl Cluster<'_> {
    pub(super) fn answer(&mut self, place: usize, token: Token) {
        let offered = self.places[place].offers.iter().any(|offer| offer.token == token);
        if let (true, Some(worker)) = (offered, self.places[place].worker) {
            self.tell(Input::Accept { worker, token });
        }
    }

    pub(super) fn begin_attempt(&mut self, place: usize, token: Token) {
        let offers = &mut self.places[place].offers;
        let Some(offer) = offers.iter().position(|offer| offer.token == token) else {
            return;
        };
        let offer = offers.remove(offer);
        let stage = self.places[place].stage;
        let scale = self.jobs.get(&token.job).map_or(1.0, |job| self.run.jobs[*job].scale);
        let time = self.experiment.stages[stage].time.mul_f64(scale);
        let mut service = time.mul_f64(self.service.log_normal(self.experiment.spread));
        let (mut inputs, mut done) = (offer.inputs, 0);
        if let (Some(kept), Some(checkpoints)) = (offer.checkpoint, self.experiment.stages[stage].checkpoints) {
            done = kept.progress.done;
            service = service.mul_f64(1.0 - done as f64 / f64::from(checkpoints.steps));
            inputs.push(OfferInput {
                stage: offer.stage,
                payload: kept.payload,
            });
        }
        let task = Task {
            token,
            inputs,
            first: 0,
            rest: 0,
            unmade: Vec::new(),
            service,
            began: self.now,
            least: self.now,
            computing: false,
            computed: false,
            over: false,
            output: None,
            done,
            step: Duration::ZERO,
            asked: false,
            yields: false,
        };
        self.places[place].busy_since.get_or_insert(self.now);
        self.places[place].tasks.push(task);
        self.fetch(place, token);
        self.compute(place);
    }

    /// Computes what is granted, once enough of every input is there: a batch begins when that holds for all of it. Each
    /// further attempt of a batch makes it take longer by a part of the longest one.
    pub(super) fn compute(&mut self, place: usize) {
        let Self {
            places,
            experiment,
            agenda,
            now,
            ..
        } = self;
        let Place {
            stage, offers, tasks, ..
        } = &mut places[place];
        let waits = |task: &Task| task.first > 0 || task.computing;
        if !offers.is_empty() || tasks.iter().any(waits) {
            return;
        }
        let spec = &experiment.stages[*stage];
        let longest = tasks.iter().map(|task| task.service).max().unwrap_or_default();
        let others = tasks.len().saturating_sub(1);
        let service = longest.mul_f64(spec.batch_cost.mul_add(others as f64, 1.0));
        for task in tasks {
            (task.began, task.service, task.computing) = (*now, service, true);
            agenda.put(*now + service, Next::Computed(place, task.token));
            if let Some(checkpoints) = spec.checkpoints {
                let left = u64::from(checkpoints.steps) - task.done;
                task.step = service.div_f64(left as f64);
                agenda.put(*now + task.step, Next::Step(place, task.token));
            }
            if spec.streams {
                let first = service / spec.chunks;
                agenda.put(*now + first, Next::First(place, task.token));
            }
        }
    }

    pub(super) fn computed(&mut self, place: usize, token: Token) {
        if let Some(task) = self.task(place, token).filter(|task| !task.yields) {
            task.computed = true;
            if task.rest == 0 {
                self.finish_in_time(place, token);
            }
        }
    }

    /// All has come and all is computed, but perhaps for the last chunk's part.
    pub(super) fn finish_in_time(&mut self, place: usize, token: Token) {
        let now = self.now;
        match self.task(place, token).map(|task| task.least) {
            Some(least) if least > now => {
                self.agenda.put(least, Next::Finish(place, token));
            }
            _ => self.finish(place, token),
        }
    }

    /// An input cannot be read: its holder is gone.
    pub(super) fn fail(&mut self, place: usize, token: Token, lost: PayloadId) {
        let Some(worker) = self.places[place].worker else {
            return;
        };
        if self.leave(place, token).is_some() {
            let failure = Failure::new(ErrorClass::Unavailable, "payload.gone", "the holder is gone");
            let lost = Some(lost);
            self.tell(Input::Failed {
                worker,
                token,
                failure,
                lost,
            });
        }
    }

    /// The worker stops what it was told to stop.
    pub(super) fn stop(&mut self, worker: Incarnation, token: Token) {
        let Some(place) = self.by_worker.get(&worker).copied() else {
            return;
        };
        self.places[place].offers.retain(|offer| offer.token != token);
        self.leave(place, token);
        // Said even of what it does not know: the slot is free.
        if self.sched.worker(worker).is_some() {
            self.agenda
                .put(self.now + self.experiment.network.latency, Next::Stopped(worker, token));
        }
        // The others of a batch do not wait for it.
        self.compute(place);
    }

    /// The attempt leaves its worker, and its flows end.
    pub(super) fn leave(&mut self, place: usize, token: Token) -> Option<Task> {
        let tasks = &mut self.places[place].tasks;
        let task = tasks.iter().position(|task| task.token == token)?;
        let task = tasks.remove(task);
        if tasks.is_empty()
            && let Some(since) = self.places[place].busy_since.take()
        {
            self.places[place].busy += self.now.since(since);
        }
        let own = self.flows.iter().filter(|(_, flow)| flow.0 == place && flow.1 == token);
        let own: Vec<(u64, Leg)> = own.map(|(flow, (_, _, leg))| (*flow, *leg)).collect();
        for (flow, leg) in own {
            self.links.stop(self.now, flow);
            self.flows.remove(&flow);
            if leg == Leg::Put {
                self.free_store(self.put_bytes(place, task.yields));
            }
        }
        self.puts.retain(|waiting| *waiting != (place, token));
        Some(task)
    }

    pub(super) fn task(&mut self, place: usize, token: Token) -> Option<&mut Task> {
        self.places[place].tasks.iter_mut().find(|task| task.token == token)
    }
}
