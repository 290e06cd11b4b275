//! Pushes: what arrives waits in memory of its own until whoever pushes says that it still wants it.

mod room;

use std::io;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use tokio::net::TcpStream;
use tokio::time::timeout;

pub(super) use room::Staging;

use super::{Inbox, LaneError, Service, held, receive_head, refuse, say};
use crate::MAX_ROWS;
use crate::buffer::Buffer;
use crate::network::Session;
use crate::table::Hold;
use crate::tcp::frame::{Direction, FrameKind, Head, MAX_RUNS, Refusal, Request};
use crate::tcp::receive::{ReceiveError, receive};
use crate::tcp::rows::{Cursor, Rows, Run};
use crate::tcp::send::{Base, Framing};

/// Below, pushed bytes are copied into place at once; from there on, on a thread that may take its time.
const INLINE_BELOW: u64 = 256 << 10;

/// How long a push may take from its turn to its last word, besides what its bytes need at [`LEAST_PACE`].
const GRACE: Duration = Duration::from_secs(10);

/// Bytes per second that a push brings at least. The room for its bytes is wanted by others.
const LEAST_PACE: u64 = 4 << 20;

fn allowed(bytes: u64) -> Duration {
    GRACE.saturating_add(Duration::from_micros(bytes.saturating_mul(1_000_000) / LEAST_PACE))
}

/// One request of a push that has arrived.
struct Staged {
    hold: Arc<Hold>,
    rows: Rows,
    bytes: Buffer,
}

// SAFETY: the memory has no thread affinity.
unsafe impl Send for Staged {}

impl Staged {
    /// Puts the bytes where they belong.
    fn apply(&self) {
        let mut from = self.bytes.as_ptr();
        let base = Base(self.hold.memory().as_ptr());
        Cursor::default().walk(&self.rows, u64::MAX, |offset, len| {
            // SAFETY: the buffer has as many bytes as the rows, which were checked against the memory. It is registered
            // for peers to write, and this value keeps it in place.
            unsafe {
                ptr::copy_nonoverlapping(from.as_ptr(), base.at(offset).as_ptr(), len);
                from = from.add(len);
            }
        });
    }
}

/// Serves a push, whose first request has come: to its end, its refusal, or the end of the lane.
pub(super) async fn push(
    stream: &TcpStream,
    service: &Service,
    session: &Session,
    inbox: &mut Inbox,
    first: Request,
    runs: Vec<Run>,
) -> Result<(), LaneError> {
    let (transfer, bytes) = (first.transfer, first.total);
    let hold = match writable(session, &first) {
        Ok(hold) => hold,
        Err(refusal) => return refuse(stream, transfer, refusal).await,
    };
    let mut byte = [0];
    let _room = tokio::select! {
        biased;
        room = service.staging.room(session, bytes) => room,
        // Whoever pushes has nothing to say now. So it is gone, or makes a mistake, which is found when it is read.
        gone = stream.peek(&mut byte) => {
            gone?;
            let found = timeout(GRACE, receive_head(stream)).await.map_err(io::Error::from)?;
            return Err(LaneError::Due { found: found.map_err(LaneError::Receive)?, due: "nothing" });
        }
    };
    let after = allowed(bytes);
    let staged = match timeout(after, gather(stream, service, &hold, inbox, first, runs)).await {
        Ok(staged) => staged?,
        Err(_) => {
            // If it listens at all.
            let _ = refuse(stream, transfer, Refusal::TooSlow { after }).now_or_never();
            return Err(LaneError::TooSlow { bytes, after });
        }
    };
    match staged {
        Ok(staged) => {
            apply(staged, bytes).await?;
            say(stream, transfer, FrameKind::Applied, false, 0).await
        }
        Err(refusal) => refuse(stream, transfer, refusal).await,
    }
}

/// Receives all requests of a push, and the word that they are still wanted.
async fn gather(
    stream: &TcpStream,
    service: &Service,
    hold: &Arc<Hold>,
    inbox: &mut Inbox,
    first: Request,
    runs: Vec<Run>,
) -> Result<Result<Vec<Staged>, Refusal>, LaneError> {
    let transfer = first.transfer;
    let (mut staged, mut request, mut runs, mut left) = (Vec::new(), first, runs, first.total);
    loop {
        // Room is taken for the bytes alone: a push of as many rows as are allowed needs no more requests than this.
        if request.bytes == 0 || staged.len() as u64 * u64::from(MAX_RUNS) > MAX_ROWS {
            return Ok(Err(Refusal::Bounds));
        }
        match stage(stream, service, hold, &request, runs).await? {
            Ok(part) => staged.push(part),
            Err(refusal) => return Ok(Err(refusal)),
        }
        say(stream, transfer, FrameKind::Staged, false, 0).await?;
        left = left.saturating_sub(request.bytes);
        if !request.more {
            break;
        }
        let Some((next, next_runs)) = inbox.request(stream).await? else {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        };
        let same = next.direction == Direction::Push && next.transfer == transfer && next.pin == first.pin;
        let same = same && next.bytes <= left;
        if !same {
            let found = Head {
                kind: FrameKind::Data,
                digest: next.digest,
                len: next.runs,
                transfer: next.transfer,
                detail: next.bytes,
            };
            return Err(LaneError::Due {
                found,
                due: "the next request of the push",
            });
        }
        (request, runs) = (next, next_runs);
    }
    match receive_head(stream).await.map_err(LaneError::Receive)? {
        Head {
            kind: FrameKind::Apply,
            transfer: this,
            ..
        } if this == transfer => Ok(Ok(staged)),
        found => Err(LaneError::Due { found, due: "Apply" }),
    }
}

/// The region that a push is for, if it may write so much there.
///
/// A push of more bytes than its region has would take memory for nothing. Whether its rows overlap nobody asks: who
/// pushes may write the region as often as it likes, and its rows are put in place one after the other, as if each were
/// a push of its own.
fn writable(session: &Session, first: &Request) -> Result<Arc<Hold>, Refusal> {
    let hold = held(session, first.pin).ok_or(Refusal::NotHeld)?;
    if !hold.memory().is_writable() {
        return Err(Refusal::ReadOnly);
    }
    if first.total > hold.memory().len() {
        return Err(Refusal::Bounds);
    }
    Ok(hold)
}

/// Receives the bytes of one request.
async fn stage(
    stream: &TcpStream,
    service: &Service,
    hold: &Arc<Hold>,
    request: &Request,
    runs: Vec<Run>,
) -> Result<Result<Staged, Refusal>, LaneError> {
    let hold = hold.clone();
    let Some(rows) = Rows::new(runs, hold.memory().len()) else {
        return Ok(Err(Refusal::Bounds));
    };
    let Some(bytes) = Buffer::take(request.bytes) else {
        return Ok(Err(Refusal::Memory));
    };
    let whole = Run {
        offset: 0,
        width: request.bytes,
        rows: 1,
        pitch: request.bytes,
    };
    let whole = Rows::new([whole], request.bytes).expect("as long as itself");
    let framing = Framing {
        transfer: request.transfer,
        frame_len: request.frame_len,
        digest: request.digest || service.options.digest,
    };
    say(stream, request.transfer, FrameKind::Ready, framing.digest, 0).await?;
    // SAFETY: the buffer has so many bytes, and nobody else has it.
    let received = unsafe { receive(stream, framing, Base(bytes.as_ptr()), &whole).await };
    match received {
        Ok(()) => Ok(Ok(Staged { hold, rows, bytes })),
        Err(ReceiveError::Corrupt { at, .. }) => Ok(Err(Refusal::Corrupt { at })),
        Err(ReceiveError::Io(error)) => Err(error.into()),
        Err(other) => Err(LaneError::Receive(other)),
    }
}

/// Puts all parts in place, in order, also when nobody waits for it any more.
///
/// # Errors
/// Where the runtime ends before it is known to be done.
async fn apply(staged: Vec<Staged>, bytes: u64) -> io::Result<()> {
    let apply = move || staged.iter().for_each(Staged::apply);
    if bytes < INLINE_BELOW {
        apply();
        return Ok(());
    }
    tokio::task::spawn_blocking(apply).await.map_err(io::Error::other)
}
