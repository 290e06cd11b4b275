use std::io;
use std::time::Duration;

use stagewire_core::{Classify, ErrorClass, Incarnation};
use stagewire_transfer::ConnectError;

/// Why the holder of a payload cannot be talked to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum LinkError {
    #[error("process {pid} does not answer at {at}: it has ended")]
    Gone { pid: u32, at: String, source: io::Error },
    #[error("process {pid} did not answer at {at} within {waited:?}; it is stopped or overloaded: look at it")]
    Silent { pid: u32, at: String, waited: Duration },
    #[error("{at} is served by user {found}, not by user {expected}; run every process of a deployment as one user")]
    User { at: String, found: u32, expected: u32 },
    #[error(
        "the process at {at} speaks version {found} of the payload protocol, this build version {expected}; \
         install the same version of Stagewire for both"
    )]
    Version { at: String, found: u16, expected: u16 },
    #[error("the process at {at} is {found}, not {expected}: it was started anew")]
    Incarnation {
        at: String,
        found: Incarnation,
        expected: Incarnation,
    },
    #[error("process {pid} of another host cannot be reached")]
    Network {
        pid: u32,
        #[source]
        source: ConnectError,
    },
    #[error("what answered at {at} is not a Stagewire process: {error}")]
    Malformed { at: String, error: String },
}

impl Classify for LinkError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Gone { .. } | Self::Silent { .. } | Self::Incarnation { .. } => ErrorClass::Unavailable,
            Self::User { .. } => ErrorClass::Denied,
            Self::Version { .. } => ErrorClass::Unsupported,
            Self::Malformed { .. } => ErrorClass::Corrupt,
            Self::Network { source, .. } => source.class(),
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::Gone { .. } | Self::Incarnation { .. } => "peer.lost",
            Self::Silent { .. } => "peer.silent",
            Self::User { .. } => "peer.user",
            Self::Version { .. } => "peer.version",
            Self::Malformed { .. } => "peer.malformed",
            Self::Network { source, .. } => source.reason(),
        }
    }
}

impl LinkError {
    /// How the holder is lost, in one line.
    pub(crate) fn how(&self) -> String {
        match self {
            Self::Network { source, .. } => source.to_string(),
            _ => self.to_string(),
        }
    }

    /// Whether the process that held the payload is no more, and the payload with it.
    pub(crate) const fn is_lost(&self) -> bool {
        matches!(
            self,
            Self::Gone { .. }
                | Self::Incarnation { .. }
                | Self::Network {
                    source: ConnectError::Gone { .. } | ConnectError::Incarnation { .. },
                    ..
                }
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_say_what_to_do() {
        let at = "/run/a.ctl".to_owned();
        let silent = LinkError::Silent {
            pid: 7,
            at: at.clone(),
            waited: Duration::from_secs(5),
        };
        assert!(silent.to_string().ends_with("overloaded: look at it"), "{silent}");
        let user = LinkError::User {
            at: at.clone(),
            found: 1,
            expected: 2,
        };
        assert!(user.to_string().ends_with("as one user"), "{user}");
        let version = LinkError::Version {
            at,
            found: 1,
            expected: 2,
        };
        assert!(
            version.to_string().ends_with("same version of Stagewire for both"),
            "{version}"
        );
    }
}
