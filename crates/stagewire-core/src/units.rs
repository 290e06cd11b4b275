use std::fmt;
use std::ops::{Add, AddAssign, Sub};
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize};

/// A number of bytes. Shown with binary units, parsed from `"256MiB"`, `"1.5GiB"`, `"10MB"` or a bare number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize)]
#[serde(transparent)]
pub struct ByteCount(pub u64);

const UNITS: [(&str, u64); 9] = [
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("kB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("B", 1),
];

impl fmt::Display for ByteCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match UNITS[..4].iter().rev().find(|unit| self.0 >= unit.1) {
            #[expect(clippy::cast_precision_loss, reason = "shown with one decimal")]
            Some((name, unit)) => write!(f, "{:.1} {name}", self.0 as f64 / *unit as f64),
            None => write!(f, "{} B", self.0),
        }
    }
}

/// A text that is not a number of bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a number of bytes; write for instance \"256MiB\" or 268435456")]
pub struct ParseByteCountError {
    text: String,
}

impl FromStr for ByteCount {
    type Err = ParseByteCountError;

    fn from_str(text: &str) -> Result<Self, ParseByteCountError> {
        let error = || ParseByteCountError { text: text.to_owned() };
        let trimmed = text.trim();
        let (number, unit) = UNITS
            .iter()
            .find_map(|(name, unit)| trimmed.strip_suffix(name).map(|number| (number.trim(), *unit)))
            .unwrap_or((trimmed, 1));
        if let Ok(whole) = number.parse::<u64>() {
            return whole.checked_mul(unit).map(Self).ok_or_else(error);
        }
        let fraction: f64 = number.parse().map_err(|_| error())?;
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "checked to be finite, not negative and below 2^63"
        )]
        match fraction * unit as f64 {
            bytes if bytes.is_finite() && (0.0..9.2e18).contains(&bytes) => Ok(Self(bytes as u64)),
            _ => Err(error()),
        }
    }
}

impl<'de> Deserialize<'de> for ByteCount {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if !deserializer.is_human_readable() {
            return u64::deserialize(deserializer).map(Self);
        }
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Either {
            Number(u64),
            Text(String),
        }
        match Either::deserialize(deserializer)? {
            Either::Number(bytes) => Ok(Self(bytes)),
            Either::Text(text) => text.parse().map_err(serde::de::Error::custom),
        }
    }
}

impl Add for ByteCount {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }
}

impl AddAssign for ByteCount {
    fn add_assign(&mut self, other: Self) {
        self.0 += other.0;
    }
}

impl Sub for ByteCount {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        Self(self.0 - other.0)
    }
}

/// A point in time: nanoseconds since the Unix epoch, as the one who calls reads the clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Timestamp(pub u64);

impl Timestamp {
    /// Time since `earlier`, zero where `earlier` is later.
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Timestamp {
    type Output = Self;
    fn add(self, duration: Duration) -> Self {
        Self(
            self.0
                .saturating_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_counts_parse_and_show() {
        assert_eq!("256MiB".parse(), Ok(ByteCount(256 << 20)));
        assert_eq!("1.5 GiB".parse(), Ok(ByteCount(3 << 29)));
        assert_eq!("10MB".parse(), Ok(ByteCount(10_000_000)));
        assert_eq!("4096".parse(), Ok(ByteCount(4096)));
        assert_eq!(ByteCount(14_300_000).to_string(), "13.6 MiB");
        for wrong in ["", "MiB", "-1", "1e40TiB", "99999999999999999999", "12 apples"] {
            assert!(wrong.parse::<ByteCount>().is_err(), "{wrong:?} parsed");
        }
    }
}
