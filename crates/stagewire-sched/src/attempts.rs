//! What became of the attempts of a job.

use std::collections::VecDeque;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use stagewire_core::{Failure, Incarnation, StageName, Timestamp, Token};

use crate::job::{Job, Phase};
use crate::{Event, Loss};

/// Attempts that a log holds; older ones are dropped and counted.
const LONGEST: usize = 32;
/// Bytes of a failure's message that a log keeps.
const MESSAGE: usize = 512;

/// The attempts of a job that have ended, the first to end first: the last 32 of them.
///
/// It stays when the job is redriven, and costs a job without attempts nothing. It is written where events are applied and
/// not where they are decided, so that the copies of the job which a decision works on share it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct AttemptLog {
    ended: Arc<VecDeque<EndedAttempt>>,
    dropped: u32,
}

/// An attempt that has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndedAttempt {
    /// Its token.
    pub token: Token,
    /// The stage.
    pub stage: StageName,
    /// Who ran it.
    pub worker: Incarnation,
    /// That worker's name for people.
    pub name: Arc<str>,
    /// When it was granted.
    pub began: Timestamp,
    /// When it ended.
    pub ended: Timestamp,
    /// How.
    pub end: AttemptEnd,
}

/// How an attempt ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the fields are what the sentence above them names")]
pub enum AttemptEnd {
    /// Its output was accepted.
    Completed,
    /// It failed, which counts against its stage.
    Failed(Failure),
    /// It was lost, which does not.
    Lost { loss: Loss, failure: Failure },
    /// It was revoked.
    Fenced(Failure),
    /// It stopped at a step boundary, for this reason, and the next one goes on from there.
    Yielded(Failure),
}

impl EndedAttempt {
    /// The attempt that the event ends, while it still runs.
    pub(crate) fn of(job: &Job, at: Timestamp, token: Token, event: &Event) -> Option<Self> {
        let run = job.run(job.find(token)?);
        let Phase::Running(attempt) = &run.phase else {
            return None;
        };
        Some(Self {
            token,
            stage: run.name.clone(),
            worker: attempt.worker,
            name: Arc::clone(&attempt.name),
            began: attempt.since,
            ended: at,
            end: AttemptEnd::of(event)?.shortened(),
        })
    }
}

impl AttemptEnd {
    /// How the event ends an attempt, if it does.
    fn of(event: &Event) -> Option<Self> {
        match event {
            Event::AttemptCompleted { .. } => Some(Self::Completed),
            Event::AttemptFailed { failure, .. } => Some(Self::Failed(failure.clone())),
            Event::AttemptLost { loss, failure, .. } => Some(Self::Lost {
                loss: *loss,
                failure: failure.clone(),
            }),
            Event::AttemptFenced { failure, .. } => Some(Self::Fenced(failure.clone())),
            Event::AttemptYielded { failure, .. } => Some(Self::Yielded(failure.clone())),
            _ => None,
        }
    }

    /// The end in one word: `completed`, `failed`, `fenced`, `yielded`, or what [`Loss::name`] says.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Failed(_) => "failed",
            Self::Lost { loss, .. } => loss.name(),
            Self::Fenced(_) => "fenced",
            Self::Yielded(_) => "yielded",
        }
    }

    /// Why it did not end well.
    pub const fn failure(&self) -> Option<&Failure> {
        match self {
            Self::Completed => None,
            Self::Failed(failure) | Self::Lost { failure, .. } | Self::Fenced(failure) | Self::Yielded(failure) => {
                Some(failure)
            }
        }
    }

    /// The same, with no more of the message than is kept.
    pub(crate) fn shortened(mut self) -> Self {
        if let Self::Failed(failure) | Self::Lost { failure, .. } | Self::Fenced(failure) | Self::Yielded(failure) =
            &mut self
            && failure.message.len() > MESSAGE
        {
            failure.message.truncate(failure.message.floor_char_boundary(MESSAGE));
            failure.message.push('…');
        }
        self
    }
}

impl AttemptLog {
    /// The attempts that are kept, the first to end first.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &EndedAttempt> + ExactSizeIterator {
        self.ended.iter()
    }

    /// Number of older ones that are not kept.
    pub const fn dropped(&self) -> u32 {
        self.dropped
    }

    pub(crate) fn push(&mut self, attempt: EndedAttempt) {
        let ended = Arc::make_mut(&mut self.ended);
        if ended.len() >= LONGEST {
            ended.pop_front();
            self.dropped = self.dropped.saturating_add(1);
        }
        ended.push_back(attempt);
    }
}

#[cfg(test)]
mod tests {
    use stagewire_core::{Attempt, Epoch, ErrorClass, JobId};
    use uuid::Uuid;

    use super::*;

    fn attempt(number: u32, message: &str) -> EndedAttempt {
        EndedAttempt {
            token: Token {
                epoch: Epoch(1),
                job: JobId(Uuid::from_u128(1)),
                attempt: Attempt(number),
            },
            stage: StageName::new("paint").expect("a name"),
            worker: Incarnation(Uuid::from_u128(2)),
            name: "paint-0".into(),
            began: Timestamp(1),
            ended: Timestamp(2),
            end: AttemptEnd::Failed(Failure::new(ErrorClass::Internal, "test", message)).shortened(),
        }
    }

    #[test]
    fn a_log_is_bounded_and_says_what_it_dropped() {
        let mut log = AttemptLog::default();
        for number in 1..=40 {
            log.push(attempt(number, "wrong"));
        }
        assert_eq!((log.iter().len(), log.dropped()), (32, 8));
        assert_eq!(log.iter().next().map(|attempt| attempt.token.attempt), Some(Attempt(9)));
    }

    #[test]
    fn long_messages_are_cut_where_a_character_ends() {
        let ended = attempt(1, &"é".repeat(400));
        let message = &ended.end.failure().expect("it failed").message;
        assert_eq!(message.chars().count(), 257, "{message}");
        assert!(message.ends_with("é…"));
    }
}
