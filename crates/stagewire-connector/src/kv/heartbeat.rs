use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// How the two sides notice each other's silence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heartbeat {
    /// Time in which a peer lets hear of itself, at least 4 ms. Of two sides, the shorter one holds for what the receiver
    /// sends.
    pub interval: Duration,
    /// How many such times may pass in silence before the next one is the last.
    pub misses: u32,
}

/// Shorter intervals are as long as this.
const SHORTEST: Duration = Duration::from_millis(4);
/// Parts of an interval in which silence is counted.
const PARTS: u32 = 4;
/// The longest part: silence is noticed that much late.
const LONGEST: Duration = Duration::from_millis(250);

impl Default for Heartbeat {
    /// Two seconds, two misses.
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(2),
            misses: 2,
        }
    }
}

impl Heartbeat {
    /// Silence after which a peer counts as gone, give or take a second.
    pub fn limit(&self) -> Duration {
        let interval = self.interval.max(SHORTEST);
        interval.saturating_mul(self.misses.saturating_add(1))
    }

    /// How often silence is counted.
    pub(super) fn part(&self) -> Duration {
        (self.interval.max(SHORTEST) / PARTS).min(LONGEST)
    }

    /// Pause between two signs of life for a peer that wants to hear one each `theirs`.
    pub(super) fn pause(&self, theirs: Duration) -> Duration {
        self.interval.min(theirs).max(SHORTEST) / 2
    }
}

/// Counts how long nothing was heard of a peer, in parts of an interval. A process that was stopped itself finds one part
/// when it goes on, however long that was, and does not blame its peers.
#[derive(Debug, Default)]
pub(super) struct Silence(AtomicU32);

impl Silence {
    pub(super) fn heard(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    /// Another part has passed. True where that is too long.
    pub(super) fn goes_on(&self, heartbeat: &Heartbeat) -> bool {
        let parts = self.0.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        heartbeat.part().saturating_mul(parts) > heartbeat.limit()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_ends_by_any_word() {
        let heartbeat = Heartbeat {
            interval: Duration::from_secs(1),
            misses: 1,
        };
        assert_eq!(heartbeat.limit(), Duration::from_secs(2));
        let silence = Silence::default();
        for _ in 0..8 {
            assert!(!silence.goes_on(&heartbeat));
        }
        assert!(silence.goes_on(&heartbeat));
        silence.heard();
        assert!(!silence.goes_on(&heartbeat));
    }

    #[test]
    fn any_interval_is_counted_in_time_and_none_spins() {
        for millis in [0, 1, 10, 1_000, 5_000, 60_000] {
            let interval = Duration::from_millis(millis);
            let heartbeat = Heartbeat { interval, misses: 2 };
            let silence = Silence::default();
            let mut waited = Duration::ZERO;
            loop {
                waited += heartbeat.part();
                if silence.goes_on(&heartbeat) {
                    break;
                }
            }
            assert!(waited > heartbeat.limit(), "{interval:?}");
            assert!(
                waited <= heartbeat.limit() + Duration::from_millis(250),
                "{interval:?}: {waited:?}"
            );
            for theirs in [Duration::ZERO, interval, Duration::MAX] {
                assert!(heartbeat.pause(theirs) >= Duration::from_millis(1));
            }
        }
    }
}
