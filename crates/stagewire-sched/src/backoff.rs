//! How long a stage of a job waits after a failure before it is tried again.

use std::time::Duration;

use stagewire_core::Token;

/// The waits after the failures of a stage: they double from one to the next, up to a bound.
///
/// Between half and all of it is waited, which differs from job to job: what failed together does not come back together.
/// It follows from the token of the attempt that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff {
    /// After the first failure, at most.
    pub first: Duration,
    /// After any failure, at most.
    pub longest: Duration,
}

impl Default for Backoff {
    /// 1 s, up to a minute.
    fn default() -> Self {
        Self {
            first: Duration::from_secs(1),
            longest: Duration::from_mins(1),
        }
    }
}

impl Backoff {
    /// How long to wait after so many failures, of which this attempt was the last.
    pub(crate) fn after(self, failures: u32, token: Token) -> Duration {
        let doubled = self.first.saturating_mul(1 << failures.saturating_sub(1).min(31));
        let most = u64::try_from(doubled.min(self.longest).as_nanos()).unwrap_or(u64::MAX);
        let half = most / 2;
        Duration::from_nanos(half + draw(token) % (most - half + 1))
    }
}

/// A number that depends on every bit of the token.
fn draw(token: Token) -> u64 {
    let (low, high) = token.job.0.as_u64_pair();
    [low, high, token.epoch.0, token.attempt.0.into()]
        .into_iter()
        .fold(0, |state, part| mix(state ^ part))
}

/// The finalizer of SplitMix64 (Steele, Lea and Flood: "Fast splittable pseudorandom number generators", 2014).
const fn mix(state: u64) -> u64 {
    let z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use stagewire_core::{Attempt, Epoch, JobId};

    use super::*;

    fn token(job: u128) -> Token {
        Token {
            epoch: Epoch(1),
            job: JobId(uuid::Uuid::from_u128(job)),
            attempt: Attempt(1),
        }
    }

    #[test]
    fn waits_double_up_to_the_bound() {
        let backoff = Backoff {
            first: Duration::from_secs(1),
            longest: Duration::from_secs(10),
        };
        for (failures, most) in [(1, 1), (2, 2), (3, 4), (4, 8), (5, 10), (40, 10), (u32::MAX, 10)] {
            let most = Duration::from_secs(most);
            for job in 0..100 {
                let wait = backoff.after(failures, token(job));
                assert!((most / 2..=most).contains(&wait), "{wait:?} after {failures} failures");
            }
        }
    }

    #[test]
    fn what_fails_together_does_not_come_back_together() {
        let backoff = Backoff::default();
        let waits: Vec<_> = (0..1000).map(|job| backoff.after(1, token(job)).as_millis()).collect();
        for hundred in (500..1000).step_by(100) {
            let back = waits
                .iter()
                .filter(|wait| (hundred..hundred + 100).contains(*wait))
                .count();
            assert!(
                (150..250).contains(&back),
                "{back} come back in the 100 ms from {hundred} ms on"
            );
        }
        assert_eq!(
            backoff.after(3, token(7)),
            backoff.after(3, token(7)),
            "the same attempt waits as long"
        );
    }

    #[test]
    fn no_bound_is_too_large_or_too_small() {
        let backoff = Backoff {
            first: Duration::MAX,
            longest: Duration::MAX,
        };
        assert!(backoff.after(9, token(1)) > Duration::from_secs(1 << 32));
        let none = Backoff {
            first: Duration::ZERO,
            longest: Duration::ZERO,
        };
        assert_eq!(none.after(9, token(1)), Duration::ZERO);
    }
}
