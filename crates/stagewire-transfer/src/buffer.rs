use std::collections::BTreeMap;
use std::ptr::{self, NonNull};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Private pages. Those of a dropped buffer are kept for the next one: a fresh page costs several times the copy into it.
pub(crate) struct Buffer {
    pages: Option<Pages>,
}

impl Buffer {
    /// At least `len` bytes, page-aligned, from 2 MiB on aligned for huge pages. Holds zeros or what was there before.
    pub(crate) fn take(len: u64) -> Option<Self> {
        let size = size_class(usize::try_from(len).ok()?)?;
        let pages = pool().take(size).or_else(|| Pages::map(size))?;
        Some(Self { pages: Some(pages) })
    }

    pub(crate) fn as_ptr(&self) -> NonNull<u8> {
        self.pages.as_ref().map_or(NonNull::dangling(), |pages| pages.ptr)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(pages) = self.pages.take() {
            // What does not fit into the pool is unmapped after the lock is gone.
            let evicted = pool().give(pages);
            drop(evicted);
        }
    }
}

const PAGE: usize = 4096;
const HUGE_PAGE: usize = 2 << 20;

/// Rounds up to an eighth of a power of two, so that buffers of similar payloads fit each other.
fn size_class(len: usize) -> Option<usize> {
    let len = len.max(PAGE).checked_next_multiple_of(PAGE)?;
    let step = (len.checked_next_power_of_two()? / 8).max(PAGE);
    len.checked_next_multiple_of(step)
}

struct Pages {
    ptr: NonNull<u8>,
    size: usize,
    mapped: NonNull<u8>,
    mapped_size: usize,
}

// SAFETY: private memory without thread affinity.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    fn map(size: usize) -> Option<Self> {
        let slack = if size >= HUGE_PAGE { HUGE_PAGE } else { 0 };
        let mapped_size = size.checked_add(slack)?;
        // SAFETY: the kernel chooses the address, so that no existing mapping is touched.
        let mapped = unsafe {
            mmap_anonymous(
                ptr::null_mut(),
                mapped_size,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        };
        let mapped = NonNull::new(mapped.ok()?.cast::<u8>())?;
        let mut aligned = mapped;
        if slack > 0 {
            let skip = mapped.as_ptr().align_offset(HUGE_PAGE);
            // SAFETY: at most `slack` bytes further, with `size` bytes behind it.
            aligned = unsafe { mapped.add(skip) };
            // SAFETY: only a hint about memory mapped above; refused where the kernel has no huge pages.
            let _ = unsafe { madvise(aligned.as_ptr().cast(), size, Advice::LinuxHugepage) };
        }
        Some(Self {
            ptr: aligned,
            size,
            mapped,
            mapped_size,
        })
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`; the buffer that used it is gone.
        let unmapped = unsafe { munmap(self.mapped.as_ptr().cast(), self.mapped_size) };
        debug_assert!(unmapped.is_ok(), "munmap: {unmapped:?}");
    }
}

/// Free pages by size, at most [`POOL_LIMIT`] bytes.
struct Pool {
    free: BTreeMap<usize, Vec<Pages>>,
    bytes: usize,
}

const POOL_LIMIT: usize = 256 << 20;

static POOL: Mutex<Pool> = Mutex::new(Pool {
    free: BTreeMap::new(),
    bytes: 0,
});

fn pool() -> MutexGuard<'static, Pool> {
    POOL.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    fn take(&mut self, size: usize) -> Option<Pages> {
        let same = self.free.get_mut(&size)?;
        let pages = same.pop()?;
        if same.is_empty() {
            self.free.remove(&size);
        }
        self.bytes -= size;
        Some(pages)
    }

    /// Keeps the pages, and gives back what has to go for them: the largest first.
    fn give(&mut self, pages: Pages) -> Vec<Pages> {
        let mut evicted = Vec::new();
        if pages.size > POOL_LIMIT {
            evicted.push(pages);
            return evicted;
        }
        while self.bytes + pages.size > POOL_LIMIT {
            let Some(largest) = self.free.last_key_value().map(|(size, _)| *size) else {
                break;
            };
            evicted.extend(self.take(largest));
        }
        self.bytes += pages.size;
        self.free.entry(pages.size).or_default().push(pages);
        evicted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_classes_waste_at_most_an_eighth_and_a_page() {
        for len in [0, 1, 4096, 4097, 100_000, 14_300_000, 1 << 30, (1 << 30) + 1] {
            let size = size_class(len).expect("fits");
            assert!(size >= len && size <= len + len / 4 + PAGE, "{len} became {size}");
            assert_eq!(size_class(size), Some(size));
        }
        assert_eq!(size_class(usize::MAX), None);
    }

    #[test]
    fn the_pool_stays_below_its_limit_and_serves_again() {
        let mut pool = Pool {
            free: BTreeMap::new(),
            bytes: 0,
        };
        let size = POOL_LIMIT / 4;
        for _ in 0..4 {
            assert!(pool.give(Pages::map(size).expect("address space")).is_empty());
        }
        let small = Pages::map(PAGE).expect("a page");
        let address = small.ptr;
        assert_eq!(pool.give(small).len(), 1, "one large buffer had to go");
        assert!(pool.bytes <= POOL_LIMIT);
        assert_eq!(pool.take(PAGE).expect("kept").ptr, address);
        assert!(pool.take(PAGE).is_none());
        assert_eq!(
            pool.give(Pages::map(POOL_LIMIT + HUGE_PAGE).expect("address space"))
                .len(),
            1
        );
    }

    #[test]
    fn large_buffers_are_aligned_for_huge_pages() {
        let buffer = Buffer::take(3 << 20).expect("memory");
        assert_eq!(buffer.as_ptr().as_ptr() as usize % HUGE_PAGE, 0);
    }
}
