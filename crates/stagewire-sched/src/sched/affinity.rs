//! Affinity: what a work queue reads from another worker's memory is best read nearby.
//!
//! It is a hint with a price, and never a wait: only workers that are free now are compared, so a free one far away goes
//! before a busy one nearby. Each step ([`Place::steps`](crate::Place::steps)) from the worker that holds the largest input
//! costs [`Limits::affinity_step`](crate::Limits::affinity_step). What a worker runs already costs, too: the part of its
//! slots in use, of the time that the attempt is predicted to take. The cheapest worker gets the job; of several, the one
//! with the fewest slots in use. The search looks at the least busy free worker of each place on the producer's host, of
//! its rail, and of all.
//!
//! An input in the store is equally far from everywhere, and a stage of kind admission is pinned to whichever worker is
//! free: for both, and for stages without inputs, the least busy worker is taken.

use stagewire_core::{Incarnation, JobId};

use super::Sched;
use crate::estimate::nanos;
use crate::queue::Rank;
use crate::topology::StageIndex;
use crate::worker::Worker;
use crate::{Holder, Place};

impl Sched {
    /// The free worker that the job is offered to.
    pub(super) fn best_worker(&self, stage: StageIndex, rank: &Rank) -> Option<Incarnation> {
        let queue = &self.index.queues[stage.get()];
        let least_busy = *queue.free.first()?;
        let near = queue.near.as_ref().filter(|_| !self.limits.affinity_step.is_zero());
        let Some((near, source)) = near.and_then(|near| Some((near, self.source(stage, rank.job)?))) else {
            return Some(least_busy.1);
        };
        let time = nanos(self.estimates[stage.get()].predict(rank.shape));
        let step = u64::try_from(self.limits.affinity_step.as_nanos()).unwrap_or(u64::MAX);
        let cost = |(used, worker): (u32, Incarnation)| {
            let known = self.workers.get(&worker)?;
            let slots = known.advertised().max(1);
            let steps = source.steps(known.at()).unwrap_or(Place::MOST_STEPS);
            let away = step.saturating_mul(u64::from(steps));
            let company = time.saturating_mul(u64::from(used)) / u64::from(slots);
            Some((away.saturating_add(company), used, worker))
        };
        let candidates = near.around(source).chain([least_busy]);
        let cheapest = candidates.filter_map(cost).min();
        Some(cheapest.map_or(least_busy.1, |(_, _, worker)| worker))
    }

    /// How far the worker is from the largest input of the job; `None` where that makes no difference.
    pub(super) fn steps_to(&self, stage: StageIndex, job: JobId, worker: Incarnation) -> Option<u32> {
        self.index.queues[stage.get()].near.as_ref()?;
        self.source(stage, job)?.steps(self.workers.get(&worker)?.at())
    }

    /// Where the worker is that holds the largest of the inputs that workers hold.
    fn source(&self, stage: StageIndex, job: JobId) -> Option<Place> {
        let job = self.jobs.get(&job)?;
        let inputs = job.links(&self.topology, stage).filter_map(|link| {
            let output = &job.run(link.from).output;
            match output.holder()? {
                Holder::Worker(worker) => Some((output.live()?.nbytes, worker)),
                Holder::Store => None,
            }
        });
        let (_, worker) = inputs.max()?;
        self.workers
            .get(&worker)
            .map(Worker::at)
            .filter(|place| place.host.is_some())
    }
}
