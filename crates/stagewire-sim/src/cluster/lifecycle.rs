//! Workers that begin, die, and are taken away.

use stagewire_core::{Incarnation, Member, StageName};
use stagewire_sched::{DrainScope, Input, WorkerInfo};

use super::work::Task;
use super::{Cluster, Next, Place};
use crate::links::End;

impl Cluster<'_> {
    /// A worker begins at this place.
    pub(super) fn attach(&mut self, place: usize) {
        let incarnation = Incarnation(self.id());
        let Place { stage, group, rank, .. } = self.places[place];
        let spec = &self.experiment.stages[stage];
        self.places[place].worker = Some(incarnation);
        self.places[place].life += 1;
        self.by_worker.insert(incarnation, place);
        let worker = WorkerInfo {
            incarnation,
            stage: spec.spec.name.clone(),
            slots: 1,
            max_batch: spec.max_batch,
            name: format!("{}-{place}", spec.spec.name),
            member: (spec.world > 1).then(|| Member {
                group: StageName::new(&format!("g{group}")).expect("a letter and digits are a name"),
                rank,
                world: spec.world,
            }),
            place: stagewire_sched::Place::default(),
        };
        self.tell(Input::WorkerAttached {
            worker,
            running: Vec::new(),
            holding: Vec::new(),
        });
        let life = self.places[place].life;
        if let Some(deaths) = self.experiment.deaths {
            let after = self.chance.exponential(deaths.mean);
            self.agenda.put(self.now + after, Next::Die(place, life));
        }
        if let Some(spot) = self.experiment.spot.filter(|spot| spot.stage == stage) {
            let after = self.chance.exponential(spot.mean);
            self.agenda.put(self.now + after, Next::Warn(place, life));
        }
    }

    pub(super) fn die(&mut self, place: usize, life: u64) {
        if let (Some(deaths), true) = (self.experiment.deaths, self.places[place].life == life) {
            self.remove(place, deaths.noticed);
            self.agenda.put(self.now + deaths.restart, Next::Attach(place));
        }
    }

    /// The machine will be taken away: the worker gets nothing new.
    pub(super) fn warn(&mut self, place: usize, life: u64) {
        if let (Some(spot), Some(worker), true) = (
            self.experiment.spot,
            self.places[place].worker,
            self.places[place].life == life,
        ) {
            self.agenda.put(self.now + spot.notice, Next::Take(place, life));
            let scope = DrainScope::Worker(worker);
            let within = Some(spot.notice);
            self.tell(Input::Drain { scope, within });
        }
    }

    pub(super) fn take(&mut self, place: usize, life: u64) {
        if let (Some(spot), true) = (self.experiment.spot, self.places[place].life == life) {
            self.remove(place, std::time::Duration::ZERO);
            self.agenda.put(self.now + spot.away, Next::Attach(place));
        }
    }

    /// A worker is gone, with what it ran and held.
    fn remove(&mut self, place: usize, noticed: std::time::Duration) {
        let Some(worker) = self.places[place].worker.take() else {
            return;
        };
        self.run.deaths += 1;
        self.places[place].life += 1;
        self.by_worker.remove(&worker);
        self.places[place].offers.clear();
        while let Some(token) = self.places[place].tasks.first().map(Task::token) {
            self.leave(place, token);
        }
        let held = self
            .payloads
            .iter()
            .filter(|(_, kept)| kept.holder == End::Worker(worker));
        let held: Vec<_> = held.map(|(payload, _)| *payload).collect();
        // Told at once or later, the order is the same: readers notice first.
        for payload in held {
            let readers = self.readers(payload);
            self.drop_payload(payload);
            for (reader, token) in readers {
                self.fail(reader, token, payload);
            }
        }
        self.agenda.put(self.now + noticed, Next::Lost(worker));
    }
}
