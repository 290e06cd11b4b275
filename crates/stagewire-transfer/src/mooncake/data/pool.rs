use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::net::sockopt::set_tcp_user_timeout;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::Operation;
use super::exchange::{ExchangeError, Job, Unsettled, exchange};
use crate::network::prepare;
use crate::tcp::line::Line;

/// Longest time until a data port has taken a connection.
const CONNECT: Duration = Duration::from_secs(5);

/// What was sent and stays unacknowledged for so long means that the other host is gone, or that nobody there has read for
/// so long: with peers that are not ours, no control connection tells it.
const UNACKNOWLEDGED_MS: u32 = 60_000;

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

    /// Runs a job on one connection. `unsettled` tells whether the peer may still do any of it.
    ///
    /// # Safety
    /// As [`exchange`].
    ///
    /// # Cancel safety
    /// As [`exchange`]; its connection is closed.
    pub(crate) async unsafe fn run(&self, job: &Job<'_>, unsettled: &Unsettled) -> Result<(), PoolError> {
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
