//! Scattered memory for one system call.

use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

use libc::{c_int, iovec, msghdr};
use tokio::io::Interest;

use super::line::Socket;

/// Vectors that one system call takes: `UIO_MAXIOV` of the kernel.
pub(crate) const MAX_VECTORS: usize = 1024;

/// Bytes that one system call moves at most, so that no other task of the thread waits long.
const MAX_CALL: usize = 4 << 20;

/// Calls in a row without a pause after which other tasks of the thread have their turn.
const CALLS_IN_A_ROW: u32 = 8;

/// Memory that is to be sent or filled, in order; moved bytes fall off its front.
#[derive(Default)]
pub(crate) struct Vectors {
    list: Vec<iovec>,
    head: usize,
    left: usize,
}

// SAFETY: whoever fills it vouches for the memory (see `push`), which has no thread affinity.
unsafe impl Send for Vectors {}
// SAFETY: as above; a shared reference allows nothing.
unsafe impl Sync for Vectors {}

impl Vectors {
    pub(crate) fn clear(&mut self) {
        self.list.clear();
        (self.head, self.left) = (0, 0);
    }

    /// Adds memory. What follows its predecessor immediately is joined with it.
    ///
    /// # Safety
    /// Until the bytes have been moved or cleared, they must be readable, and where they are received into, writable
    /// and used by nobody else.
    pub(crate) unsafe fn push(&mut self, at: NonNull<u8>, len: usize) {
        self.left += len;
        let base = at.as_ptr().cast();
        match self.list.last_mut() {
            Some(last) if last.iov_base.wrapping_byte_add(last.iov_len) == base => last.iov_len += len,
            _ if len == 0 => {}
            _ => self.list.push(iovec {
                iov_base: base,
                iov_len: len,
            }),
        }
    }

    /// Bytes not moved yet.
    pub(crate) fn left(&self) -> usize {
        self.left
    }

    fn advance(&mut self, mut bytes: usize) {
        self.left -= bytes;
        while let Some(first) = self.list.get_mut(self.head) {
            if bytes < first.iov_len {
                first.iov_base = first.iov_base.wrapping_byte_add(bytes);
                first.iov_len -= bytes;
                return;
            }
            bytes -= first.iov_len;
            self.head += 1;
        }
    }

    /// Has `call` move the next vectors, at most `limit` bytes.
    fn call(&mut self, limit: usize, call: impl FnOnce(&mut msghdr) -> isize) -> io::Result<Moved> {
        let rest = &mut self.list[self.head..];
        let (mut count, mut wanted) = (0, 0);
        while count < rest.len().min(MAX_VECTORS) && wanted < limit {
            wanted += rest[count].iov_len;
            count += 1;
        }
        // What the last vector has too much is cut off for the time of the call.
        let over = wanted.saturating_sub(limit);
        wanted -= over;
        if let Some(last) = rest[..count].last_mut() {
            last.iov_len -= over;
        }
        // SAFETY: all zeros is a valid msghdr: no name, no vectors, no control data.
        let mut message: msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = rest.as_mut_ptr();
        message.msg_iovlen = count;
        let result = usize::try_from(call(&mut message)).map_err(|_| io::Error::last_os_error());
        if let Some(last) = rest[..count].last_mut() {
            last.iov_len += over;
        }
        let bytes = result?;
        self.advance(bytes);
        Ok(Moved { bytes, wanted })
    }

    fn send_now(&mut self, fd: c_int, limit: usize, flags: c_int) -> io::Result<Moved> {
        // SAFETY: the message and its vectors live until the call returns; the pushers vouch for the memory.
        self.call(limit, |message| unsafe {
            libc::sendmsg(fd, message, libc::MSG_NOSIGNAL | flags)
        })
    }

    fn receive_now(&mut self, fd: c_int, flags: c_int) -> io::Result<Moved> {
        // SAFETY: as for sending; the pushers vouch that nobody else uses the memory.
        self.call(MAX_CALL, |message| unsafe { libc::recvmsg(fd, message, flags) })
    }

    /// Sends `bytes` bytes, which are there.
    ///
    /// # Cancel safety
    /// Part of it may have been sent; nothing is sent after the future was dropped.
    pub(crate) async fn send(&mut self, stream: &impl Socket, bytes: usize) -> io::Result<()> {
        let (mut turns, end) = (Turns::default(), self.left - bytes);
        let fd = stream.as_fd().as_raw_fd();
        while self.left > end {
            let limit = (self.left - end).min(MAX_CALL);
            let moved = stream.attempt(Interest::WRITABLE, |flags| self.send_now(fd, limit, flags))?;
            turns.after(stream, Interest::WRITABLE, moved).await?;
        }
        Ok(())
    }

    /// Receives at least one byte, and what is there already.
    ///
    /// # Errors
    /// [`io::ErrorKind::UnexpectedEof`] where the peer ended the stream.
    ///
    /// # Cancel safety
    /// No byte is written after the future was dropped.
    pub(crate) async fn receive(&mut self, stream: &impl Socket, turns: &mut Turns) -> io::Result<()> {
        let fd = stream.as_fd().as_raw_fd();
        loop {
            let moved = stream.attempt(Interest::READABLE, |flags| self.receive_now(fd, flags))?;
            if moved.is_some_and(|moved| moved.bytes == 0) {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            turns.after(stream, Interest::READABLE, moved).await?;
            if moved.is_some() {
                return Ok(());
            }
        }
    }
}

/// What a system call did.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Moved {
    bytes: usize,
    wanted: usize,
}

impl Moved {
    pub(super) fn bytes(self) -> usize {
        self.bytes
    }

    /// Whether it moved less than it could: the socket is not ready any more, which spares the next call.
    pub(crate) fn is_short(self) -> bool {
        0 < self.bytes && self.bytes < self.wanted
    }
}

/// Waits where a socket is not ready, and where it always is, lets others have their turn.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    in_a_row: u32,
}

impl Turns {
    async fn after(&mut self, stream: &impl Socket, interest: Interest, moved: Option<Moved>) -> io::Result<()> {
        if moved.is_none() && stream.ready(interest).await? {
            self.in_a_row = 0;
        } else if self.in_a_row < CALLS_IN_A_ROW {
            self.in_a_row += 1;
        } else {
            self.in_a_row = 0;
            tokio::task::yield_now().await;
        }
        Ok(())
    }
}
