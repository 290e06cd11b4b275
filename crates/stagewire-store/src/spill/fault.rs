use std::path::{Path, PathBuf};

use rustix::io::Errno;
use stagewire_core::{Classify, ErrorClass};

use crate::JournalError;

/// What went wrong with the files that objects move to.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum SpillFault {
    #[error("cannot {what} {}: {error}", path.display())]
    Io {
        what: &'static str,
        path: PathBuf,
        error: Errno,
    },
    #[error(
        "a defect of the store kept it from {what} {}; its log has the rest: please report it, with that",
        path.display()
    )]
    Panicked { what: &'static str, path: PathBuf },
    #[error("cannot {what} the spill directory {}: {error}; name a directory that can be made or is there, and no link", path.display())]
    Dir {
        what: &'static str,
        path: PathBuf,
        error: Errno,
    },
    #[error("the spill directory {} is open to others: {problem}; it must be this user's alone, mode 0700", path.display())]
    Insecure { path: PathBuf, problem: String },
    #[error("another store uses the spill directory {}", path.display())]
    InUse { path: PathBuf },
    #[error(
        "the spill directory {} holds the payloads of store {found}, this is {expected}: give this one the data directory \
         of that one, or another spill directory; or remove the directory if nobody needs them",
        path.display()
    )]
    Foreign {
        path: PathBuf,
        found: String,
        expected: String,
    },
}

impl SpillFault {
    pub(crate) fn new(what: &'static str, path: impl AsRef<Path>, error: Errno) -> Self {
        let path = path.as_ref().to_owned();
        Self::Io { what, path, error }
    }
}

impl SpillFault {
    /// Files that the index cannot name are of no use.
    pub(crate) fn of_index(error: &JournalError) -> Self {
        let unknown = || Self::new("write", "the store's index", Errno::IO);
        match error {
            JournalError::Io { what, path, source } => {
                Self::new(what, path, Errno::from_io_error(source).unwrap_or(Errno::IO))
            }
            _ => unknown(),
        }
    }
}

impl Classify for SpillFault {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Io { error, .. } => match *error {
                Errno::NOSPC | Errno::DQUOT => ErrorClass::Exhausted,
                Errno::NOENT | Errno::LOOP => ErrorClass::Corrupt,
                Errno::CANCELED => ErrorClass::Cancelled,
                _ => ErrorClass::Unavailable,
            },
            Self::Dir { error, .. } => match *error {
                Errno::NOENT | Errno::LOOP | Errno::NOTDIR | Errno::NAMETOOLONG => ErrorClass::Invalid,
                Errno::ACCESS | Errno::PERM | Errno::ROFS => ErrorClass::Denied,
                Errno::NOSPC | Errno::DQUOT => ErrorClass::Exhausted,
                _ => ErrorClass::Unavailable,
            },
            Self::Panicked { .. } => ErrorClass::Internal,
            Self::Insecure { .. } => ErrorClass::Denied,
            Self::InUse { .. } | Self::Foreign { .. } => ErrorClass::Conflict,
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::Io { error, .. } => match *error {
                Errno::NOSPC | Errno::DQUOT => "spill.no_space",
                Errno::NOENT | Errno::LOOP => "spill.lost",
                _ => "spill.io",
            },
            Self::Panicked { .. } => "spill.defect",
            Self::Dir { .. } => "spill.dir",
            Self::Insecure { .. } => "spill.insecure",
            Self::InUse { .. } => "spill.in_use",
            Self::Foreign { .. } => "spill.foreign",
        }
    }
}
