use std::fmt;
use std::io;
use std::path::PathBuf;

use stagewire_core::{Classify, ErrorClass};
use stagewire_sched::TopologyError;

/// Why a `stagewire.toml` is not accepted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum ConfigError {
    #[error("{}: cannot be read", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{}:{line}: not TOML: {message}", path.display())]
    Syntax {
        path: PathBuf,
        line: usize,
        message: String,
    },
    #[error("{}:{line}: {unknown}", path.display())]
    Unknown {
        path: PathBuf,
        line: usize,
        unknown: Box<UnknownName>,
    },
    #[error("{}:{line}: {error}", path.display())]
    Topology {
        path: PathBuf,
        line: usize,
        error: TopologyError,
    },
    #[error("{}:{line}: {message}", path.display())]
    Value {
        path: PathBuf,
        line: usize,
        message: String,
    },
}

/// A key or value that this version does not know, and what could have been meant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownName {
    /// `key` or `value`.
    pub what: &'static str,
    /// As the file writes it.
    pub name: String,
    /// The table that it is in, as the file writes it: `[server]`, `[[stage]]`.
    pub table: String,
    /// The closest of `valid`, where one is close.
    pub nearest: Option<String>,
    /// Everything that is valid there.
    pub valid: Vec<String>,
}

impl fmt::Display for UnknownName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unknown {} {:?} in {}", self.what, self.name, self.table)?;
        if let Some(nearest) = &self.nearest {
            write!(f, "; did you mean {nearest:?}?")?;
        }
        match (self.valid.is_empty(), &self.nearest) {
            (true, _) => Ok(()),
            (false, None) => write!(f, "; valid here: {}", self.valid.join(", ")),
            (false, Some(_)) => write!(f, " Valid here: {}", self.valid.join(", ")),
        }
    }
}

impl Classify for ConfigError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Read { source, .. } if source.kind() == io::ErrorKind::NotFound => ErrorClass::NotFound,
            Self::Read { .. } => ErrorClass::Denied,
            _ => ErrorClass::Invalid,
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::Read { .. } => "config.unreadable",
            Self::Syntax { .. } => "config.syntax",
            Self::Unknown { .. } => "config.unknown_key",
            Self::Topology { error, .. } => error.reason(),
            Self::Value { .. } => "config.value",
        }
    }
}
