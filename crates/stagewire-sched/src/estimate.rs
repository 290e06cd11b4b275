//! How long attempts take, learnt from those that were completed.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Shapes of one stage that are remembered; the one that was seen last longest ago makes room.
const SHAPES: usize = 256;
/// What a stage is taken to need before anything is known of it.
const UNKNOWN: Duration = Duration::from_secs(1);
/// Bounds of a time. A class pays for every attempt, and pays for none more than that.
const SHORTEST: Duration = Duration::from_millis(1);
const LONGEST: Duration = Duration::from_secs(3_600);

/// Times of the attempts of one stage: an exponentially weighted mean for each shape, and one over all of them for a shape
/// that was not seen yet.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct Estimate {
    /// Number of times learnt.
    seen: u64,
    all: Option<u64>,
    /// Mean in nanoseconds, and when it was learnt last, in times learnt.
    shapes: BTreeMap<u64, (u64, u64)>,
}

impl Estimate {
    /// Learns from an attempt that was completed.
    pub(crate) fn learn(&mut self, shape: u64, took: Duration) {
        let took = nanos(took);
        self.seen += 1;
        self.all = Some(mean(self.all, took));
        if !self.shapes.contains_key(&shape) && self.shapes.len() >= SHAPES {
            let oldest = self.shapes.iter().min_by_key(|(_, (_, last))| *last);
            if let Some(oldest) = oldest.map(|(shape, _)| *shape) {
                self.shapes.remove(&oldest);
            }
        }
        let known = self.shapes.get(&shape).map(|(mean, _)| *mean);
        self.shapes.insert(shape, (mean(known, took), self.seen));
    }

    /// How long an attempt will probably take, from 1 ms to an hour.
    pub(crate) fn predict(&self, shape: u64) -> Duration {
        let known = self.shapes.get(&shape).map(|(mean, _)| *mean);
        known.or(self.all).map_or(UNKNOWN, Duration::from_nanos)
    }
}

/// A new time counts for an eighth.
fn mean(known: Option<u64>, took: u64) -> u64 {
    known.map_or(took, |mean| mean - mean / 8 + took / 8)
}

/// A time within the bounds, in nanoseconds.
pub(crate) fn nanos(took: Duration) -> u64 {
    let nanos = took.clamp(SHORTEST, LONGEST).as_nanos();
    u64::try_from(nanos).expect("an hour has fewer nanoseconds than 2^64")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_told_apart_and_an_unknown_one_gets_the_mean() {
        let mut estimate = Estimate::default();
        assert_eq!(estimate.predict(1), UNKNOWN);
        for _ in 0..100 {
            estimate.learn(1, Duration::from_millis(200));
            estimate.learn(2, Duration::from_secs(20));
        }
        let near = |shape, expected: Duration| {
            let predicted = estimate.predict(shape);
            let ratio = predicted.as_secs_f64() / expected.as_secs_f64();
            assert!((0.99..1.01).contains(&ratio), "{predicted:?} for {expected:?}");
        };
        near(1, Duration::from_millis(200));
        near(2, Duration::from_secs(20));
        let mixed = estimate.predict(3);
        assert!(
            Duration::from_secs(5) < mixed && mixed < Duration::from_secs(15),
            "{mixed:?}"
        );
    }

    #[test]
    fn a_change_is_followed_and_an_outlier_is_not() {
        let mut estimate = Estimate::default();
        estimate.learn(0, Duration::from_secs(8));
        estimate.learn(0, Duration::from_secs(80));
        assert_eq!(estimate.predict(0), Duration::from_secs(17));
        for _ in 0..60 {
            estimate.learn(0, Duration::from_secs(2));
        }
        let predicted = estimate.predict(0);
        assert!(
            predicted.abs_diff(Duration::from_secs(2)) < Duration::from_millis(20),
            "{predicted:?}"
        );
    }

    #[test]
    fn memory_is_bounded_and_times_are_too() {
        let mut estimate = Estimate::default();
        estimate.learn(7, Duration::ZERO);
        estimate.learn(8, Duration::MAX);
        assert_eq!((estimate.predict(7), estimate.predict(8)), (SHORTEST, LONGEST));
        for shape in 100..10_000 {
            estimate.learn(shape, Duration::from_secs(1));
        }
        assert_eq!(estimate.shapes.len(), SHAPES);
        assert!(estimate.shapes.contains_key(&9_999) && !estimate.shapes.contains_key(&7));
    }
}
