use std::time::Duration;

use serde::{Deserialize, Serialize};
use stagewire_core::Lease;

use crate::PublishSpec;

/// Who ends the life of a payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Owner {
    /// The orchestrator: the payload stays until it is released by name, whoever reads it and how often.
    Orchestrator,
    /// Nobody but the lease.
    Lease(Lease),
}

impl From<Lease> for Owner {
    fn from(lease: Lease) -> Self {
        Self::Lease(lease)
    }
}

impl Owner {
    /// The deadline of a payload of this owner where its producer names none.
    pub(crate) const fn usual_deadline(self) -> Option<Duration> {
        match self {
            Self::Lease(Lease::DeleteOnConsume) => Some(PublishSpec::UNCONSUMED),
            Self::Lease(Lease::Ttl(ttl)) => Some(ttl),
            Self::Orchestrator | Self::Lease(_) => None,
        }
    }

    /// How long a payload lives whose producer names this deadline: a time to live is not extended by it.
    pub(crate) fn life(self, deadline: Option<Duration>) -> Option<Duration> {
        match self {
            Self::Lease(Lease::Ttl(ttl)) => Some(deadline.map_or(ttl, |deadline| deadline.min(ttl))),
            _ => deadline,
        }
    }

    /// Whether one consumer at a time may read the payload, and ends it.
    pub(crate) const fn is_exclusive(self) -> bool {
        matches!(self, Self::Lease(lease) if lease.is_exclusive())
    }

    /// Whether somebody who watches over the payload releases it by name, also once it has failed.
    pub(crate) const fn releases_failed(self) -> bool {
        matches!(self, Self::Orchestrator)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_lives_longer_than_its_time_to_live() {
        let [short, long] = [1, 2].map(Duration::from_secs);
        let ttl = Owner::Lease(Lease::Ttl(short));
        for (owner, deadline, life) in [
            (ttl, None, Some(short)),
            (ttl, Some(long), Some(short)),
            (Owner::Lease(Lease::Ttl(long)), Some(short), Some(short)),
            (Owner::Lease(Lease::DeleteOnConsume), Some(long), Some(long)),
            (Owner::Lease(Lease::Pinned), None, None),
            (Owner::Orchestrator, Some(long), Some(long)),
        ] {
            assert_eq!(owner.life(deadline), life, "{owner:?} {deadline:?}");
        }
        assert_eq!(ttl.usual_deadline(), Some(short));
    }
}
