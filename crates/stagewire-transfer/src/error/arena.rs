use std::io;

use stagewire_core::{ByteCount, Classify, ErrorClass};

/// Why the arena gave no memory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum ArenaError {
    #[error("an extent of 0 bytes cannot be allocated")]
    Empty,
    #[error(
        "the arena has no room for {requested}: {allocated} of {limit} are in use, the largest free range has {largest}; \
         raise arena-bytes or release payloads"
    )]
    Exhausted {
        requested: ByteCount,
        allocated: ByteCount,
        limit: ByteCount,
        largest: ByteCount,
    },
    #[error(
        "the arena would need {needed} of fresh memory, this machine has {available} available; \
         lower arena-bytes or free memory"
    )]
    Memory { needed: ByteCount, available: ByteCount },
    #[error("cannot {what} a shared-memory segment of {len}")]
    Segment {
        what: &'static str,
        len: ByteCount,
        #[source]
        error: io::Error,
    },
}

impl Classify for ArenaError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Empty => ErrorClass::Invalid,
            Self::Exhausted { .. } | Self::Memory { .. } => ErrorClass::Exhausted,
            Self::Segment { .. } => ErrorClass::Unavailable,
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::Empty => "arena.empty",
            Self::Exhausted { .. } => "arena.exhausted",
            Self::Memory { .. } => "arena.memory",
            Self::Segment { .. } => "arena.segment",
        }
    }
}
