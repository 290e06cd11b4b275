use std::io;
use std::path::{Path, PathBuf};

use stagewire_core::{Classify, ErrorClass};

/// Why the journal cannot be opened, read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum JournalError {
    #[error("cannot open the journal {}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("another server has the journal {} open; stop it, or give this one another --data-dir", path.display())]
    InUse { path: PathBuf },
    #[error(
        "the journal {} has format {found}, this build reads {expected}; use the version that wrote it, or another \
         --data-dir", path.display()
    )]
    Version { path: PathBuf, found: u64, expected: u64 },
    #[error(
        "the journal {} is about {found}, the configuration about {expected}; give another --data-dir", path.display()
    )]
    Scope {
        path: PathBuf,
        found: String,
        expected: String,
    },
    #[error(
        "the journal {} is damaged: {what}; move it away to start without its jobs, or bring back a copy", path.display()
    )]
    Corrupt { path: PathBuf, what: String },
    #[error("the journal cannot be written, so nothing can be promised any more")]
    Write(#[source] Box<redb::Error>),
    #[error("the journal's writer panicked, so nothing can be promised any more: {error}")]
    Panicked { error: String },
}

impl JournalError {
    pub(super) fn write(error: impl Into<redb::Error>) -> Self {
        Self::Write(Box::new(error.into()))
    }

    pub(crate) fn task(error: &tokio::task::JoinError) -> Self {
        Self::Panicked {
            error: error.to_string(),
        }
    }

    pub(super) fn open(path: &Path, error: redb::DatabaseError) -> Self {
        let path = path.to_owned();
        match error {
            redb::DatabaseError::DatabaseAlreadyOpen | redb::DatabaseError::LockProtocolMismatch => {
                Self::InUse { path }
            }
            redb::DatabaseError::Storage(redb::StorageError::Io(source))
                if source.kind() != io::ErrorKind::InvalidData && source.kind() != io::ErrorKind::UnexpectedEof =>
            {
                Self::Io { path, source }
            }
            error => Self::Corrupt {
                path,
                what: error.to_string(),
            },
        }
    }
}

impl Classify for JournalError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Io { .. } | Self::Write(_) => ErrorClass::Unavailable,
            Self::InUse { .. } | Self::Scope { .. } => ErrorClass::Conflict,
            Self::Version { .. } => ErrorClass::Unsupported,
            Self::Corrupt { .. } => ErrorClass::Corrupt,
            Self::Panicked { .. } => ErrorClass::Internal,
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::Io { .. } => "journal.unreadable",
            Self::InUse { .. } => "journal.in_use",
            Self::Version { .. } => "journal.version",
            Self::Scope { .. } => "journal.scope",
            Self::Corrupt { .. } => "journal.corrupt",
            Self::Write(_) | Self::Panicked { .. } => "journal.write",
        }
    }
}
