//! Preemption: a job of one class gets the worker of a running job of another, which goes on later from a checkpoint.
//!
//! It happens at stages with checkpoints, for jobs that wait there for nothing but a worker. Of the attempts of the classes
//! that their class preempts, the one that was granted last is asked to yield: it has done the least. There are never more
//! asked than jobs of the class wait. Who was asked and goes on all the same is not asked again on the same stream.
//!
//! *Nobody starves.* An attempt is asked only once it has come further than where it began, so that each time its job has
//! advanced, and a stage of a job yields to others three times in a life: after that it runs to its end. The freed worker goes to
//! the class that it was freed for, out of turn, and that class pays for it as for any other start: the bounds of the
//! module `share` hold for the starts in turn, and for each start of a preempted job there are at most three out of turn.
//!
//! Bytes for the output of the waiting job must be free already: what the yielding attempt has set aside is not counted
//! on, as its checkpoint takes room, too.

use stagewire_core::{ErrorClass, Failure, JobId, Timestamp, Token};
use uuid::Uuid;

use super::Sched;
use super::plan::Plan;
use crate::topology::{ClassIndex, StageIndex};
use crate::worker::Worker;
use crate::{Decision, Preemptor};

impl Sched {
    /// Asks one attempt to yield, if a job should have its worker.
    pub(super) fn preempt(&self, now: Timestamp) -> Option<Decision> {
        if self.draining {
            return None;
        }
        let mut stages = self.topology.checkpointing().iter().copied();
        stages.find_map(|stage| self.preempt_at(now, stage))
    }

    fn preempt_at(&self, now: Timestamp, stage: StageIndex) -> Option<Decision> {
        let queue = &self.index.queues[stage.get()];
        if !queue.free.is_empty() || queue.yieldable.is_empty() {
            return None;
        }
        // The attempt that yields gives its credit back.
        let last = self.topology.consumers(stage).is_empty();
        if !last && queue.held > self.topology.spec(stage).max_held {
            return None;
        }
        self.topology.class_indices().find_map(|class| {
            let preempted = self.topology.preempted(class);
            if preempted.is_empty() {
                return None;
            }
            let under_way = queue.yielding[class.get()] + self.shares[stage.get()].owed(class.get());
            let mut waiting = queue.of(class).filter(|rank| self.may_begin(rank));
            let waiting = waiting.nth(under_way as usize)?;
            if !self.has_bytes(stage, waiting) {
                return None;
            }
            let (_, token) = preempted
                .iter()
                .filter_map(|class| self.granted_last(stage, *class))
                .max()?;
            let by = Preemptor {
                job: waiting.job,
                class: self.topology.classes()[class.get()].name.clone(),
            };
            let message = format!(
                "job {} of class {} needs a worker of stage {}: attempt {token} of class {} should yield at its next step \
                 boundary, and goes on later",
                by.job,
                by.class,
                self.topology.name(stage),
                self.jobs.get(&token.job)?.terms.class,
            );
            let failure = Failure::new(ErrorClass::Unavailable, "attempt.preempted", message)
                .with("by", by.job)
                .with("class", &by.class);
            let mut plan = Plan::new(self, now);
            self.ask(&mut plan, stage, token, Some(by), failure);
            Some(plan.decision)
        })
    }

    /// The attempt of a class that was granted last, among those that may be asked to yield and whose worker hears it.
    fn granted_last(&self, stage: StageIndex, class: ClassIndex) -> Option<(Timestamp, Token)> {
        let bound = |at, id| (class, Timestamp(at), JobId(id));
        let of_class = bound(0, Uuid::nil())..=bound(u64::MAX, Uuid::max());
        let mut last_first = self.index.queues[stage.get()].yieldable.range(of_class).rev();
        last_first.find_map(|(_, since, job)| {
            let phase = &self.jobs.get(job)?.run(stage).phase;
            let stays = self.workers.get(&phase.worker()?).is_some_and(Worker::stays);
            phase.token().filter(|_| stays).map(|token| (*since, token))
        })
    }
}
