use std::io;
use std::path::PathBuf;
use std::time::Duration;

use stagewire_core::{Classify, ErrorClass};

/// Why there is no keeper, or it does not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum KeeperError {
    #[error("cannot {what} in the data directory {}", dir.display())]
    Io {
        what: &'static str,
        dir: PathBuf,
        source: io::Error,
    },
    #[error("cannot start {} as the keeper of {}", program.display(), dir.display())]
    Start {
        program: PathBuf,
        dir: PathBuf,
        source: io::Error,
    },
    #[error("the keeper of {} did not listen within {waited:?}; it was started as {}", dir.display(), program.display())]
    Silent {
        program: PathBuf,
        dir: PathBuf,
        waited: Duration,
    },
    #[error("{} is open to others: {problem}; nobody else may read the secret of a store", path.display())]
    Insecure { path: PathBuf, problem: String },
    #[error("the keeper's socket in {} belongs to user {found}, not to {expected}", dir.display())]
    User { dir: PathBuf, found: u32, expected: u32 },
    #[error("the keeper of {} refused: {problem}", dir.display())]
    Refused { dir: PathBuf, problem: String },
    #[error("another keeper holds the memory of {}", dir.display())]
    Another { dir: PathBuf },
}

impl Classify for KeeperError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Io { .. } | Self::Start { .. } | Self::Silent { .. } => ErrorClass::Unavailable,
            Self::Insecure { .. } | Self::User { .. } | Self::Refused { .. } => ErrorClass::Denied,
            Self::Another { .. } => ErrorClass::Conflict,
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::Io { .. } | Self::Start { .. } | Self::Silent { .. } | Self::Another { .. } => "store.keeper",
            Self::Insecure { .. } | Self::User { .. } | Self::Refused { .. } => "store.keeper_denied",
        }
    }
}
