use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create, open};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use stagewire_core::ByteCount;

use super::SegmentName;
use crate::ArenaError;

/// One memfd. Only the process that made it can write to it, through the mapping that it made before it set the seals.
///
/// The seals forbid to shrink it (a reader's access can never raise SIGBUS), to grow it and to map it for writing once
/// more, even through `/proc/PID/fd`. So the bytes of a segment whose maker has died never change again.
pub(crate) struct Segment {
    id: u64,
    name: SegmentName,
    base: NonNull<u8>,
    len: u64,
    reader: OwnedFd,
}

// SAFETY: the mapping is shared memory without thread affinity; who may write which bytes is decided by the extents.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

impl Segment {
    pub(super) fn create(id: u64, len: u64) -> Result<Self, ArenaError> {
        let failed = |what| {
            move |error: rustix::io::Errno| ArenaError::Segment {
                what,
                len: ByteCount(len),
                error: error.into(),
            }
        };
        let memfd = memfd().map_err(failed("create"))?;
        ftruncate(&memfd, len).map_err(failed("size"))?;
        let path = format!("/proc/self/fd/{}", memfd.as_raw_fd());
        let reader = open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        let reader = reader.map_err(failed("reopen read-only through /proc/self/fd"))?;
        let base = map(memfd.as_fd(), len, ProtFlags::READ | ProtFlags::WRITE).map_err(failed("map"))?;
        let name = SegmentName(rand::random());
        let segment = Self {
            id,
            name,
            base,
            len,
            reader,
        };
        fcntl_add_seals(&memfd, SEALS).map_err(failed("seal"))?;
        Ok(segment)
    }

    /// Maps a segment of another process for reading, once it is proved to be one that nobody can change.
    pub(super) fn adopt(id: u64, name: SegmentName, memfd: OwnedFd, len: u64) -> io::Result<Self> {
        check_sealed(memfd.as_fd(), len)?;
        let seals = rustix::fs::fcntl_get_seals(&memfd)?;
        if !seals.contains(SEALS) {
            return Err(io::Error::other(format!(
                "the segment is not sealed against writing: {seals:?}"
            )));
        }
        let base = map(memfd.as_fd(), len, ProtFlags::READ)?;
        Ok(Self {
            id,
            name,
            base,
            len,
            reader: memfd,
        })
    }

    /// Bytes of physical memory that it takes.
    pub(super) fn resident(&self) -> u64 {
        resident(&self.reader, self.len)
    }

    pub(crate) fn name(&self) -> SegmentName {
        self.name
    }

    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Address of a byte of the segment.
    pub(super) fn at(&self, offset: u64) -> NonNull<u8> {
        assert!(offset <= self.len, "offset {offset} of a segment of {} bytes", self.len);
        // SAFETY: the offset stays inside the mapping or one past it, and fits in usize because the mapping does.
        unsafe { self.base.add(offset as usize) }
    }

    /// The descriptor to hand to readers.
    pub(crate) fn reader(&self) -> BorrowedFd<'_> {
        self.reader.as_fd()
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `create` or `adopt`, and every extent keeps the segment alive.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.len as usize) };
        debug_assert!(unmapped.is_ok(), "munmap: {unmapped:?}");
    }
}

const SEALS: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::FUTURE_WRITE)
    .union(SealFlags::SEAL);

/// Without execute permission where the kernel knows the flag (6.3), which also spares its log a warning.
fn memfd() -> rustix::io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    match memfd_create("stagewire-arena", flags | MemfdFlags::NOEXEC_SEAL) {
        Err(rustix::io::Errno::INVAL) => memfd_create("stagewire-arena", flags),
        made => made,
    }
}

/// Bytes of physical memory that a memfd of `len` bytes takes.
pub(super) fn resident(memfd: &OwnedFd, len: u64) -> u64 {
    // The kernel counts in units of 512 bytes. A descriptor that cannot be asked is taken to be full.
    rustix::fs::fstat(memfd).map_or(len, |stat| u64::try_from(stat.st_blocks).unwrap_or(0) * 512)
}

/// Maps all `len` bytes of a memfd, shared.
pub(crate) fn map(memfd: BorrowedFd<'_>, len: u64, protection: ProtFlags) -> rustix::io::Result<NonNull<u8>> {
    let len = usize::try_from(len).map_err(|_| rustix::io::Errno::NOMEM)?;
    // SAFETY: the kernel chooses the address, so that no existing mapping is touched.
    let base = unsafe { mmap(ptr::null_mut(), len, protection, MapFlags::SHARED, memfd, 0) }?;
    NonNull::new(base.cast()).ok_or(rustix::io::Errno::NOMEM)
}

/// Proves that a descriptor from a peer is a memfd of `len` bytes that nobody can shrink.
pub(crate) fn check_sealed(memfd: BorrowedFd<'_>, len: u64) -> io::Result<()> {
    let seals = rustix::fs::fcntl_get_seals(memfd)?;
    let needed = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    if !seals.contains(needed) {
        return Err(io::Error::other(format!(
            "the segment is not sealed against shrinking: {seals:?}"
        )));
    }
    let found = rustix::fs::fstat(memfd)?.st_size;
    if u64::try_from(found) != Ok(len) {
        return Err(io::Error::other(format!(
            "the segment has {found} bytes, its owner said {len}"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_cannot_write_nor_shrink() {
        let segment = Segment::create(0, 8192).expect("a segment");
        check_sealed(segment.reader(), 8192).expect("sealed");
        assert!(
            check_sealed(segment.reader(), 4096).is_err(),
            "a wrong length was believed"
        );
        let writable = ProtFlags::READ | ProtFlags::WRITE;
        assert!(map(segment.reader(), 8192, writable).is_err(), "mapped for writing");
        let path = format!("/proc/self/fd/{}", segment.reader().as_raw_fd());
        let again = open(path, OFlags::RDWR, Mode::empty()).expect("the kernel lets the owner reopen it");
        assert!(
            map(again.as_fd(), 8192, writable).is_err(),
            "mapped for writing after a reopen"
        );
        assert!(ftruncate(&again, 4096).is_err(), "shrunk");
        assert!(ftruncate(&again, 16384).is_err(), "grown");
        assert!(rustix::io::write(&again, b"x").is_err(), "written");
    }
}
