use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

use rustix::mm::{ProtFlags, munmap};

use crate::arena::{check_sealed, map};
use crate::host::Counters;

/// A peer's segment: mapped on first use, once for all regions in it.
pub(crate) struct PeerSegment {
    descriptor: OwnedFd,
    len: u64,
    counters: Arc<Counters>,
    base: OnceLock<Base>,
}

/// Where it is mapped.
struct Base(NonNull<u8>);

// SAFETY: a read-only mapping without thread affinity.
unsafe impl Send for Base {}
// SAFETY: as above.
unsafe impl Sync for Base {}

impl PeerSegment {
    /// Takes a descriptor that a peer sent.
    ///
    /// # Errors
    /// Where it is not a memfd of `len` bytes, sealed against shrinking: reading such a mapping could raise SIGBUS.
    pub(super) fn new(descriptor: OwnedFd, len: u64, counters: Arc<Counters>) -> io::Result<Self> {
        check_sealed(descriptor.as_fd(), len)?;
        Ok(Self {
            descriptor,
            len,
            counters,
            base: OnceLock::new(),
        })
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// The first byte of the segment, mapped read-only for as long as this lives.
    pub(crate) fn base(&self) -> io::Result<NonNull<u8>> {
        if let Some(base) = self.base.get() {
            return Ok(base.0);
        }
        let mapped = Base(map(self.descriptor.as_fd(), self.len, ProtFlags::READ)?);
        match self.base.set(mapped) {
            Ok(()) => {
                self.counters.mapped_bytes.fetch_add(self.len, Ordering::Relaxed);
            }
            // Another thread was first.
            Err(mapped) => self.unmap(&mapped),
        }
        Ok(self.base.get().expect("set just now").0)
    }

    fn unmap(&self, base: &Base) {
        // SAFETY: mapped by `base` with this length, and given to nobody who is still there.
        let unmapped = unsafe { munmap(base.0.as_ptr().cast(), self.len as usize) };
        debug_assert!(unmapped.is_ok(), "munmap: {unmapped:?}");
    }
}

impl Drop for PeerSegment {
    fn drop(&mut self) {
        if let Some(base) = self.base.take() {
            self.unmap(&base);
            self.counters.mapped_bytes.fetch_sub(self.len, Ordering::Relaxed);
        }
    }
}
