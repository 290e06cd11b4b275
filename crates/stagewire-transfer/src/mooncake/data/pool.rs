use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::Operation;
use super::exchange::{ExchangeError, Job, exchange};

/// Longest time until a data port has taken a connection.
const CONNECT: Duration = Duration::from_secs(5);

/// The data connections to one peer. Each carries one job at a time; what does not get one waits its turn.
#[derive(Debug)]
pub(crate) struct Pool {
    host: String,
    port: u16,
    idle: Mutex<Vec<TcpStream>>,
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

    /// Runs a job. `begun` tells whether a request may have reached the peer.
    ///
    /// # Safety
    /// As [`exchange`].
    ///
    /// # Cancel safety
    /// As [`exchange`]; the connection is closed.
    pub(crate) async unsafe fn run(&self, job: &Job<'_>, begun: &AtomicBool) -> Result<(), PoolError> {
        let _permit = self.permits.acquire().await.expect("the semaphore is never closed");
        if let Some(stream) = self.take() {
            // SAFETY: the caller's contract.
            match unsafe { exchange(&stream, job, begun) }.await {
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
        unsafe { exchange(&stream, job, begun) }.await?;
        self.give(stream);
        Ok(())
    }

    /// A connection that is still open, as far as this host knows.
    fn take(&self) -> Option<TcpStream> {
        loop {
            let stream = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop()?;
            // Nothing is to be read from it: the end, an error or bytes mean that it is of no more use.
            let quiet = stream
                .try_read(&mut [0])
                .is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock);
            if quiet {
                return Some(stream);
            }
        }
    }

    fn give(&self, stream: TcpStream) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(stream);
    }

    async fn connect(&self) -> Result<TcpStream, PoolError> {
        let connected = async {
            let late = |_| io::Error::new(io::ErrorKind::TimedOut, format!("not within {CONNECT:?}"));
            let stream = timeout(CONNECT, TcpStream::connect((self.host.as_str(), self.port)))
                .await
                .map_err(late)??;
            stream.set_nodelay(true)?;
            Ok(stream)
        };
        connected.await.map_err(|error| PoolError::Connect {
            host: self.host.clone(),
            port: self.port,
            error,
        })
    }
}

/// Whether the job's requests may have reached the peer.
pub(crate) fn has_begun(begun: &AtomicBool) -> bool {
    begun.load(Ordering::Relaxed)
}
