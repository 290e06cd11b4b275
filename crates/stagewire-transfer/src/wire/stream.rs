use std::collections::VecDeque;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::net::sockopt;
use tokio::net::TcpStream;
use tokio::sync::Notify;

use super::MAX_FRAME;

/// Frames after the greeting may be so long: a transport's own messages travel in them.
pub(crate) const MAX_STREAM_FRAME: usize = 64 << 10;

/// Above so many unsent bytes, [`Stream::send`] waits.
const QUEUE: usize = 256 << 10;

/// What was sent and stays unacknowledged for so long means that the other host is gone. On a lane it may mean that the
/// other process stands still, which the deadlines of its transfers judge.
const UNACKNOWLEDGED_MS: u32 = 11_000;

/// Bytes of the length in front of each frame.
const PREFIX: usize = 4;

/// One end of a TCP connection that carries frames, each behind its length (u32, little endian).
pub(crate) struct Stream {
    socket: TcpStream,
    incoming: Mutex<Incoming>,
    /// Frames that were taken and not yet sent, or part of one.
    outgoing: Mutex<VecDeque<u8>>,
    /// Told when `outgoing` is no longer empty.
    filled: Notify,
}

/// Bytes that were read and not yet handed out.
pub(crate) struct Incoming {
    bytes: Vec<u8>,
    max_frame: usize,
}

impl Stream {
    /// Takes a connected socket. Its frames are short at first, as greetings are.
    pub(crate) fn new(socket: TcpStream) -> Self {
        Self {
            socket,
            incoming: Mutex::new(Incoming {
                bytes: Vec::new(),
                max_frame: MAX_FRAME,
            }),
            outgoing: Mutex::default(),
            filled: Notify::new(),
        }
    }

    /// The other side is known: it may send long frames. From here on, it is lost when it acknowledges nothing for as long
    /// as [`UNACKNOWLEDGED_MS`].
    pub(crate) fn greeted(&self) -> io::Result<()> {
        lock(&self.incoming).max_frame = MAX_STREAM_FRAME;
        Ok(sockopt::set_tcp_user_timeout(&self.socket, UNACKNOWLEDGED_MS)?)
    }

    /// The bare socket, where nothing is under way in either direction.
    pub(crate) fn into_socket(self) -> io::Result<TcpStream> {
        if lock(&self.incoming).bytes.is_empty() && lock(&self.outgoing).is_empty() {
            Ok(self.socket)
        } else {
            Err(io::Error::other("bytes were sent before the greeting was answered"))
        }
    }

    /// Sends one frame, or leaves it to [`Stream::flush`]; waits while too much is unsent.
    ///
    /// # Cancel safety
    /// A dropped future has sent the frame or nothing.
    pub(crate) async fn send(&self, frame: &[u8]) -> io::Result<()> {
        while lock(&self.outgoing).len() >= QUEUE {
            self.write_some().await?;
        }
        self.post(frame)
    }

    /// Sends one frame, or leaves it to [`Stream::flush`]. Never waits.
    pub(crate) fn post(&self, frame: &[u8]) -> io::Result<()> {
        let len = u32::try_from(frame.len()).map_err(io::Error::other)?;
        let mut outgoing = lock(&self.outgoing);
        let waits = !outgoing.is_empty();
        outgoing.extend(len.to_le_bytes());
        outgoing.extend(frame);
        if !waits {
            self.write(&mut outgoing)?;
        }
        if !outgoing.is_empty() {
            self.filled.notify_one();
        }
        Ok(())
    }

    /// Writes as much as the socket takes now.
    fn write(&self, outgoing: &mut VecDeque<u8>) -> io::Result<()> {
        while !outgoing.is_empty() {
            let (next, _) = outgoing.as_slices();
            match self.socket.try_write(next) {
                Ok(written) => drop(outgoing.drain(..written)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Sends what was left over, as soon as there is any and the socket takes some.
    ///
    /// # Cancel safety
    /// Safe.
    pub(crate) async fn flush(&self) -> io::Result<()> {
        loop {
            let filled = self.filled.notified();
            if !lock(&self.outgoing).is_empty() {
                break;
            }
            filled.await;
        }
        self.write_some().await
    }

    async fn write_some(&self) -> io::Result<()> {
        self.socket.writable().await?;
        self.write(&mut lock(&self.outgoing))
    }

    /// Sends everything that was left over.
    pub(crate) async fn flush_all(&self) -> io::Result<()> {
        while !lock(&self.outgoing).is_empty() {
            self.write_some().await?;
        }
        Ok(())
    }

    /// Receives one frame into `buffer`; gives its length, or `None` at the end of the stream.
    ///
    /// # Cancel safety
    /// A dropped future has received nothing.
    pub(crate) async fn receive(&self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        loop {
            if let Some(len) = lock(&self.incoming).take(buffer)? {
                return Ok(Some(len));
            }
            self.socket.readable().await?;
            let mut incoming = lock(&self.incoming);
            let missing = incoming.missing();
            let at = incoming.bytes.len();
            incoming.bytes.resize(at + missing, 0);
            let read = self.socket.try_read(&mut incoming.bytes[at..]);
            incoming.bytes.truncate(at + *read.as_ref().unwrap_or(&0));
            match read {
                Ok(0) if at == 0 => return Ok(None),
                Ok(0) => {
                    return Err(io::Error::new(
                        io::ErrorKind::UnexpectedEof,
                        "the stream ends inside a frame",
                    ));
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // Closed with frames unread: an end like any other.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
                Err(error) => return Err(error),
            }
        }
    }

    /// Sends no more; the other end sees the end of the stream.
    pub(crate) fn end_sending(&self) -> io::Result<()> {
        Ok(rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Write)?)
    }
}

impl Incoming {
    #[cfg(feature = "fuzzing")]
    pub(crate) fn new() -> Self {
        Self {
            bytes: Vec::new(),
            max_frame: MAX_STREAM_FRAME,
        }
    }

    #[cfg(feature = "fuzzing")]
    pub(crate) fn extend(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Length of the frame under way, once that is known.
    fn announced(&self) -> Option<usize> {
        let prefix = self.bytes.first_chunk::<PREFIX>()?;
        Some(u32::from_le_bytes(*prefix) as usize)
    }

    /// Bytes until the frame, or its length, is complete: never more than that, so that what follows stays in the socket.
    pub(crate) fn missing(&self) -> usize {
        let wanted = self.announced().map_or(PREFIX, |len| PREFIX + len);
        wanted - self.bytes.len()
    }

    /// Hands out a complete frame.
    pub(crate) fn take(&mut self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        let Some(len) = self.announced() else {
            return Ok(None);
        };
        let max = self.max_frame.min(buffer.len());
        if len == 0 || len > max {
            let problem = format!("a frame of {len} bytes; 1 to {max} are allowed");
            return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
        }
        if self.bytes.len() < PREFIX + len {
            return Ok(None);
        }
        buffer[..len].copy_from_slice(&self.bytes[PREFIX..]);
        self.bytes.clear();
        Ok(Some(len))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    async fn pair() -> (Stream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
        let address = listener.local_addr().expect("bound");
        let (here, there) = tokio::join!(TcpStream::connect(address), listener.accept());
        (Stream::new(here.expect("connected")), there.expect("accepted").0)
    }

    #[tokio::test]
    async fn frames_arrive_whole_however_they_are_cut() {
        let (stream, mut other) = pair().await;
        let sent = tokio::spawn(async move {
            for byte in [3, 0, 0, 0, b'a', b'b', b'c', 1, 0, 0, 0, b'd'] {
                other.write_all(&[byte]).await.expect("sent");
                tokio::task::yield_now().await;
            }
            other
        });
        let mut buffer = [0; MAX_FRAME];
        assert_eq!(stream.receive(&mut buffer).await.expect("whole"), Some(3));
        assert_eq!(&buffer[..3], b"abc");
        assert_eq!(stream.receive(&mut buffer).await.expect("whole"), Some(1));
        drop(sent.await.expect("no panic"));
        assert_eq!(stream.receive(&mut buffer).await.expect("an end"), None);
    }

    #[tokio::test]
    async fn oversized_and_cut_frames_are_errors() {
        for bytes in [
            &[1, 16, 0, 0, 9][..],
            &[0, 0, 0, 0],
            &[255, 255, 255, 255],
            &[3, 0, 0, 0, b'a'],
        ] {
            let (stream, mut other) = pair().await;
            other.write_all(bytes).await.expect("sent");
            drop(other);
            let received = stream.receive(&mut [0; MAX_FRAME]).await;
            assert!(received.is_err(), "{bytes:?} is {received:?}");
        }
    }

    #[tokio::test]
    async fn what_the_socket_does_not_take_is_sent_later() {
        let (stream, mut other) = pair().await;
        let frame = vec![7; 60 << 10];
        let frames = 200;
        let send = async {
            for _ in 0..frames {
                stream.send(&frame).await.expect("sent");
            }
            stream.flush_all().await.expect("sent");
        };
        let flush = async {
            loop {
                stream.flush().await.expect("sent");
            }
        };
        let receive = async {
            for _ in 0..frames {
                assert_eq!(other.read_u32_le().await.expect("a length") as usize, frame.len());
                let mut found = vec![0; frame.len()];
                other.read_exact(&mut found).await.expect("a frame");
                assert!(found == frame, "bytes of a frame changed");
            }
        };
        tokio::select! {
            _ = futures::future::join(send, receive) => {}
            () = flush => unreachable!("endless"),
        }
    }
}
