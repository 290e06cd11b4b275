use std::io;
use std::path::PathBuf;

use stagewire_core::{Classify, ErrorClass};

/// What is wrong with a store's index.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum JournalError {
    #[error("cannot {what} the store's index {}", path.display())]
    Io {
        what: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error("{} is not the index of a store; name another data directory", path.display())]
    NotAJournal { path: PathBuf },
    #[error("the store's index {} has version {found}, this build reads version {expected}", path.display())]
    Version { path: PathBuf, found: u32, expected: u32 },
    #[error(
        "the store's index {} is damaged at byte {offset}: the checksum is {found:016x}, it should be {expected:016x}; \
         more follows, so that nothing can be guessed: put back a copy, or remove it together with the payloads",
        path.display()
    )]
    Damaged {
        path: PathBuf,
        offset: u64,
        expected: u64,
        found: u64,
    },
    #[error("the store's index {} says at byte {offset} what cannot be: {what}", path.display())]
    Senseless { path: PathBuf, offset: u64, what: String },
}

impl Classify for JournalError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Io { .. } => ErrorClass::Unavailable,
            Self::Version { .. } => ErrorClass::Unsupported,
            Self::NotAJournal { .. } => ErrorClass::Invalid,
            Self::Damaged { .. } | Self::Senseless { .. } => ErrorClass::Corrupt,
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::Io { .. } => "store.index_io",
            Self::Version { .. } => "store.index_version",
            Self::NotAJournal { .. } | Self::Damaged { .. } | Self::Senseless { .. } => "store.index_corrupt",
        }
    }
}
