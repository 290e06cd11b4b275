use std::time::Duration;

/// How long to wait before a worker is started again: half a second, doubled with every death, at most 30 seconds.
/// A life that lasted counts as a new beginning.
#[derive(Debug, Default)]
pub(super) struct Backoff {
    deaths: u32,
}

const FIRST: Duration = Duration::from_millis(500);
const LONGEST: Duration = Duration::from_secs(30);

/// A worker that was ready for so long did not die of its start.
const LASTED: Duration = Duration::from_secs(60);

impl Backoff {
    /// The wait after a life that was ready for `ready` (zero where it never was).
    pub(super) fn after(&mut self, ready: Duration) -> Duration {
        if ready >= LASTED {
            self.deaths = 0;
        }
        let wait = FIRST.saturating_mul(1 << self.deaths.min(10)).min(LONGEST);
        self.deaths += 1;
        wait
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_a_limit_and_start_over_after_a_long_life() {
        let mut backoff = Backoff::default();
        let waits: Vec<u128> = (0..9)
            .map(|_| backoff.after(Duration::from_secs(1)).as_millis())
            .collect();
        assert_eq!(waits, [500, 1000, 2000, 4000, 8000, 16000, 30000, 30000, 30000]);
        assert_eq!(backoff.after(LASTED), FIRST);
        assert_eq!(backoff.after(Duration::ZERO), 2 * FIRST);
    }
}
