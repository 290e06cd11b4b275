//! Affinity: what a work queue reads from another worker's memory is best read nearby.
//!
//! It is a hint with a price, and never a wait: only workers that are free now are compared, so a free one far away goes
//! before a busy one nearby. Each step ([`Place::steps`](crate::Place::steps)) from the worker that holds the largest input
//! costs [`Limits::affinity_step`](crate::Limits::affinity_step). What a worker runs already costs, too: the part of its
//! slots in use, of the time that the attempt is predicted to take. The search looks at the least busy free worker of each
//! place on the producer's host, of its rail, and of all; which of them gets the job, the policy says
//! ([`Routing`](crate::Routing)): unless it is another one, the cheapest, of several the one with the fewest slots in use.
//!
//! An input in the store is equally far from everywhere, and a stage of kind admission is pinned to whichever worker is
//! free: for both, and for stages without inputs, the least busy worker is taken.

use std::time::Duration;

use stagewire_core::{Incarnation, JobId};

use super::Sched;
use crate::estimate::nanos;
use crate::queue::Rank;
use crate::topology::StageIndex;
use crate::worker::Worker;
use crate::{Candidate, Holder, Place};

impl Sched {
    /// Free workers that the job could be offered to, and the position of the one that it is.
    pub(super) fn route(&self, stage: StageIndex, rank: &Rank) -> Option<(Vec<Candidate>, usize)> {
        let queue = &self.index.queues[stage.get()];
        let least_busy = *queue.free.first()?;
        let source = self.source(stage, rank.job);
        let near = queue.near.as_ref().zip(source);
        let near = near.filter(|_| !self.limits.affinity_step.is_zero());
        let near = near.into_iter().flat_map(|(near, source)| near.around(source));
        let mut candidates = Vec::new();
        for (used, worker) in near.chain([least_busy]) {
            if candidates.iter().all(|known: &Candidate| known.worker != worker) {
                candidates.extend(self.candidate(stage, rank, source, used, worker));
            }
        }
        let last = candidates.len().checked_sub(1)?;
        let routing = &self.policy.routing;
        let chosen = routing.choose(self.topology.name(stage), rank.job, &candidates);
        Some((candidates, chosen.min(last)))
    }

    /// What it costs to have the worker, which uses so many slots, run the job.
    pub(super) fn candidate(
        &self,
        stage: StageIndex,
        rank: &Rank,
        source: Option<Place>,
        used: u32,
        worker: Incarnation,
    ) -> Option<Candidate> {
        let known = self.workers.get(&worker)?;
        let slots = known.advertised();
        let steps = source.and_then(|source| source.steps(known.at()));
        let far = source.map_or(0, |_| steps.unwrap_or(Place::MOST_STEPS));
        let step = u64::try_from(self.limits.affinity_step.as_nanos()).unwrap_or(u64::MAX);
        let away = step.saturating_mul(u64::from(far));
        let company = match used {
            0 => 0,
            used => {
                let time = nanos(self.estimates[stage.get()].predict(rank.shape));
                time.saturating_mul(u64::from(used)) / u64::from(slots.max(1))
            }
        };
        Some(Candidate {
            worker,
            used,
            slots,
            steps,
            cost: Duration::from_nanos(away.saturating_add(company)),
        })
    }

    /// Where the worker is that holds the largest of the inputs that workers hold; `None` where that makes no difference.
    pub(super) fn source(&self, stage: StageIndex, job: JobId) -> Option<Place> {
        self.index.queues[stage.get()].near.as_ref()?;
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
