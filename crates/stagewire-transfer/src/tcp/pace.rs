//! A bound on the bytes per second that this process sends on lanes.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use stagewire_core::ByteCount;
use tokio::time::{Instant, sleep_until};

/// So much sending time may be made up for: what late timers of a busy machine cost, not more.
const BURST: Duration = Duration::from_millis(50);

/// Whoever sends waits for its turn here, so that all lanes together keep the bound.
#[derive(Debug)]
pub(crate) struct Pace {
    limit: Option<Limit>,
}

#[derive(Debug)]
struct Limit {
    bytes_per_second: u64,
    /// When what was granted so far has been sent, at that rate.
    done: Mutex<Instant>,
}

impl Pace {
    pub(crate) fn new(bytes_per_second: Option<ByteCount>) -> Self {
        let limit = bytes_per_second.map(|rate| Limit {
            bytes_per_second: rate.0.max(1),
            done: Mutex::new(Instant::now()),
        });
        Self { limit }
    }

    /// Waits until some of `wanted` bytes may be sent, and tells how many.
    ///
    /// # Cancel safety
    /// A dropped turn is lost: the others wait as if its bytes had been sent.
    pub(crate) async fn turn(&self, wanted: usize) -> usize {
        let Some(limit) = &self.limit else {
            return wanted;
        };
        let (bytes, begin) = limit.grant(wanted, Instant::now());
        sleep_until(begin).await;
        bytes
    }
}

impl Limit {
    /// How many bytes may be sent, and when sending them may begin.
    fn grant(&self, wanted: usize, now: Instant) -> (usize, Instant) {
        let quantum = usize::try_from(self.bytes_per_second / 100).unwrap_or(usize::MAX);
        let bytes = wanted.min(quantum.clamp(1 << 10, 1 << 20));
        let takes = Duration::from_nanos((bytes as u128 * 1_000_000_000 / u128::from(self.bytes_per_second)) as u64);
        let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        let earliest = now.checked_sub(BURST).unwrap_or(*done);
        let begin = (*done).max(earliest);
        *done = begin + takes;
        (bytes, begin)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Time that passes until so many bytes were granted to somebody who waits for each grant.
    fn takes(limit: &Limit, mut bytes: usize, begun: Instant) -> Duration {
        let mut now = begun;
        while bytes > 0 {
            let (granted, begin) = limit.grant(bytes, now);
            bytes -= granted;
            now = now.max(begin);
        }
        now - begun
    }

    #[test]
    fn bytes_take_their_time_and_idle_time_is_not_saved_up() {
        for rate in [1_000_000, 5_000_000_000] {
            let pace = Pace::new(Some(ByteCount(rate)));
            let limit = pace.limit.as_ref().expect("a bound");
            for idle in [Duration::ZERO, Duration::from_secs(60)] {
                let begun = Instant::now() + idle;
                let took = takes(limit, 2 * rate as usize, begun).as_secs_f64();
                assert!((1.9..2.05).contains(&took), "{took} s at {rate}");
            }
        }
    }

    #[test]
    fn all_who_send_share_the_bound() {
        let pace = Pace::new(Some(ByteCount(1_000_000)));
        let limit = pace.limit.as_ref().expect("a bound");
        let now = Instant::now();
        let last = (0..200).map(|_| limit.grant(10_000, now).1).max().expect("some");
        let took = (last - now).as_secs_f64();
        assert!((1.9..2.1).contains(&took), "{took} s");
    }

    #[tokio::test]
    async fn without_a_bound_nothing_waits() {
        assert_eq!(Pace::new(None).turn(1 << 40).await, 1 << 40);
    }
}
