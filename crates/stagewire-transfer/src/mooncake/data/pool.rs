use std::io;
use std::pin::pin;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use futures::future::select;
use rustix::net::sockopt::set_tcp_user_timeout;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::Operation;
use super::exchange::{ExchangeError, Job, Unsettled, exchange};
use crate::copy::Piece;
use crate::network::prepare;
use crate::tcp::line::Line;

/// Longest time until a data port has taken a connection.
const CONNECT: Duration = Duration::from_secs(5);

/// What was sent and stays unacknowledged for so long means that the other host is gone, or that nobody there has read for
/// so long: with peers that are not ours, no control connection tells it.
const UNACKNOWLEDGED_MS: u32 = 60_000;

/// From so many bytes, a job uses two connections: while an engine, which has one thread for all of them, waits for one, it
/// serves the other. Measured: a read of 1 MiB takes a tenth to a quarter less time.
const SPLIT_FROM: u64 = 512 << 10;

/// The data connections to one peer. Each carries one job at a time; what does not get one waits its turn.
#[derive(Debug)]
pub(crate) struct Pool {
    host: String,
    port: u16,
    idle: Mutex<Vec<Line>>,
    permits: Semaphore,
}

/// Why a job did not succeed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PoolError {
    #[error("its data port {host}:{port} does not answer")]
    Connect {
        host: String,
        port: u16,
        #[source]
        error: io::Error,
    },
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
}

impl Pool {
    /// At most `connections` to the data port of a peer, none of them made yet.
    pub(crate) fn new(host: String, port: u16, connections: usize) -> Self {
        Self {
            host,
            port,
            idle: Mutex::default(),
            permits: Semaphore::new(connections.max(1)),
        }
    }

    /// Runs a job, a large one on two connections. `unsettled` tells whether the peer may still do any of it.
    ///
    /// # Safety
    /// As [`exchange`].
    ///
    /// # Cancel safety
    /// As [`exchange`]; its connections are closed.
    pub(crate) async unsafe fn run(&self, job: &Job<'_>, unsettled: &Unsettled) -> Result<(), PoolError> {
        let halves = halves(job.pieces);
        let [first, second] = &halves;
        if second.is_empty() {
            // SAFETY: the caller's contract.
            return unsafe { self.run_on_one(job, unsettled) }.await;
        }
        let (first, second) = (Job { pieces: first, ..*job }, Job { pieces: second, ..*job });
        // SAFETY: the caller's contract; no byte is in both halves.
        let (first, second) = unsafe { (self.run_on_one(&first, unsettled), self.run_on_one(&second, unsettled)) };
        match select(pin!(first), pin!(second)).await.factor_first() {
            (Ok(()), other) => other.await,
            // What the peer makes of the other half shows whether anything is still to come of a push.
            (Err(error @ PoolError::Exchange(ExchangeError::Rejected { .. })), other)
                if job.operation == Operation::Write =>
            {
                let _ = other.await;
                Err(error)
            }
            (Err(error), _) => Err(error),
        }
    }

    /// # Safety
    /// As [`exchange`].
    async unsafe fn run_on_one(&self, job: &Job<'_>, unsettled: &Unsettled) -> Result<(), PoolError> {
        let _permit = self.permits.acquire().await.expect("the semaphore is never closed");
        if let Some(stream) = self.take() {
            // SAFETY: the caller's contract.
            match unsafe { exchange(&stream, job, unsettled) }.await {
                Ok(()) => {
                    self.give(stream);
                    return Ok(());
                }
                // The peer may have closed a connection that was idle for long. A read can be asked again.
                Err(ExchangeError::Closed | ExchangeError::Broken(_)) if job.operation == Operation::Read => {}
                Err(error) => return Err(error.into()),
            }
        }
        let stream = self.connect().await?;
        // SAFETY: the caller's contract.
        unsafe { exchange(&stream, job, unsettled) }.await?;
        self.give(stream);
        Ok(())
    }

    /// A connection that is still open, as far as this host knows.
    fn take(&self) -> Option<Line> {
        loop {
            let stream = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop()?;
            if stream.is_quiet() {
                return Some(stream);
            }
        }
    }

    fn give(&self, stream: Line) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(stream);
    }

    async fn connect(&self) -> Result<Line, PoolError> {
        let connected = async {
            let late = |_| io::Error::new(io::ErrorKind::TimedOut, format!("not within {CONNECT:?}"));
            let stream = timeout(CONNECT, TcpStream::connect((self.host.as_str(), self.port)))
                .await
                .map_err(late)??;
            prepare(&stream)?;
            set_tcp_user_timeout(&stream, UNACKNOWLEDGED_MS)?;
            Line::new(stream)
        };
        connected.await.map_err(|error| PoolError::Connect {
            host: self.host.clone(),
            port: self.port,
            error,
        })
    }
}

/// Cuts a large job into two of about the same number of bytes. The second one is empty where the job is not large.
fn halves(pieces: &[Piece]) -> [Vec<Piece>; 2] {
    let bytes: u64 = pieces.iter().map(|piece| piece.len).sum();
    let [mut first, mut second] = [Vec::new(), Vec::new()];
    if bytes < SPLIT_FROM {
        return [first, second];
    }
    let mut room = bytes / 2;
    for &Piece { src, dst, len } in pieces {
        let here = len.min(room);
        room -= here;
        if here > 0 {
            first.push(Piece { src, dst, len: here });
        }
        if here < len {
            let (src, dst, len) = (src + here, dst + here, len - here);
            second.push(Piece { src, dst, len });
        }
    }
    [first, second]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn halves_have_each_byte_once(lens in prop::collection::vec(1_u64..1 << 20, 0..9)) {
            let (mut at, mut pieces) = (0, Vec::new());
            for len in lens {
                pieces.push(Piece { src: at + 7, dst: 2 * at, len });
                at += len + 3;
            }
            let bytes: u64 = pieces.iter().map(|piece| piece.len).sum();
            let [first, second] = halves(&pieces);
            let sum = |pieces: &[Piece]| pieces.iter().map(|piece| piece.len).sum::<u64>();
            if bytes < SPLIT_FROM {
                prop_assert!(first.is_empty() && second.is_empty());
            } else {
                prop_assert_eq!((sum(&first), sum(&second)), (bytes / 2, bytes - bytes / 2));
                // Joined where one piece was cut, they are what they were made of.
                let mut joined: Vec<Piece> = Vec::new();
                for piece in first.into_iter().chain(second) {
                    match joined.last_mut() {
                        Some(last) if last.src + last.len == piece.src => last.len += piece.len,
                        _ => joined.push(piece),
                    }
                }
                prop_assert_eq!(joined, pieces);
            }
        }
    }
}
