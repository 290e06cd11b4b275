use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;

use crate::Target;
use crate::buffer::Buffer;

/// Memory that pulls and bare copies write in turn, so that both find the same pages.
#[derive(Debug)]
pub struct Room {
    pages: Arc<Pages>,
    len: usize,
}

struct Pages(Buffer);

// SAFETY: private memory without thread affinity; who writes when is decided by `Room`.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl std::fmt::Debug for Pages {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Pages")
    }
}

impl Room {
    /// Memory as [`Target::allocate`] gives it; `None` where the system has none.
    pub fn new(len: usize) -> Option<Self> {
        let pages = Arc::new(Pages(Buffer::take(len as u64)?));
        Some(Self { pages, len })
    }

    /// The bytes, unless a target made of them is still there.
    pub fn bytes(&mut self) -> Option<&mut [u8]> {
        let pages = Arc::get_mut(&mut self.pages)?;
        // SAFETY: mapped and initialised for as long as the buffer lives, which is borrowed with these bytes, and no
        // target writes to them: it would hold the buffer.
        Some(unsafe { slice::from_raw_parts_mut(pages.0.as_ptr().as_ptr(), self.len) })
    }

    /// A target of all bytes, unless there is one.
    pub fn target(&mut self) -> Option<Target> {
        let ptr: NonNull<u8> = Arc::get_mut(&mut self.pages)?.0.as_ptr();
        // SAFETY: the buffer outlives the target, which holds it, and until then nobody else gets at the bytes.
        Some(unsafe { Target::new(ptr, self.len, self.pages.clone()) })
    }
}
