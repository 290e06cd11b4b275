//! What the reader makes of the owner's greetings.

use serde::de::DeserializeOwned;
use stagewire_core::{Incarnation, ProcessRef};

use crate::ConnectError;
use crate::wire::{self, Full, Welcome, WireError};

/// How a peer is gone that says nothing.
pub(crate) const NO_ANSWER: &str = "it closed the connection instead of an answer to the greeting";

/// What an owner says that lets the reader in.
pub(crate) struct Welcomed {
    pub(crate) process: ProcessRef,
    pub(crate) canary: (u64, u64),
    pub(crate) session: u128,
}

/// Decodes one of the owner's greetings.
pub(crate) fn decode<T: DeserializeOwned>(peer: Incarnation, frame: &[u8]) -> Result<T, ConnectError> {
    wire::decode_versioned(frame).map_err(|error| match error {
        WireError::Version { found } => ConnectError::Version {
            peer,
            found,
            expected: wire::VERSION,
        },
        error => ConnectError::Refused {
            peer,
            problem: format!("it greets with {error}"),
        },
    })
}

/// Judges the answer to a Hello that was sent to `at`.
pub(crate) fn judge(peer: Incarnation, at: &str, frame: &[u8]) -> Result<Welcomed, ConnectError> {
    match decode(peer, frame)? {
        Welcome::Open {
            process,
            canary,
            session,
        } => Ok(Welcomed {
            process,
            canary,
            session,
        }),
        Welcome::Incarnation { found } => Err(ConnectError::Incarnation {
            path: at.to_owned(),
            expected: peer,
            found,
        }),
        Welcome::Token { problem } => Err(ConnectError::Token { peer, problem }),
        Welcome::Refused { problem } => Err(ConnectError::Refused { peer, problem }),
        Welcome::Full(Full { what, held, most }) => {
            let what = what.name();
            Err(ConnectError::Full { peer, what, held, most })
        }
    }
}
