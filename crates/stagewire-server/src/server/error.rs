use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use stagewire_core::{ByteCount, Classify, ErrorClass};

use crate::{JournalError, OccupyError};

/// Why a server does not start. Nothing is left running or lying about.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum StartError {
    #[error(transparent)]
    RunDir(#[from] OccupyError),
    #[error(transparent)]
    Journal(#[from] JournalError),
    #[error(
        "{address} is in use by another program; choose another port with \"listen\" in [server] or --listen (port 0 \
         takes a free one)"
    )]
    AddressInUse { address: SocketAddr },
    #[error("cannot listen on {address}; is it an address of this host?")]
    Listen { address: SocketAddr, source: io::Error },
    #[error(
        "{address} can be reached from other hosts, so clients must show a token: set \"token-file\" in [server], or \
         listen on 127.0.0.1"
    )]
    TokenRequired { address: SocketAddr },
    #[error("cannot use the token file {}: {problem}", path.display())]
    TokenFile { path: PathBuf, problem: String },
    #[error("\"{key}\" in [server] is {wanted}, more than the memory of this host ({available}); give it less")]
    Memory {
        key: &'static str,
        wanted: ByteCount,
        available: ByteCount,
    },
    #[error("cannot use the data directory {}", path.display())]
    DataDir { path: PathBuf, source: io::Error },
    #[error("neither \"data-dir\", XDG_STATE_HOME nor HOME says where to keep the journal; give --data-dir")]
    NoDataDir,
    #[error("the host store cannot start")]
    Store(#[source] Box<stagewire_connector::StartError>),
    #[error("the host store cannot take over what the server before left")]
    OpenStore(#[source] Box<stagewire_store::OpenError>),
}

impl Classify for StartError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::RunDir(error) => error.class(),
            Self::Journal(error) => error.class(),
            Self::AddressInUse { .. } => ErrorClass::Conflict,
            Self::Listen { .. } | Self::DataDir { .. } => ErrorClass::Unavailable,
            Self::TokenRequired { .. } | Self::TokenFile { .. } | Self::NoDataDir => ErrorClass::Invalid,
            Self::Memory { .. } => ErrorClass::Exhausted,
            Self::Store(error) => error.class(),
            Self::OpenStore(error) => error.class(),
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::RunDir(error) => error.reason(),
            Self::Journal(error) => error.reason(),
            Self::AddressInUse { .. } => "server.port_in_use",
            Self::Listen { .. } => "server.listen",
            Self::TokenRequired { .. } | Self::TokenFile { .. } => "server.token_file",
            Self::Memory { .. } => "server.memory",
            Self::DataDir { .. } | Self::NoDataDir => "server.data_dir",
            Self::Store(error) => error.reason(),
            Self::OpenStore(error) => error.reason(),
        }
    }
}
