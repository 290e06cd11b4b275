//! Batches: compatible items of a work queue that one worker runs together.
//!
//! A batch is what waits when its worker is free, so it is waited for by nobody: the job whose turn it is begins it, and
//! jobs of the same shape come along. Each has a token, a grant and an end of its own. The next batch begins when every
//! attempt of this one has ended. Who comes along out of turn pays for that as any other; the time of an attempt is that
//! of its batch divided by the attempts in it.
//!
//! A job of which an attempt has failed or was lost runs alone from then on: should it take its worker along each time, it
//! takes no others to quarantine with it. What happens to a batch costs each of its jobs one attempt at most.

use std::collections::BTreeSet;

use stagewire_core::Incarnation;

use super::Sched;
use crate::job::Job;
use crate::queue::Rank;
use crate::topology::StageIndex;
use crate::worker::Worker;

/// Jobs of each class that are looked at for each place of a batch: the search must not grow with the queue.
const WINDOW: usize = 8;

impl Sched {
    /// The jobs that this worker runs along with the first one: of the same shape, those of its own class before others,
    /// each class in its order.
    pub(super) fn companions(&self, stage: StageIndex, first: &Rank, worker: Incarnation) -> Vec<Rank> {
        let most = self.workers.get(&worker).map_or(1, Worker::max_batch) as usize;
        let room = self.credits(stage).min(self.byte_places(stage, first));
        let places = most.min(room).saturating_sub(1);
        let runs_alone = |rank: &Rank| self.jobs.get(&rank.job).is_none_or(Job::has_stumbled);
        let Some(own) = self.jobs.get(&first.job).map(|job| job.class).filter(|_| places > 0) else {
            return Vec::new();
        };
        if runs_alone(first) {
            return Vec::new();
        }
        let mut made: BTreeSet<_> = self.cache_key(first.job, stage).into_iter().collect();
        let mut makes_another = |rank: &Rank| {
            let key = self.cache_key(rank.job, stage);
            key.is_none_or(|key| self.cache.maker(key).is_none() && made.insert(key))
        };
        let queue = &self.index.queues[stage.get()];
        let others = self.topology.class_indices().filter(|class| *class != own);
        std::iter::once(own)
            .chain(others)
            .flat_map(|class| queue.of(class).take(most.saturating_mul(WINDOW)))
            .filter(|rank| rank.shape == first.shape && rank.job != first.job && self.may_begin(rank))
            .filter(|rank| !runs_alone(rank) && makes_another(rank))
            .take(places)
            .copied()
            .collect()
    }
}
