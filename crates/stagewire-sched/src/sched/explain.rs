use std::time::Duration;

use stagewire_core::{ByteCount, JobId, StageName, Timestamp};

use super::Sched;
use crate::job::{Job, JobState, Phase};
use crate::queue::Rank;
use crate::topology::StageIndex;
use crate::{Position, WaitCause, Waiting};

impl Sched {
    /// Why the job has not ended: one entry for each stage that is not done, or one for the job where it is being cancelled.
    /// Empty for a job that has ended or is unknown.
    pub fn explain(&self, now: Timestamp, job: JobId) -> Vec<Waiting> {
        let Some(job) = self.jobs.get(&job) else {
            return Vec::new();
        };
        let until = |deadline: Timestamp| deadline.since(now);
        match job.state {
            JobState::Ended { .. } => Vec::new(),
            JobState::Cancelling { since } => vec![Waiting {
                stage: None,
                class: job.terms.class.clone(),
                waited: now.since(since),
                dropped_in: None,
                resumes: None,
                yields: None,
                cause: WaitCause::Stopping {
                    attempts: self.stopping.get(&job.id).copied().unwrap_or_default(),
                    within: job.cancel_deadline(&self.limits).map_or(Duration::ZERO, until),
                },
            }],
            JobState::Active => {
                let stages = self.topology.indices().map(|stage| (stage, &job.run(stage).phase));
                let waiting = stages.filter(|(_, phase)| !phase.is_done());
                let dropped_in = job.drop_deadline(job.has_begun(&self.topology)).map(until);
                let explain = |(stage, phase): (StageIndex, &Phase)| Waiting {
                    stage: Some(self.topology.name(stage).clone()),
                    class: job.terms.class.clone(),
                    waited: now.since(phase.since()),
                    dropped_in,
                    resumes: job.run(stage).checkpoint().map(|kept| kept.progress.clone()),
                    yields: job.yields(stage).cloned(),
                    cause: self.cause(now, job, stage, phase),
                };
                waiting.map(explain).collect()
            }
        }
    }

    /// Where the job stands in the queues of the stages that it waits for, but for those where it [waits for another
    /// job](WaitCause::SameWork). Takes time in proportion to the logarithm of their length.
    pub fn positions(&self, job: JobId) -> impl Iterator<Item = (&StageName, Position)> {
        let job = self.jobs.get(&job).filter(|job| job.state == JobState::Active);
        let stages = job.into_iter().flat_map(|job| {
            let begun = job.has_begun(&self.topology);
            self.topology.indices().map(move |stage| (job, stage, begun))
        });
        stages.filter_map(|(job, stage, begun)| match job.run(stage).phase {
            Phase::Queued { again, .. } if job.run(stage).awaits.is_none() => {
                let rank = Rank::new(again, job, begun);
                Some((self.topology.name(stage), self.position(job, stage, &rank)))
            }
            _ => None,
        })
    }

    fn position(&self, job: &Job, stage: StageIndex, rank: &Rank) -> Position {
        let queue = &self.index.queues[stage.get()];
        Position {
            ahead: queue.ahead(job.class, rank),
            others: queue.len() - queue.len_of(job.class),
        }
    }

    fn cause(&self, now: Timestamp, job: &Job, stage: StageIndex, phase: &Phase) -> WaitCause {
        match phase {
            Phase::Queued { .. } if let Some(job) = job.run(stage).awaits => WaitCause::SameWork { job },
            Phase::Queued { again, .. } => {
                self.queue_cause(job, stage, Rank::new(*again, job, job.has_begun(&self.topology)))
            }
            Phase::Offered(offer) => WaitCause::Answer {
                worker: offer.worker,
                within: offer.deadline.since(now),
            },
            Phase::Running(attempt) => WaitCause::Attempt {
                worker: attempt.worker,
                progress: attempt.progress.clone(),
                within: attempt.deadline.since(now),
            },
            Phase::Blocked { .. } | Phase::Done { .. } | Phase::Cached { .. } => match job.retry_at(stage) {
                Some(at) => WaitCause::Backoff {
                    failures: job.run(stage).failures,
                    limit: self.topology.spec(stage).max_attempts,
                    within: at.since(now),
                    failure: job.run(stage).last_failure().cloned(),
                },
                None => WaitCause::Inputs {
                    stages: self.missing_inputs(job, stage),
                },
            },
        }
    }

    fn missing_inputs(&self, job: &Job, stage: StageIndex) -> Vec<StageName> {
        let missing = job.links(&self.topology, stage).filter(|link| !job.has_input(link));
        missing.map(|link| self.topology.name(link.from).clone()).collect()
    }

    fn queue_cause(&self, job: &Job, stage: StageIndex, rank: Rank) -> WaitCause {
        if self.draining {
            return WaitCause::Draining;
        }
        let queue = &self.index.queues[stage.get()];
        let Position { ahead, others } = self.position(job, stage, &rank);
        if self.paused && rank.new {
            return WaitCause::Paused { ahead, others };
        }
        let pool = queue.pool;
        if pool.workers == 0 {
            return self.missing_ranks(stage).unwrap_or(WaitCause::NoWorker {
                away: pool.away,
                draining: pool.draining,
            });
        }
        if !self.has_credit(stage) {
            return WaitCause::Credit {
                ahead,
                others,
                held: queue.held,
                limit: self.topology.spec(stage).max_held,
            };
        }
        if let Some((first, ..)) = self.first_job(stage)
            && let Some(credit) = self.byte_credit()
            && !self.has_bytes(stage, &first)
        {
            return WaitCause::Bytes {
                ahead,
                others,
                needed: ByteCount(self.bytes_needed(stage, &first)),
                free: credit.free,
                reserved: credit.reserved,
                held: credit.held,
                advertised: credit.advertised,
            };
        }
        if !queue.free.is_empty() {
            return WaitCause::Dispatch { ahead, others };
        }
        let paused = queue
            .paused
            .iter()
            .rev()
            .filter_map(|(_, worker)| self.workers.get(worker));
        WaitCause::Slot {
            ahead,
            others,
            advertised: pool.advertised,
            running: pool.running,
            reserved: pool.reserved,
            stopping: pool.stopping,
            paused: pool.paused,
            declined: paused.filter_map(|worker| worker.declined.as_deref().cloned()).next(),
        }
    }
}
