use std::sync::Arc;
use std::time::Duration;

use stagewire_core::{ByteCount, ErrorClass, Failure, JobId, StageName, Timestamp};

use super::Sched;
use super::plan::Plan;
use crate::job::{Job, StageSet};
use crate::topology::StageIndex;
use crate::{CacheKey, Decision, Effect, Event, IdempotencyKey, JobNotice, NoticeKind, Refusal, Terms, Urgency};

/// Bounds of a queue deadline.
const LEAST_DEADLINE: Duration = Duration::from_millis(1);
const LONGEST_DEADLINE: Duration = Duration::from_secs(366 * 86_400);

impl Sched {
    /// The job that was submitted with this key before, as long as it is remembered.
    ///
    /// # Errors
    /// [`Refusal::KeyConflict`] where it was another submission.
    pub fn first_of(&self, key: &IdempotencyKey) -> Result<Option<JobId>, Refusal> {
        let Some(first) = self.keys.get(&key.key).and_then(|first| self.jobs.get(first)) else {
            return Ok(None);
        };
        if first.key.as_ref().is_some_and(|known| known.hash == key.hash) {
            Ok(Some(first.id))
        } else {
            let (key, job) = (key.key.clone(), first.id);
            Err(Refusal::KeyConflict { key, job })
        }
    }

    pub(super) fn submit(
        &self,
        now: Timestamp,
        job: JobId,
        params: Arc<str>,
        key: Option<IdempotencyKey>,
        urgency: Urgency,
    ) -> Result<Decision, Refusal> {
        if let Some(first) = key.as_ref().map(|key| self.first_of(key)).transpose()?.flatten() {
            return Ok(Decision {
                job: Some(first),
                ..Decision::default()
            });
        }
        if self.jobs.contains_key(&job) {
            return Err(Refusal::DuplicateJob { job });
        }
        self.has_room(ByteCount(params.len() as u64))?;
        self.check_bytes(urgency.shape)?;
        let terms = self.terms(urgency)?;
        let mut plan = Plan::new(self, now);
        let new = Job::new(
            &self.topology,
            job,
            self.next_number,
            &params,
            key.as_ref(),
            &terms,
            now,
        );
        plan.create(
            new,
            Event::JobSubmitted {
                job,
                params,
                key,
                terms,
            },
        );
        Ok(plan.decision)
    }

    /// Whether a job with parameters of so many bytes is taken.
    pub(super) fn has_room(&self, nbytes: ByteCount) -> Result<(), Refusal> {
        if self.draining {
            return Err(Refusal::Draining);
        }
        let (queued, limit) = (self.index.active.len(), self.limits.max_queued);
        if queued >= limit {
            return Err(Refusal::QueueFull { queued, limit });
        }
        let (queued, limit) = (ByteCount(self.index.active_bytes), self.limits.max_queued_bytes);
        if queued.0.saturating_add(nbytes.0) > limit.0 {
            return Err(Refusal::QueueBytes { nbytes, queued, limit });
        }
        Ok(())
    }

    /// What is agreed with somebody who submits a job.
    fn terms(&self, urgency: Urgency) -> Result<Terms, Refusal> {
        let class = match urgency.class {
            None => self.topology.default_class(),
            Some(class) => self.topology.class(&class).ok_or_else(|| Refusal::UnknownClass {
                class: class.chars().take(64).collect(),
                known: self.topology.classes().iter().map(|class| class.name.clone()).collect(),
            })?,
        };
        let (least, most) = (LEAST_DEADLINE, LONGEST_DEADLINE);
        if let Some(deadline) = urgency
            .queue_deadline
            .filter(|deadline| !(least..=most).contains(deadline))
        {
            return Err(Refusal::QueueDeadline { deadline, least, most });
        }
        let mut skip = urgency.skip;
        skip.sort_unstable();
        skip.dedup();
        if let Some(stage) = skip.iter().find(|stage| self.topology.find(stage).is_none()) {
            return Err(Refusal::UnknownSkip {
                stage: stage.clone(),
                known: self.topology.names(),
            });
        }
        let skipped = StageSet::of(&self.topology, &skip);
        let last = |stage: &StageIndex| self.topology.consumers(*stage).is_empty();
        if self.topology.indices().filter(last).all(|stage| skipped.has(stage)) {
            return Err(Refusal::NothingToDo { skip });
        }
        Ok(Terms {
            class: class.name.clone(),
            queue_deadline: urgency.queue_deadline.or(class.queue_deadline),
            shape: urgency.shape,
            skip,
            cache: self.cacheable(urgency.cache),
        })
    }

    /// Keys of stages that have an output, one each.
    fn cacheable(&self, mut keys: Vec<(StageName, CacheKey)>) -> Vec<(StageName, CacheKey)> {
        let publishes = |name: &StageName| {
            let stage = self.topology.find(name);
            stage.is_some_and(|stage| !self.topology.consumers(stage).is_empty())
        };
        keys.retain(|(stage, _)| publishes(stage));
        keys.sort_unstable();
        keys.dedup_by(|one, other| one.0 == other.0);
        keys
    }

    /// The job has not begun in time: nobody would wait for it any more.
    pub(super) fn drop_late(&self, now: Timestamp, job: JobId) -> Decision {
        let mut plan = Plan::new(self, now);
        plan.change(job, |job| {
            let (waited, terms) = (now.since(job.job().entered), &job.job().terms);
            let message = format!(
                "job {} of class {} had not begun {waited:.1?} after it was submitted and was dropped, as its queue \
                 deadline is {:.1?}; submit it again when less waits, give it a longer deadline, or add workers",
                job.job().id,
                terms.class,
                terms.queue_deadline.unwrap_or_default(),
            );
            job.doom(Failure::new(ErrorClass::Deadline, "job.queue_deadline", message));
        });
        plan.decision
    }

    /// Forgets the job that ended first, where more are remembered than should be.
    pub(super) fn forget_one(&self) -> Option<Decision> {
        let too_many = self.index.ended.len() > self.limits.max_ended;
        let (_, job) = *self.index.ended.first().filter(|_| too_many)?;
        let notice = JobNotice {
            job,
            stage: None,
            attempt: None,
            worker: None,
            kind: NoticeKind::Forgotten,
        };
        Some(Decision {
            events: vec![Event::JobForgotten { job }],
            effects: vec![Effect::Job(notice)],
            job: None,
        })
    }
}
