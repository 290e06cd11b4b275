//! What the journal says, and what follows from it.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use stagewire_core::{PayloadId, Token};
use stagewire_transfer::Location;

use crate::Retention;

/// One thing that happened. Journals hold these by position: new variants go to the end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Record {
    /// An object is complete.
    Sealed(PayloadId, Entry),
    /// Its bytes are somewhere else now.
    Moved(PayloadId, Place),
    /// It is gone: deleted, evicted, expired or lost.
    Gone(PayloadId),
}

/// What is known of an object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Entry {
    /// Attempt that wrote it.
    pub(crate) token: Option<Token>,
    /// What may happen to it when the store needs room, as the store encodes it.
    pub(crate) retention: Kept,
    /// When it expires, in milliseconds since 1970.
    pub(crate) expires_at: Option<u64>,
    /// Bytes of each part.
    pub(crate) parts: Vec<u64>,
    /// Where they are.
    pub(crate) place: Place,
    /// What its owner wants to know of it, see `NewObject::label`.
    pub(crate) label: Vec<u8>,
}

/// `Retention`, as it is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Kept {
    Held,
    SoftPinned,
    /// With the nanoseconds that making it again takes.
    Cached(u64),
}

impl From<Retention> for Kept {
    fn from(retention: Retention) -> Self {
        match retention {
            Retention::Held => Self::Held,
            Retention::SoftPinned => Self::SoftPinned,
            Retention::Cached { cost } => Self::Cached(u64::try_from(cost.as_nanos()).unwrap_or(u64::MAX)),
        }
    }
}

impl From<Kept> for Retention {
    fn from(kept: Kept) -> Self {
        match kept {
            Kept::Held => Self::Held,
            Kept::SoftPinned => Self::SoftPinned,
            Kept::Cached(nanos) => Self::Cached {
                cost: Duration::from_nanos(nanos),
            },
        }
    }
}

/// Where the bytes of an object are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Place {
    /// In shared memory, one extent for each part that has bytes.
    Memory(Vec<Option<Location>>),
    /// In a spill file of this name, whose bytes have this digest.
    File { name: String, digest: u128 },
}

impl Place {
    /// Whether it outlives the machine's memory.
    pub(crate) const fn is_durable(&self) -> bool {
        matches!(self, Self::File { .. })
    }
}

/// The objects that there are, after any number of records.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Ledger {
    entries: BTreeMap<PayloadId, Entry>,
}

/// A record about an object that is not there, or is there already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Senseless;

impl Ledger {
    /// Makes a record true.
    pub(crate) fn apply(&mut self, record: Record) -> Result<(), Senseless> {
        match record {
            Record::Sealed(payload, _) if self.entries.contains_key(&payload) => Err(Senseless),
            Record::Sealed(payload, entry) => {
                self.entries.insert(payload, entry);
                Ok(())
            }
            Record::Moved(payload, place) => {
                self.entries.get_mut(&payload).ok_or(Senseless)?.place = place;
                Ok(())
            }
            Record::Gone(payload) => self.entries.remove(&payload).map(drop).ok_or(Senseless),
        }
    }

    pub(crate) fn get(&self, payload: PayloadId) -> Option<&Entry> {
        self.entries.get(&payload)
    }

    pub(crate) const fn entries(&self) -> &BTreeMap<PayloadId, Entry> {
        &self.entries
    }
}

pub(crate) fn encode(record: &Record) -> Vec<u8> {
    postcard::to_stdvec(record).expect("records have nothing that postcard cannot encode")
}

pub(crate) fn decode(body: &[u8]) -> Result<Record, String> {
    match postcard::take_from_bytes(body) {
        Ok((record, [])) => Ok(record),
        Ok((_, rest)) => Err(format!("{} bytes follow the record", rest.len())),
        Err(error) => Err(error.to_string()),
    }
}
