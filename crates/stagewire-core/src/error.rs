use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

/// The closed set of error classes. Python raises one exception class for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorClass {
    /// The input is wrong; the same call will fail again.
    Invalid,
    /// What the call names does not exist.
    NotFound,
    /// It contradicts something that exists.
    Conflict,
    /// The caller acts for an attempt that was superseded.
    Fenced,
    /// A bounded resource is used up.
    Exhausted,
    /// The caller asks too often.
    RateLimited,
    /// A peer or the server cannot be reached, or died.
    Unavailable,
    /// Time ran out.
    Deadline,
    /// Somebody asked to stop.
    Cancelled,
    /// The caller did not say who it is.
    Unauthenticated,
    /// The caller may not do this.
    Denied,
    /// This build, host or backend cannot do it.
    Unsupported,
    /// Bytes are not what they were.
    Corrupt,
    /// A defect of Stagewire, or an exception in a stage's own code.
    Internal,
}

impl ErrorClass {
    /// Every class.
    pub const ALL: [Self; 14] = [
        Self::Invalid,
        Self::NotFound,
        Self::Conflict,
        Self::Fenced,
        Self::Exhausted,
        Self::RateLimited,
        Self::Unavailable,
        Self::Deadline,
        Self::Cancelled,
        Self::Unauthenticated,
        Self::Denied,
        Self::Unsupported,
        Self::Corrupt,
        Self::Internal,
    ];

    /// The name as it stands in JSON: `not_found`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Invalid => "invalid",
            Self::NotFound => "not_found",
            Self::Conflict => "conflict",
            Self::Fenced => "fenced",
            Self::Exhausted => "exhausted",
            Self::RateLimited => "rate_limited",
            Self::Unavailable => "unavailable",
            Self::Deadline => "deadline",
            Self::Cancelled => "cancelled",
            Self::Unauthenticated => "unauthenticated",
            Self::Denied => "denied",
            Self::Unsupported => "unsupported",
            Self::Corrupt => "corrupt",
            Self::Internal => "internal",
        }
    }

    /// The class of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|class| class.name() == name)
    }
}

impl fmt::Display for ErrorClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What every public error can say of itself.
pub trait Classify: std::error::Error {
    /// The class.
    fn class(&self) -> ErrorClass;

    /// The reason key, such as `grant.expired`; each has a line in `docs/errors.md`.
    fn reason(&self) -> &'static str;

    /// The values that the message shows, by name, for programs.
    fn details(&self) -> BTreeMap<String, String> {
        BTreeMap::new()
    }

    /// The error in the form that crosses processes. The message includes the chain of sources.
    fn to_failure(&self) -> Failure
    where
        Self: Sized,
    {
        let mut message = self.to_string();
        let mut source = self.source();
        while let Some(error) = source {
            message = format!("{message}: {error}");
            source = error.source();
        }
        Failure {
            class: self.class(),
            reason: self.reason().to_owned(),
            message,
            details: self.details(),
        }
    }
}

/// An error that crossed, or will cross, a process boundary.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message} [{class}: {reason}]")]
pub struct Failure {
    /// The class.
    pub class: ErrorClass,
    /// The reason key.
    pub reason: String,
    /// What happened, to what, and what to do.
    pub message: String,
    /// Values by name.
    #[serde(default)]
    pub details: BTreeMap<String, String>,
}

impl Failure {
    /// A failure without details.
    pub fn new(class: ErrorClass, reason: &str, message: impl Into<String>) -> Self {
        Self {
            class,
            reason: reason.to_owned(),
            message: message.into(),
            details: BTreeMap::new(),
        }
    }

    /// The same failure with one more detail.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl fmt::Display) -> Self {
        self.details.insert(name.to_owned(), value.to_string());
        self
    }
}
