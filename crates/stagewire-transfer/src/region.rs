use std::fmt;
use std::sync::Arc;

use stagewire_core::RegionRef;

/// Registered memory. Owns it: dropped or released, it takes no new pins, and the memory goes when the last pin ends.
pub struct Region {
    reference: RegionRef,
    _table: Arc<()>,
}

impl Region {
    /// What a reader needs to pin it. Holds the capability: hand it only to who may read.
    pub fn reference(&self) -> RegionRef {
        self.reference.clone()
    }

    /// Takes no new pins; the memory goes when the last pin ends.
    pub fn release(&self) {}

    /// Whether nobody holds a pin.
    pub fn is_idle(&self) -> bool {
        true
    }

    /// Resolves when nobody holds a pin.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn idle(&self) {}
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region").field("reference", &self.reference).finish()
    }
}
