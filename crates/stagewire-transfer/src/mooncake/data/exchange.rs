use std::io;
use std::pin::pin;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::watermark::Watermark;
use super::{Operation, REQUEST, Request, STATUS, Status};
use crate::copy::Piece;
use crate::tcp::line::Line;
use crate::tcp::vectors::{Turns, Vectors};

/// Requests of one group. The next group is under way before the answers of the last one are read, so that there are at
/// most 512 requests without an answer: an engine's queue is that long, and their heads fit into any socket's buffer.
const GROUP: usize = 256;

/// Memory of this process, on one side of a [`Job`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Local(pub(crate) NonNull<u8>);

// SAFETY: an address; who makes a job of it vouches for the memory.
unsafe impl Send for Local {}
// SAFETY: as above.
unsafe impl Sync for Local {}

/// What moves between this process and a server's memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Job<'a> {
    pub(crate) operation: Operation,
    /// The address that offset 0 of the server's side is at.
    pub(crate) remote: u64,
    /// What offset 0 of this side is.
    pub(crate) local: Local,
    /// From the server for a read, to the server for a write. None is empty.
    pub(crate) pieces: &'a [Piece],
}

/// Why a job ended early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExchangeError {
    #[error("the peer refuses the {len} bytes at {addr:#x}")]
    Rejected { addr: u64, len: u64 },
    #[error("the peer answers with the unknown status {0}")]
    Status(u32),
    #[error("the peer's answers do not follow version 2 of the data protocol")]
    Version,
    #[error("the peer closed the data connection")]
    Closed,
    #[error("the data connection broke")]
    Broken(#[source] io::Error),
}

impl Job<'_> {
    fn request(&self, piece: &Piece) -> Request {
        let offset = match self.operation {
            Operation::Read => piece.src,
            Operation::Write => piece.dst,
        };
        Request {
            operation: self.operation,
            addr: self.remote + offset,
            len: piece.len,
        }
    }

    /// # Safety
    /// The piece must lie inside this side's memory.
    unsafe fn local(&self, piece: &Piece) -> NonNull<u8> {
        let offset = match self.operation {
            Operation::Read => piece.dst,
            Operation::Write => piece.src,
        };
        // SAFETY: the caller's contract.
        unsafe { self.local.0.add(offset as usize) }
    }
}

/// Counts exchanges whose requests were begun and neither all answered nor refused: the peer may still do what they
/// ask for, however the connection ended.
#[derive(Debug, Default)]
pub(crate) struct Unsettled(AtomicUsize);

impl Unsettled {
    /// Whether the peer may still do anything.
    pub(crate) fn any(&self) -> bool {
        self.0.load(Ordering::Relaxed) > 0
    }
}

/// Runs a job on one connection, which is unsettled from before its first byte until its end.
///
/// # Safety
/// The pieces must lie inside this side's memory, which must stay in place until the future is done or dropped; for a
/// read, nobody else may use the bytes concerned, for a write, they must be readable.
///
/// # Cancel safety
/// This side's memory is not touched after the future was dropped. The connection is of no further use then, nor after an
/// error.
pub(crate) async unsafe fn exchange(stream: &Line, job: &Job<'_>, unsettled: &Unsettled) -> Result<(), ExchangeError> {
    unsettled.0.fetch_add(1, Ordering::Relaxed);
    // SAFETY: the caller's contract.
    let ended = unsafe { converse(stream, job) }.await;
    // What came before a refusal was answered; what follows it, the peer throws away.
    if matches!(ended, Ok(()) | Err(ExchangeError::Rejected { .. })) {
        unsettled.0.fetch_sub(1, Ordering::Relaxed);
    }
    ended
}

/// # Safety
/// As [`exchange`].
async unsafe fn converse(stream: &Line, job: &Job<'_>) -> Result<(), ExchangeError> {
    let mut before: Option<Answers<'_>> = None;
    for pieces in job.pieces.chunks(GROUP) {
        // SAFETY: the caller's contract.
        let (mut out, mut next) = unsafe { (Outgoing::new(job, pieces), Answers::new(job, pieces)) };
        let due = before.as_mut().unwrap_or(&mut next);
        if let Err(error) = due.while_sending(stream, &mut out).await? {
            // A peer that refuses closes the connection, but it said so before.
            due.receive(stream).await?;
            next.receive(stream).await?;
            return Err(broken(error));
        }
        if let Some(before) = &mut before {
            before.receive(stream).await?;
        }
        before = Some(next);
    }
    match before {
        Some(mut answers) => answers.receive(stream).await,
        None => Ok(()),
    }
}

/// The requests of one group, followed by their bytes where they write.
struct Outgoing {
    _heads: Vec<[u8; REQUEST]>,
    vectors: Vectors,
}

impl Outgoing {
    /// # Safety
    /// As [`exchange`].
    unsafe fn new(job: &Job<'_>, pieces: &[Piece]) -> Self {
        let heads: Vec<_> = pieces.iter().map(|piece| job.request(piece).encode()).collect();
        let mut vectors = Vectors::default();
        for (piece, head) in pieces.iter().zip(&heads) {
            // SAFETY: the heads live on the heap, next to the vectors; for the rest the caller vouches.
            unsafe {
                vectors.push(NonNull::from(head).cast(), REQUEST);
                if job.operation == Operation::Write {
                    vectors.push(job.local(piece), piece.len as usize);
                }
            }
        }
        Self { _heads: heads, vectors }
    }
}

/// The answers to one group: a status for each request, followed by its bytes where it reads.
struct Answers<'a> {
    job: &'a Job<'a>,
    pieces: &'a [Piece],
    statuses: Vec<[u8; STATUS]>,
    vectors: Vectors,
    turns: Turns,
    /// Requests whose status was good.
    good: usize,
    /// Bytes up to the end of the next status.
    due: usize,
    expected: usize,
}

impl<'a> Answers<'a> {
    /// # Safety
    /// As [`exchange`].
    unsafe fn new(job: &'a Job<'a>, pieces: &'a [Piece]) -> Self {
        let mut statuses = vec![[0; STATUS]; pieces.len()];
        let mut vectors = Vectors::default();
        for (piece, status) in pieces.iter().zip(&mut statuses) {
            // SAFETY: the statuses live on the heap, next to the vectors; for the rest the caller vouches.
            unsafe {
                vectors.push(NonNull::from(status).cast(), STATUS);
                if job.operation == Operation::Read {
                    vectors.push(job.local(piece), piece.len as usize);
                }
            }
        }
        Self {
            job,
            pieces,
            expected: vectors.left(),
            statuses,
            vectors,
            turns: Turns::default(),
            good: 0,
            due: STATUS,
        }
    }

    /// Sends, and takes answers that come meanwhile: a refusal ends it at once.
    async fn while_sending(&mut self, stream: &Line, out: &mut Outgoing) -> Result<io::Result<()>, ExchangeError> {
        let all = out.vectors.left();
        let mut sending = pin!(out.vectors.send(stream, all));
        loop {
            tokio::select! {
                biased;
                sent = &mut sending => return Ok(sent),
                received = self.vectors.receive(stream, &mut self.turns), if self.vectors.left() > 0 => {
                    self.received(received)?;
                }
            }
        }
    }

    /// Takes all answers that are left.
    async fn receive(&mut self, stream: &Line) -> Result<(), ExchangeError> {
        let mut watermark = Watermark::new(stream);
        while self.vectors.left() > 0 {
            watermark.adapt(self.vectors.left());
            let received = self.vectors.receive(stream, &mut self.turns).await;
            self.received(received)?;
        }
        Ok(())
    }

    /// Looks at the statuses that are complete.
    fn received(&mut self, received: io::Result<()>) -> Result<(), ExchangeError> {
        let found = self.expected - self.vectors.left();
        while self.good < self.pieces.len() && self.due <= found {
            let piece = &self.pieces[self.good];
            match Status::decode(self.statuses[self.good]) {
                Some(Status::Done) => {}
                Some(Status::Rejected) => {
                    let Request { addr, len, .. } = self.job.request(piece);
                    return Err(ExchangeError::Rejected { addr, len });
                }
                Some(Status::Other(code)) => return Err(ExchangeError::Status(code)),
                None => return Err(ExchangeError::Version),
            }
            self.good += 1;
            self.due += STATUS;
            if self.job.operation == Operation::Read {
                self.due += piece.len as usize;
            }
        }
        received.map_err(broken)
    }
}

fn broken(error: io::Error) -> ExchangeError {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => ExchangeError::Closed,
        _ => ExchangeError::Broken(error),
    }
}
