use std::fmt;

use serde::{Deserialize, Serialize};

/// Which room: its number, which both sides know, and its life.
///
/// A number that prefill uses again while decode may still ask for the room before it takes a higher life. Then the two are
/// never taken for each other: who comes too late for the old one is told `kv.superseded`, and who comes too early for the
/// new one waits until it is opened. A bare number is life 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RoomId {
    /// The request's.
    pub number: u64,
    /// How often prefill has begun anew, or whatever else grows each time.
    pub life: u64,
}

impl RoomId {
    /// A later life of a number.
    pub const fn of_life(number: u64, life: u64) -> Self {
        Self { number, life }
    }
}

impl From<u64> for RoomId {
    fn from(number: u64) -> Self {
        Self { number, life: 0 }
    }
}

impl fmt::Display for RoomId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.life {
            0 => write!(f, "{}", self.number),
            life => write!(f, "{} (life {life})", self.number),
        }
    }
}
