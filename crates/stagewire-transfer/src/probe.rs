//! Bare copies to measure transports against: no pin, no check of the peer, no bookkeeping, and no code shared with the
//! transports. For benchmarks.

mod duo;
mod room;
mod streaming;

use std::io;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

use duo::Duo;
use libc::iovec;

pub use room::Room;

/// Bytes that a thread takes at a time when two share a copy.
const PART: usize = 1 << 20;

/// Vectors that one system call takes.
const IOV_MAX: usize = 1024;

/// Rows of bytes: packed in the destination, a pitch apart in the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rows {
    /// How many.
    pub count: usize,
    /// Bytes of each.
    pub width: usize,
    /// Bytes from one to the next in the source.
    pub pitch: usize,
}

/// How memory is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// `memcpy` on one thread.
    Plain,
    /// Stores that go around the caches, on one thread.
    Streaming,
    /// `memcpy` on two threads.
    PlainTwice,
    /// Stores that go around the caches, on two threads.
    StreamingTwice,
}

impl Way {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Plain, Self::Streaming, Self::PlainTwice, Self::StreamingTwice];

    /// As people read it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "memcpy",
            Self::Streaming => "non-temporal",
            Self::PlainTwice => "memcpy, 2 threads",
            Self::StreamingTwice => "non-temporal, 2 threads",
        }
    }
}

/// Threads that `cma` copies so many bytes with.
pub fn cma_threads(bytes: u64) -> usize {
    crate::cma::threads(bytes)
}

/// Copies with a second thread at hand, which waits between copies.
#[derive(Debug)]
pub struct Probe {
    duo: Duo,
}

/// Part of a copy: rows of one width, or a piece of one row.
#[derive(Debug, Clone, Copy)]
struct Part {
    src: usize,
    dst: usize,
    rows: Rows,
}

/// The first byte of a destination, of which every part goes to one thread.
#[derive(Clone, Copy)]
struct Base(*mut u8);

// SAFETY: whoever makes one holds the exclusive borrow of the bytes until all threads are done with it.
unsafe impl Send for Base {}
// SAFETY: as above.
unsafe impl Sync for Base {}

impl Probe {
    /// Starts the second thread.
    ///
    /// # Errors
    /// Where the system gives no thread.
    pub fn start() -> io::Result<Self> {
        Ok(Self { duo: Duo::start()? })
    }

    /// Copies rows of `src` into `dst`.
    ///
    /// # Panics
    /// Where the rows do not lie inside both.
    pub fn copy(&self, way: Way, src: &[u8], dst: &mut [u8], rows: Rows) {
        rows.check(src.len(), dst.len());
        let (streaming, threads) = match way {
            Way::Plain => (false, 1),
            Way::Streaming => (true, 1),
            Way::PlainTwice => (false, 2),
            Way::StreamingTwice => (true, 2),
        };
        let base = Base(dst.as_mut_ptr());
        let copy = |part: Part| {
            for row in 0..part.rows.count {
                // SAFETY: `check` proved that all rows lie inside both slices, whose borrows exclude an overlap; each
                // part is copied once.
                unsafe {
                    let from = src.as_ptr().add(part.src + row * part.rows.pitch);
                    let to = { base }.0.add(part.dst + row * part.rows.width);
                    if streaming {
                        streaming::copy(from, to, part.rows.width);
                    } else {
                        ptr::copy_nonoverlapping(from, to, part.rows.width);
                    }
                }
            }
        };
        self.share(rows, threads, copy);
    }

    /// Copies rows at an address of another process with `process_vm_readv`.
    ///
    /// # Errors
    /// What the system says; also where not all bytes are readable there.
    ///
    /// # Panics
    /// Where `dst` is too short.
    pub fn read_process(&self, pid: u32, address: u64, dst: &mut [u8], rows: Rows, threads: usize) -> io::Result<()> {
        rows.check(usize::MAX, dst.len());
        let pid = libc::pid_t::try_from(pid).map_err(io::Error::other)?;
        let base = Base(dst.as_mut_ptr());
        let failed = std::sync::Mutex::new(None);
        let read = |part: Part| {
            let base = { base }.0;
            let vector = |at: *mut u8| iovec {
                iov_base: at.cast(),
                iov_len: part.rows.width,
            };
            let offsets: Vec<usize> = (0..part.rows.count).collect();
            for rows in offsets.chunks(IOV_MAX) {
                let local = rows.iter().map(|row| {
                    // SAFETY: `check` proved that all rows lie inside the slice.
                    vector(unsafe { base.add(part.dst + row * part.rows.width) })
                });
                let remote = rows.iter().map(|row| {
                    let at = (address as usize).wrapping_add(part.src + row * part.rows.pitch);
                    vector(ptr::without_provenance_mut(at))
                });
                let (local, remote): (Vec<_>, Vec<_>) = (local.collect(), remote.collect());
                // SAFETY: the local vectors are parts of `dst`, which is borrowed exclusively and of which each byte is
                // in one part; the kernel checks the remote ones.
                let copied = unsafe {
                    let (local, remote, count) = (local.as_ptr(), remote.as_ptr(), local.len() as libc::c_ulong);
                    libc::process_vm_readv(pid, local, count, remote, count, 0)
                };
                if usize::try_from(copied).ok() != Some(rows.len() * part.rows.width) {
                    let error = if copied < 0 {
                        io::Error::last_os_error()
                    } else {
                        io::Error::other(format!("{copied} bytes of {} rows were read", rows.len()))
                    };
                    *failed.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(error);
                }
            }
        };
        self.share(rows, threads, read);
        match failed.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
            None => Ok(()),
            Some(error) => Err(error),
        }
    }

    /// Runs all parts, on this thread or on two.
    fn share(&self, rows: Rows, threads: usize, work: impl Fn(Part) + Sync) {
        if threads < 2 {
            return work(Part { src: 0, dst: 0, rows });
        }
        let parts = rows.parts();
        let next = AtomicUsize::new(0);
        self.duo.both(&|| {
            while let Some(part) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
                work(*part);
            }
        });
    }
}

impl Rows {
    /// `bytes` bytes without a gap.
    pub const fn whole(bytes: usize) -> Self {
        Self {
            count: 1,
            width: bytes,
            pitch: bytes,
        }
    }

    fn check(self, src: usize, dst: usize) {
        let end = (self.count - 1) * self.pitch + self.width;
        assert!(self.width <= self.pitch && end <= src, "the rows end at {end} of {src}");
        let bytes = self.count * self.width;
        assert!(bytes <= dst, "the rows have {bytes} bytes, the destination {dst}");
    }

    /// Parts of about [`PART`] bytes.
    fn parts(self) -> Vec<Part> {
        let mut parts = Vec::new();
        if self.width > PART {
            for row in 0..self.count {
                for at in (0..self.width).step_by(PART) {
                    parts.push(Part {
                        src: row * self.pitch + at,
                        dst: row * self.width + at,
                        rows: Self::whole(PART.min(self.width - at)),
                    });
                }
            }
            return parts;
        }
        let step = (PART / self.width.max(1)).max(1);
        for row in (0..self.count).step_by(step) {
            parts.push(Part {
                src: row * self.pitch,
                dst: row * self.width,
                rows: Self {
                    count: step.min(self.count - row),
                    ..self
                },
            });
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(clippy::print_stderr, reason = "a skip must be visible")]
    fn every_way_copies_the_same_bytes() {
        let probe = Probe::start().expect("a thread");
        let shapes = [(1, 3 * PART + 5), (4, PART + 77), (300, 4097), (1, 1), (5000, 9)];
        for (count, width) in shapes {
            let rows = Rows {
                count,
                width,
                pitch: width + 64,
            };
            let src: Vec<u8> = (0..count * rows.pitch).map(|byte| (byte * 7 % 251) as u8).collect();
            let expected: Vec<u8> = src.chunks(rows.pitch).flat_map(|row| &row[..width]).copied().collect();
            for way in Way::ALL {
                let mut dst = vec![0; count * width];
                probe.copy(way, &src, &mut dst, rows);
                assert!(dst == expected, "{way:?} of {rows:?}");
            }
            for threads in [1, 2] {
                let mut dst = vec![0; count * width];
                let address = src.as_ptr().addr() as u64;
                match probe.read_process(std::process::id(), address, &mut dst, rows, threads) {
                    Ok(()) => assert!(dst == expected, "process_vm_readv of {rows:?}"),
                    Err(error) => eprintln!("skipped: process_vm_readv says {error}"),
                }
            }
        }
    }
}
