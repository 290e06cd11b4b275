use std::io;

use stagewire_core::{ByteCount, Classify, ErrorClass};

use crate::SegmentName;

/// Why a segment of another process was not adopted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum AdoptError {
    #[error("segment {segment} cannot be adopted as {len} that nobody can change")]
    Segment {
        segment: SegmentName,
        len: ByteCount,
        #[source]
        error: io::Error,
    },
    #[error("segment {segment} is in this arena already")]
    Twice { segment: SegmentName },
    #[error(
        "the extent of {len} bytes at {offset} is not inside the {segment_len} bytes of segment {segment}, on whole pages"
    )]
    Outside {
        segment: SegmentName,
        offset: u64,
        len: u64,
        segment_len: u64,
    },
    #[error("the extents at {offset} and {other} of segment {segment} overlap")]
    Overlap {
        segment: SegmentName,
        offset: u64,
        other: u64,
    },
}

impl Classify for AdoptError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Segment { .. } | Self::Outside { .. } | Self::Overlap { .. } => ErrorClass::Corrupt,
            Self::Twice { .. } => ErrorClass::Conflict,
        }
    }

    fn reason(&self) -> &'static str {
        "arena.adopt"
    }
}
