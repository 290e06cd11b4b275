//! Outputs: published, put into the store, let go.

use stagewire_core::{ByteCount, PayloadId, Token, TransferMode};
use stagewire_sched::{Input, PayloadInfo, ResultInfo};

use super::fetch::Leg;
use super::{Cluster, Kept};
use crate::links::End;

impl Cluster<'_> {
    /// Who reads the output may begin while the rest of it is made.
    pub(super) fn first_made(&mut self, place: usize, token: Token) {
        let name = &self.experiment.stages[self.places[place].stage].spec.name;
        if let (Some(worker), false) = (self.places[place].worker, self.sched.topology().is_last(name)) {
            self.publish(place, token, End::Worker(worker), false);
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
        let published = task.output;
        let spec = &self.experiment.stages[stage];
        if let Some(payload) = published {
            self.complete(place, token, None);
            return self.last_made(payload, spec.chunks.into());
        }
        if !self.sched.topology().is_last(&spec.spec.name) {
            return match (spec.mode, self.places[place].worker) {
                (TransferMode::Store, _) => self.put(place, token),
                (TransferMode::P2p, Some(worker)) => {
                    self.publish(place, token, End::Worker(worker), true);
                    self.complete(place, token, None);
                }
                (TransferMode::P2p, None) => {}
            };
        }
        let Some(task) = self.task(place, token) else { return };
        let first = task.began + task.service.mul_f64(spec.first);
        if let Some(job) = self.jobs.get(&token.job) {
            let record = &mut self.run.jobs[*job];
            record.first = Some(record.first.map_or(first.min(now), |other| other.min(first)));
        }
        self.complete(place, token, Some(ResultInfo::default()));
    }

    /// What an attempt puts into the store: its checkpoint, where it yields, and else its output.
    pub(super) fn put_bytes(&self, place: usize, yields: bool) -> u64 {
        let stage = &self.experiment.stages[self.places[place].stage];
        let checkpoint = stage.checkpoints.filter(|_| yields);
        checkpoint.map_or(stage.output, |checkpoints| checkpoints.nbytes).0
    }

    /// Writes the output, or the checkpoint, to the store, once that has room.
    pub(super) fn put(&mut self, place: usize, token: Token) {
        let (Some(worker), Some(task)) = (self.places[place].worker, self.task(place, token)) else {
            return;
        };
        let yields = task.yields;
        let nbytes = self.put_bytes(place, yields);
        if !self.has_room(nbytes) {
            self.run.puts_that_waited += 1;
            self.puts.push_back((place, token));
            return;
        }
        self.stored += nbytes;
        let flow = self.links.begin(self.now, End::Worker(worker), End::Store, nbytes);
        self.flows.insert(flow, (place, token, Leg::Put));
    }

    /// What was put is in the store.
    pub(super) fn put_done(&mut self, place: usize, token: Token) {
        if self.task(place, token).is_some_and(|task| task.yields) {
            return self.yielded(place, token);
        }
        self.publish(place, token, End::Store, true);
        self.complete(place, token, None);
    }

    fn publish(&mut self, place: usize, token: Token, holder: End, whole: bool) {
        let id = PayloadId(self.id());
        let spec = &self.experiment.stages[self.places[place].stage];
        let (nbytes, chunks) = (spec.output.0, spec.chunks);
        let Some(worker) = self.places[place].worker else {
            return;
        };
        let Some(task) = self.task(place, token) else { return };
        task.output = Some(id);
        let kept = Kept { holder, nbytes, whole };
        self.payloads.insert(id, kept);
        self.run.hold(nbytes);
        let payload = PayloadInfo {
            id,
            nbytes: ByteCount(nbytes),
            chunks,
            stored: holder == End::Store,
            handle: Vec::new().into(),
        };
        self.tell(Input::Published { worker, token, payload });
    }

    fn complete(&mut self, place: usize, token: Token, result: Option<ResultInfo>) {
        let Some(worker) = self.places[place].worker else {
            return;
        };
        if self.leave(place, token).is_some() {
            self.run.attempts[self.places[place].stage] += 1;
            self.tell(Input::Completed {
                worker,
                token,
                result,
                handovers: Vec::new(),
            });
        }
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

    pub(super) fn free_store(&mut self, nbytes: u64) {
        self.stored -= nbytes;
        while let Some((place, token)) = self.puts.front().copied() {
            let yields = self.task(place, token).is_some_and(|task| task.yields);
            if !self.has_room(self.put_bytes(place, yields)) {
                break;
            }
            self.puts.pop_front();
            self.put(place, token);
        }
    }

    pub(super) fn has_room(&self, nbytes: u64) -> bool {
        let capacity = self.experiment.store_capacity.map_or(u64::MAX, |capacity| capacity.0);
        // What is larger than the store would wait for ever.
        self.stored == 0 || self.stored.saturating_add(nbytes) <= capacity
    }
}
