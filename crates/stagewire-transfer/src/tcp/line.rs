//! How a task waits for a data connection.

use std::io;
use std::net;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures::FutureExt;
use libc::{MSG_DONTWAIT, c_int};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, recv};
use tokio::io::Interest;
use tokio::net::TcpStream;

use super::vectors::Moved;
use crate::readiness;

/// A connection whose bytes are moved by system calls.
pub(crate) trait Socket: AsFd + Sync {
    /// Has `call` move bytes, with these flags, unless it is known that it could not. `None` where it could not.
    fn attempt(&self, interest: Interest, call: impl FnMut(c_int) -> io::Result<Moved>) -> io::Result<Option<Moved>>;

    /// Waits until a call may move bytes. Tells whether other tasks of this thread had their turn meanwhile.
    ///
    /// # Cancel safety
    /// Safe.
    fn ready(&self, interest: Interest) -> impl Future<Output = io::Result<bool>> + Send;
}

/// The runtime's poller watches it all the time.
impl Socket for TcpStream {
    fn attempt(
        &self,
        interest: Interest,
        mut call: impl FnMut(c_int) -> io::Result<Moved>,
    ) -> io::Result<Option<Moved>> {
        let mut moved = None;
        let done = self.try_io(interest, || match call(MSG_DONTWAIT) {
            Ok(done) => {
                moved = Some(done);
                if done.is_short() {
                    Err(io::ErrorKind::WouldBlock.into())
                } else {
                    Ok(())
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            Err(error) => Err(error),
        });
        match done {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
            _ => Ok(moved),
        }
    }

    async fn ready(&self, interest: Interest) -> io::Result<bool> {
        Self::ready(self, interest).await?;
        Ok(true)
    }
}

/// The reader's end of a data connection.
#[derive(Debug)]
pub(crate) enum Line {
    /// From another host.
    Far(TcpStream),
    /// From a process of this host.
    Near(Near),
}

/// The other end is a process of this host, whose next bytes are a copy away: whoever waits for them first does so in the
/// kernel, on its own thread, for [`BRIEFLY`]. By way of the runtime's poller, each wait costs another thread's waking and
/// a hand-over from it. Measured: 4 KiB take 22 µs instead of 33, 1 MiB takes a tenth less.
///
/// A short limit has its own price: the kernel sets a timer for it each time, which takes 1 to 2 µs on a virtual machine,
/// and the wait is a call of its own. So while the peer answers in time, the call that receives waits itself, for up to
/// [`PATIENTLY`]; a peer that does not answer in time once is not waited for like that before it does again.
///
/// No low-water mark (`SO_RCVLOWAT`) is set for such a call: the kernel compares it with what has come since the call took what
/// was there, so that a call which has part of its bytes sleeps over the last ones, here for as long as the timer. Measured:
/// one pull of 1 MiB in twenty took 4 to 6 ms.
#[derive(Debug)]
pub(crate) struct Near {
    /// Its calls wait unless their flags say otherwise. The poller watches it only while a longer wait lasts, because it is
    /// woken by whatever comes.
    stream: net::TcpStream,
    /// Whether the last call found nothing more to receive.
    drained: AtomicBool,
    /// Whether the last call found no more room to send.
    full: AtomicBool,
    /// Whether the last wait for bytes was no longer than [`BRIEFLY`].
    prompt: AtomicBool,
}

/// About as long as an inline copy of shared memory may keep a thread, and longer than a busy owner takes for an answer.
const BRIEFLY: Duration = Duration::from_micros(100);

/// The least that the kernel's cheap timers can be told. They count in ticks: an answer that is late once may keep the
/// thread for two of them, 8 ms where a second has 250.
const PATIENTLY: Duration = Duration::from_millis(1);

impl Line {
    /// # Errors
    /// Where the runtime does not let go of the stream.
    pub(crate) fn new(stream: TcpStream) -> io::Result<Self> {
        if !stream.peer_addr()?.ip().is_loopback() {
            return Ok(Self::Far(stream));
        }
        let stream = stream.into_std()?;
        stream.set_read_timeout(Some(PATIENTLY))?;
        stream.set_nonblocking(false)?;
        Ok(Self::Near(Near {
            stream,
            drained: AtomicBool::new(true),
            full: AtomicBool::new(false),
            prompt: AtomicBool::new(false),
        }))
    }

    /// Whether the peer has neither closed it nor said anything that nobody waits for.
    pub(crate) fn is_quiet(&self) -> bool {
        let nothing = |read: io::Result<usize>| read.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock);
        match self {
            Self::Far(stream) => match TcpStream::ready(stream, Interest::READABLE).now_or_never() {
                None => true,
                Some(ready) => ready.is_ok() && nothing(stream.try_read(&mut [0])),
            },
            Self::Near(near) => nothing(near.peek()),
        }
    }

    #[cfg(test)]
    pub(crate) fn into_stream(self) -> TcpStream {
        match self {
            Self::Far(stream) => stream,
            Self::Near(near) => {
                near.stream.set_nonblocking(true).expect("connected");
                TcpStream::from_std(near.stream).expect("not watched")
            }
        }
    }
}

impl AsFd for Line {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Far(stream) => stream.as_fd(),
            Self::Near(near) => near.stream.as_fd(),
        }
    }
}

impl Socket for Line {
    fn attempt(&self, interest: Interest, call: impl FnMut(c_int) -> io::Result<Moved>) -> io::Result<Option<Moved>> {
        match self {
            Self::Far(stream) => stream.attempt(interest, call),
            Self::Near(near) => near.attempt(interest, call),
        }
    }

    async fn ready(&self, interest: Interest) -> io::Result<bool> {
        match self {
            Self::Far(stream) => Socket::ready(stream, interest).await,
            Self::Near(near) => near.ready(interest).await,
        }
    }
}

impl Near {
    fn exhausted(&self, interest: Interest) -> &AtomicBool {
        if interest.is_readable() {
            &self.drained
        } else {
            &self.full
        }
    }

    fn attempt(
        &self,
        interest: Interest,
        mut call: impl FnMut(c_int) -> io::Result<Moved>,
    ) -> io::Result<Option<Moved>> {
        let exhausted = self.exhausted(interest);
        let waits = exhausted.load(Ordering::Relaxed);
        if waits && !(interest.is_readable() && self.prompt.load(Ordering::Relaxed)) {
            return Ok(None);
        }
        let begun = waits.then(Instant::now);
        let moved = call(if waits { 0 } else { MSG_DONTWAIT });
        let bytes = moved.as_ref().map_or(0, |moved| moved.bytes());
        if begun.is_some_and(|begun| is_late(begun.elapsed(), bytes)) {
            self.prompt.store(false, Ordering::Relaxed);
        }
        match moved {
            Ok(moved) => {
                exhausted.store(moved.is_short(), Ordering::Relaxed);
                Ok(Some(moved))
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn peek(&self) -> io::Result<usize> {
        let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
        let (_, bytes) = recv(&self.stream, &mut [0], flags)?;
        Ok(bytes)
    }

    async fn ready(&self, interest: Interest) -> io::Result<bool> {
        self.exhausted(interest).store(false, Ordering::Relaxed);
        let flags = if interest.is_readable() {
            PollFlags::IN
        } else {
            PollFlags::OUT
        };
        let limit = Timespec::try_from(BRIEFLY).expect("a fraction of a second");
        // Whatever it says but that nothing came, the next call shows.
        let came = !matches!(poll(&mut [PollFd::new(&self.stream, flags)], Some(&limit)), Ok(0));
        if interest.is_readable() {
            self.prompt.store(came, Ordering::Relaxed);
        }
        if came {
            return Ok(false);
        }
        let watched = readiness::watch(self.stream.try_clone()?.into(), interest)?;
        watched.ready(interest).await?.retain_ready();
        Ok(true)
    }
}

/// Whether a call that moved so many bytes waited for longer than [`BRIEFLY`]. Copying takes its time, too, 1 MiB alone longer
/// than that: a slow machine copies 1 GB/s.
fn is_late(took: Duration, bytes: usize) -> bool {
    took > BRIEFLY + Duration::from_nanos(bytes as u64)
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn what_comes_late_is_waited_for_beside_other_tasks_and_what_is_there_is_not() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let (connected, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
        let line = Line::new(connected.expect("it listens")).expect("connected");
        let (mut peer, _) = accepted.expect("connected");
        assert!(matches!(line, Line::Near(_)) && line.is_quiet());
        // On one thread: the peer writes only after the line has let go of it.
        let (waited, written) = tokio::join!(line.ready(Interest::READABLE), peer.write_all(&[1]));
        written.expect("it listens");
        assert!(waited.expect("readable"), "nobody else had a turn");
        assert!(!line.ready(Interest::READABLE).await.expect("readable"));
        assert!(!line.is_quiet(), "a byte that nobody waits for");
        let (mut stream, mut byte) = (line.into_stream(), [0]);
        tokio::io::AsyncReadExt::read_exact(&mut stream, &mut byte)
            .await
            .expect("a byte");
        let line = Line::new(stream).expect("connected");
        assert!(line.is_quiet());
        drop(peer);
        line.ready(Interest::READABLE).await.expect("the end");
        assert!(!line.is_quiet(), "its peer is gone");
    }

    #[test]
    fn what_takes_long_to_copy_is_not_late() {
        let [short, long] = [150, 1500].map(Duration::from_micros);
        assert!(is_late(short, 0) && is_late(short, 4096) && is_late(long, 1 << 20));
        assert!(!is_late(BRIEFLY, 0) && !is_late(short, 1 << 20));
    }
}
