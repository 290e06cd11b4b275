//! Pushes: what arrives waits in memory of its own until whoever pushes says that it still wants it.

use std::io;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use stagewire_core::ByteCount;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{Inbox, LaneError, Service, held, receive_head, refuse, say};
use crate::MAX_ROWS;
use crate::buffer::Buffer;
use crate::network::Session;
use crate::table::Hold;
use crate::tcp::frame::{Direction, FrameKind, Head, MAX_RUNS, Refusal, Request};
use crate::tcp::receive::{ReceiveError, receive};
use crate::tcp::rows::{Cursor, Rows, Run};
use crate::tcp::send::{Base, Framing};
use crate::tcp::vectors::Turns;

/// Bytes that one permit stands for.
const UNIT: u64 = 4096;

/// Below, pushed bytes are copied into place at once; from there on, on a thread that may take its time.
const INLINE_BELOW: u64 = 256 << 10;

/// Who has begun a push and says nothing for so long is cut off: others may wait for the memory.
const SILENCE: Duration = Duration::from_secs(30);

fn patient() -> Turns {
    Turns::with_patience(SILENCE)
}

/// The memory of all pushes that have arrived in part.
#[derive(Debug)]
pub(crate) struct Staging {
    units: u32,
    free: Arc<Semaphore>,
}

impl Staging {
    pub(crate) fn new(bytes: ByteCount) -> Self {
        let units = u32::try_from(bytes.0 / UNIT).unwrap_or(u32::MAX).max(1);
        let free = Arc::new(Semaphore::new(units as usize));
        Self { units, free }
    }

    /// Waits for room; a push larger than all of it waits until it is alone.
    async fn room(&self, bytes: u64) -> OwnedSemaphorePermit {
        let units = u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX).min(self.units);
        let permit = self.free.clone().acquire_many_owned(units).await;
        permit.expect("the semaphore is never closed")
    }
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
    let transfer = first.transfer;
    let hold = match writable(session, &first) {
        Ok(hold) => hold,
        Err(refusal) => return refuse(stream, transfer, refusal).await,
    };
    let mut byte = [0];
    let _room = tokio::select! {
        biased;
        room = service.staging.room(first.total) => room,
        // Whoever pushes has nothing to say now. So it is gone, or makes a mistake, which is found when it is read.
        gone = stream.peek(&mut byte) => {
            gone?;
            let found = receive_head(stream, patient()).await.map_err(LaneError::Receive)?;
            return Err(LaneError::Due { found, due: "nothing" });
        }
    };
    let (mut staged, mut request, mut runs, mut left) = (Vec::new(), first, runs, first.total);
    loop {
        // Room is taken for the bytes alone: a push of as many rows as are allowed needs no more requests than this.
        if request.bytes == 0 || staged.len() as u64 * u64::from(MAX_RUNS) > MAX_ROWS {
            return refuse(stream, transfer, Refusal::Bounds).await;
        }
        match stage(stream, service, &hold, &request, runs).await? {
            Ok(part) => staged.push(part),
            Err(refusal) => return refuse(stream, transfer, refusal).await,
        }
        say(stream, transfer, FrameKind::Staged, false, 0).await?;
        left = left.saturating_sub(request.bytes);
        if !request.more {
            break;
        }
        let Some((next, next_runs)) = inbox.request(stream, patient()).await? else {
            return Ok(());
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
    match receive_head(stream, patient()).await {
        Ok(Head {
            kind: FrameKind::Apply,
            transfer: this,
            ..
        }) if this == transfer => {}
        Ok(found) => return Err(LaneError::Due { found, due: "Apply" }),
        Err(error) => return Err(LaneError::Receive(error)),
    }
    apply(staged, first.total).await?;
    say(stream, transfer, FrameKind::Applied, false, 0).await
}

/// The region that a push is for, if it may write so much there. No byte is written twice, so that a push is not larger
/// than its region.
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
    if runs.iter().any(Run::overlaps_itself) {
        return Ok(Err(Refusal::Bounds));
    }
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
    let received = unsafe { receive(stream, framing, Base(bytes.as_ptr()), &whole, patient()).await };
    match received {
        Ok(()) => Ok(Ok(Staged { hold, rows, bytes })),
        Err(ReceiveError::Corrupt { at, .. }) => Ok(Err(Refusal::Corrupt { at })),
        Err(ReceiveError::Io(error)) => Err(error.into()),
        Err(other) => Err(LaneError::Receive(other)),
    }
}

/// Puts all parts in place, also when nobody waits for it any more.
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
