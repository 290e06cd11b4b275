use std::collections::BTreeMap;
use std::io;

use stagewire_core::{ByteCount, Classify, ErrorClass};

use crate::driver::DriveError;

/// Longest name that a message repeats, in characters.
const SHOWN: usize = 80;

/// Why an input is not taken or not found.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum InputError {
    #[error("there is no input {name:?}: it was never sent to /v1/inputs, or was dropped because no job refers to it")]
    Unknown { name: String },
    #[error(
        "parameter {param:?} names the input {name:?}, which is not here: it was never sent to /v1/inputs, or was \
         dropped because no job refers to it; send it again"
    )]
    UnknownParam { param: String, name: String },
    #[error(
        "the input is {}; this server takes at most {limit} (\"max-input\" in [server])",
        .declared.map_or_else(|| "more than that".to_owned(), |size| ByteCount(size).to_string())
    )]
    TooLarge { declared: Option<u64>, limit: ByteCount },
    #[error(
        "there is no room for {need} more: the inputs that jobs refer to, and those that are being sent, have {used} of \
         {limit} (\"input-bytes\" in [server]); send it again when jobs have ended"
    )]
    Room {
        need: ByteCount,
        used: ByteCount,
        limit: ByteCount,
    },
    #[error("{limit} inputs are being sent at once, and more are not taken; try again later")]
    Busy { limit: usize },
    #[error("nothing more of the input came for {seconds} s; {received} had come. Send it again")]
    Stalled { seconds: u64, received: ByteCount },
    #[error(
        "only {received} of the input came in {seconds} s, and it is given up: after 30 s it must come at {rate} a second. \
         Send it again over a faster connection"
    )]
    Slow {
        seconds: u64,
        received: ByteCount,
        rate: ByteCount,
    },
    #[error("the input broke off after {received}: {problem}")]
    Broken { received: ByteCount, problem: String },
    #[error("cannot {what} an input; is the disk full?")]
    Store { what: &'static str, source: io::Error },
    #[error(transparent)]
    Drive(#[from] DriveError),
}

impl InputError {
    pub(super) fn unknown(name: &str) -> Self {
        Self::Unknown {
            name: name.chars().take(SHOWN).collect(),
        }
    }

    pub(super) fn unknown_param(param: &str, name: &str) -> Self {
        Self::UnknownParam {
            param: param.to_owned(),
            name: name.chars().take(SHOWN).collect(),
        }
    }

    pub(super) const fn store(what: &'static str, source: io::Error) -> Self {
        Self::Store { what, source }
    }
}

impl Classify for InputError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Unknown { .. } | Self::UnknownParam { .. } => ErrorClass::NotFound,
            Self::TooLarge { .. } | Self::Broken { .. } => ErrorClass::Invalid,
            Self::Room { .. } | Self::Busy { .. } => ErrorClass::Exhausted,
            Self::Stalled { .. } | Self::Slow { .. } => ErrorClass::Deadline,
            Self::Store { .. } => ErrorClass::Unavailable,
            Self::Drive(error) => error.class(),
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::Unknown { .. } | Self::UnknownParam { .. } => "input.unknown",
            Self::TooLarge { .. } => "input.too_large",
            Self::Room { .. } => "input.room",
            Self::Busy { .. } => "input.busy",
            Self::Stalled { .. } | Self::Slow { .. } => "input.stalled",
            Self::Broken { .. } => "input.broken",
            Self::Store { .. } => "input.store",
            Self::Drive(error) => error.reason(),
        }
    }

    fn details(&self) -> BTreeMap<String, String> {
        let pairs: Vec<(&str, String)> = match self {
            Self::Unknown { name } => vec![("input", name.clone())],
            Self::UnknownParam { param, name } => vec![("param", param.clone()), ("input", name.clone())],
            Self::TooLarge { limit, .. } => vec![("limit_bytes", limit.0.to_string())],
            Self::Room { need, used, limit } => vec![
                ("nbytes", need.0.to_string()),
                ("used_bytes", used.0.to_string()),
                ("limit_bytes", limit.0.to_string()),
            ],
            Self::Busy { limit } => vec![("limit", limit.to_string())],
            Self::Stalled { received, .. } | Self::Slow { received, .. } | Self::Broken { received, .. } => {
                vec![("received_bytes", received.0.to_string())]
            }
            Self::Store { .. } => vec![],
            Self::Drive(error) => return error.details(),
        };
        let owned = pairs.into_iter().map(|(name, value)| (name.to_owned(), value));
        owned.collect()
    }
}
