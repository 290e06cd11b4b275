//! Tells an engine that is stuck from one whose connection broke.

use std::time::{Duration, Instant};

/// An engine is stuck when it failed so often, one transfer after the other, for so long, while the peer lives. One
/// failure is a connection that broke; Mooncake then waits for a second before it makes another.
const ENOUGH: u32 = 3;
const WITHIN: Duration = Duration::from_secs(1);

/// Failures since the last success.
#[derive(Debug, Default)]
pub(super) struct Strikes {
    count: u32,
    first: Option<Instant>,
    last: Option<Instant>,
}

impl Strikes {
    /// Counts a failure of something that began at `since`. Those that were under way together count as one. Tells how
    /// many there were, and within what time, once that is too much.
    pub(super) fn add(&mut self, since: Instant, now: Instant) -> Option<(u32, Duration)> {
        if self.last.is_none_or(|last| since >= last) {
            self.count += 1;
            self.last = Some(now);
        }
        let within = now - *self.first.get_or_insert(now);
        (self.count >= ENOUGH && within >= WITHIN).then_some((self.count, within))
    }

    /// Something went well.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_failed_together_counts_once_and_quickly_not_at_all() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let mut strikes = Strikes::default();
        for end in [100, 101, 102, 103] {
            assert_eq!(strikes.add(at(0), at(end)), None);
        }
        assert_eq!(strikes.add(at(104), at(110)), None);
        assert_eq!(strikes.add(at(111), at(120)), None, "too soon to tell");
        let within = Duration::from_millis(1100);
        assert_eq!(strikes.add(at(121), at(1200)), Some((4, within)));
        strikes.clear();
        assert_eq!(strikes.add(at(1300), at(9000)), None);
        assert_eq!(strikes.add(at(9000), at(19_000)), None, "two are not enough");
    }
}
