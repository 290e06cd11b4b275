//! Inputs on their way to who reads them.

use stagewire_core::{PayloadId, Token};
use stagewire_sched::OfferInput;

use super::{Cluster, Next};
use crate::links::End;

/// Which part of an attempt a flow of bytes belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Leg {
    /// The first chunk of an input.
    First(PayloadId),
    /// Others.
    Rest(PayloadId),
    /// The output on its way into the store.
    Put,
}

/// Pieces in which an input comes.
fn chunks(input: &OfferInput) -> u64 {
    u64::from(input.payload.chunks.max(1))
}

impl Cluster<'_> {
    /// The first chunk of every input begins to come.
    pub(super) fn fetch(&mut self, place: usize, token: Token) {
        let Some(worker) = self.places[place].worker else {
            return;
        };
        let Some(task) = self.places[place].tasks.iter_mut().find(|task| task.token == token) else {
            return;
        };
        let mut gone = None;
        for input in &task.inputs {
            let payload = input.payload.id;
            let Some(kept) = self.payloads.get(&payload).copied() else {
                gone = gone.or(Some(payload));
                continue;
            };
            let first = kept.nbytes.div_ceil(chunks(input));
            if first > 0 {
                let flow = self.links.begin(self.now, kept.holder, End::Worker(worker), first);
                self.flows.insert(flow, (place, token, Leg::First(payload)));
                task.first += 1;
                task.rest += usize::from(kept.nbytes > first);
            } else if !kept.whole {
                task.unmade.push(payload);
                task.rest += 1;
            }
        }
        if let Some(payload) = gone {
            self.fail(place, token, payload);
        }
    }

    /// The chunks of an input follow the first one: those that are made, all but the last one where it is not.
    fn fetch_rest(&mut self, place: usize, token: Token, payload: PayloadId, chunks: u64) {
        let Some(kept) = self.payloads.get(&payload).copied() else {
            return self.fail(place, token, payload);
        };
        let first = kept.nbytes.div_ceil(chunks);
        let rest = kept.nbytes - first;
        if kept.whole {
            return self.flow(place, token, payload, rest);
        }
        // Smaller than the first, where the bytes cannot be cut evenly.
        let last = first.min(rest);
        if let Some(task) = self.task(place, token) {
            task.unmade.push(payload);
            task.rest += usize::from(rest > last);
        }
        self.flow(place, token, payload, rest - last);
    }

    fn flow(&mut self, place: usize, token: Token, payload: PayloadId, nbytes: u64) {
        let (Some(kept), Some(worker)) = (self.payloads.get(&payload), self.places[place].worker) else {
            return;
        };
        if nbytes > 0 {
            let flow = self.links.begin(self.now, kept.holder, End::Worker(worker), nbytes);
            self.flows.insert(flow, (place, token, Leg::Rest(payload)));
        }
    }

    /// The last chunk of a payload is made: who has read the others gets it.
    pub(super) fn last_made(&mut self, payload: PayloadId, chunks: u64) {
        let Some(kept) = self.payloads.get_mut(&payload) else {
            return;
        };
        kept.whole = true;
        let first = kept.nbytes.div_ceil(chunks);
        let last = first.min(kept.nbytes - first);
        let waits = |place: usize| {
            let tasks = self.places[place].tasks.iter();
            let tasks = tasks.filter(|task| task.unmade.contains(&payload));
            tasks.map(move |task| (place, task.token))
        };
        let waiting: Vec<_> = (0..self.places.len()).flat_map(waits).collect();
        for (place, token) in waiting {
            if let Some(task) = self.task(place, token) {
                task.unmade.retain(|unmade| *unmade != payload);
            }
            if last > 0 {
                self.flow(place, token, payload, last);
            } else {
                self.rest_came(place, token);
            }
        }
    }

    /// A part of an input has come that is not its first chunk.
    fn rest_came(&mut self, place: usize, token: Token) {
        let now = self.now;
        let Some(task) = self.task(place, token) else { return };
        task.rest -= 1;
        if task.rest == 0 {
            let most = task.inputs.iter().map(chunks).max().unwrap_or(1);
            task.least = now + task.service.div_f64(most as f64);
            if task.computed {
                self.finish_in_time(place, token);
            }
        }
    }

    pub(super) fn flows_done(&mut self) {
        self.flows_due = None;
        while let Some(flow) = self.links.take_done(self.now) {
            let Some((place, token, leg)) = self.flows.remove(&flow) else {
                continue;
            };
            let Some(task) = self.task(place, token) else { continue };
            match leg {
                Leg::First(payload) => {
                    task.first -= 1;
                    let input = task.inputs.iter().find(|input| input.payload.id == payload);
                    let chunks = input.map_or(1, chunks);
                    self.fetch_rest(place, token, payload, chunks);
                    self.compute(place);
                }
                Leg::Rest(_) => self.rest_came(place, token),
                Leg::Put => self.put_done(place, token),
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

    /// Attempts that still read this payload.
    pub(super) fn readers(&self, payload: PayloadId) -> Vec<(usize, Token)> {
        let reads = |leg: &Leg| matches!(leg, Leg::First(id) | Leg::Rest(id) if *id == payload);
        let flows = self.flows.values().filter(|(_, _, leg)| reads(leg));
        let waits = self.places.iter().enumerate().flat_map(|(place, at)| {
            let tasks = at.tasks.iter().filter(|task| task.unmade.contains(&payload));
            tasks.map(move |task| (place, task.token))
        });
        flows.map(|(place, token, _)| (*place, *token)).chain(waits).collect()
    }
}
