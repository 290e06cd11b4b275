//! Threads that stay with a lane of this host while it is busy.

use std::io;
use std::net::{self, Shutdown};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use futures::executor::block_on;
use libc::c_int;
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::spawn_blocking;

use super::{Inbox, Incoming, LaneError, Service, pull};
use crate::network::Session;
use crate::tcp::frame::Direction;
use crate::tcp::line::Socket;
use crate::tcp::vectors::Moved;

/// Lanes that have a thread at the same time. The others are served by the runtime's own.
const THREADS: usize = 16;

/// How long a thread waits for the next request of its lane.
const LINGER: Duration = Duration::from_millis(100);

/// Threads for busy lanes of this host.
///
/// A request that a thread of its own waits for in the kernel is answered sooner than one of which the runtime's poller
/// hears first: that costs the waking of one thread, a hand-over, and often the waking of a second one. And what such a
/// thread sends takes one call, however long the peer takes to make room.
#[derive(Debug)]
pub(super) struct Attendants(Arc<Semaphore>);

impl Default for Attendants {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(THREADS)))
    }
}

impl Attendants {
    /// A thread, if one is free.
    pub(super) fn one(&self) -> Option<Attendant> {
        self.0.clone().try_acquire_owned().ok().map(Attendant)
    }
}

#[cfg(test)]
impl Service {
    /// Lanes that have a thread now.
    pub(crate) fn attended(&self) -> usize {
        THREADS - self.attendants.0.available_permits()
    }
}

/// The right to a thread.
pub(super) struct Attendant(OwnedSemaphorePermit);

impl Attendant {
    /// Serves pulls, until something else is asked for, or nothing for [`LINGER`]. Gives back the lane, what has come of a
    /// request, and the request that is to be served next; none where the peer has closed the lane.
    ///
    /// # Cancel safety
    /// The lane is closed. The thread ends soon, and until then may send from memory that it holds.
    pub(super) async fn attend(
        self,
        stream: TcpStream,
        service: &Arc<Service>,
        session: &Arc<Session>,
        mut inbox: Inbox,
    ) -> Result<(TcpStream, Inbox, Option<Incoming>), LaneError> {
        let stream = stream.into_std()?;
        stream.set_read_timeout(Some(LINGER))?;
        stream.set_nonblocking(false)?;
        let stream = Arc::new(stream);
        let open = Open(Some(stream.clone()));
        let (service, session) = (service.clone(), session.clone());
        let served = spawn_blocking(move || {
            let served = block_on(pulls(&Attended(stream), &service, &session, &mut inbox));
            drop(self.0);
            (served, inbox)
        });
        let (served, mut inbox) = served.await.map_err(io::Error::other)?;
        let stream = open.into_inner();
        stream.set_nonblocking(true)?;
        let stream = TcpStream::from_std(stream)?;
        let next = match served? {
            Served::All(next) => next,
            Served::Idle => inbox.request(&stream).await?,
        };
        Ok((stream, inbox, next))
    }
}

/// Why a thread leaves its lane.
enum Served {
    /// This is not for it, or there is nothing more.
    All(Option<Incoming>),
    /// Nothing came for long.
    Idle,
}

async fn pulls(
    stream: &Attended,
    service: &Service,
    session: &Session,
    inbox: &mut Inbox,
) -> Result<Served, LaneError> {
    loop {
        match inbox.request(stream).await {
            Ok(Some((request, runs))) if request.direction == Direction::Pull => {
                pull(stream, service, session, &request, runs).await?;
            }
            Err(LaneError::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Served::Idle),
            other => return other.map(Served::All),
        }
    }
}

/// A connection whose thread may wait.
struct Attended(Arc<net::TcpStream>);

impl AsFd for Attended {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Socket for Attended {
    fn attempt(&self, _: Interest, mut call: impl FnMut(c_int) -> io::Result<Moved>) -> io::Result<Option<Moved>> {
        loop {
            match call(0) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
                Ok(moved) => return Ok(Some(moved)),
            }
        }
    }

    /// Its calls wait themselves.
    async fn ready(&self, _: Interest) -> io::Result<bool> {
        Ok(false)
    }
}

/// Shut down when dropped, so that the thread that serves it leaves it.
struct Open(Option<Arc<net::TcpStream>>);

impl Open {
    /// After its thread has left it.
    fn into_inner(mut self) -> net::TcpStream {
        let stream = self.0.take().and_then(Arc::into_inner);
        stream.expect("the thread has dropped its own")
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        if let Some(stream) = &self.0 {
            // Where it fails, it is over already.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}
