//! Attempts: fetch the inputs, compute, hand on the output.

use stagewire_core::{ByteCount, ErrorClass, Failure, PayloadId, Timestamp, Token, TransferMode};
use stagewire_sched::{Input, OfferInput, PayloadInfo, ResultInfo};

use super::{Cluster, Kept, Next};
use crate::links::End;

/// Which part of an attempt a flow of bytes belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Leg {
    /// The first chunk of an input.
    First(PayloadId),
    /// The others.
    Rest(PayloadId),
    /// The output on its way into the store.
    Put,
}

/// An attempt as its worker runs it.
#[derive(Debug)]
pub(super) struct Task {
    token: Token,
    inputs: Vec<OfferInput>,
    /// Flows that it waits for: before it can begin to compute, and before it can end.
    first: usize,
    rest: usize,
    service: std::time::Duration,
    began: Timestamp,
    /// Its last chunk's part of the work is not done before.
    least: Timestamp,
    computed: bool,
    over: bool,
    output: Option<PayloadId>,
}

/// Pieces in which an input comes.
fn chunks(input: &OfferInput) -> u64 {
    u64::from(input.payload.chunks.max(1))
}

impl Cluster<'_> {
    pub(super) fn answer(&mut self, place: usize, token: Token) {
        let offered = self.places[place]
            .offer
            .as_ref()
            .is_some_and(|offer| offer.token == token);
        if let (true, Some(worker)) = (offered, self.places[place].worker) {
            self.tell(Input::Accept { worker, token });
        }
    }

    pub(super) fn begin_attempt(&mut self, place: usize, token: Token) {
        let Some(offer) = self.places[place].offer.take_if(|offer| offer.token == token) else {
            return;
        };
        let Some(worker) = self.places[place].worker else {
            return;
        };
        let stage = self.places[place].stage;
        let scale = self.jobs.get(&token.job).map_or(1.0, |job| self.run.jobs[*job].scale);
        let time = self.experiment.stages[stage].time.mul_f64(scale);
        let service = time.mul_f64(self.service.log_normal(self.experiment.spread));
        let mut task = Task {
            token,
            inputs: offer.inputs,
            first: 0,
            rest: 0,
            service,
            began: self.now,
            least: self.now,
            computed: false,
            over: false,
            output: None,
        };
        for input in &task.inputs {
            let payload = input.payload.id;
            let Some(kept) = self.payloads.get(&payload).copied() else {
                continue;
            };
            let first = kept.nbytes.div_ceil(chunks(input));
            if first > 0 {
                let flow = self.links.begin(self.now, kept.holder, End::Worker(worker), first);
                self.flows.insert(flow, (place, token, Leg::First(payload)));
                task.first += 1;
                task.rest += usize::from(kept.nbytes > first);
            }
        }
        let gone = task
            .inputs
            .iter()
            .map(|input| input.payload.id)
            .find(|id| !self.payloads.contains_key(id));
        let ready = task.first == 0;
        self.places[place].busy_since = Some(self.now);
        self.places[place].task = Some(task);
        if let Some(payload) = gone {
            self.fail(place, payload);
        } else if ready {
            self.compute(place);
        }
    }

    /// Enough is there to begin.
    fn compute(&mut self, place: usize) {
        let Some(task) = self.places[place].task.as_mut() else {
            return;
        };
        task.began = self.now;
        self.agenda
            .put(self.now + task.service, Next::Computed(place, task.token));
    }

    pub(super) fn computed(&mut self, place: usize, token: Token) {
        if let Some(task) = self.task(place, token) {
            task.computed = true;
            if task.rest == 0 {
                self.finish_in_time(place, token);
            }
        }
    }

    /// All has come and all is computed, but perhaps for the last chunk's part.
    fn finish_in_time(&mut self, place: usize, token: Token) {
        let now = self.now;
        match self.task(place, token).map(|task| task.least) {
            Some(least) if least > now => {
                self.agenda.put(least, Next::Finish(place, token));
            }
            _ => self.finish(place, token),
        }
    }

    /// The chunks of an input follow the first one.
    fn fetch_rest(&mut self, place: usize, token: Token, payload: PayloadId, chunks: u64) {
        let (Some(kept), Some(worker)) = (self.payloads.get(&payload).copied(), self.places[place].worker) else {
            return self.fail(place, payload);
        };
        let rest = kept.nbytes - kept.nbytes.div_ceil(chunks);
        if rest > 0 {
            let flow = self.links.begin(self.now, kept.holder, End::Worker(worker), rest);
            self.flows.insert(flow, (place, token, Leg::Rest(payload)));
        }
    }

    pub(super) fn flows_done(&mut self) {
        self.flows_due = None;
        while let Some(flow) = self.links.take_done(self.now) {
            let Some((place, token, leg)) = self.flows.remove(&flow) else {
                continue;
            };
            let (now, stage) = (self.now, self.places[place].stage);
            let Some(task) = self.task(place, token) else { continue };
            match leg {
                Leg::First(payload) => {
                    task.first -= 1;
                    let ready = task.first == 0;
                    let input = task.inputs.iter().find(|input| input.payload.id == payload);
                    let chunks = input.map_or(1, chunks);
                    self.fetch_rest(place, token, payload, chunks);
                    if ready {
                        self.compute(place);
                    }
                }
                Leg::Rest(_) => {
                    task.rest -= 1;
                    if task.rest == 0 {
                        let most = task.inputs.iter().map(chunks).max().unwrap_or(1);
                        task.least = now + task.service.div_f64(most as f64);
                        if task.computed {
                            self.finish_in_time(place, token);
                        }
                    }
                }
                Leg::Put => self.publish(place, stage, End::Store),
            }
        }
    }

    /// When flows are looked at next.
    pub(super) fn plan_flows(&mut self) {
        if let Some(appointment) = self.flows_due.take() {
            self.agenda.cancel(appointment);
        }
        if let Some(due) = self.links.next_done() {
            self.flows_due = Some(self.agenda.put(due.max(self.now), Next::Flows));
        }
    }

    /// The stage function has returned.
    pub(super) fn finish(&mut self, place: usize, token: Token) {
        let stage = self.places[place].stage;
        let now = self.now;
        let Some(task) = self.task(place, token).filter(|task| !task.over) else {
            return;
        };
        task.over = true;
        let spec = &self.experiment.stages[stage];
        if !self.sched.topology().is_last(&spec.spec.name) {
            return match spec.mode {
                TransferMode::Store => self.put(place, token),
                TransferMode::P2p => {
                    let Some(worker) = self.places[place].worker else {
                        return;
                    };
                    self.publish(place, stage, End::Worker(worker));
                }
            };
        }
        let Some(task) = self.task(place, token) else { return };
        let first = task.began + task.service.mul_f64(spec.first);
        if let Some(job) = self.jobs.get(&token.job) {
            let record = &mut self.run.jobs[*job];
            record.first = Some(record.first.map_or(first.min(now), |other| other.min(first)));
        }
        self.complete(place, Some(ResultInfo::default()));
    }

    /// Writes the output to the store, once that has room.
    fn put(&mut self, place: usize, token: Token) {
        let stage = self.places[place].stage;
        let nbytes = self.experiment.stages[stage].output.0;
        let Some(worker) = self.places[place].worker else {
            return;
        };
        if !self.has_room(nbytes) {
            self.run.puts_that_waited += 1;
            self.puts.push_back((place, token));
            return;
        }
        self.stored += nbytes;
        let flow = self.links.begin(self.now, End::Worker(worker), End::Store, nbytes);
        self.flows.insert(flow, (place, token, Leg::Put));
    }

    fn publish(&mut self, place: usize, stage: usize, holder: End) {
        let id = PayloadId(self.id());
        let (Some(worker), Some(task)) = (self.places[place].worker, self.places[place].task.as_mut()) else {
            return;
        };
        let spec = &self.experiment.stages[stage];
        let nbytes = spec.output.0;
        let token = task.token;
        task.output = Some(id);
        self.payloads.insert(id, Kept { holder, nbytes });
        self.run.hold(nbytes);
        let payload = PayloadInfo {
            id,
            nbytes: ByteCount(nbytes),
            chunks: spec.chunks,
            stored: holder == End::Store,
            handle: Vec::new().into(),
        };
        self.tell(Input::Published { worker, token, payload });
        self.complete(place, None);
    }

    fn complete(&mut self, place: usize, result: Option<ResultInfo>) {
        let Some(worker) = self.places[place].worker else {
            return;
        };
        if let Some(task) = self.leave(place) {
            let token = task.token;
            self.run.attempts[self.places[place].stage] += 1;
            self.tell(Input::Completed {
                worker,
                token,
                result,
                handovers: Vec::new(),
            });
        }
    }

    /// An input cannot be read: its holder is gone.
    pub(super) fn fail(&mut self, place: usize, lost: PayloadId) {
        let Some(worker) = self.places[place].worker else {
            return;
        };
        if let Some(task) = self.leave(place) {
            let failure = Failure::new(ErrorClass::Unavailable, "payload.gone", "the holder is gone");
            self.tell(Input::Failed {
                worker,
                token: task.token,
                failure,
                lost: Some(lost),
            });
        }
    }

    /// The worker stops what it was told to stop.
    pub(super) fn stop(&mut self, worker: stagewire_core::Incarnation, token: Token) {
        let Some(place) = self.by_worker.get(&worker).copied() else {
            return;
        };
        self.places[place].offer.take_if(|offer| offer.token == token);
        if self.task(place, token).is_some() {
            self.leave(place);
        }
        // Said even of what it does not know: the slot is free.
        if self.sched.worker(worker).is_some() {
            self.agenda
                .put(self.now + self.experiment.network.latency, Next::Stopped(worker, token));
        }
    }

    /// The attempt leaves its worker, and its flows end.
    pub(super) fn leave(&mut self, place: usize) -> Option<Task> {
        let task = self.places[place].task.take()?;
        if let Some(since) = self.places[place].busy_since.take() {
            self.places[place].busy += self.now.since(since);
        }
        let own = self
            .flows
            .iter()
            .filter(|(_, flow)| flow.0 == place && flow.1 == task.token);
        let own: Vec<(u64, Leg)> = own.map(|(flow, (_, _, leg))| (*flow, *leg)).collect();
        for (flow, leg) in own {
            self.links.stop(self.now, flow);
            self.flows.remove(&flow);
            if leg == Leg::Put {
                self.free_store(self.experiment.stages[self.places[place].stage].output.0);
            }
        }
        self.puts.retain(|(waiting, _)| *waiting != place);
        Some(task)
    }

    pub(super) fn drop_payload(&mut self, payload: PayloadId) {
        let Some(kept) = self.payloads.remove(&payload) else {
            return;
        };
        self.run.let_go(kept.nbytes);
        if kept.holder == End::Store {
            self.free_store(kept.nbytes);
        }
    }

    fn free_store(&mut self, nbytes: u64) {
        self.stored -= nbytes;
        while let Some((place, token)) = self.puts.front().copied() {
            if !self.has_room(self.experiment.stages[self.places[place].stage].output.0) {
                break;
            }
            self.puts.pop_front();
            self.put(place, token);
        }
    }

    fn has_room(&self, nbytes: u64) -> bool {
        let capacity = self.experiment.store_capacity.map_or(u64::MAX, |capacity| capacity.0);
        // What is larger than the store would wait for ever.
        self.stored == 0 || self.stored.saturating_add(nbytes) <= capacity
    }

    pub(super) fn task(&mut self, place: usize, token: Token) -> Option<&mut Task> {
        self.places[place].task.as_mut().filter(|task| task.token == token)
    }

    /// Places whose attempt still reads this payload.
    pub(super) fn readers(&self, payload: PayloadId) -> Vec<usize> {
        let reads = |leg: &Leg| matches!(leg, Leg::First(id) | Leg::Rest(id) if *id == payload);
        let flows = self.flows.values().filter(|(_, _, leg)| reads(leg));
        flows.map(|(place, ..)| *place).collect()
    }
}
