use stagewire_core::{JobId, Timestamp};

use super::Sched;
use super::plan::Plan;
use crate::job::{JobState, Outcome};
use crate::{Decision, Event, Refusal};

impl Sched {
    /// Queued stages end at once, running ones are told; the job is cancelled when they have stopped.
    pub(super) fn cancel(&self, now: Timestamp, job: JobId) -> Result<Decision, Refusal> {
        let mut plan = Plan::new(self, now);
        let state = &self.jobs.get(&job).ok_or(Refusal::UnknownJob { job })?.state;
        match state {
            JobState::Active => plan.change(job, |plan| plan.push(Event::JobCancelling { job })),
            JobState::Cancelling { .. } => (),
            JobState::Ended { outcome, .. } if *outcome == Outcome::Cancelled => (),
            JobState::Ended { .. } => {
                let state = state.name();
                return Err(Refusal::JobEnded { job, state });
            }
        }
        Ok(plan.decision)
    }

    /// The attempts have not stopped in time; the job does not wait for them. Their slots do.
    pub(super) fn cancel_overdue(&self, now: Timestamp, job: JobId) -> Decision {
        let mut plan = Plan::new(self, now);
        plan.change(job, |job| job.stop_waiting());
        plan.decision
    }
}
