use std::sync::Arc;

use stagewire_core::{ByteCount, JobId, Timestamp};

use super::Sched;
use super::plan::Plan;
use crate::job::Job;
use crate::{Decision, Effect, Event, IdempotencyKey, JobNotice, NoticeKind, Refusal};

impl Sched {
    pub(super) fn submit(
        &self,
        now: Timestamp,
        job: JobId,
        params: Arc<str>,
        key: Option<IdempotencyKey>,
    ) -> Result<Decision, Refusal> {
        if let Some(key) = &key
            && let Some(first) = self.keys.get(&key.key).and_then(|first| self.jobs.get(first))
        {
            return if first.key.as_ref().is_some_and(|known| known.hash == key.hash) {
                Ok(Decision {
                    job: Some(first.id),
                    ..Decision::default()
                })
            } else {
                let (key, job) = (key.key.clone(), first.id);
                Err(Refusal::KeyConflict { key, job })
            };
        }
        if self.draining {
            return Err(Refusal::Draining);
        }
        if self.jobs.contains_key(&job) {
            return Err(Refusal::DuplicateJob { job });
        }
        let (queued, limit) = (self.index.active.len(), self.limits.max_queued);
        if queued >= limit {
            return Err(Refusal::QueueFull { queued, limit });
        }
        let nbytes = ByteCount(params.len() as u64);
        let (queued, limit) = (ByteCount(self.index.active_bytes), self.limits.max_queued_bytes);
        if queued.0.saturating_add(nbytes.0) > limit.0 {
            return Err(Refusal::QueueBytes { nbytes, queued, limit });
        }
        let mut plan = Plan::new(self, now);
        let new = Job::new(&self.topology, job, self.next_number, &params, key.as_ref(), now);
        plan.create(new, Event::JobSubmitted { job, params, key });
        Ok(plan.decision)
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
