//! The server as a whole: what starts, in which order, and what stops.

use std::net::SocketAddr;
use std::path::PathBuf;

use stagewire_api::RunDir;
use stagewire_core::{Classify, ErrorClass, Failure};

use crate::Config;
use crate::run_dir::{Occupied, OccupyError};

/// What a server needs to start.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ServerOptions {
    /// What to serve.
    pub config: Config,
    /// Where the processes of the deployment find each other.
    pub run_dir: RunDir,
    /// Takes the place of `listen` in the file.
    pub listen: Option<SocketAddr>,
    /// Takes the place of `data-dir` in the file.
    pub data_dir: Option<PathBuf>,
}

impl ServerOptions {
    /// Everything as the file says.
    pub const fn new(config: Config, run_dir: RunDir) -> Self {
        Self {
            config,
            run_dir,
            listen: None,
            data_dir: None,
        }
    }
}

/// Why a server does not start. Nothing is left running or lying about.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum StartError {
    #[error(transparent)]
    RunDir(#[from] OccupyError),
    #[error(
        "{address} is in use by another program; choose another port with \"listen\" in [server] or --listen (port 0 takes a free one)"
    )]
    AddressInUse { address: SocketAddr },
    #[error("cannot listen on {address}")]
    Listen {
        address: SocketAddr,
        source: std::io::Error,
    },
}

impl Classify for StartError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::RunDir(error) => error.class(),
            Self::AddressInUse { .. } => ErrorClass::Conflict,
            Self::Listen { .. } => ErrorClass::Unavailable,
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::RunDir(error) => error.reason(),
            Self::AddressInUse { .. } => "server.port_in_use",
            Self::Listen { .. } => "server.listen",
        }
    }
}

/// A running server.
#[derive(Debug)]
pub struct Server {
    run_dir: Occupied,
    http: SocketAddr,
    epoch: u64,
}

impl Server {
    /// Starts: takes the run directory, replays the journal, listens, and tells the world in `server.json`.
    ///
    /// # Errors
    /// [`StartError`].
    pub async fn start(options: ServerOptions) -> Result<Self, StartError> {
        let address = options.listen.unwrap_or(options.config.server.listen);
        let run_dir = Occupied::occupy(options.run_dir).await?;
        let listener = tokio::net::TcpListener::bind(address)
            .await
            .map_err(|source| match source.kind() {
                std::io::ErrorKind::AddrInUse => StartError::AddressInUse { address },
                _ => StartError::Listen { address, source },
            })?;
        let http = listener
            .local_addr()
            .map_err(|source| StartError::Listen { address, source })?;
        run_dir.worker_token()?;
        run_dir.announce(http.to_string(), options.config.pipeline.name.to_string(), 1)?;
        Ok(Self {
            run_dir,
            http,
            epoch: 1,
        })
    }

    /// The address that serves both HTTP and gRPC.
    pub const fn http_addr(&self) -> SocketAddr {
        self.http
    }

    /// How often a server has started on this journal.
    pub const fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Resolves when the server has stopped by itself, with the reason: it could not write its journal.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn stopped(&self) -> Failure {
        std::future::pending().await
    }

    /// Stops within 5 s: no new requests, streams end, the journal is closed, nothing of the server is left in the run
    /// directory. Jobs stay in the journal; workers run on for their linger time.
    pub async fn shutdown(self) {
        self.run_dir.leave().await;
    }
}
