//! Copies out of another process.

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use libc::{c_void, iovec};
use smallvec::SmallVec;
use stagewire_core::Record;

use crate::buffer::Buffer;
use crate::copy::{MoveError, Mover, Piece, pieces};
use crate::link::Grip;

/// Pieces that one system call takes: `UIO_MAXIOV` of the kernel, less one for the owner's random word.
pub(super) const MAX_PIECES: usize = 1023;

/// Bytes of the owner's random word.
const WORD: u64 = size_of::<u64>() as u64;

/// Pieces that begin at most so far apart are read together with what lies between them, and picked out here: the
/// kernel takes 0.2 µs for each piece, as long as for so many bytes. Less than a page apart, so that what lies between
/// is on a page that one of them needs anyhow, and can be read if they can.
const NEAR: u64 = 2048;

/// As long as they are at least so many: a call of their own costs as much as some pieces.
const LEAST_NEAR: usize = 16;

/// Bytes that are read together at most, so that they are picked out of the caches.
const TOGETHER: u64 = 256 << 10;

type Vectors = SmallVec<[iovec; 2]>;

/// Copies out of another process. The grip keeps the memory in place there.
pub(super) struct OutOfProcess {
    pub(super) pid: u32,
    pub(super) address: u64,
    /// Address and value of the owner's random word.
    pub(super) canary: (u64, u64),
    pub(super) grip: Arc<Grip>,
}

impl Mover for OutOfProcess {
    const CHOOSES: bool = false;

    unsafe fn copy(&self, records: &[Record], dst: NonNull<u8>, _streaming: bool) -> Result<(), MoveError> {
        let pieces = pieces(records);
        let (mut left, mut apart) = (&pieces[..], 0);
        while apart < left.len() {
            let near = near(&left[apart..]);
            if near < LEAST_NEAR {
                apart += near.max(1);
                continue;
            }
            let (first, rest) = left.split_at(apart);
            let (together, rest) = rest.split_at(near);
            // SAFETY: the caller's contract.
            unsafe {
                self.read_each(first, dst)?;
                self.read_together(together, dst)?;
            }
            (left, apart) = (rest, 0);
        }
        // SAFETY: the caller's contract.
        unsafe { self.read_each(left, dst) }
    }

    /// The copies have proven what they read; a connection that is over ends pulls all the same.
    fn verify(&self) -> Result<(), MoveError> {
        if self.grip.link().is_open() {
            Ok(())
        } else {
            Err(MoveError::Lost)
        }
    }
}

impl OutOfProcess {
    /// Reads each piece straight to where it goes.
    ///
    /// # Safety
    /// As [`Mover::copy`].
    unsafe fn read_each(&self, pieces: &[Piece], dst: NonNull<u8>) -> Result<(), MoveError> {
        for pieces in pieces.chunks(MAX_PIECES) {
            let (mut local, mut remote) = (
                Vectors::with_capacity(pieces.len() + 1),
                Vectors::with_capacity(pieces.len() + 1),
            );
            for piece in pieces {
                // SAFETY: the caller's contract.
                let base = unsafe { dst.add(piece.dst as usize) };
                local.push(vector(base.as_ptr().cast(), piece.len));
                remote.push(there(self.address.wrapping_add(piece.src), piece.len));
            }
            self.read(local, remote)?;
        }
        Ok(())
    }

    /// Reads [`near`] pieces and what lies between them, and copies them to where they go.
    ///
    /// # Safety
    /// As [`Mover::copy`].
    unsafe fn read_together(&self, pieces: &[Piece], dst: NonNull<u8>) -> Result<(), MoveError> {
        let start = pieces[0].src;
        let end = pieces.iter().map(|piece| piece.src + piece.len).max().unwrap_or(start);
        let Some(buffer) = Buffer::take(TOGETHER) else {
            // SAFETY: the caller's contract.
            return unsafe { self.read_each(pieces, dst) };
        };
        let (local, remote) = (
            vector(buffer.as_ptr().as_ptr().cast(), end - start),
            there(self.address.wrapping_add(start), end - start),
        );
        self.read(Vectors::from_iter([local]), Vectors::from_iter([remote]))?;
        for piece in pieces {
            // SAFETY: the buffer holds the source from `start` to `end`, which all pieces lie in; for the destination
            // the caller's contract. The buffer is nobody else's.
            unsafe {
                let src = buffer.as_ptr().add((piece.src - start) as usize);
                dst.add(piece.dst as usize)
                    .copy_from_nonoverlapping(src, piece.len as usize);
            }
        }
        Ok(())
    }

    /// Reads all of `remote` into `local`, whose memory is reserved for that.
    ///
    /// It reads the owner's random word last. A process that executed another program has the same number and lives, but
    /// another memory. One call reads one memory, and keeps it as it is even where the process ends meanwhile: so the word
    /// proves what came before it.
    fn read(&self, mut local: Vectors, mut remote: Vectors) -> Result<(), MoveError> {
        let (address, expected) = self.canary;
        let mut word = 0_u64;
        local.push(vector((&raw mut word).cast(), WORD));
        remote.push(there(address, WORD));
        let (mut local, mut remote) = (&mut local[..], &mut remote[..]);
        while !local.is_empty() {
            match read_process(self.pid, local, remote) {
                // Part of it, up to an unreadable page: the next turn says which, from its first byte.
                Ok(copied) if copied > 0 => {
                    advance(&mut local, copied);
                    advance(&mut remote, copied);
                }
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Err(MoveError::Lost),
                Err(error) if error.raw_os_error() != Some(libc::EFAULT) => return Err(MoveError::Os(error)),
                _ => {
                    // Another program may be running there by now.
                    if !matches!(read_word(self.pid, address), Ok(word) if word == expected) {
                        return Err(MoveError::Lost);
                    }
                    let offset = (remote[0].iov_base.addr() as u64).wrapping_sub(self.address);
                    return Err(MoveError::Unreadable { offset });
                }
            }
        }
        if word == expected { Ok(()) } else { Err(MoveError::Lost) }
    }
}

/// How many of the first pieces are read together: short ones, each a little behind the one before.
fn near(pieces: &[Piece]) -> usize {
    let start = pieces.first().map_or(0, |first| first.src);
    let mut before = start;
    let is_near = |piece: &&Piece| {
        let begins = piece.src >= before && piece.src - before <= NEAR;
        before = piece.src;
        begins && piece.len <= NEAR && piece.src + piece.len - start <= TOGETHER
    };
    pieces.iter().take_while(is_near).count()
}

fn vector(base: *mut c_void, len: u64) -> iovec {
    iovec {
        iov_base: base,
        iov_len: len as usize,
    }
}

/// An address of another process: it only becomes a pointer because the system call wants one.
fn there(address: u64, len: u64) -> iovec {
    vector(std::ptr::without_provenance_mut(address as usize), len)
}

/// Drops the first `bytes` bytes.
fn advance(vectors: &mut &mut [iovec], mut bytes: usize) {
    while let Some(first) = vectors.first_mut() {
        if bytes < first.iov_len {
            first.iov_base = first.iov_base.wrapping_byte_add(bytes);
            first.iov_len -= bytes;
            return;
        }
        bytes -= first.iov_len;
        *vectors = &mut std::mem::take(vectors)[1..];
    }
}

/// One `process_vm_readv`: copies from `remote` in process `pid` to `local` here, as far as it gets.
fn read_process(pid: u32, local: &[iovec], remote: &[iovec]) -> io::Result<usize> {
    let pid = libc::pid_t::try_from(pid).map_err(io::Error::other)?;
    // SAFETY: both arrays are as long as said. The callers made the local vectors from memory that is reserved for the
    // copy; the remote ones are checked by the kernel.
    let copied = unsafe {
        libc::process_vm_readv(
            pid,
            local.as_ptr(),
            local.len() as libc::c_ulong,
            remote.as_ptr(),
            remote.len() as libc::c_ulong,
            0,
        )
    };
    usize::try_from(copied).map_err(|_| io::Error::last_os_error())
}

/// Reads one word of a process.
pub(super) fn read_word(pid: u32, address: u64) -> io::Result<u64> {
    let mut word = 0_u64;
    let local = iovec {
        iov_base: std::ptr::from_mut(&mut word).cast(),
        iov_len: size_of::<u64>(),
    };
    let remote = iovec {
        iov_base: std::ptr::without_provenance_mut(address as usize),
        iov_len: size_of::<u64>(),
    };
    match read_process(pid, &[local], &[remote])? {
        8 => Ok(word),
        read => Err(io::Error::other(format!("{read} of 8 bytes were read"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_together() {
        let rows = |pitch: u64, len: u64| -> Vec<Piece> {
            let row = |index: u64| Piece {
                src: 5 + index * pitch,
                dst: index * len,
                len,
            };
            (0..1000).map(row).collect()
        };
        assert_eq!(near(&[]), 0);
        assert_eq!(near(&rows(NEAR + 1, 8)), 1, "too far apart");
        assert_eq!(near(&rows(NEAR + 1, NEAR + 1)), 0, "too long");
        assert_eq!(near(&rows(100, 64)), 1000);
        assert_eq!(near(&rows(NEAR, 8)), 128, "more than fits");
        let mut backwards = rows(100, 64);
        backwards.reverse();
        assert_eq!(near(&backwards), 1);
    }

    #[test]
    fn vectors_advance_across_their_ends() {
        let bytes = [0_u8; 12];
        let vector = |at: usize, len| vector(bytes[at..].as_ptr().cast_mut().cast(), len);
        let mut vectors = [vector(0, 4), vector(4, 4), vector(8, 4)];
        let mut rest = &mut vectors[..];
        advance(&mut rest, 6);
        assert_eq!((rest.len(), rest[0].iov_len), (2, 2));
        assert_eq!(rest[0].iov_base.addr(), bytes.as_ptr().addr() + 6);
        advance(&mut rest, 6);
        assert!(rest.is_empty());
    }
}
