use std::fmt;
use std::ops::Deref;
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;

/// A peer's region as it stands in the peer's arena: read-only, nothing copied. Cloning is cheap.
///
/// The region stays in place for as long as a mapping lives, also when its owner has released it or died. The owner
/// promised not to write to bytes that it has announced; bytes of a chunk not yet announced may still change.
#[derive(Clone)]
pub struct Mapping {
    inner: Arc<dyn Keep>,
    ptr: NonNull<u8>,
    len: usize,
}

/// What keeps mapped bytes and their pin.
pub(crate) trait Keep: Send + Sync {}

// SAFETY: read-only shared memory without thread affinity.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// # Safety
    /// The `len` bytes at `ptr` must be mapped for as long as `keep` lives.
    pub(crate) unsafe fn new(ptr: NonNull<u8>, len: usize, keep: Arc<dyn Keep>) -> Self {
        Self { inner: keep, ptr, len }
    }

    /// The first byte. Writing to it raises SIGSEGV.
    pub fn as_ptr(&self) -> *const u8 {
        self.ptr.as_ptr()
    }
}

impl Deref for Mapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the bytes are mapped while `inner` lives, pages of a memfd are initialised, the seals exclude SIGBUS,
        // and the pin keeps the owner from using the range for anything else.
        unsafe { slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let _ = &self.inner;
        write!(f, "Mapping({} bytes)", self.len)
    }
}
