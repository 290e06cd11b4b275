//! Unix sockets that wake their runtime only for what somebody waits for.
//!
//! A socket that a runtime watches both ways wakes it twice in an exchange: for the answer, and before that because the peer
//! has read the request, so that more could be written, which nobody waits for.

use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown, recv, sendmsg, shutdown};
use tokio::io::unix::{AsyncFd, AsyncFdReadyGuard};
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::UnixStream;

use crate::readiness;

/// Takes a connection apart, for a reader and a writer that need not know of each other.
///
/// # Errors
/// There are no descriptors left.
pub fn split(stream: UnixStream) -> io::Result<(Reader, Writer)> {
    let stream = OwnedFd::from(stream.into_std()?);
    let writer = Writer {
        socket: stream.try_clone()?,
        room: None,
    };
    let socket = readiness::watch(stream, Interest::READABLE)?;
    Ok((Reader { socket }, writer))
}

/// What the peer sends. It is there for who reads as soon as it has come, whether the runtime knows of it or not.
#[derive(Debug)]
pub struct Reader {
    socket: AsyncFd<OwnedFd>,
}

impl Reader {
    /// A descriptor of the same socket, to wait for what comes in other ways.
    ///
    /// # Errors
    /// There are no descriptors left.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        self.socket.get_ref().try_clone()
    }
}

impl AsyncRead for Reader {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let mut ready = None;
        loop {
            let room = buffer.initialize_unfilled();
            match recv(self.socket.get_ref(), &mut *room, RecvFlags::DONTWAIT) {
                Ok((read, _)) => {
                    buffer.advance(read);
                    return Poll::Ready(Ok(()));
                }
                Err(rustix::io::Errno::AGAIN) => {
                    // What comes after this call makes it ready again.
                    if let Some(mut ready) = ready.take() {
                        AsyncFdReadyGuard::clear_ready(&mut ready);
                    }
                    ready = Some(ready!(self.socket.poll_read_ready(context))?);
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Poll::Ready(Err(error.into())),
            }
        }
    }
}

/// What is sent to the peer, which hears of the end when this is dropped.
#[derive(Debug)]
pub struct Writer {
    socket: OwnedFd,
    /// Watched while the socket is full.
    room: Option<AsyncFd<OwnedFd>>,
}

impl AsyncWrite for Writer {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(context, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        loop {
            if let Some(room) = &self.room {
                ready!(room.poll_write_ready(context))?.retain_ready();
                self.room = None;
            }
            // A peer that is gone is an error, not a signal.
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match sendmsg(&self.socket, slices, &mut SendAncillaryBuffer::default(), flags) {
                Ok(written) => return Poll::Ready(Ok(written)),
                Err(rustix::io::Errno::AGAIN) => {
                    let socket = self.socket.try_clone()?;
                    self.room = Some(readiness::watch(socket, Interest::WRITABLE)?);
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Poll::Ready(Err(error.into())),
            }
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(shutdown(&self.socket, Shutdown::Write).map_err(io::Error::from))
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // Where it fails, it is over already.
        let _ = shutdown(&self.socket, Shutdown::Write);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;
    use std::time::Duration;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[derive(Default)]
    struct Wakings(AtomicUsize);

    impl Wake for Wakings {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn pair() -> ((Reader, Writer), UnixStream) {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        (split(ours).expect("descriptors"), theirs)
    }

    #[tokio::test]
    async fn bytes_come_in_order_both_ways_also_through_a_full_socket_and_the_end_is_heard() {
        let ((mut read, mut write), theirs) = pair();
        let (mut from, mut to) = theirs.into_split();
        let sent: Vec<u8> = (0..3_000_000_u32).map(|at| (at % 251) as u8).collect();
        let (mut there, mut back) = (Vec::new(), Vec::new());
        let ours = async {
            write.write_all(&sent).await.expect("they read");
            drop(write);
            read.read_to_end(&mut back).await.expect("they write");
        };
        let echo = async {
            from.read_to_end(&mut there).await.expect("we write");
            to.write_all(&there).await.expect("we read");
            drop((from, to));
        };
        let both = async { tokio::join!(ours, echo) };
        tokio::time::timeout(Duration::from_secs(20), both)
            .await
            .expect("in time");
        assert!(there == sent && back == sent);
    }

    /// Room in the socket wakes only who waits for it.
    #[tokio::test]
    async fn a_peer_that_reads_wakes_a_writer_that_waits_and_no_reader() {
        let ((mut read, mut write), mut theirs) = pair();
        let (reading, writing) = (Arc::new(Wakings::default()), Arc::new(Wakings::default()));
        let [reader, writer] = [&reading, &writing].map(|wakings| std::task::Waker::from(Arc::clone(wakings)));
        let (mut reader, mut writer) = (Context::from_waker(&reader), Context::from_waker(&writer));
        let mut byte = [0];
        let mut buffer = ReadBuf::new(&mut byte);
        assert!(Pin::new(&mut read).poll_read(&mut reader, &mut buffer).is_pending());
        let mut filled = 0;
        while let Poll::Ready(written) = Pin::new(&mut write).poll_write(&mut writer, &[0; 10_000]) {
            filled += written.expect("there is room");
        }
        assert!(write.room.is_some(), "it is waited for");
        theirs.read_exact(&mut vec![0; filled]).await.expect("written");
        while writing.0.load(Ordering::SeqCst) == 0 {
            tokio::task::yield_now().await;
        }
        assert!(Pin::new(&mut write).poll_write(&mut writer, &[1]).is_ready());
        assert!(write.room.is_none(), "nobody waits any more");
        assert_eq!(reading.0.load(Ordering::SeqCst), 0, "nothing to read");
        theirs.write_all(&[7]).await.expect("we are there");
        while reading.0.load(Ordering::SeqCst) == 0 {
            tokio::task::yield_now().await;
        }
        assert!(Pin::new(&mut read).poll_read(&mut reader, &mut buffer).is_ready());
        assert_eq!(buffer.filled(), [7]);
    }

    #[tokio::test]
    async fn a_peer_that_is_gone_is_an_error() {
        let ((mut read, mut write), theirs) = pair();
        drop(theirs);
        assert_eq!(read.read(&mut [0; 8]).await.expect("the end"), 0);
        let error = write.write_all(&[1]).await.expect_err("nobody is there");
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }
}
