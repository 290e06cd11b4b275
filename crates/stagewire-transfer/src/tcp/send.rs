//! Memory becomes the data frames of a transfer.

use std::io;
use std::ptr::NonNull;

use twox_hash::XxHash3_64;

use super::digest::Digest;
use super::frame::{FrameKind, HEAD, Head, encode_head};
use super::line::Socket;
use super::pace::Pace;
use super::rows::{Cursor, Rows, Run};
use super::vectors::Vectors;
use crate::copy::{Read, copy_rows};

/// How the stream of a transfer is cut and proven. Both sides agree on it before.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Framing {
    pub(crate) transfer: u64,
    pub(crate) frame_len: u32,
    pub(crate) digest: bool,
}

impl Framing {
    /// The head of the frame that begins at `at` of a stream of so many bytes.
    pub(crate) fn head(&self, at: u64, bytes: u64) -> Head {
        Head {
            kind: FrameKind::Data,
            digest: self.digest,
            len: u64::from(self.frame_len).min(bytes - at) as u32,
            transfer: self.transfer,
            detail: at,
        }
    }
}

/// First byte of memory that rows lie in.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Base(pub(crate) NonNull<u8>);

// SAFETY: an address; who uses it vouches for the memory.
unsafe impl Send for Base {}
// SAFETY: as above.
unsafe impl Sync for Base {}

impl Base {
    /// # Safety
    /// The offset must lie inside the memory.
    pub(crate) unsafe fn at(self, offset: u64) -> NonNull<u8> {
        // SAFETY: the caller's contract.
        unsafe { self.0.add(offset as usize) }
    }
}

/// Memory whose bytes are to be sent.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Source {
    pub(crate) base: Base,
    /// Whether it may be written meanwhile. Then the payload of a frame with a digest is a copy, of which both are made.
    pub(crate) changes: bool,
}

/// Sends all rows, at the given pace.
///
/// # Safety
/// The rows must lie inside readable memory from the source's base on that stays in place until this future is done or
/// dropped, and that nobody writes meanwhile, unless the source says so.
///
/// # Cancel safety
/// The stream is of no further use, unless nothing was to be sent.
pub(crate) async unsafe fn send(
    stream: &impl Socket,
    framing: Framing,
    pace: &Pace,
    source: Source,
    rows: &Rows,
) -> io::Result<()> {
    let (mut vectors, mut gathered) = (Vectors::default(), Vec::new());
    let (mut cursor, mut at) = (Cursor::default(), 0);
    while at < rows.bytes() {
        let head = framing.head(at, rows.bytes());
        let mut encoded = [0_u8; HEAD];
        let front = Base(NonNull::from(&mut encoded).cast());
        vectors.clear();
        // SAFETY: the head outlives the vectors; for the rest the caller vouches.
        unsafe {
            vectors.push(front.0, HEAD);
            let digest = lay_out(&head, source, rows, &mut cursor, &mut gathered, &mut vectors);
            front.0.cast().write(encode_head(&head, digest));
        }
        while vectors.left() > 0 {
            let bytes = pace.turn(vectors.left()).await;
            vectors.send(stream, bytes).await?;
        }
        at += u64::from(framing.frame_len);
    }
    Ok(())
}

/// Collects the payload of one frame, and its digest. Narrow rows are copied together, and bytes to hash that may change.
///
/// # Safety
/// As [`send`]; and nobody may change `gathered` before the vectors are sent or cleared.
unsafe fn lay_out(
    head: &Head,
    source: Source,
    rows: &Rows,
    cursor: &mut Cursor,
    gathered: &mut Vec<u8>,
    vectors: &mut Vectors,
) -> u64 {
    let (len, base) = (head.len as usize, source.base);
    if rows.is_narrow() || (source.changes && head.digest) {
        gathered.clear();
        gathered.reserve(len);
        let mut to = gathered.as_mut_ptr();
        let read = |run: &Run| Read {
            at: base.0.as_ptr().wrapping_add(run.offset as usize),
            width: run.width as usize,
            rows: run.rows as usize,
            pitch: run.pitch as usize,
        };
        cursor.stride(rows, len as u64, |run, next| {
            let (width, rows) = (run.width as usize, run.rows as usize);
            // SAFETY: the rows of a frame have `len` bytes together, for which there is room; the caller vouches for
            // the source.
            unsafe {
                copy_rows(read(&run), to, width, next.map(read), false);
                to = to.add(width * rows);
            }
        });
        // SAFETY: just filled.
        unsafe { gathered.set_len(len) };
        // SAFETY: stays until the vectors were sent.
        unsafe { vectors.push(NonNull::from(gathered.as_slice()).cast(), len) };
        return if head.digest { XxHash3_64::oneshot(gathered) } else { 0 };
    }
    let mut digest = Digest::new(head.digest);
    cursor.walk(rows, len as u64, |offset, width| {
        // SAFETY: the caller's contract.
        unsafe {
            let at = base.at(offset);
            digest.add_cold(at, width, len);
            vectors.push(at, width);
        }
    });
    digest.finish()
}
