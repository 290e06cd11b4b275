//! Values of the file that TOML has no type for.

use std::time::Duration;

use serde::{Deserialize, Deserializer};

/// A span of time as the file writes it: `"300s"`, `"1.5m"`, `"250ms"`, `"2h"`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span(pub(super) Duration);

const UNITS: [(&str, f64); 4] = [("ms", 0.001), ("s", 1.0), ("m", 60.0), ("h", 3600.0)];

/// Reads a span of time, from a millisecond to a year.
fn parse(text: &str) -> Result<Span, String> {
    let error = || format!("{text:?} is not a span of time; write for instance \"300s\", \"5m\" or \"250ms\"");
    let trimmed = text.trim();
    let (number, unit) = UNITS
        .iter()
        .find_map(|(name, unit)| trimmed.strip_suffix(name).map(|number| (number.trim(), *unit)))
        .ok_or_else(error)?;
    let seconds: f64 = number.parse::<f64>().map_err(|_| error())? * unit;
    if (0.001..=31_622_400.0).contains(&seconds) {
        Ok(Span(Duration::from_secs_f64(seconds)))
    } else {
        Err(format!("{text:?} is out of range: 1 ms to 366 days"))
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        parse(&String::deserialize(deserializer)?).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_parse() {
        assert_eq!(parse("300s"), Ok(Span(Duration::from_mins(5))));
        assert_eq!(parse("1.5 m"), Ok(Span(Duration::from_secs(90))));
        assert_eq!(parse("250ms"), Ok(Span(Duration::from_millis(250))));
        for wrong in ["", "5", "s", "-1s", "0s", "nans", "infh", "1e300h", "3 days"] {
            assert!(parse(wrong).is_err(), "{wrong:?} parsed");
        }
    }
}
