use std::io;
use std::path::PathBuf;
use std::time::Duration;

use stagewire_core::{Classify, ErrorClass, Incarnation};

/// Why the holder of a payload cannot be talked to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum LinkError {
    #[error("process {pid} does not answer at {socket}: it has ended")]
    Gone {
        pid: u32,
        socket: PathBuf,
        source: io::Error,
    },
    #[error("process {pid} did not answer at {socket} within {waited:?}; it is stopped or overloaded: look at it")]
    Silent {
        pid: u32,
        socket: PathBuf,
        waited: Duration,
    },
    #[error(
        "{socket} is served by user {found}, not by user {expected}; run every process of a deployment as one user"
    )]
    User { socket: PathBuf, found: u32, expected: u32 },
    #[error(
        "the process at {socket} speaks version {found} of the payload protocol, this build version {expected}; \
         install the same version of Stagewire for both"
    )]
    Version { socket: PathBuf, found: u16, expected: u16 },
    #[error("the process at {socket} is {found}, not {expected}: it was started anew")]
    Incarnation {
        socket: PathBuf,
        found: Incarnation,
        expected: Incarnation,
    },
    #[error("what answered at {socket} is not a Stagewire process: {error}")]
    Malformed { socket: PathBuf, error: String },
}

impl Classify for LinkError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Gone { .. } | Self::Silent { .. } | Self::Incarnation { .. } => ErrorClass::Unavailable,
            Self::User { .. } => ErrorClass::Denied,
            Self::Version { .. } => ErrorClass::Unsupported,
            Self::Malformed { .. } => ErrorClass::Corrupt,
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::Gone { .. } | Self::Incarnation { .. } => "peer.lost",
            Self::Silent { .. } => "peer.silent",
            Self::User { .. } => "peer.user",
            Self::Version { .. } => "peer.version",
            Self::Malformed { .. } => "peer.malformed",
        }
    }
}

impl LinkError {
    /// Whether the process that held the payload is no more, and the payload with it.
    pub(crate) const fn is_lost(&self) -> bool {
        matches!(self, Self::Gone { .. } | Self::Incarnation { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_say_what_to_do() {
        let socket = PathBuf::from("/run/a.ctl");
        let silent = LinkError::Silent {
            pid: 7,
            socket: socket.clone(),
            waited: Duration::from_secs(5),
        };
        assert!(silent.to_string().ends_with("overloaded: look at it"), "{silent}");
        let user = LinkError::User {
            socket: socket.clone(),
            found: 1,
            expected: 2,
        };
        assert!(user.to_string().ends_with("as one user"), "{user}");
        let version = LinkError::Version {
            socket,
            found: 1,
            expected: 2,
        };
        assert!(
            version.to_string().ends_with("same version of Stagewire for both"),
            "{version}"
        );
    }
}
