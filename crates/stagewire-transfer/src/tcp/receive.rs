//! The data frames of a transfer become memory.

use std::io;
use std::ptr::NonNull;

use twox_hash::XxHash3_64;

use super::digest::Digest;
use super::frame::{FrameError, FrameKind, HEAD, Head, Refusal, check_payload, decode_head};
use super::line::Socket;
use super::rows::{Cursor, Rows};
use super::send::{Base, Framing};
use super::vectors::{Turns, Vectors};
use crate::copy::{Read, copy_rows};

/// Why not all bytes of a transfer came.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReceiveError {
    #[error("the other side refuses: {0:?}")]
    Refused(Refusal),
    #[error("bytes from {at} on arrived changed: the digest {expected:016x} on bytes with digest {found:016x}")]
    Corrupt { at: u64, expected: u64, found: u64 },
    #[error("{0} where a frame was due")]
    Malformed(FrameError),
    #[error("{found:?} where {expected:?} was due")]
    Unexpected { expected: Head, found: Head },
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl ReceiveError {
    /// The same, of a stream that is part of a longer one, behind so many bytes.
    pub(crate) fn behind(self, bytes: u64) -> Self {
        match self {
            Self::Corrupt { at, expected, found } => Self::Corrupt {
                at: at + bytes,
                expected,
                found,
            },
            Self::Refused(Refusal::Corrupt { at }) => Self::Refused(Refusal::Corrupt { at: at + bytes }),
            other => other,
        }
    }
}

/// Receives all rows, and to the end also where a digest is wrong, so that the lane can be used again.
///
/// # Safety
/// The rows must lie inside writable memory from `base` on that stays in place and that nobody else uses until this
/// future is done or dropped.
///
/// # Cancel safety
/// No byte is written after the future was dropped. The stream is of no further use then, nor after an error other than
/// a refusal.
pub(crate) async unsafe fn receive(
    stream: &impl Socket,
    mut framing: Framing,
    base: Base,
    rows: &Rows,
) -> Result<(), ReceiveError> {
    let total = rows.bytes();
    let (mut vectors, mut gathered, mut turns) = (Vectors::default(), Vec::new(), Turns::default());
    let mut corrupt = None;
    let (mut heads, mut behind) = ([[0_u8; HEAD]; 2], 0_u8);
    let (mut cursor, mut at) = (Cursor::default(), 0);
    // The head of the first frame comes with its payload, that of each other one with the payload before it.
    let mut proven = false;
    while at < total {
        let expected = framing.head(at, total);
        let next = at + u64::from(expected.len);
        let [head, following] = &mut heads;
        vectors.clear();
        let begin = cursor;
        // SAFETY: heads and gathered bytes outlive the vectors; for the rest the caller vouches.
        unsafe {
            if at == 0 {
                vectors.push(NonNull::from(&mut *head).cast(), HEAD);
            }
            lay_out(&expected, base, rows, &mut cursor, &mut gathered, &mut vectors);
            if next < total {
                vectors.push(NonNull::from(&mut *following).cast(), HEAD);
            } else {
                // A call that could have brought one more byte shows that nothing is left to receive, which spares the
                // next transfer a call that brings nothing.
                vectors.push(NonNull::from(&mut behind), 1);
            }
        }
        let spare = usize::from(next == total);
        let behind_head = vectors.left() - if at == 0 { HEAD } else { 0 };
        loop {
            if !proven && vectors.left() <= behind_head {
                // The sender adds digests where only it wants them.
                framing.digest = prove(head, &expected)?;
                proven = true;
            }
            if vectors.left() <= spare {
                break;
            }
            vectors.receive(stream, &mut turns).await?;
        }
        if vectors.left() < spare {
            let error = io::Error::new(io::ErrorKind::InvalidData, "bytes behind the end of a transfer");
            return Err(error.into());
        }
        // SAFETY: the caller vouches for the rows, and the vectors are filled.
        let digest = unsafe { settle(&framing.head(at, total), base, rows, begin, &gathered) };
        if framing.digest
            && let Err((expected, found)) = check_payload(head, digest)
        {
            corrupt.get_or_insert(ReceiveError::Corrupt { at, expected, found });
        }
        heads.swap(0, 1);
        proven = false;
        at = next;
    }
    corrupt.map_or(Ok(()), Err)
}

/// Collects where the payload of one frame goes: into the rows, or for narrow ones first into one buffer.
///
/// # Safety
/// As [`receive`].
unsafe fn lay_out(
    head: &Head,
    base: Base,
    rows: &Rows,
    cursor: &mut Cursor,
    gathered: &mut Vec<u8>,
    vectors: &mut Vectors,
) {
    let len = head.len as usize;
    if rows.is_narrow() {
        cursor.walk(rows, len as u64, |_, _| ());
        gathered.resize(len.max(gathered.len()), 0);
        // SAFETY: stays until the vectors are filled.
        unsafe { vectors.push(NonNull::from(gathered.as_mut_slice()).cast(), len) };
        return;
    }
    // SAFETY: the caller's contract.
    cursor.walk(rows, len as u64, |offset, width| unsafe {
        vectors.push(base.at(offset), width);
    });
}

/// Moves the payload of a frame from the buffer into narrow rows, and computes its digest.
///
/// # Safety
/// As [`receive`], and the payload was received.
unsafe fn settle(head: &Head, base: Base, rows: &Rows, mut cursor: Cursor, gathered: &[u8]) -> u64 {
    let len = head.len as usize;
    if !rows.is_narrow() {
        let mut digest = Digest::new(head.digest);
        if head.digest {
            // SAFETY: the caller's contract.
            cursor.walk(rows, len as u64, |offset, width| unsafe {
                digest.add(base.at(offset), width, len);
            });
        }
        return digest.finish();
    }
    let gathered = &gathered[..len];
    let mut from = gathered.as_ptr();
    cursor.stride(rows, len as u64, |run, _| {
        let (width, rows) = (run.width as usize, run.rows as usize);
        let packed = Read {
            at: from,
            width,
            rows,
            pitch: width,
        };
        // SAFETY: the rows of a frame have `len` bytes together; the caller vouches for the destination.
        unsafe {
            copy_rows(packed, base.at(run.offset).as_ptr(), run.pitch as usize, None, false);
            from = from.add(width * rows);
        }
    });
    if head.digest { XxHash3_64::oneshot(gathered) } else { 0 }
}

/// Proves that a head is the one that was due, if need be with a digest that was not asked for. Tells whether it has one.
fn prove(bytes: &[u8; HEAD], expected: &Head) -> Result<bool, ReceiveError> {
    let found = decode_head(bytes).map_err(ReceiveError::Malformed)?;
    let more = Head {
        digest: true,
        ..*expected
    };
    if found == *expected || found == more {
        return Ok(found.digest);
    }
    if found.kind == FrameKind::Refused && found.transfer == expected.transfer && found.len == 0 {
        let refusal = Refusal::from_detail(found.detail).map_err(ReceiveError::Malformed)?;
        return Err(ReceiveError::Refused(refusal));
    }
    let expected = *expected;
    Err(ReceiveError::Unexpected { expected, found })
}
