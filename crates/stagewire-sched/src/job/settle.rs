//! What follows for a job from its own state: each step is an event, and a settled job has none left.

use stagewire_core::{ErrorClass, Failure, PayloadId, Timestamp};

use super::{Job, JobState, Losses, Output, Phase, StageRun, StageSet};
use crate::topology::{StageIndex, Topology};
use crate::{Event, Limits, OfferEnd, Outcome};

impl Job {
    /// The next thing that must happen, given how many of its superseded attempts have not stopped yet.
    pub(crate) fn next_step(&self, topology: &Topology, limits: &Limits, stopping: u32) -> Option<Event> {
        match &self.state {
            JobState::Ended { .. } => None,
            JobState::Cancelling { .. } => {
                let failure = || Failure::new(ErrorClass::Cancelled, "job.cancelled", self.says("was cancelled"));
                let end = || (stopping == 0).then(|| self.end(Outcome::Cancelled));
                self.wind_down(failure).or_else(end)
            }
            JobState::Active => match self.verdict(topology, limits) {
                Some(failure) => Some(self.fail(failure)),
                None => self
                    .fence(topology)
                    .or_else(|| self.release(topology))
                    .or_else(|| self.skip(topology))
                    .or_else(|| self.reopen(topology))
                    .or_else(|| self.succeed()),
            },
        }
    }

    /// The next thing on the way to failing.
    pub(crate) fn fail(&self, failure: Failure) -> Event {
        let revoked = || {
            let what = format!(
                "failed, and with it ends whatever still runs of it: {}",
                failure.message
            );
            Failure::new(ErrorClass::Cancelled, "job.failed", self.says(&what))
        };
        self.wind_down(revoked)
            .unwrap_or_else(|| self.end(Outcome::Failed(failure)))
    }

    fn end(&self, outcome: Outcome) -> Event {
        Event::JobEnded { job: self.id, outcome }
    }

    /// Takes back offers, attempts and payloads of a job that is going to end.
    fn wind_down(&self, failure: impl Fn() -> Failure) -> Option<Event> {
        self.stages
            .iter()
            .find_map(|run| match (&run.phase, run.payloads().next()) {
                (Phase::Offered(offer), _) => Some(Event::OfferEnded {
                    token: offer.token,
                    end: OfferEnd::Withdrawn,
                }),
                (Phase::Running(attempt), _) => Some(Event::AttemptFenced {
                    token: attempt.token,
                    failure: failure(),
                }),
                (_, Some((payload, ..))) => Some(self.let_go(run, payload.id)),
                _ => None,
            })
    }

    /// Why the job must not be tried again.
    fn verdict(&self, topology: &Topology, limits: &Limits) -> Option<Failure> {
        for stage in topology.indices() {
            let (run, spec) = (self.run(stage), topology.spec(stage));
            if run.failures >= spec.max_attempts {
                let otherwise = || {
                    let message = self.says(&format!("failed {} times in stage {}", run.failures, run.name));
                    Failure::new(ErrorClass::Internal, "job.failures", message)
                };
                return Some(run.last_failure().cloned().unwrap_or_else(otherwise));
            }
        }
        let losses = self.losses;
        let of = |count: u32, limit: u32| (count >= limit).then_some(count);
        if let Some(count) = of(losses.killed_workers, limits.max_killed_workers) {
            let message = self.says(&format!(
                "was running on {count} workers that died, and is not tried on another; their logs may say why: often \
                 memory, or a crash in native code"
            ));
            return Some(Failure::new(ErrorClass::Internal, "job.killed_workers", message));
        }
        if let Some(count) = of(losses.expired, limits.max_expired) {
            let message = self.says(&format!(
                "had {count} attempts that fell silent or stopped, and is not tried again; see the logs of its workers, \
                 and raise \"no-progress\" of a stage whose steps are long"
            ));
            return Some(Failure::new(ErrorClass::Deadline, "job.attempts_expired", message));
        }
        let count = of(losses.lost_inputs, limits.max_lost_inputs)?;
        let message = self.says(&format!(
            "could not read its inputs {count} times, and is not tried again; can its workers reach each other?"
        ));
        Some(Failure::new(ErrorClass::Unavailable, "job.inputs_lost", message))
    }

    /// Whether anything has happened to it that may end it: an attempt that failed, or was lost.
    pub(crate) fn has_stumbled(&self) -> bool {
        let Losses {
            killed_workers,
            expired,
            lost_inputs,
            unaccepted: _,
        } = self.losses;
        let lost = [killed_workers, expired, lost_inputs].iter().any(|count| *count > 0);
        lost || self.stages.iter().any(|run| run.failures > 0)
    }

    /// Takes back what reads, or makes, a payload that will never be complete, and offers whose input is gone.
    fn fence(&self, topology: &Topology) -> Option<Event> {
        topology.indices().find_map(|stage| match &self.run(stage).phase {
            Phase::Offered(offer) => {
                let gone = self.links(topology, stage).zip(&offer.inputs).any(|(link, payload)| {
                    self.run(link.from).output.live().is_none_or(|live| live.id != *payload)
                });
                let resumes = self.run(stage).checkpoint().map(|kept| kept.payload.id);
                let gone = gone || offer.resumed.map(|resumed| resumed.payload) != resumes;
                gone.then_some(Event::OfferEnded {
                    token: offer.token,
                    end: OfferEnd::Withdrawn,
                })
            }
            Phase::Running(attempt) => {
                let void = |output: &Output, wanted| {
                    matches!(output, Output::Gone { payload, sealed: false } if wanted == Some(*payload))
                };
                let own = match self.run(stage).output {
                    Output::Gone { payload, .. } => Some((stage, payload)),
                    Output::None | Output::Live(_) | Output::Shared(_) => None,
                };
                let input = self.links(topology, stage).zip(&attempt.inputs).find_map(|(link, payload)| {
                    void(&self.run(link.from).output, Some(*payload)).then_some((link.from, *payload))
                });
                let (producer, payload) = own.or(input)?;
                let message = format!(
                    "payload {payload} of stage {} is gone before it was complete: attempt {} of stage {} cannot end well",
                    topology.name(producer),
                    attempt.token,
                    topology.name(stage)
                );
                let failure = Failure::new(ErrorClass::Fenced, "payload.void", message);
                Some(Event::AttemptFenced {
                    token: attempt.token,
                    failure,
                })
            }
            _ => None,
        })
    }

    /// Lets go of a payload that nobody can need any more.
    fn release(&self, topology: &Topology) -> Option<Event> {
        let safe = self.safe_stages(topology);
        topology.indices().find_map(|stage| {
            let run = self.run(stage);
            let needless = run.phase.is_done() || !topology.spec(stage).checkpoint;
            if let Some(kept) = run.checkpoint().filter(|_| needless) {
                return Some(self.let_go(run, kept.payload.id));
            }
            let payload = run.output.live().filter(|_| run.phase.is_done())?;
            let mut consumers = topology.consumers(stage).iter();
            let consumed = consumers.all(|consumer| safe.has(*consumer));
            consumed.then(|| self.let_go(run, payload.id))
        })
    }

    /// Lets go of this payload of a stage. What is kept for others stays.
    fn let_go(&self, run: &StageRun, payload: PayloadId) -> Event {
        let (job, stage) = (self.id, run.name.clone());
        match &run.output {
            Output::Shared(shared) if shared.payload.id == payload => Event::SharedLeft { job, stage, payload },
            _ => Event::PayloadReleased { job, stage, payload },
        }
    }

    /// Stages that need their inputs no more: those that are done, where what they made is a result, is in a store, or is
    /// itself needed no more.
    fn safe_stages(&self, topology: &Topology) -> StageSet {
        let mut safe = StageSet::default();
        for stage in topology.upstream_first().iter().rev().copied() {
            let run = self.run(stage);
            let output_safe = match run.output.live() {
                Some(payload) => payload.stored,
                None => topology.consumers(stage).iter().all(|consumer| safe.has(*consumer)),
            };
            if self.skips(stage) || (run.phase.is_done() && output_safe) {
                safe = safe.with(stage);
            }
        }
        safe
    }

    /// Closes a stage whose consumers are all done without it.
    fn skip(&self, topology: &Topology) -> Option<Event> {
        topology.indices().find_map(|stage| {
            let run = self.run(stage);
            let consumers = topology.consumers(stage);
            let served = consumers.iter().all(|consumer| self.run(*consumer).phase.is_done());
            (run.phase.is_idle() && served && !consumers.is_empty()).then(|| Event::StageSkipped {
                job: self.id,
                stage: run.name.clone(),
            })
        })
    }

    /// Runs a stage again whose output is gone while a consumer that has not begun waits for it.
    fn reopen(&self, topology: &Topology) -> Option<Event> {
        topology.indices().find_map(|stage| {
            let run = self.run(stage);
            let gone = run.phase.is_done() && run.output.live().is_none() && !self.skips(stage);
            let mut consumers = topology.consumers(stage).iter();
            let needed = gone && consumers.any(|consumer| self.run(*consumer).phase.is_idle());
            needed.then(|| Event::StageReopened {
                job: self.id,
                stage: run.name.clone(),
            })
        })
    }

    fn succeed(&self) -> Option<Event> {
        let done = self.stages.iter().all(|run| run.phase.is_done());
        done.then(|| self.end(Outcome::Succeeded))
    }

    fn says(&self, what: &str) -> String {
        format!("job {} {what}", self.id)
    }

    /// When the job is dropped, unless it has begun.
    pub(crate) fn drop_deadline(&self, begun: bool) -> Option<Timestamp> {
        self.due().filter(|_| self.state == JobState::Active && !begun)
    }

    /// Whether the first attempt at a stage of kind admission, which is where the work is, was granted; where the job
    /// needs no such stage, whether any attempt was.
    pub(crate) fn has_begun(&self, topology: &Topology) -> bool {
        let begun = |stage: StageIndex| match self.run(stage).phase {
            Phase::Running(_) | Phase::Done { token: Some(_), .. } => true,
            Phase::Blocked { again, .. } | Phase::Queued { again, .. } => again,
            Phase::Offered(ref offer) => offer.again,
            Phase::Done { token: None, .. } | Phase::Cached { .. } => false,
        };
        let heavy = topology.admission().without(self.skipped);
        let counts = |stage: &StageIndex| heavy.is_empty() || heavy.has(*stage);
        topology.indices().filter(counts).any(begun)
    }

    /// When a job that is being cancelled is cancelled at the latest.
    pub(crate) fn cancel_deadline(&self, limits: &Limits) -> Option<Timestamp> {
        match self.state {
            JobState::Cancelling { since } => Some(since + limits.cancel),
            JobState::Active | JobState::Ended { .. } => None,
        }
    }
}
