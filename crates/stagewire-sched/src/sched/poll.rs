use stagewire_core::Timestamp;

use super::Sched;
use crate::timers::{Due, Timer};
use crate::{Decision, Event};

impl Sched {
    /// The next thing that is due: a deadline that has passed, then what a worker brought back in vain, then a dead letter
    /// or an ended job too many, then what is kept for several jobs, then an offer. One thing each time, so that a decision stays small.
    pub(super) fn poll(&self, now: Timestamp) -> Decision {
        if let Some((deadline, due)) = self.index.timers.first()
            && deadline <= now
        {
            return match due {
                Due::Stop(worker, token) => self.evict(now, worker, token),
                Due::Timer(timer) => self.due(now, timer),
            };
        }
        self.settle_holdings()
            .or_else(|| self.discard_one())
            .or_else(|| self.forget_one())
            .or_else(|| self.cache_step(now))
            .or_else(|| self.dispatch(now))
            .or_else(|| self.preempt(now))
            .unwrap_or_default()
    }

    fn due(&self, now: Timestamp, timer: Timer) -> Decision {
        match timer {
            Timer::Away(worker) => self.worker_away_too_long(now, worker),
            Timer::Resume(worker) => Decision {
                events: vec![Event::WorkerResumed { worker }],
                ..Decision::default()
            },
            Timer::Drain(worker) => self.drain_overdue(now, worker),
            Timer::Offer(job, stage) => self.offer_unanswered(now, job, stage),
            Timer::Attempt(job, stage) => self.attempt_expired(now, job, stage),
            Timer::Retry(job, stage) => self.retry(now, job, stage),
            Timer::Cancel(job) => self.cancel_overdue(now, job),
            Timer::Drop(job) => self.drop_late(now, job),
        }
    }
}
