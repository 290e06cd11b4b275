//! The owner's end of a lane.

mod attend;
mod stage;

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use stagewire_core::Device;
use tokio::net::TcpStream;

use super::frame::{
    Direction, FrameError, FrameKind, HEAD, Head, REQUEST_HEAD, RUN, Refusal, Request, decode_head, decode_request,
    decode_runs, encode_head,
};
use super::line::Socket;
use super::options::TcpOptions;
use super::pace::Pace;
use super::receive::ReceiveError;
use super::rows::{Rows, Run};
use super::send::{Base, Framing, Source, send};
use super::vectors::{Turns, Vectors};
use crate::network::{LaneServer, Session};
use crate::table::Hold;
use crate::wire::Kind;

use attend::Attendants;
use stage::Staging;

/// What all lanes of a process have in common, at both ends.
#[derive(Debug)]
pub(crate) struct Service {
    pub(crate) options: TcpOptions,
    pub(crate) pace: Pace,
    staging: Staging,
    attendants: Attendants,
}

impl Service {
    pub(crate) fn new(options: TcpOptions) -> Self {
        Self {
            pace: Pace::new(options.send_rate),
            staging: Staging::new(options.staging),
            attendants: Attendants::default(),
            options,
        }
    }
}

/// Serves the lanes that a network accepts.
#[derive(Debug)]
pub(crate) struct Server(pub(crate) Arc<Service>);

impl LaneServer for Server {
    fn serve(&self, stream: TcpStream, session: Arc<Session>) -> BoxFuture<'static, ()> {
        let service = self.0.clone();
        Box::pin(async move {
            let served = async {
                let peer = stream.peer_addr()?;
                service.options.prepare(&stream, peer.ip())?;
                serve(stream, &service, &session).await
            };
            match served.await {
                Ok(()) => {}
                // Whoever gives up a transfer closes its lane.
                Err(LaneError::Io(error) | LaneError::Receive(ReceiveError::Io(error))) => {
                    tracing::debug!(%error, "a lane broke off");
                }
                Err(problem) => tracing::warn!(%problem, "a lane is closed"),
            }
        })
    }
}

/// Why a lane ends before the peer closes it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LaneError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("it sends {0}")]
    Frame(#[from] FrameError),
    #[error("it sends {0}")]
    Receive(ReceiveError),
    #[error("it sends {found:?} where {due} was due")]
    Due { found: Head, due: &'static str },
    #[error("its push of {bytes} bytes had not arrived after {after:?}")]
    TooSlow { bytes: u64, after: Duration },
}

/// Serves one transfer after the other until the peer closes the lane.
///
/// # Errors
/// Where the peer breaks the protocol or the connection ends inside a transfer; then the lane is to be closed.
///
/// # Cancel safety
/// The lane is of no further use. Pushes that were to be applied are applied all the same.
pub(crate) async fn serve(
    mut stream: TcpStream,
    service: &Arc<Service>,
    session: &Arc<Session>,
) -> Result<(), LaneError> {
    let is_near = stream.peer_addr()?.ip().is_loopback();
    let mut inbox = Inbox::default();
    let mut next = inbox.request(&stream).await?;
    while let Some((request, runs)) = next {
        match request.direction {
            Direction::Pull => pull(&stream, service, session, &request, runs).await?,
            Direction::Push => stage::push(&stream, service, session, &mut inbox, request, runs).await?,
        }
        if is_near && let Some(attendant) = service.attendants.one() {
            (stream, inbox, next) = attendant.attend(stream, service, session, inbox).await?;
        } else {
            next = inbox.request(&stream).await?;
        }
    }
    Ok(())
}

async fn pull(
    stream: &impl Socket,
    service: &Service,
    session: &Session,
    request: &Request,
    runs: Vec<Run>,
) -> Result<(), LaneError> {
    let framing = Framing {
        transfer: request.transfer,
        frame_len: request.frame_len,
        digest: request.digest || service.options.digest,
    };
    let Some(hold) = held(session, request.pin) else {
        return refuse(stream, request.transfer, Refusal::NotHeld).await;
    };
    let Some(rows) = Rows::new(runs, hold.memory().len()) else {
        return refuse(stream, request.transfer, Refusal::Bounds).await;
    };
    let source = Source {
        base: Base(hold.memory().as_ptr()),
        changes: hold.may_change(),
    };
    // SAFETY: the rows were checked against the memory, which is held until the end of this function.
    unsafe { send(stream, framing, &service.pace, source, &rows).await? };
    drop(hold);
    Ok(())
}

/// The region behind a pin of this transport, which reaches host memory only.
fn held(session: &Session, pin: u64) -> Option<Arc<Hold>> {
    let ours = |hold: &Arc<Hold>| hold.kind() == Kind::Tcp && hold.memory().device() == Device::Cpu;
    session.hold(pin).filter(ours)
}

async fn refuse(stream: &impl Socket, transfer: u64, refusal: Refusal) -> Result<(), LaneError> {
    say(stream, transfer, FrameKind::Refused, false, refusal.detail()).await
}

/// Sends a head without payload.
async fn say(stream: &impl Socket, transfer: u64, kind: FrameKind, digest: bool, detail: u64) -> Result<(), LaneError> {
    let head = Head {
        kind,
        digest,
        len: 0,
        transfer,
        detail,
    };
    Ok(send_head(stream, &head).await?)
}

/// Sends a head without payload.
pub(crate) async fn send_head(stream: &impl Socket, head: &Head) -> io::Result<()> {
    let mut encoded = encode_head(head, 0);
    let mut vectors = Vectors::default();
    // SAFETY: the bytes outlive the vectors.
    unsafe { vectors.push(NonNull::from(&mut encoded).cast(), HEAD) };
    vectors.send(stream, HEAD).await
}

/// Receives a head without payload.
///
/// # Cancel safety
/// The stream is of no further use.
pub(crate) async fn receive_head(stream: &impl Socket) -> Result<Head, ReceiveError> {
    let mut encoded = [0; HEAD];
    let (mut vectors, mut turns) = (Vectors::default(), Turns::default());
    // SAFETY: the bytes outlive the vectors.
    unsafe { vectors.push(NonNull::from(&mut encoded).cast(), HEAD) };
    while vectors.left() > 0 {
        vectors.receive(stream, &mut turns).await?;
    }
    let head = decode_head(&encoded).map_err(ReceiveError::Malformed)?;
    if head.len != 0 {
        return Err(ReceiveError::Malformed(FrameError::Reserved));
    }
    Ok(head)
}

/// A request and what it asks for.
type Incoming = (Request, Vec<Run>);

/// What the peer asks for. Usually one system call brings a whole request.
struct Inbox {
    buffer: Vec<u8>,
    filled: usize,
}

impl Default for Inbox {
    fn default() -> Self {
        Self {
            buffer: vec![0; FIRST],
            filled: 0,
        }
    }
}

/// Bytes that the first system call for a request may bring: room for 63 runs.
const FIRST: usize = 2048 + REQUEST_HEAD;

impl Inbox {
    /// The next request; `None` where the peer closed the lane instead.
    ///
    /// # Cancel safety
    /// Safe: what has come of it is kept, also after an error.
    async fn request(&mut self, stream: &impl Socket) -> Result<Option<Incoming>, LaneError> {
        let mut turns = Turns::default();
        match self.fill(stream, &mut turns, REQUEST_HEAD, FIRST).await {
            Err(error) if self.filled == 0 && error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            filled => filled?,
        }
        let head: [u8; REQUEST_HEAD] = *self.buffer.first_chunk().expect("the buffer is longer");
        let request = decode_request(&head)?;
        let len = REQUEST_HEAD + request.runs as usize * RUN;
        if self.filled > len {
            return Err(FrameError::Reserved.into());
        }
        self.buffer.resize(len.max(FIRST), 0);
        self.fill(stream, &mut turns, len, len).await?;
        let runs = decode_runs(&head, &self.buffer[REQUEST_HEAD..len])?;
        self.buffer.truncate(FIRST);
        self.buffer.shrink_to(FIRST);
        self.filled = 0;
        Ok(Some((request, runs)))
    }

    /// Receives until there are `least` bytes, at most `most`.
    async fn fill(&mut self, stream: &impl Socket, turns: &mut Turns, least: usize, most: usize) -> io::Result<()> {
        let mut vectors = Vectors::default();
        let room = &mut self.buffer[self.filled..most.max(self.filled)];
        let len = room.len();
        // SAFETY: the buffer outlives the vectors and is not used before the last receive.
        unsafe { vectors.push(NonNull::from(room).cast(), len) };
        while self.filled < least {
            vectors.receive(stream, turns).await?;
            self.filled = most - vectors.left();
        }
        Ok(())
    }
}
