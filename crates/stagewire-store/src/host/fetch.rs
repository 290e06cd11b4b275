use std::sync::Arc;

use stagewire_core::{ByteCount, PayloadId};
use stagewire_transfer::{Target, TargetError};

use crate::StoreError;

/// Checks that there is one destination for each part, of its size.
pub(super) fn check_destinations(
    payload: PayloadId,
    parts: &[ByteCount],
    destinations: &[Arc<Target>],
) -> Result<(), StoreError> {
    if parts.len() != destinations.len() {
        return Err(StoreError::Destinations {
            payload,
            parts: parts.len(),
            destinations: destinations.len(),
        });
    }
    for (part, (wanted, destination)) in parts.iter().zip(destinations).enumerate() {
        let (end, len) = (wanted.0, destination.len());
        if end != len {
            let source = TargetError::OutOfBounds { start: 0, end, len };
            return Err(misfit(payload, part, *wanted, destination, source));
        }
    }
    Ok(())
}

pub(super) fn misfit(
    payload: PayloadId,
    part: usize,
    wanted: ByteCount,
    destination: &Target,
    source: TargetError,
) -> StoreError {
    StoreError::Target {
        payload,
        part,
        wanted,
        found: ByteCount(destination.len()),
        source,
    }
}
