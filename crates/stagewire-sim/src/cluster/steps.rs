//! Attempts that come to step boundaries, and stop there where they were asked to: the next one goes on from a checkpoint.

use stagewire_core::{ByteCount, PayloadId, Progress, Token};
use stagewire_sched::{Input, PayloadInfo};

use super::{Cluster, Kept, Next};
use crate::links::End;

impl Cluster<'_> {
    /// The worker says how far it is. With the last step the stage function returns, so that nothing is left to yield.
    pub(super) fn step(&mut self, place: usize, token: Token) {
        let Some(total) = self.steps_of(place) else { return };
        let worker = self.places[place].worker;
        let (Some(worker), Some(task)) = (worker, self.task(place, token)) else {
            return;
        };
        task.done += 1;
        let done = task.done;
        if done >= total {
            return;
        }
        self.tell(Input::Renew {
            worker,
            token,
            sequence: done,
            progress: Some(progress(done, total)),
        });
        // One that finds no room goes on, and looks again after the next step.
        let (now, room) = (self.now, self.has_room(self.put_bytes(place, true)));
        let Some(task) = self.task(place, token) else { return };
        task.yields = task.asked && room;
        if task.yields {
            self.put(place, token);
        } else {
            let next = now + task.step;
            self.agenda.put(next, Next::Step(place, token));
        }
    }

    pub(super) fn ask(&mut self, place: usize, token: Token) {
        if let Some(task) = self.task(place, token) {
            task.asked = true;
        }
    }

    /// The checkpoint is in the store, and the worker free.
    pub(super) fn yielded(&mut self, place: usize, token: Token) {
        let (nbytes, id) = (self.put_bytes(place, true), PayloadId(self.id()));
        let kept = Kept {
            holder: End::Store,
            nbytes,
            whole: true,
        };
        self.payloads.insert(id, kept);
        self.run.hold(nbytes);
        let (worker, total) = (self.places[place].worker, self.steps_of(place));
        if let (Some(worker), Some(total), Some(task)) = (worker, total, self.leave(place, token)) {
            let payload = PayloadInfo {
                id,
                nbytes: ByteCount(nbytes),
                chunks: 1,
                stored: true,
                handle: Vec::new().into(),
            };
            self.tell(Input::Yielded {
                worker,
                token,
                payload: Some(payload),
                progress: progress(task.done, total),
            });
        }
        let runs = self.sched.job(token.job).into_iter().flat_map(|job| job.stages());
        let mut kept = runs.filter_map(|run| run.checkpoint());
        if !kept.any(|kept| kept.payload.id == id) {
            self.drop_payload(id);
        }
    }

    fn steps_of(&self, place: usize) -> Option<u64> {
        let stage = &self.experiment.stages[self.places[place].stage];
        stage.checkpoints.map(|checkpoints| checkpoints.steps.into())
    }
}

fn progress(done: u64, total: u64) -> Progress {
    Progress {
        done,
        total,
        unit: "step".to_owned(),
    }
}
