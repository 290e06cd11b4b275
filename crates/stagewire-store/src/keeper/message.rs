//! What an owner and a keeper say to each other, one postcard message per packet.
//!
//! ```text
//! owner                       keeper
//! Hello(secret) ─────────────▶
//!                ◀──────────── Welcome, or Refused and the end
//! Keep(name, len) + memfd ───▶
//!                ◀──────────── Done
//! Fetch ─────────────────────▶
//!                ◀──────────── Segment(name, len) + memfd, for each; Done
//! Drop(name) ────────────────▶
//!                ◀──────────── Done
//! Stop ──────────────────────▶
//!                ◀──────────── Done, and the end of the keeper
//! ```

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use stagewire_core::ProcessRef;
use stagewire_transfer::SegmentName;

use super::secret::Secret;

pub(super) const VERSION: u16 = 1;
/// Longest packet.
pub(super) const MAX: usize = 512;
/// Segments that a keeper takes.
pub(super) const MAX_SEGMENTS: usize = 4096;

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Request {
    Hello { version: u16, secret: Secret },
    Keep { name: SegmentName, len: u64 },
    Fetch,
    Drop { name: SegmentName },
    Stop,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Reply {
    Welcome { process: ProcessRef },
    Refused { problem: String },
    Segment { name: SegmentName, len: u64 },
    Done,
}

pub(super) fn encode(message: &impl Serialize) -> Vec<u8> {
    postcard::to_stdvec(message).expect("messages have nothing that postcard cannot encode")
}

pub(super) fn decode<T: DeserializeOwned>(packet: &[u8]) -> Result<T, String> {
    postcard::from_bytes(packet).map_err(|error| error.to_string())
}
