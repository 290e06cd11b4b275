use std::sync::Arc;

use stagewire_core::ByteCount;
use stagewire_transfer::{Target, TargetError};

use super::object::About;
use crate::StoreError;

/// Checks that there is one destination for each part, of its size.
pub(super) fn check_destinations(about: &About, destinations: &[Arc<Target>]) -> Result<(), StoreError> {
    if about.parts.len() != destinations.len() {
        return Err(StoreError::Destinations {
            payload: about.payload,
            parts: about.parts.len(),
            destinations: destinations.len(),
        });
    }
    for (part, (wanted, destination)) in about.parts.iter().zip(destinations).enumerate() {
        let (end, len) = (wanted.0, destination.len());
        if end != len {
            let source = TargetError::OutOfBounds { start: 0, end, len };
            return Err(misfit(about, part, destination, source));
        }
    }
    Ok(())
}

pub(super) fn misfit(about: &About, part: usize, destination: &Target, source: TargetError) -> StoreError {
    StoreError::Target {
        payload: about.payload,
        part,
        wanted: about.parts[part],
        found: ByteCount(destination.len()),
        source,
    }
}
