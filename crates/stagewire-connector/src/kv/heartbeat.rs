use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// How the two sides notice each other's silence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heartbeat {
    /// Time in which a peer lets hear of itself. Of two sides, the shorter one holds for what the receiver sends.
    pub interval: Duration,
    /// How many such times may pass in silence before the next one is the last.
    pub misses: u32,
}

/// Parts of an interval in which silence is counted.
const PARTS: u32 = 4;

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
        self.interval.saturating_mul(self.misses.saturating_add(1))
    }

    /// How often silence is counted.
    pub(super) fn part(&self) -> Duration {
        self.interval.max(Duration::from_millis(4)) / PARTS
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
        parts > heartbeat.misses.saturating_add(1).saturating_mul(PARTS)
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
}
