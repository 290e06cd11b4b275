use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{Classify, ErrorClass};

/// Who keeps a payload alive, and until when, where no orchestrator does.
///
/// As text, in TOML and in JSON: `delete_on_consume`, `ttl(30s)`, `pinned`, `cached`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
#[non_exhaustive]
pub enum Lease {
    /// One consumer at a time; the payload is deleted when one has consumed it. Where that one dies first, its successor
    /// begins at chunk 0.
    #[default]
    DeleteOnConsume,
    /// Any number of consumers, for this long after publishing. Reads do not extend it.
    Ttl(Duration),
    /// Any number of consumers, until it is released by name.
    Pinned,
    /// Any number of consumers, until a store needs the room. Only a store keeps such payloads.
    Cached,
}

impl Lease {
    /// Whether a payload of this lease has one consumer at a time, which ends it.
    pub const fn is_exclusive(self) -> bool {
        matches!(self, Self::DeleteOnConsume)
    }
}

/// Units of a time to live, the longest first.
const UNITS: [(&str, u128); 6] = [
    ("h", 3_600_000_000_000),
    ("m", 60_000_000_000),
    ("s", 1_000_000_000),
    ("ms", 1_000_000),
    ("us", 1_000),
    ("ns", 1),
];

impl fmt::Display for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DeleteOnConsume => f.write_str("delete_on_consume"),
            Self::Ttl(ttl) => {
                let nanos = ttl.as_nanos();
                // Hours and minutes are read, not written: 90s says more than 1m and a rest.
                let unit = UNITS[2..].iter().find(|(_, unit)| nanos % unit == 0);
                let (name, unit) = unit.copied().unwrap_or(("ns", 1));
                write!(f, "ttl({}{name})", nanos / unit)
            }
            Self::Pinned => f.write_str("pinned"),
            Self::Cached => f.write_str("cached"),
        }
    }
}

impl FromStr for Lease {
    type Err = LeaseError;

    fn from_str(text: &str) -> Result<Self, LeaseError> {
        match text {
            "delete_on_consume" => Ok(Self::DeleteOnConsume),
            "pinned" => Ok(Self::Pinned),
            "cached" => Ok(Self::Cached),
            _ => {
                let ttl = text.strip_prefix("ttl(").and_then(|rest| rest.strip_suffix(')'));
                let ttl = ttl.ok_or_else(|| LeaseError::Unknown { text: text.to_owned() })?;
                let ttl = parse_ttl(ttl).ok_or_else(|| LeaseError::Ttl { text: ttl.to_owned() })?;
                Ok(Self::Ttl(ttl))
            }
        }
    }
}

/// A whole number and a unit, more than nothing.
fn parse_ttl(text: &str) -> Option<Duration> {
    let digits = text.find(|c: char| !c.is_ascii_digit())?;
    let (count, name) = text.split_at(digits);
    let unit = UNITS.iter().find(|(unit, _)| *unit == name)?.1;
    let nanos = count.parse::<u128>().ok()?.checked_mul(unit)?;
    let seconds = u64::try_from(nanos / 1_000_000_000).ok()?;
    let ttl = Duration::new(seconds, u32::try_from(nanos % 1_000_000_000).ok()?);
    (!ttl.is_zero()).then_some(ttl)
}

impl TryFrom<String> for Lease {
    type Error = LeaseError;

    fn try_from(text: String) -> Result<Self, LeaseError> {
        text.parse()
    }
}

impl From<Lease> for String {
    fn from(lease: Lease) -> Self {
        lease.to_string()
    }
}

/// Why text is not a lease.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum LeaseError {
    #[error("unknown lease {text:?}; it is one of delete_on_consume, ttl(30s), pinned, cached")]
    Unknown { text: String },
    #[error("{text:?} is no time to live; give a whole number above 0 and one of h, m, s, ms, us, ns, such as 30s")]
    Ttl { text: String },
}

impl Classify for LeaseError {
    fn class(&self) -> ErrorClass {
        ErrorClass::Invalid
    }

    fn reason(&self) -> &'static str {
        "payload.lease"
    }
}
