use std::collections::BTreeSet;

use stagewire_core::{Incarnation, JobId, Timestamp, Token};

use crate::ranked::Ranked;
use crate::topology::StageIndex;

/// What is due first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Due {
    /// A worker has not stopped an attempt.
    Stop(Incarnation, Token),
    /// Something else.
    Timer(Timer),
}

impl Due {
    /// For people who wonder why the server woke up.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Stop(..) => "attempt.stop",
            Self::Timer(timer) => timer.name(),
        }
    }

    const fn is_away(self) -> bool {
        matches!(self, Self::Timer(Timer::Away(_)))
    }
}

/// What is due at a deadline. At the same time the loss of a worker comes before the loss of its attempts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Timer {
    /// A worker has been away for too long.
    Away(Incarnation),
    /// A worker gets offers again.
    Resume(Incarnation),
    /// A draining worker has had its time.
    Drain(Incarnation),
    /// An offer was not answered.
    Offer(JobId, StageIndex),
    /// An attempt was not renewed, or made no progress.
    Attempt(JobId, StageIndex),
    /// A stage has waited for long enough after a failure.
    Retry(JobId, StageIndex),
    /// The attempts of a job that is being cancelled have not stopped.
    Cancel(JobId),
    /// A job has not begun.
    Drop(JobId),
}

impl Timer {
    const fn name(self) -> &'static str {
        match self {
            Self::Away(_) => "worker.away",
            Self::Resume(_) => "worker.resume",
            Self::Drain(_) => "worker.drain",
            Self::Offer(..) => "offer.answer",
            Self::Attempt(..) => "attempt.renewal",
            Self::Retry(..) => "stage.retry",
            Self::Cancel(_) => "job.cancel",
            Self::Drop(_) => "job.queue_deadline",
        }
    }
}

fn sooner(one: Option<(Timestamp, Timer)>, other: Option<(Timestamp, Timer)>) -> Option<(Timestamp, Timer)> {
    match (one, other) {
        (Some(one), Some(other)) => Some(if other < one { other } else { one }),
        (one, other) => one.or(other),
    }
}

/// All deadlines, in order. Whoever sets one takes it back: it is kept nowhere else.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Timers {
    /// All but those below: often one for each job that waits.
    most: BTreeSet<(Timestamp, Timer)>,
    /// [`Timer::Offer`], which are few, as they are answered at once.
    offers: BTreeSet<(Timestamp, JobId, StageIndex)>,
    /// [`Timer::Attempt`], which are set anew with each renewal.
    attempts: Ranked<(Timestamp, JobId, StageIndex)>,
    /// [`Timer::Stop`], which are few, and long.
    stops: BTreeSet<(Timestamp, Incarnation, Token)>,
}

impl Timers {
    pub(crate) fn first(&self) -> Option<(Timestamp, Due)> {
        let stop = self
            .stops
            .first()
            .map(|(at, worker, token)| (*at, Due::Stop(*worker, *token)));
        let offer = self.offers.first();
        let offer = offer.map(|(at, job, stage)| (*at, Timer::Offer(*job, *stage)));
        let attempt = self.attempts.first();
        let attempt = attempt.map(|(at, job, stage)| (*at, Timer::Attempt(*job, *stage)));
        let most = sooner(self.most.first().copied(), sooner(offer, attempt));
        let most = most.map(|(at, timer)| (at, Due::Timer(timer)));
        match (stop, most) {
            // What a worker does not stop comes after its loss, and before all the rest.
            (Some(stop), Some(most)) if most.0 < stop.0 || (most.0 == stop.0 && most.1.is_away()) => Some(most),
            (stop, most) => stop.or(most),
        }
    }

    pub(crate) fn set(&mut self, deadline: Option<Timestamp>, timer: Timer) {
        match (deadline, timer) {
            (Some(deadline), Timer::Offer(job, stage)) => _ = self.offers.insert((deadline, job, stage)),
            (Some(deadline), Timer::Attempt(job, stage)) => _ = self.attempts.insert((deadline, job, stage)),
            (Some(deadline), timer) => _ = self.most.insert((deadline, timer)),
            (None, _) => (),
        }
    }

    pub(crate) fn clear(&mut self, deadline: Option<Timestamp>, timer: Timer) {
        match (deadline, timer) {
            (Some(deadline), Timer::Offer(job, stage)) => _ = self.offers.remove(&(deadline, job, stage)),
            (Some(deadline), Timer::Attempt(job, stage)) => _ = self.attempts.remove(&(deadline, job, stage)),
            (Some(deadline), timer) => _ = self.most.remove(&(deadline, timer)),
            (None, _) => (),
        }
    }

    pub(crate) fn set_stop(&mut self, deadline: Option<Timestamp>, worker: Incarnation, token: Token) {
        if let Some(deadline) = deadline {
            self.stops.insert((deadline, worker, token));
        }
    }

    pub(crate) fn clear_stop(&mut self, deadline: Option<Timestamp>, worker: Incarnation, token: Token) {
        if let Some(deadline) = deadline {
            self.stops.remove(&(deadline, worker, token));
        }
    }
}
