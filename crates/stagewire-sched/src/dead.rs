//! Jobs that failed for good and that somebody may want to have tried again.

use serde::{Deserialize, Serialize};
use stagewire_core::{Failure, Timestamp};

use crate::{Job, JobState, Outcome};

/// A job that failed for good. It is kept, with its inputs, until it is redriven or discarded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeadLetter<'a> {
    /// The job.
    pub job: &'a Job,
    /// Why it failed.
    pub failure: &'a Failure,
    /// What of: a closed set.
    pub cause: DeathCause,
    /// When.
    pub died: Timestamp,
}

/// What a job died of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum DeathCause {
    /// A stage failed as often as it may, or in a way that does not pass.
    Failed,
    /// It is in quarantine: too many workers died while they ran it.
    KilledWorkers,
    /// Too many of its attempts fell silent or stopped.
    Expired,
    /// Its inputs could not be read too many times.
    InputsLost,
}

impl DeathCause {
    /// In one word, as in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Failed => "failed",
            Self::KilledWorkers => "killed_workers",
            Self::Expired => "expired",
            Self::InputsLost => "inputs_lost",
        }
    }

    /// Reason of the failure that a job gets for its losses.
    pub(crate) const fn reason(self) -> Option<&'static str> {
        match self {
            Self::Failed => None,
            Self::KilledWorkers => Some("job.killed_workers"),
            Self::Expired => Some("job.attempts_expired"),
            Self::InputsLost => Some("job.inputs_lost"),
        }
    }

    fn of(failure: &Failure) -> Self {
        let is_it = |cause: &Self| cause.reason() == Some(&*failure.reason);
        let losses = [Self::KilledWorkers, Self::Expired, Self::InputsLost];
        losses.into_iter().find(is_it).unwrap_or(Self::Failed)
    }
}

/// Why a dead letter is not kept any longer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Discard {
    /// Somebody asked for it.
    Asked,
    /// There are more of them than are kept, or their inputs take the room of others, and it died first.
    Crowded,
}

impl Outcome {
    /// Whether a job that ended so is a dead letter: it failed, and not because nobody waits for it any more.
    pub(crate) fn is_death(&self) -> bool {
        matches!(self, Self::Failed(failure) if failure.reason != "job.queue_deadline")
    }
}

impl Job {
    /// The job as a dead letter, where it is one.
    pub fn dead_letter(&self) -> Option<DeadLetter<'_>> {
        match &self.state {
            JobState::Ended {
                outcome: Outcome::Failed(failure),
                at,
            } if self.dead => Some(DeadLetter {
                job: self,
                failure,
                cause: DeathCause::of(failure),
                died: *at,
            }),
            _ => None,
        }
    }

    /// When it died, where it is a dead letter.
    pub(crate) fn died(&self) -> Option<Timestamp> {
        self.ended().filter(|_| self.dead)
    }
}
