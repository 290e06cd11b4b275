use std::time::Duration;

use stagewire_core::{Classify, ErrorClass, StageName};
use tonic::Code;

use crate::RunDirError;

/// Why a worker could not attach, or cannot attach again.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum AttachError {
    #[error("no server was found within {waited:?}")]
    NoServer { waited: Duration, source: RunDirError },
    #[error("the server at {address} could not be reached within {waited:?}: {error}; see whether it runs")]
    Unreachable {
        address: String,
        waited: Duration,
        error: String,
    },
    #[error("the server at {address} refused worker {worker} for stage {stage}: {message}")]
    Refused {
        address: String,
        worker: String,
        stage: StageName,
        code: Code,
        message: String,
    },
}

impl Classify for AttachError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::NoServer { source, .. } => source.class(),
            Self::Unreachable { .. } => ErrorClass::Unavailable,
            Self::Refused {
                code: Code::Unauthenticated,
                ..
            } => ErrorClass::Unauthenticated,
            Self::Refused {
                code: Code::Unimplemented | Code::FailedPrecondition,
                ..
            } => ErrorClass::Unsupported,
            Self::Refused { .. } => ErrorClass::Invalid,
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::NoServer { source, .. } => source.reason(),
            Self::Unreachable { .. } => "server.unreachable",
            Self::Refused { .. } => "worker.refused",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_is_not_there_may_have_died() {
        let error = AttachError::Unreachable {
            address: "127.0.0.1:1".to_owned(),
            waited: Duration::from_secs(60),
            error: "connection refused".to_owned(),
        };
        assert_eq!(
            error.to_string(),
            "the server at 127.0.0.1:1 could not be reached within 60s: connection refused; see whether it runs"
        );
    }
}
