//! How fast jobs end: when it is worth asking again where the queue is full.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Ends of jobs that count.
const ENDS: usize = 32;
/// Shortest and longest that anybody is told to wait, in seconds.
const BOUNDS: (u64, u64) = (1, 300);
/// What is said before any job has ended, in seconds.
const UNKNOWN: u64 = 5;

/// When jobs ended last.
#[derive(Debug, Default)]
pub(crate) struct Pace(Mutex<VecDeque<Instant>>);

impl Pace {
    /// A job has ended.
    pub(crate) fn ended(&self, at: Instant) {
        let mut ends = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if ends.len() == ENDS {
            ends.pop_front();
        }
        ends.push_back(at);
    }

    /// Seconds in which one more job is expected to end: the mean over the last ends, the silence since then included.
    pub(crate) fn next_end(&self, now: Instant) -> u64 {
        let ends = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(first) = ends.front() else {
            return UNKNOWN;
        };
        let count = u32::try_from(ends.len()).expect("a few");
        let mean = now.saturating_duration_since(*first) / count;
        let seconds = mean.as_secs() + u64::from(mean.subsec_nanos() > 0);
        seconds.clamp(BOUNDS.0, BOUNDS.1)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn it_follows_how_fast_jobs_end() {
        let pace = Pace::default();
        let begin = Instant::now();
        let at = |seconds: f64| begin + Duration::from_secs_f64(seconds);
        assert_eq!(pace.next_end(begin), UNKNOWN);
        pace.ended(begin);
        assert_eq!(pace.next_end(begin), 1, "never 0");
        for n in 1..=100 {
            pace.ended(at(7.5 * f64::from(n)));
        }
        assert_eq!(pace.next_end(at(750.0 + 7.5)), 8, "one every 7.5 s");
        for n in 1..=100 {
            pace.ended(at(750.0 + 0.1 * f64::from(n)));
        }
        assert_eq!(pace.next_end(at(760.1)), 1, "faster now");
        assert_eq!(pace.next_end(at(760.0 + 640.0)), 21, "and they have stopped");
        assert_eq!(pace.next_end(at(1e6)), 300);
    }
}
