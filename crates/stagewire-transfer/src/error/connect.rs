use std::io;
use std::time::Duration;

use stagewire_core::{Classify, ErrorClass, Incarnation};

/// Why a peer could not be reached over a transport.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum ConnectError {
    #[error("peer {peer} offers no {transport}; it offers {offered:?}")]
    NotOffered {
        peer: Incarnation,
        transport: &'static str,
        offered: Vec<String>,
    },
    #[error("the {transport} address of peer {peer} does not decode: {problem}")]
    Address {
        peer: Incarnation,
        transport: &'static str,
        problem: String,
    },
    #[error(
        "peer {peer} is on another host or in another pid namespace; {transport} reaches only processes of this one"
    )]
    OtherHost { peer: Incarnation, transport: &'static str },
    #[error("peer {peer} is gone: {how}")]
    Gone { peer: Incarnation, how: String },
    #[error("at {path} another process answers: expected peer {expected}, found {found}")]
    Incarnation {
        path: String,
        expected: Incarnation,
        found: Incarnation,
    },
    #[error("peer {peer} speaks version {found} of the data protocol, this build version {expected}")]
    Version {
        peer: Incarnation,
        found: u16,
        expected: u16,
    },
    #[error(
        "peer {peer} runs {transport} {found}, this process {transport} {expected}: between these two a transfer may never \
         end; install the same release on both"
    )]
    BackendVersion {
        peer: Incarnation,
        transport: &'static str,
        found: String,
        expected: String,
    },
    #[error("the process behind {path} runs as user {found}, this one as {expected}")]
    User { path: String, found: u32, expected: u32 },
    #[error(
        "peer {peer} refuses the token of this process: {problem}; give all processes of a deployment the same one"
    )]
    Token { peer: Incarnation, problem: String },
    #[error("peer {peer} refuses: {problem}")]
    Refused { peer: Incarnation, problem: String },
    #[error("this process may not read the memory of peer {peer} (pid {pid}): {reason}")]
    Forbidden {
        peer: Incarnation,
        pid: u32,
        reason: String,
    },
    #[error("peer {peer} has {held} {what} and takes {most} at most: close some, or raise its `NetworkLimits`")]
    Full {
        peer: Incarnation,
        what: &'static str,
        held: u64,
        most: u64,
    },
    #[error("peer {peer} did not answer within {after:?}")]
    Deadline { peer: Incarnation, after: Duration },
    #[error("cannot {what} for peer {peer}")]
    Io {
        peer: Incarnation,
        what: &'static str,
        #[source]
        error: io::Error,
    },
}

impl Classify for ConnectError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::NotOffered { .. } | Self::OtherHost { .. } | Self::Version { .. } | Self::BackendVersion { .. } => {
                ErrorClass::Unsupported
            }
            Self::Address { .. } => ErrorClass::Invalid,
            Self::Gone { .. } | Self::Incarnation { .. } | Self::Refused { .. } | Self::Io { .. } => {
                ErrorClass::Unavailable
            }
            Self::User { .. } | Self::Forbidden { .. } => ErrorClass::Denied,
            Self::Token { .. } => ErrorClass::Unauthenticated,
            Self::Full { .. } => ErrorClass::Exhausted,
            Self::Deadline { .. } => ErrorClass::Deadline,
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::NotOffered { .. } => "connect.not_offered",
            Self::Address { .. } => "connect.address",
            Self::OtherHost { .. } => "connect.other_host",
            Self::Gone { .. } => "peer.lost",
            Self::Incarnation { .. } => "peer.incarnation",
            Self::Version { .. } => "connect.version",
            Self::BackendVersion { .. } => "connect.backend_version",
            Self::User { .. } => "connect.user",
            Self::Token { .. } => "connect.token",
            Self::Refused { .. } => "connect.refused",
            Self::Full { .. } => "connect.full",
            Self::Forbidden { .. } => "cma.forbidden",
            Self::Deadline { .. } => "connect.deadline",
            Self::Io { .. } => "connect.io",
        }
    }
}
