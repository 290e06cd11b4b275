use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use stagewire_core::{Classify, ErrorClass};

/// Why a [`Host`](crate::Host) or a [`Network`](crate::Network) did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum StartError {
    #[error(
        "the path of the data socket has {len} bytes, {}; a Unix socket allows {max}: choose a shorter run directory",
        path.display()
    )]
    PathTooLong { path: PathBuf, len: usize, max: usize },
    #[error("{} is not a directory that only this user can enter: {problem}; use `chmod 700` or another directory", path.display())]
    Insecure { path: PathBuf, problem: String },
    #[error("the data socket {} is in use by a living process", path.display())]
    InUse { path: PathBuf },
    #[error("{bind} is not a loopback address: set a token, which all processes of the deployment share")]
    TokenMissing { bind: SocketAddr },
    #[error("{bind} names no interface: say in `advertise` at which address others reach this host")]
    AdvertiseMissing { bind: SocketAddr },
    #[error("the network has a {transport} transport already; use that one")]
    AlreadyRunning { transport: &'static str },
    #[error("cannot start a thread")]
    Thread {
        #[source]
        error: io::Error,
    },
    #[error(
        "TCP congestion control {wanted:?} cannot be used ({error}); this host allows {allowed}, and {default:?} is its \
         default"
    )]
    Congestion {
        wanted: String,
        allowed: String,
        default: String,
        error: io::Error,
    },
    #[error("cannot {what} {address}")]
    Network {
        what: &'static str,
        address: SocketAddr,
        #[source]
        error: io::Error,
    },
    #[error("cannot {what} {}", path.display())]
    Io {
        what: &'static str,
        path: PathBuf,
        #[source]
        error: io::Error,
    },
}

impl Classify for StartError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::PathTooLong { .. } | Self::AdvertiseMissing { .. } | Self::Congestion { .. } => ErrorClass::Invalid,
            Self::TokenMissing { .. } => ErrorClass::Unauthenticated,
            Self::Insecure { .. } => ErrorClass::Denied,
            Self::InUse { .. } | Self::AlreadyRunning { .. } => ErrorClass::Conflict,
            Self::Thread { .. } => ErrorClass::Exhausted,
            Self::Io { .. } | Self::Network { .. } => ErrorClass::Unavailable,
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::PathTooLong { .. } => "socket.path_too_long",
            Self::Insecure { .. } => "socket.insecure_directory",
            Self::InUse { .. } => "socket.in_use",
            Self::TokenMissing { .. } => "network.token_missing",
            Self::AdvertiseMissing { .. } => "network.advertise_missing",
            Self::AlreadyRunning { .. } => "network.already_running",
            Self::Thread { .. } => "network.thread",
            Self::Congestion { .. } => "network.congestion",
            Self::Network { .. } => "network.io",
            Self::Io { .. } => "socket.io",
        }
    }
}
