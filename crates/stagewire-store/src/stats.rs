use std::sync::atomic::{AtomicU64, Ordering};

use stagewire_core::ByteCount;

use crate::Share;

/// What a store has done so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StoreStats {
    /// Cached and soft-pinned objects that went to make room for others.
    pub evicted: Share,
    /// Objects that went because their deadline had come.
    pub expired: Share,
    /// Objects that were moved to a file.
    pub spilled: Share,
    /// Objects that were brought back from a file.
    pub restored: Share,
}

/// Counts as they are kept.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) evicted: Count,
    pub(crate) expired: Count,
    pub(crate) spilled: Count,
    pub(crate) restored: Count,
}

/// Objects and their bytes, counted up.
#[derive(Debug, Default)]
pub(crate) struct Count {
    objects: AtomicU64,
    nbytes: AtomicU64,
}

impl Count {
    pub(crate) fn add(&self, nbytes: ByteCount) {
        self.objects.fetch_add(1, Ordering::Relaxed);
        self.nbytes.fetch_add(nbytes.0, Ordering::Relaxed);
    }

    fn share(&self) -> Share {
        Share {
            objects: self.objects.load(Ordering::Relaxed),
            nbytes: ByteCount(self.nbytes.load(Ordering::Relaxed)),
        }
    }
}

impl Counts {
    pub(crate) fn stats(&self) -> StoreStats {
        StoreStats {
            evicted: self.evicted.share(),
            expired: self.expired.share(),
            spilled: self.spilled.share(),
            restored: self.restored.share(),
        }
    }
}
