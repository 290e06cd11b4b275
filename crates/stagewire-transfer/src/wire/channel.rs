use std::io;
use std::os::fd::BorrowedFd;

use super::stream::MAX_STREAM_FRAME;
use super::{MAX_FRAME, Received, Socket, Stream};

/// A control connection, whichever socket it uses.
pub(crate) enum Channel {
    /// To a process of this host; carries descriptors.
    Unix(Socket),
    /// To any host.
    Tcp(Stream),
}

impl Channel {
    /// No frame that arrives is longer.
    pub(crate) fn max_frame(&self) -> usize {
        match self {
            Self::Unix(_) => MAX_FRAME,
            Self::Tcp(_) => MAX_STREAM_FRAME,
        }
    }

    /// Whether the other side can only do what this one serves: nothing of this process's memory is in its hands.
    pub(crate) fn is_remote(&self) -> bool {
        matches!(self, Self::Tcp(_))
    }

    /// Sends one frame, with a descriptor if there is one.
    ///
    /// # Cancel safety
    /// A dropped future has sent the frame or nothing.
    pub(crate) async fn send(&self, frame: &[u8], descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
        match self {
            Self::Unix(socket) => socket.send(frame, descriptor).await,
            Self::Tcp(_) if descriptor.is_some() => Err(io::Error::other("TCP carries no descriptors")),
            Self::Tcp(stream) => stream.send(frame).await,
        }
    }

    /// Sends one frame, or leaves it to [`Channel::flush`]. Never waits.
    pub(crate) fn post(&self, frame: &[u8]) -> io::Result<()> {
        match self {
            Self::Unix(socket) => socket.post(frame),
            Self::Tcp(stream) => stream.post(frame),
        }
    }

    /// Waits until frames are left over, and sends some.
    ///
    /// # Cancel safety
    /// Safe.
    pub(crate) async fn flush(&self) -> io::Result<()> {
        match self {
            Self::Unix(socket) => socket.flush().await,
            Self::Tcp(stream) => stream.flush().await,
        }
    }

    /// Receives one frame into `buffer`.
    ///
    /// # Cancel safety
    /// A dropped future has received nothing.
    pub(crate) async fn receive(&self, buffer: &mut [u8]) -> io::Result<Received> {
        match self {
            Self::Unix(socket) => socket.receive(buffer).await,
            Self::Tcp(stream) => {
                let received = stream.receive(buffer).await?;
                Ok(received.map_or(Received::End, |len| Received::Frame(len, None)))
            }
        }
    }

    /// Sends no more; the other end sees [`Received::End`].
    pub(crate) fn end_sending(&self) -> io::Result<()> {
        match self {
            Self::Unix(socket) => socket.end_sending(),
            Self::Tcp(stream) => stream.end_sending(),
        }
    }
}
