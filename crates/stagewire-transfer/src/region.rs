use std::fmt;
use std::sync::Arc;

use stagewire_core::RegionRef;

use crate::table::{RegionKey, Table};

/// Registered memory, which it owns. Dropping it releases it.
pub struct Region {
    reference: RegionRef,
    table: Arc<Table>,
}

impl Region {
    pub(crate) fn new(reference: RegionRef, table: Arc<Table>) -> Self {
        Self { reference, table }
    }

    fn key(&self) -> RegionKey {
        RegionKey {
            region: self.reference.region,
            generation: self.reference.generation,
        }
    }

    /// What a reader needs to pin it. Holds the capability: hand it only to who may read.
    pub fn reference(&self) -> RegionRef {
        self.reference.clone()
    }

    /// Takes no new pins from now on; the memory goes when the last pin ends.
    pub fn release(&self) {
        self.table.release(self.key());
    }

    /// Whether nobody holds a pin.
    pub fn is_idle(&self) -> bool {
        self.table.is_idle(self.key())
    }

    /// Resolves when nobody holds a pin.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn idle(&self) {
        self.table.idle(self.key()).await;
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        self.release();
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Region").field(&self.reference).finish()
    }
}
