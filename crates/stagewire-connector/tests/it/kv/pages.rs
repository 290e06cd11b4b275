//! Memory that a rank of an engine has, and looks at itself.

use std::cell::UnsafeCell;
use std::ptr::NonNull;
use std::sync::Arc;

use stagewire_transfer::{Borrowed, Memory, Target};

/// Bytes that others write or read while this process keeps away from them.
#[derive(Clone)]
pub(crate) struct Pages(Arc<Cells>);

struct Cells(Box<[UnsafeCell<u8>]>);

#[expect(unsafe_code, reason = "a cache that rooms share page by page")]
// SAFETY: who reads or writes which page when is decided by rooms, which is what is tested.
unsafe impl Sync for Cells {}

impl Pages {
    pub(crate) fn new(bytes: &[u8]) -> Self {
        Self(Arc::new(Cells(
            bytes.iter().map(|&byte| UnsafeCell::new(byte)).collect(),
        )))
    }

    fn first(&self) -> NonNull<u8> {
        NonNull::new(self.0.0.as_ptr().cast_mut().cast()).expect("a box is somewhere")
    }

    fn len(&self) -> usize {
        self.0.0.len()
    }

    pub(crate) fn target(&self) -> Target {
        #[expect(unsafe_code, reason = "a cache that rooms share page by page")]
        // SAFETY: the cells live as long as the owner; tests look at pages that no room has.
        unsafe {
            Target::new(self.first(), self.len(), self.0.clone())
        }
    }

    pub(crate) fn memory(&self) -> Memory {
        #[expect(unsafe_code, reason = "a cache that rooms share page by page")]
        // SAFETY: the cells live as long as the owner; tests write pages that no room has.
        unsafe {
            Borrowed::new(self.first(), self.len(), self.0.clone()).into()
        }
    }

    pub(crate) fn read(&self) -> Vec<u8> {
        #[expect(unsafe_code, reason = "a cache that rooms share page by page")]
        // SAFETY: as for `target`.
        self.0
            .0
            .iter()
            .map(|cell| unsafe { cell.get().read_volatile() })
            .collect()
    }

    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) {
        for (cell, &byte) in self.0.0[offset..].iter().zip(bytes) {
            #[expect(unsafe_code, reason = "a cache that rooms share page by page")]
            // SAFETY: as for `memory`.
            unsafe {
                cell.get().write_volatile(byte);
            }
        }
    }
}
