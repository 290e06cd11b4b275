//! Memory of the arena that Python writes to, and that is published without a copy.

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use stagewire_connector::Registered;
use stagewire_transfer::{Extent, ExtentMut, ExtentWriter, Memory};

/// Bytes of the arena that Python's tensors lie over.
pub(crate) struct Allocation {
    extent: Extent,
    /// Publishing all of it registers nothing.
    _registered: Option<Registered>,
    /// As long as it is there, nobody in this process sees the bytes as constant.
    _writer: ExtentWriter,
}

/// Where the allocations of a connector are, by address.
#[derive(Default)]
pub(crate) struct Allocations(Mutex<BTreeMap<usize, Weak<Allocation>>>);

impl Allocations {
    pub(crate) fn add(
        &self,
        extent: ExtentMut,
        register: impl FnOnce(Memory) -> Option<Registered>,
    ) -> (NonNull<u8>, Arc<Allocation>) {
        let (extent, writer) = extent.open();
        let pointer = extent.as_ptr();
        let allocation = Arc::new(Allocation {
            _registered: register(extent.clone().into()),
            extent,
            _writer: writer,
        });
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|_, allocation| allocation.strong_count() > 0);
        known.insert(pointer.addr().get(), Arc::downgrade(&allocation));
        (pointer, allocation)
    }

    /// The part of the arena at this address, where an allocation has all of it.
    pub(crate) fn find(&self, pointer: NonNull<u8>, len: usize) -> Option<Extent> {
        let address = pointer.addr().get();
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (start, allocation) = known.range(..=address).next_back()?;
        let allocation = allocation.upgrade()?;
        allocation.extent.slice((address - start) as u64, len as u64)
    }
}
