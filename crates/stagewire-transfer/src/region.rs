use std::fmt;
use std::sync::Arc;

use stagewire_core::RegionRef;

use crate::RegisterError;
use crate::table::{RegionKey, Registration, Table};

/// Registered memory, which it owns. Dropping it releases it.
pub struct Region {
    reference: RegionRef,
    table: Arc<Table>,
}

impl Region {
    /// Registers with a host's table.
    pub(crate) fn register(table: &Arc<Table>, registration: Registration) -> Result<Self, RegisterError> {
        let transport = registration.kind.name();
        match table.register(registration) {
            Ok(reference) => Ok(Self {
                reference,
                table: table.clone(),
            }),
            Err((problem, memory)) => Err(RegisterError::new(transport, problem, memory)),
        }
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
