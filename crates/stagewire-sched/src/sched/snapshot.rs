use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use stagewire_core::{Classify, Epoch, ErrorClass, JobId, StageName, Timestamp};

use super::Sched;
use crate::cache::{Cache, Kept};
use crate::estimate::Estimate;
use crate::job::{FIRST_ATTEMPT, Job, Phase};
use crate::volume::Volume;
use crate::worker::Slot;
use crate::{Holder, Limits, Topology};

/// The durable state of a scheduler, without what does not outlive the server: offers, streams, slots, progress.
///
/// It takes the place of all the durable events up to it, so that a journal can be cut short.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    epoch: Epoch,
    next_number: u64,
    paused: bool,
    jobs: Vec<Job>,
    /// How long attempts take, by stage.
    estimates: BTreeMap<StageName, Estimate>,
    /// How large outputs are, by stage.
    volumes: BTreeMap<StageName, Volume>,
    /// What is kept for jobs that would make the same.
    kept: Kept,
}

/// Why a snapshot cannot be restored.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// A job has other stages than the pipeline.
    #[error(
        "job {job} was submitted to a pipeline with the stages {found:?}; this one has {expected:?}. \
         Start with the old pipeline and let its jobs end, or with an empty data directory"
    )]
    OtherPipeline {
        /// The job.
        job: JobId,
        /// Its stages.
        found: Vec<StageName>,
        /// The stages of the pipeline.
        expected: Vec<StageName>,
    },
}

impl Classify for RestoreError {
    fn class(&self) -> ErrorClass {
        ErrorClass::Conflict
    }

    fn reason(&self) -> &'static str {
        "journal.pipeline"
    }
}

impl Sched {
    /// The durable state. Replaying the durable events up to now gives an equal one.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot {
            epoch: self.epoch,
            next_number: self.next_number,
            paused: self.paused,
            jobs: self.jobs.values().map(Self::durable).collect(),
            estimates: self.by_name(&self.estimates),
            volumes: self.by_name(&self.volumes),
            kept: self.cache.kept().clone(),
        }
    }

    /// A scheduler with this durable state. Go on as after a replay.
    ///
    /// # Errors
    /// [`RestoreError`] where a job was submitted to another pipeline.
    pub fn restore(topology: Topology, limits: Limits, snapshot: Snapshot) -> Result<Self, RestoreError> {
        let mut sched = Self::new(topology, limits);
        sched.epoch = snapshot.epoch;
        sched.paused = snapshot.paused;
        for (stage, estimate) in snapshot.estimates {
            if let Some(stage) = sched.topology.find(&stage) {
                sched.estimates[stage.get()] = estimate;
            }
        }
        for (stage, volume) in snapshot.volumes {
            if let Some(stage) = sched.topology.find(&stage) {
                sched.volumes[stage.get()] = volume;
            }
        }
        for job in snapshot.jobs {
            let found = || job.stages.iter().map(|run| &run.name);
            let expected = || sched.topology.stages().iter().map(|spec| &spec.name);
            if !found().eq(expected()) {
                return Err(RestoreError::OtherPipeline {
                    job: job.id,
                    found: found().cloned().collect(),
                    expected: expected().cloned().collect(),
                });
            }
            let runs = job.stages.clone();
            sched.insert_job(job);
            for run in runs {
                for (_, _, holder) in run.payloads() {
                    if let Holder::Worker(worker) = holder {
                        sched.ensure_worker(worker, &run.name);
                    }
                }
                if let Phase::Running(attempt) = &run.phase {
                    for worker in attempt.workers() {
                        sched.ensure_worker(worker, &run.name);
                        sched.set_slot(worker, attempt.token, Some(Slot::Running));
                    }
                }
            }
        }
        sched.next_number = sched.next_number.max(snapshot.next_number);
        sched.cache = Cache::of(snapshot.kept, &sched.topology, sched.jobs.values());
        Ok(sched)
    }

    fn by_name<T: Clone>(&self, of_stages: &[T]) -> BTreeMap<StageName, T> {
        let stages = self.topology.names().into_iter();
        stages.zip(of_stages.iter().cloned()).collect()
    }

    /// The job as a replay would leave it.
    fn durable(job: &Job) -> Job {
        let mut job = job.clone();
        job.next_attempt = FIRST_ATTEMPT;
        job.losses.unaccepted = 0;
        for run in &mut job.stages {
            run.awaits = None;
            match &mut run.phase {
                Phase::Offered(offer) => {
                    run.phase = Phase::Queued {
                        since: offer.queued,
                        again: offer.again,
                    };
                }
                Phase::Running(attempt) => {
                    let attempt = Arc::make_mut(attempt);
                    attempt.deadline = Timestamp::default();
                    attempt.progressed = Timestamp::default();
                    attempt.sequence = 0;
                    attempt.progress = None;
                    attempt.price = None;
                    attempt.asked = None;
                }
                Phase::Blocked { .. } | Phase::Queued { .. } | Phase::Done { .. } | Phase::Cached { .. } => (),
            }
        }
        job
    }
}
