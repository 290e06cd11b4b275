//! The reader's end of a lane.

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

use stagewire_core::Record;

use super::frame::{Direction, FrameKind, Head, MAX_RUNS, Refusal, Request, encode_request};
use super::line::Line;
use super::pace::Pace;
use super::pool::Lane;
use super::receive::{ReceiveError, receive};
use super::rows::{Rows, Run, are_narrow};
use super::send::{Base, Framing, Source, send};
use super::serve::{receive_head, send_head};
use super::vectors::Vectors;

/// Records of one request at most.
pub(crate) const MAX_RECORDS: usize = MAX_RUNS as usize;

/// Payload of a frame that only the kernel touches: the larger, the fewer system calls.
const PLAIN_FRAME: u32 = 1 << 20;

/// Payload of a frame that is hashed, gathered or scattered here or there. Small enough that it is still in the cache when
/// it is sent, or when it has come; and one is gathered while those before it are received.
const TOUCHED_FRAME: u32 = 256 << 10;

/// Memory on this side of a transfer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Local {
    pub(crate) base: Base,
    pub(crate) len: u64,
    /// Whether peers may write it during a push from it.
    pub(crate) changes: bool,
}

/// What the peer is asked for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wish {
    /// The pin that keeps its region in place.
    pub(crate) pin: u64,
    /// Whether this side wants digests.
    pub(crate) digest: bool,
}

impl Wish {
    /// For rows of the peer and of this side.
    fn frame_len(self, theirs: &[Run], ours: &Rows) -> u32 {
        if self.digest || ours.is_narrow() || are_narrow(theirs) {
            TOUCHED_FRAME
        } else {
            PLAIN_FRAME
        }
    }
}

/// Pulls one part of a batch.
///
/// # Safety
/// The records must be legal for the local memory, of which nobody else may use these bytes until this future is done or
/// dropped.
///
/// # Cancel safety
/// Nothing is written after the future was dropped; but the lane is of no further use, nor after an error.
pub(crate) async unsafe fn pull(
    lane: &mut Lane,
    wish: Wish,
    local: Local,
    part: &[Record],
) -> Result<(), ReceiveError> {
    let runs: Vec<Run> = part.iter().map(Run::source).collect();
    let rows = rows(part.iter().map(Run::destination), local.len)?;
    let transfer = lane.next_transfer();
    let frame_len = wish.frame_len(&runs, &rows);
    let request = Request {
        direction: Direction::Pull,
        digest: wish.digest,
        more: false,
        runs: runs.len() as u32,
        transfer,
        pin: wish.pin,
        bytes: rows.bytes(),
        total: rows.bytes(),
        frame_len,
    };
    send_request(&lane.stream, &request, &runs).await?;
    let framing = Framing {
        transfer,
        frame_len,
        digest: wish.digest,
    };
    // SAFETY: the rows were checked against the memory; for the rest the caller vouches.
    unsafe { receive(&lane.stream, framing, local.base, &rows).await }
}

/// Pushes all parts of a batch, and has the owner put them in place when all have arrived. From the moment when it is
/// asked to, `asked` is true.
///
/// # Safety
/// The records must be legal for the local memory, which must be readable and stay in place until this future is done
/// or dropped.
///
/// # Cancel safety
/// While `asked` is false, a dropped push writes nothing at the owner; after that it may be in place any time. The lane
/// is of no further use, nor after an error.
pub(crate) async unsafe fn push(
    lane: &mut Lane,
    pace: &Pace,
    wish: Wish,
    local: Local,
    parts: &[Vec<Record>],
    asked: &AtomicBool,
) -> Result<(), ReceiveError> {
    let transfer = lane.next_transfer();
    let stream = &lane.stream;
    let total = parts.iter().flatten().map(Record::nbytes).sum();
    let mut before = 0;
    for (index, part) in parts.iter().enumerate() {
        let runs: Vec<Run> = part.iter().map(Run::destination).collect();
        let rows = rows(part.iter().map(Run::source), local.len)?;
        let frame_len = wish.frame_len(&runs, &rows);
        let request = Request {
            direction: Direction::Push,
            digest: wish.digest,
            more: index + 1 < parts.len(),
            runs: runs.len() as u32,
            transfer,
            pin: wish.pin,
            bytes: rows.bytes(),
            total,
            frame_len,
        };
        send_request(stream, &request, &runs).await?;
        let framing = Framing {
            transfer,
            frame_len,
            // The owner adds digests where only it wants them.
            digest: expect(stream, transfer, FrameKind::Ready).await?.digest,
        };
        let source = Source {
            base: local.base,
            changes: local.changes,
        };
        // SAFETY: the rows were checked against the memory; for the rest the caller vouches.
        if let Err(error) = unsafe { send(stream, framing, pace, source, &rows).await } {
            return Err(why(stream, transfer, error).await.behind(before));
        }
        let staged = expect(stream, transfer, FrameKind::Staged).await;
        staged.map_err(|error| error.behind(before))?;
        before += rows.bytes();
    }
    asked.store(true, Ordering::Relaxed);
    let apply = Head {
        kind: FrameKind::Apply,
        digest: false,
        len: 0,
        transfer,
        detail: 0,
    };
    send_head(stream, &apply).await?;
    expect(stream, transfer, FrameKind::Applied).await?;
    Ok(())
}

/// The rows of this side, which were checked before.
fn rows(runs: impl IntoIterator<Item = Run>, len: u64) -> Result<Rows, ReceiveError> {
    Rows::new(runs, len).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput).into())
}

/// Receives the head that is due.
async fn expect(stream: &Line, transfer: u64, kind: FrameKind) -> Result<Head, ReceiveError> {
    let found = receive_head(stream).await?;
    if found.transfer == transfer && found.kind == kind {
        return Ok(found);
    }
    if found.transfer == transfer && found.kind == FrameKind::Refused {
        let refusal = Refusal::from_detail(found.detail).map_err(ReceiveError::Malformed)?;
        return Err(ReceiveError::Refused(refusal));
    }
    let expected = Head {
        kind,
        transfer,
        ..found
    };
    Err(ReceiveError::Unexpected { expected, found })
}

/// Why a lane was closed in the middle of a push: the owner may have said it before.
async fn why(stream: &Line, transfer: u64, error: io::Error) -> ReceiveError {
    match expect(stream, transfer, FrameKind::Staged).await {
        Err(refused @ ReceiveError::Refused(_)) => refused,
        _ => error.into(),
    }
}

async fn send_request(stream: &Line, request: &Request, runs: &[Run]) -> io::Result<()> {
    let mut encoded = encode_request(request, runs);
    let len = encoded.len();
    let mut vectors = Vectors::default();
    // SAFETY: the bytes outlive the vectors.
    unsafe { vectors.push(NonNull::from(encoded.as_mut_slice()).cast(), len) };
    vectors.send(stream, len).await
}
