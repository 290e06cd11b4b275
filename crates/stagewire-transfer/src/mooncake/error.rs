use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use stagewire_core::{Classify, ErrorClass};

use crate::TransferError;

/// Why something failed between this process and a peer that speaks Mooncake only.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum MooncakeError {
    #[error("Mooncake cannot listen on {address}")]
    Bind {
        address: SocketAddr,
        #[source]
        error: io::Error,
    },
    #[error(
        "Mooncake would listen on {address}, that is on every interface, without a word of what to tell others; \
         bind one interface, or set `advertise`"
    )]
    Advertise { address: SocketAddr },
    #[error("Mooncake was started at this host before; a host has its ports once")]
    Started,
    #[error("Mooncake peer {segment} gave no answer to a {what} message: {problem}")]
    Handshake {
        segment: String,
        what: &'static str,
        problem: String,
    },
    #[error("Mooncake peer {segment} gave no answer to a {what} message in time: {problem}")]
    HandshakeDeadline {
        segment: String,
        what: &'static str,
        problem: String,
    },
    #[error("Mooncake peer {segment} cannot be used: {problem}")]
    Descriptor { segment: String, problem: String },
    #[error(
        "Mooncake peer {segment} speaks version {found} of the data protocol, which acknowledges nothing; \
         install release 0.3.13 or later there"
    )]
    Version { segment: String, found: u64 },
    #[error("Mooncake peer {segment} was lost: {how}")]
    Lost { segment: String, how: String },
    #[error(
        "Mooncake peer {segment} refuses {len} bytes at {address:#x}: they are not inside memory that is registered \
         there, or may not be used so"
    )]
    Rejected { segment: String, address: u64, len: u64 },
    #[error("Mooncake peer {segment} breaks the data protocol: {problem}")]
    Protocol { segment: String, problem: String },
    #[error("Mooncake peer {segment} did not finish {what} within {after:?}")]
    Deadline {
        segment: String,
        what: &'static str,
        after: Duration,
    },
    #[error(
        "whether {bytes} bytes were written at Mooncake peer {segment} is unknown: {how}; they may still be written, \
         so that the memory there must not be used for anything else before that peer has unregistered it"
    )]
    InDoubt { segment: String, bytes: u64, how: String },
    #[error("the region was released, or is not registered with mooncake at this host")]
    NotExposable,
    #[error(
        "no more than {exposed} regions of this process fit into what Mooncake tells its peers, 1 MiB; \
         release some, or register fewer and larger ones"
    )]
    Full { exposed: usize },
    #[error(transparent)]
    Transfer(#[from] TransferError),
}

impl Classify for MooncakeError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Bind { .. } | Self::Handshake { .. } | Self::Lost { .. } | Self::InDoubt { .. } => {
                ErrorClass::Unavailable
            }
            Self::Advertise { .. } | Self::Descriptor { .. } => ErrorClass::Invalid,
            Self::HandshakeDeadline { .. } | Self::Deadline { .. } => ErrorClass::Deadline,
            Self::Version { .. } => ErrorClass::Unsupported,
            Self::Rejected { .. } | Self::NotExposable => ErrorClass::NotFound,
            Self::Protocol { .. } => ErrorClass::Corrupt,
            Self::Started => ErrorClass::Conflict,
            Self::Full { .. } => ErrorClass::Exhausted,
            Self::Transfer(error) => error.class(),
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::Bind { .. } => "mooncake.bind",
            Self::Advertise { .. } => "mooncake.advertise",
            Self::Started => "mooncake.started",
            Self::Handshake { .. } => "mooncake.handshake",
            Self::HandshakeDeadline { .. } => "mooncake.handshake_deadline",
            Self::Descriptor { .. } => "mooncake.descriptor",
            Self::Version { .. } => "mooncake.version",
            Self::Lost { .. } => "peer.lost",
            Self::Rejected { .. } => "mooncake.rejected",
            Self::Protocol { .. } => "mooncake.protocol",
            Self::Deadline { .. } => "transfer.deadline",
            Self::InDoubt { .. } => "transfer.in_doubt",
            Self::NotExposable => "mooncake.not_exposable",
            Self::Full { .. } => "mooncake.full",
            Self::Transfer(error) => error.reason(),
        }
    }

    fn details(&self) -> BTreeMap<String, String> {
        let segment = match self {
            Self::Handshake { segment, .. }
            | Self::HandshakeDeadline { segment, .. }
            | Self::Descriptor { segment, .. }
            | Self::Version { segment, .. }
            | Self::Lost { segment, .. }
            | Self::Rejected { segment, .. }
            | Self::Protocol { segment, .. }
            | Self::Deadline { segment, .. }
            | Self::InDoubt { segment, .. } => segment,
            Self::Transfer(error) => return error.details(),
            Self::Bind { .. } | Self::Advertise { .. } | Self::Started | Self::NotExposable | Self::Full { .. } => {
                return BTreeMap::new();
            }
        };
        BTreeMap::from([("segment".to_owned(), segment.clone())])
    }
}
