//! When to look again at what is under way.

use std::time::{Duration, Instant};

/// Sleeping less costs more than it gains.
const SHORTEST: Duration = Duration::from_micros(20);
/// What stands still is looked at so often at least.
const LONGEST: Duration = Duration::from_millis(250);

/// Without a forecast, or long past it, a pause is this part of the time since something last happened: the end of a
/// transfer is noticed at most that much late.
const PATIENCE: u32 = 16;

/// After so long, it is this part: what stands still costs next to nothing.
const STANDSTILL: Duration = Duration::from_millis(200);
const STANDSTILL_PATIENCE: u32 = 6;

/// Close to the forecast, a pause is this part of it.
const PRECISION: u32 = 64;

/// Batches of fewer bytes tell little about the speed.
const TELLING: u64 = 256 << 10;

/// How long transfers took so far, and with it when the one under way is likely to end.
#[derive(Debug)]
pub(super) struct Pace {
    /// When something last happened.
    last: Instant,
    nanos_per_byte: Option<f64>,
}

impl Pace {
    pub(super) fn new() -> Self {
        Self {
            last: Instant::now(),
            nanos_per_byte: None,
        }
    }

    /// Something happened.
    pub(super) fn happened(&mut self, now: Instant) {
        self.last = now;
    }

    /// A batch ended that was submitted at `since`. With `early`, the first look found it so: it took less than that.
    ///
    /// The forecast follows the quickest: what is slept too long is lost, a look too early costs little.
    pub(super) fn ended(&mut self, now: Instant, since: Instant, bytes: u64, early: bool) {
        if bytes >= TELLING {
            let took = now.duration_since(since.max(self.last));
            let found = took.as_nanos() as f64 / bytes as f64;
            self.nanos_per_byte = Some(match self.nanos_per_byte {
                Some(before) if early => found.min(before) / 2.0,
                Some(before) if found > before => before + (found - before) / 8.0,
                _ => found,
            });
        }
        self.last = now;
    }

    /// How long to sleep while a batch of so many bytes is the next to end.
    pub(super) fn pause(&self, now: Instant, bytes: u64) -> Duration {
        let elapsed = now.duration_since(self.last);
        let forecast = self.nanos_per_byte.filter(|_| bytes >= TELLING);
        let pause = match forecast.map(|nanos| Duration::from_nanos((nanos * bytes as f64) as u64)) {
            Some(forecast) if elapsed < forecast * 3 / 4 => forecast * 3 / 4 - elapsed,
            Some(forecast) if elapsed < forecast * 3 / 2 => forecast / PRECISION,
            _ if elapsed < STANDSTILL => elapsed / PATIENCE,
            _ => elapsed / STANDSTILL_PATIENCE,
        };
        pause.clamp(SHORTEST, LONGEST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_forecast_is_slept_towards_and_looked_at_closely() {
        let mut pace = Pace::new();
        let start = pace.last;
        let after = |millis| start + Duration::from_millis(millis);
        assert_eq!(
            pace.pause(after(160), MIB),
            Duration::from_millis(10),
            "without a forecast"
        );
        pace.happened(start);
        pace.ended(after(64), start, 16 * MIB, false);
        pace.happened(start);
        assert_eq!(pace.pause(after(8), 16 * MIB), Duration::from_millis(40));
        assert_eq!(pace.pause(after(60), 16 * MIB), Duration::from_millis(1));
        assert_eq!(pace.pause(after(112), 16 * MIB), Duration::from_millis(7));
        assert_eq!(pace.pause(after(960), 16 * MIB), Duration::from_millis(160));
        assert_eq!(pace.pause(after(100_000), 16 * MIB), LONGEST);
        assert_eq!(pace.pause(start, 1), SHORTEST, "small ones are not forecast");
        pace.happened(start);
        pace.ended(after(640), start, 16 * MIB, false);
        pace.happened(start);
        assert!(
            pace.pause(start, 16 * MIB) < Duration::from_millis(110),
            "one slow transfer counts little"
        );
        pace.ended(after(100), start, 16 * MIB, true);
        pace.happened(start);
        assert!(
            pace.pause(start, 16 * MIB) < Duration::from_millis(40),
            "overslept, it believes less"
        );
    }

    /// Each look costs a hundred microseconds at most, through an interpreter and without optimisation.
    #[test]
    fn three_seconds_of_standstill_cost_few_looks() {
        for forecast in [None, Some(1), Some(32), Some(1000)] {
            let mut pace = Pace::new();
            if let Some(millis) = forecast {
                pace.ended(pace.last + Duration::from_millis(millis), pace.last, MIB, false);
            }
            let (mut now, mut looks) = (pace.last, 0);
            while now - pace.last < Duration::from_secs(3) {
                now += pace.pause(now, MIB);
                looks += 1;
            }
            assert!(looks < 150, "{looks} looks with a forecast of {forecast:?} ms");
        }
    }
}
