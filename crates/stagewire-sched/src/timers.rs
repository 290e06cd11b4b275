use std::collections::BTreeSet;

use stagewire_core::{Incarnation, JobId, Timestamp, Token};

use crate::topology::StageIndex;

/// What is due at a deadline. At the same time the loss of a worker comes before the loss of its attempts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Timer {
    /// A worker has been away for too long.
    Away(Incarnation),
    /// A worker has not stopped an attempt.
    Stop(Incarnation, Token),
    /// A worker gets offers again.
    Resume(Incarnation),
    /// An offer was not answered.
    Offer(JobId, StageIndex),
    /// An attempt was not renewed, or made no progress.
    Attempt(JobId, StageIndex),
    /// The attempts of a job that is being cancelled have not stopped.
    Cancel(JobId),
    /// A job has not begun.
    Drop(JobId),
}

impl Timer {
    /// For people who wonder why the server woke up.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Away(_) => "worker.away",
            Self::Stop(..) => "attempt.stop",
            Self::Resume(_) => "worker.resume",
            Self::Offer(..) => "offer.answer",
            Self::Attempt(..) => "attempt.renewal",
            Self::Cancel(_) => "job.cancel",
            Self::Drop(_) => "job.queue_deadline",
        }
    }
}

/// All deadlines, in order. Whoever sets one takes it back: it is kept nowhere else.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Timers(BTreeSet<(Timestamp, Timer)>);

impl Timers {
    pub(crate) fn first(&self) -> Option<(Timestamp, Timer)> {
        self.0.first().copied()
    }

    pub(crate) fn set(&mut self, deadline: Option<Timestamp>, timer: Timer) {
        if let Some(deadline) = deadline {
            self.0.insert((deadline, timer));
        }
    }

    pub(crate) fn clear(&mut self, deadline: Option<Timestamp>, timer: Timer) {
        if let Some(deadline) = deadline {
            self.0.remove(&(deadline, timer));
        }
    }
}
