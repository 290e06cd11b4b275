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
        self.part(0, self.len())
    }

    pub(crate) fn part(&self, offset: usize, len: usize) -> Vec<u8> {
        assert!(offset + len <= self.len(), "in bounds");
        let mut bytes = vec![0; len];
        #[expect(unsafe_code, reason = "a cache that rooms share page by page")]
        // SAFETY: as for `target`, and in bounds.
        unsafe {
            self.first()
                .add(offset)
                .as_ptr()
                .copy_to_nonoverlapping(bytes.as_mut_ptr(), len);
        }
        bytes
    }

    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.len(), "in bounds");
        #[expect(unsafe_code, reason = "a cache that rooms share page by page")]
        // SAFETY: as for `memory`, and in bounds.
        unsafe {
            self.first()
                .add(offset)
                .as_ptr()
                .copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        }
    }
}
