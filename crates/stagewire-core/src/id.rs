use std::cmp::Ordering;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize};
use uuid::Uuid;

macro_rules! uuid_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub Uuid);

        /// The order of the bytes, compared as one number: search trees do little else.
        impl Ord for $name {
            fn cmp(&self, other: &Self) -> Ordering {
                self.0.as_u128().cmp(&other.0.as_u128())
            }
        }

        impl PartialOrd for $name {
            fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
                Some(self.cmp(other))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl FromStr for $name {
            type Err = uuid::Error;

            fn from_str(text: &str) -> Result<Self, uuid::Error> {
                text.parse().map(Self)
            }
        }
    };
}

uuid_id!(
    /// One submitted job. Version 7: sorts by the time of submission.
    JobId
);
uuid_id!(
    /// One published payload. A payload published again by a later attempt has another id.
    PayloadId
);
uuid_id!(
    /// One life of one process. A process that restarts under the same name has another incarnation.
    Incarnation
);

/// How often the server has started on this journal; each start adds one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Epoch(pub u64);

/// Counts the offers made for one job, over all its stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Attempt(pub u32);

/// The right to act for one attempt of one job.
///
/// Valid until that attempt is superseded, also across a server restart. Every write, delete and completion carries it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Token {
    /// Epoch in which the offer was made.
    pub epoch: Epoch,
    /// The job.
    pub job: JobId,
    /// The attempt, unique within the job and epoch.
    pub attempt: Attempt,
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}.{}", self.job, self.epoch.0, self.attempt.0)
    }
}

/// Name of a stage, class or pipeline: 1 to 64 of `a–z`, `0–9`, `-`, `_`, starting with a letter.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct StageName(Arc<str>);

/// A name that is not allowed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name:?} is not a name: use 1 to 64 of a-z, 0-9, '-' and '_', starting with a letter")]
pub struct NameError {
    name: String,
}

impl StageName {
    /// Checks and makes a name.
    ///
    /// # Errors
    /// [`NameError`] where the text is empty, too long, or holds another character.
    pub fn new(name: &str) -> Result<Self, NameError> {
        let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '_';
        let starts = name.chars().next().is_some_and(|c| c.is_ascii_lowercase());
        if starts && name.len() <= 64 && name.chars().all(allowed) {
            Ok(Self(name.into()))
        } else {
            Err(NameError {
                name: name.chars().take(80).collect(),
            })
        }
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for StageName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for StageName {
    type Err = NameError;

    fn from_str(name: &str) -> Result<Self, NameError> {
        Self::new(name)
    }
}

impl<'de> Deserialize<'de> for StageName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::new(&String::deserialize(deserializer)?).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked() {
        for good in ["encode", "vae-decode", "d2", "a_b"] {
            assert!(StageName::new(good).is_ok(), "{good:?} refused");
        }
        for bad in ["", "Encode", "2d", "a/b", "../x", "é", &"a".repeat(65)] {
            assert!(StageName::new(bad).is_err(), "{bad:?} accepted");
        }
    }
}
