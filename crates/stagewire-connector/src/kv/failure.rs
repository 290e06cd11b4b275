//! Why rooms end.

use std::fmt::Display;
use std::time::Duration;

use stagewire_core::{ErrorClass, Failure};

/// A peer has died, or its connection has ended and did not come back.
pub(super) fn lost(peer: impl Display, how: impl Display) -> Failure {
    Failure::new(
        ErrorClass::Unavailable,
        "kv.peer_lost",
        format!("{peer} is gone: {how}"),
    )
}

/// A peer says nothing any more; `problem` is what came last of trying to reach it.
pub(super) fn silent(peer: impl Display, limit: Duration, problem: Option<&str>) -> Failure {
    let mut message =
        format!("{peer} has said nothing for {limit:?}; it is stopped, overloaded or out of reach: look at it");
    if let Some(problem) = problem {
        message = format!("{message}; last: {problem}");
    }
    Failure::new(ErrorClass::Unavailable, "kv.silent", message)
}

/// What has happened to a peer, as the reason why a room ends.
pub(super) fn in_room(room: u64, failure: Failure) -> Failure {
    let message = format!("room {room}: {}", failure.message);
    Failure { message, ..failure }.with("room", room)
}

/// The room took too long.
pub(super) fn late(room: u64, at: impl Display, after: Duration, phase: &str) -> Failure {
    let message = format!("room {room}: it was {phase} at {at} when its {after:?} were over");
    Failure::new(ErrorClass::Deadline, "kv.deadline", message)
        .with("room", room)
        .with("phase", phase)
}

/// Its owner let go of it.
pub(super) fn dropped(room: u64, by: impl Display) -> Failure {
    let message = format!("room {room}: {by} gave it up");
    Failure::new(ErrorClass::Cancelled, "kv.aborted", message).with("room", room)
}

/// The whole sender or receiver has ended.
pub(super) fn closed(what: impl Display) -> Failure {
    Failure::new(ErrorClass::Cancelled, "kv.closed", format!("{what} has ended"))
}

/// An answer that goes with no question.
pub(super) fn malformed(peer: impl Display) -> Failure {
    let message = format!("{peer} gave an answer that goes with no question");
    Failure::new(ErrorClass::Corrupt, "protocol.malformed", message)
}
