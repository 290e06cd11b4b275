//! The server's clock: starts at the wall clock and then never jumps.

use std::time::{Duration, Instant, SystemTime};

use stagewire_core::Timestamp;

/// Nanoseconds since the Unix epoch that only grow, whatever happens to the wall clock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clock {
    wall: Timestamp,
    begin: Instant,
}

impl Clock {
    /// A clock that is not behind `floor`, the time of the last thing that is remembered.
    pub(crate) fn not_before(floor: Timestamp) -> Self {
        let wall = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        let wall = Timestamp(u64::try_from(wall.as_nanos()).unwrap_or(u64::MAX));
        Self {
            wall: wall.max(floor),
            begin: Instant::now(),
        }
    }

    pub(crate) fn now(&self) -> Timestamp {
        self.wall + self.begin.elapsed()
    }

    /// How long until then; zero where it has passed.
    pub(crate) fn until(&self, then: Timestamp) -> Duration {
        then.since(self.now())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_goes_on_from_what_is_remembered() {
        let future = Clock::not_before(Timestamp(0)).now() + Duration::from_hours(1);
        let clock = Clock::not_before(future);
        assert!(clock.now() >= future);
        assert!(clock.until(future + Duration::from_secs(5)) <= Duration::from_secs(5));
        assert_eq!(clock.until(Timestamp(1)), Duration::ZERO);
    }
}
