//! Outputs that are made once for all jobs that would make the same.
//!
//! Where a job names a key for what a stage makes, that is kept when the stage is done and lies in the store. Another job
//! with the key gets it as the output of its own stage, which does not run. While one job makes it, others that come to
//! their turn wait for that attempt; when it ends otherwise than well, they are as before. What is kept belongs to the
//! cache and not to the jobs that read it: it counts among the held bytes once, while any of them needs it. What none
//! needs counts as free, and goes when a job needs the room, or when that is more than a quarter of it all; what was not
//! used for longest goes first.

use stagewire_core::{JobId, PayloadId, Timestamp};

use super::Sched;
use super::plan::{JobPlan, Plan};
use crate::cache::Entry;
use crate::job::Output;
use crate::queue::Rank;
use crate::topology::StageIndex;
use crate::{CacheKey, CacheTally, Decision, Event, Holder};

impl Sched {
    /// What is kept for jobs that would make the same.
    pub fn cache_tally(&self) -> CacheTally {
        self.cache.tally()
    }

    /// Payloads that are kept and that no job needs at present.
    pub fn idle_cached(&self) -> impl Iterator<Item = PayloadId> {
        self.cache.idle()
    }

    pub(super) fn cache_key(&self, job: JobId, stage: StageIndex) -> Option<CacheKey> {
        self.jobs.get(&job)?.cache_key(stage)
    }

    /// Another job that makes what this one would.
    pub(super) fn maker(&self, job: JobId, stage: StageIndex) -> Option<JobId> {
        self.cache.maker(self.cache_key(job, stage)?)
    }

    /// One job gets what is kept for it, or waits no more for one that did not make it; or one payload goes that is in the
    /// way.
    pub(super) fn cache_step(&self, now: Timestamp) -> Option<Decision> {
        let mut plan = Plan::new(self, now);
        if let Some((job, stage, kept)) = self.cache.first_due() {
            let name = self.topology.name(stage).clone();
            let event = match kept {
                Some(Entry { payload, token, .. }) => Event::StageCached {
                    job,
                    stage: name,
                    payload: payload.clone(),
                    token: *token,
                },
                None => Event::AwaitEnded { job, stage: name },
            };
            plan.change(job, |plan| plan.push(event));
            return Some(plan.decision);
        }
        let limit = self.limits.payload_bytes.map(|bytes| bytes.0);
        let payload = self.cache.surplus(limit, self.taken_bytes())?;
        drop_payload(&mut plan, payload);
        Some(plan.decision)
    }

    /// The job waits for the one that makes the same.
    pub(super) fn await_maker(&self, now: Timestamp, stage: StageIndex, rank: &Rank) -> Option<Decision> {
        let by = self.maker(rank.job, stage)?;
        let mut plan = Plan::new(self, now);
        let (job, stage) = (rank.job, self.topology.name(stage).clone());
        plan.change(job, |plan| plan.push(Event::Awaits { job, stage, by }));
        Some(plan.decision)
    }

    /// The bytes of a payload are gone that several jobs may read.
    pub(super) fn lose_shared(&self, plan: &mut Plan<'_>, payload: PayloadId) {
        let Some(key) = self.cache.key_of(payload) else { return };
        for job in self.cache.users(key) {
            plan.change(job, |job| job.lose_payload(payload));
        }
        drop_payload(plan, payload);
    }
}

/// Only once no job uses it.
fn drop_payload(plan: &mut Plan<'_>, payload: PayloadId) {
    plan.push(Event::CacheDropped { payload });
    plan.release(Holder::Store, payload);
}

impl JobPlan<'_, '_> {
    /// The attempt is done: others get what it has made, where the store has it and nothing is kept for them yet.
    pub(super) fn share(&mut self, stage: StageIndex) {
        let job = self.job();
        let Output::Live(live) = &job.run(stage).output else {
            return;
        };
        let token = live.token;
        let fresh = |key| self.sched().cache.get(key).is_none();
        if live.payload.stored && job.cache_key(stage).is_some_and(fresh) {
            self.push(Event::OutputShared { token });
        }
    }
}
