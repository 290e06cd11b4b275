use std::collections::{BTreeMap, BTreeSet};

use super::Sched;
use crate::cache::Cache;
use crate::index::{Index, WorkerMark};
use crate::job::{Job, JobState, MAX_PREEMPTIONS, Output, Phase};
use crate::worker::{Slot, Worker};

impl Sched {
    /// Proves the guarantees from the state. Takes time in proportion to it: for tests and debug builds.
    ///
    /// # Errors
    /// What does not hold, and for whom.
    pub fn check(&self) -> Result<(), String> {
        for job in self.jobs.values() {
            self.check_job(job)?;
        }
        for worker in self.workers.values() {
            self.check_worker(worker)?;
        }
        if let Some(credit) = self.byte_credit() {
            let sum = |parts: [stagewire_core::ByteCount; 2]| parts.iter().map(|part| u128::from(part.0)).sum::<u128>();
            let there = sum([credit.advertised, credit.over]);
            let used = sum([credit.free, credit.reserved]) + u128::from(credit.held.0);
            if used != there || (credit.free.0 > 0 && credit.over.0 > 0) {
                return Err(format!(
                    "free + reserved + held bytes are not those advertised: {credit:?}"
                ));
            }
            let (reserved, held) = self.count_bytes();
            if (reserved, held) != (u128::from(credit.reserved.0), u128::from(credit.held.0)) {
                return Err(format!(
                    "{reserved} bytes are reserved and {held} held, and the credit is {credit:?}"
                ));
            }
        }
        self.check_index()
    }

    /// Bytes that are reserved, for what is made or has not stopped, and that are held.
    fn count_bytes(&self) -> (u128, u128) {
        let (mut reserved, mut held) = (0, 0);
        let mut shared = BTreeMap::new();
        for run in self.jobs.values().flat_map(|job| &job.stages) {
            if let Output::Shared(kept) = &run.output {
                shared.insert(kept.payload.id, u128::from(kept.payload.nbytes.0));
                continue;
            }
            held += u128::from(run.checkpoint_bytes().0);
            match (&run.phase, run.output.live()) {
                (_, Some(payload)) => held += u128::from(payload.nbytes.0),
                (Phase::Offered(offer), None) => reserved += u128::from(offer.nbytes),
                (Phase::Running(attempt), None) => reserved += u128::from(attempt.nbytes),
                (_, None) => (),
            }
        }
        for slot in self.workers.values().flat_map(|worker| worker.slots.values()) {
            if let Slot::Stopping { nbytes, .. } = slot {
                reserved += u128::from(*nbytes);
            }
        }
        (reserved, held + shared.values().sum::<u128>())
    }

    fn check_job(&self, job: &Job) -> Result<(), String> {
        let ensure = |holds: bool, what: &str| {
            if holds {
                Ok(())
            } else {
                Err(format!("job {}: {what}: {job:?}", job.id))
            }
        };
        let tokens: Vec<_> = job.stages.iter().filter_map(|run| run.phase.token()).collect();
        let distinct: BTreeSet<_> = tokens.iter().collect();
        ensure(distinct.len() == tokens.len(), "two stages have the same token")?;
        let busy = job.stages.iter().any(|run| run.phase.worker().is_some());
        let live = job.stages.iter().any(|run| run.payloads().next().is_some());
        let stopping = self.stopping.get(&job.id).copied().unwrap_or_default();
        let next = job.next_step(&self.topology, &self.limits, stopping);
        ensure(next.is_none(), &format!("something is left to do: {next:?}"))?;
        match job.state {
            JobState::Ended { .. } => {
                ensure(!busy, "it has ended and still runs")?;
                ensure(!live, "it has ended and still holds payloads")?;
            }
            JobState::Cancelling { .. } => {
                ensure(!busy && !live, "it is being cancelled and still runs or holds payloads")?;
                ensure(stopping > 0, "it is being cancelled and waits for nobody")?;
            }
            JobState::Active => {
                let queued = job.stages.iter().any(|run| matches!(run.phase, Phase::Queued { .. }));
                let retries = job.stages.iter().any(|run| run.retry.is_some());
                ensure(
                    busy || queued || retries,
                    "no stage runs, or waits for a worker or to be tried again",
                )?;
            }
        }
        for (run, spec) in job.stages.iter().zip(self.topology.stages()) {
            let kept = run.checkpoint().is_none_or(|_| spec.checkpoint && !run.phase.is_done());
            ensure(run.preemptions <= MAX_PREEMPTIONS, "a stage was preempted too often")?;
            ensure(kept, "a stage keeps a checkpoint that it cannot need")?;
            let waits = run.retry.is_none() || matches!(run.phase, Phase::Blocked { .. });
            ensure(waits, "a stage that is to wait after a failure does not")?;
            if let Some(token) = run.phase.token().filter(|_| run.phase.worker().is_some()) {
                let slot = match run.phase {
                    Phase::Offered(_) => Slot::Reserved,
                    _ => Slot::Running,
                };
                let worker = run.phase.worker().and_then(|worker| self.workers.get(&worker));
                let used = worker.and_then(|worker| worker.slots.get(&token)) == Some(&slot);
                ensure(used, "an attempt uses no slot of its worker")?;
            }
        }
        if let Some(key) = &job.key {
            ensure(self.keys.get(&key.key) == Some(&job.id), "its key leads elsewhere")?;
        }
        Ok(())
    }

    fn check_worker(&self, worker: &Worker) -> Result<(), String> {
        let ensure = |holds: bool, what: &str| {
            if holds {
                Ok(())
            } else {
                Err(format!("worker {}: {what}: {worker:?}", worker.incarnation))
            }
        };
        let used = |usage: fn(Slot) -> bool| u32::try_from(worker.tokens(usage).count()).unwrap_or(u32::MAX);
        let reserved = used(|slot| slot == Slot::Reserved);
        let held = used(|slot| slot != Slot::Reserved);
        let adds_up = worker.free() + reserved + held == worker.advertised();
        ensure(adds_up, "free + reserved + held is not advertised")?;
        ensure(worker.counts_add_up(), "its slots are counted wrongly")?;
        let leads = worker.member().is_some() && self.followers(worker).is_some();
        ensure(worker.whole == leads, "its group is counted wrongly")?;
        if !worker.is_attached() {
            let idle = worker.tokens(|slot| slot != Slot::Running).count() == 0 && worker.unclaimed.is_empty();
            ensure(idle, "it is away and still has offers or is waited for to stop")?;
        }
        for (token, slot) in worker.slots.iter() {
            let phase = self.phase_of(worker.incarnation, *token).map(|(_, phase)| phase);
            let fits = match slot {
                Slot::Reserved => matches!(phase, Some(Phase::Offered(_))),
                Slot::Running => matches!(phase, Some(Phase::Running(_))),
                Slot::Stopping { .. } => phase.is_none(),
            };
            ensure(fits, &format!("slot {token} does not match the job"))?;
        }
        Ok(())
    }

    /// Proves no more than that every look-up says what jobs and workers say. That holds after any events in any order.
    ///
    /// # Errors
    /// What does not hold.
    pub fn check_index(&self) -> Result<(), String> {
        let mut index = Index::new(&self.topology);
        let mut stopping = BTreeMap::new();
        for job in self.jobs.values() {
            index.move_job(None, Some(&self.whole_mark(job)));
        }
        for worker in self.workers.values() {
            index.move_worker(None, Some(WorkerMark::of(worker)));
            for (token, slot) in worker.slots.iter() {
                index.timers.set_stop(slot.stop_deadline(), worker.incarnation, *token);
                if slot.is_stopping() {
                    *stopping.entry(token.job).or_default() += 1;
                }
            }
        }
        if index != self.index {
            return Err(format!("the index is {:?} and should be {index:?}", self.index));
        }
        let cache = Cache::of(self.cache.kept().clone(), &self.topology, self.jobs.values());
        if cache != self.cache {
            return Err(format!("the cache is {:?} and should be {cache:?}", self.cache));
        }
        if stopping != self.stopping {
            return Err(format!(
                "stopping attempts are {:?} and should be {stopping:?}",
                self.stopping
            ));
        }
        let keys = self.keys.values().filter(|job| !self.jobs.contains_key(job)).count();
        if keys > 0 {
            return Err(format!("{keys} keys lead to no job"));
        }
        Ok(())
    }
}
