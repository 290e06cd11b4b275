use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, Shutdown, UCred, recvmsg, sendmsg, shutdown, sockopt,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;

use crate::readiness;

/// One end of a `SOCK_SEQPACKET` connection.
pub(crate) struct Socket {
    fd: AsyncFd<OwnedFd>,
    /// Posted frames that found the socket's buffer full.
    backlog: Mutex<VecDeque<Vec<u8>>>,
    backlog_filled: Notify,
}

/// What a packet was.
pub(crate) enum Received {
    /// A frame of so many bytes, and the descriptor that came with it.
    Frame(usize, Option<OwnedFd>),
    /// The other end will send no more.
    End,
}

impl Socket {
    /// Takes a connected, non-blocking socket.
    pub(crate) fn new(fd: OwnedFd) -> io::Result<Self> {
        Ok(Self {
            fd: readiness::watch(fd, Interest::READABLE)?,
            backlog: Mutex::default(),
            backlog_filled: Notify::new(),
        })
    }

    /// Who is at the other end, as the kernel says.
    pub(crate) fn credentials(&self) -> io::Result<UCred> {
        Ok(sockopt::socket_peercred(&self.fd)?)
    }

    /// Sends one frame, with a descriptor if there is one.
    ///
    /// # Cancel safety
    /// A dropped future has sent the frame or nothing.
    pub(crate) async fn send(&self, frame: &[u8], descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
        loop {
            match send_packet(self.fd.as_fd(), frame, descriptor) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.room().await?,
                sent => return sent,
            }
        }
    }

    /// Waits until the socket has room. It is watched for that only now: else every frame that the peer reads would wake the
    /// runtime.
    async fn room(&self) -> io::Result<()> {
        let watched = readiness::watch(self.fd.get_ref().try_clone()?, Interest::WRITABLE)?;
        watched.writable().await?.retain_ready();
        Ok(())
    }

    /// Sends one frame, or leaves it to [`Socket::flush`]. Never waits.
    pub(crate) fn post(&self, frame: &[u8]) -> io::Result<()> {
        match send_packet(self.fd.as_fd(), frame, None) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.backlog().push_back(frame.to_vec());
                self.backlog_filled.notify_one();
                Ok(())
            }
            sent => sent,
        }
    }

    /// Waits until a frame is left over, and sends it.
    ///
    /// # Cancel safety
    /// A frame leaves the backlog only once it is sent.
    pub(crate) async fn flush(&self) -> io::Result<()> {
        let Some(frame) = self.backlog().front().cloned() else {
            self.backlog_filled.notified().await;
            return Ok(());
        };
        let sent = self.send(&frame, None).await;
        self.backlog().pop_front();
        sent
    }

    fn backlog(&self) -> MutexGuard<'_, VecDeque<Vec<u8>>> {
        self.backlog.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Receives one frame into `buffer`.
    ///
    /// # Cancel safety
    /// A dropped future has received nothing.
    pub(crate) async fn receive(&self, buffer: &mut [u8]) -> io::Result<Received> {
        self.fd
            .async_io(Interest::READABLE, |fd| receive_packet(fd.as_fd(), buffer))
            .await
    }

    /// Sends no more; the other end sees [`Received::End`].
    pub(crate) fn end_sending(&self) -> io::Result<()> {
        Ok(shutdown(&self.fd, Shutdown::Write)?)
    }
}

fn send_packet(socket: BorrowedFd<'_>, frame: &[u8], descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = descriptor.as_slice();
    if !descriptors.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let sent = sendmsg(socket, &[IoSlice::new(frame)], &mut control, flags)?;
    if sent == frame.len() {
        Ok(())
    } else {
        Err(io::Error::other(format!(
            "{sent} of {} bytes of a packet were sent",
            frame.len()
        )))
    }
}

fn receive_packet(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<Received> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let message = match recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, flags) {
        // Closed with frames unread: an end like any other.
        Err(rustix::io::Errno::CONNRESET) => return Ok(Received::End),
        received => received?,
    };
    let descriptor = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    if message.bytes == 0 {
        return Ok(Received::End);
    }
    if message.flags.contains(ReturnFlags::TRUNC) {
        return Err(io::Error::other(format!("a frame above {} bytes", buffer.len())));
    }
    if message.flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::Error::other(
            "a descriptor was lost: this process has reached its open-file limit; raise it with `ulimit -n`",
        ));
    }
    Ok(Received::Frame(message.bytes, descriptor))
}
