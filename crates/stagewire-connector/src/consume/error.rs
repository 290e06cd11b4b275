use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use stagewire_core::{ByteCount, Classify, ErrorClass, Failure, Handle, PayloadId, StageName};
use stagewire_transfer::{ConnectError, TransferError};

use crate::LinkError;
use crate::error::chain;

/// Which chunk of which payload, from whom: what every error of a consumer says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The request.
    pub request: String,
    /// Stage that produced the payload.
    pub stage: StageName,
    /// The payload.
    pub payload: PayloadId,
    /// Chunk that was asked for.
    pub chunk: u32,
    /// Number of chunks.
    pub chunks: u32,
    /// Process that holds the payload.
    pub pid: u32,
}

impl Place {
    pub(crate) fn new(handle: &Handle, chunk: u32, pid: u32) -> Box<Self> {
        Box::new(Self {
            request: handle.request.clone(),
            stage: handle.stage.clone(),
            payload: handle.payload,
            chunk,
            chunks: handle.manifest.chunks(),
            pid,
        })
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            request,
            stage,
            payload,
            chunk,
            chunks,
            pid,
        } = self;
        write!(
            f,
            "request {request:?}, stage {stage}, chunk {chunk} of {chunks}, payload {payload} at process {pid}"
        )
    }
}

/// Why a payload could not be consumed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum ConsumeError {
    #[error("the payload has {expected} tensors, {found} destinations were given")]
    DestinationCount { expected: usize, found: usize },
    #[error("destination {index} has {found}, its tensor needs {expected}")]
    DestinationSize {
        index: usize,
        found: ByteCount,
        expected: ByteCount,
    },
    #[error("{at}: the payload is on {transport}, which this process cannot read; it can read {ours}")]
    NoTransport {
        at: Box<Place>,
        transport: String,
        ours: String,
    },
    #[error("{at}: its holder cannot be talked to")]
    Link { at: Box<Place>, source: LinkError },
    #[error("{at}: the process that held it is lost ({how}); it must be produced again")]
    PeerLost { at: Box<Place>, how: String },
    #[error("{at}: the producer failed: {failure}")]
    Failed { at: Box<Place>, failure: Failure },
    #[error("{at}: it is gone: {why}; it must be produced again")]
    Gone { at: Box<Place>, why: &'static str },
    #[error("{at}: another consumer is at it, and its first consumer deletes it")]
    Claimed { at: Box<Place> },
    #[error("{at}: the handle's capability is not the payload's; the handle is forged or damaged")]
    Denied { at: Box<Place> },
    #[error(
        "{at}: its bytes were changed after they had been shown (digest {found:016x} instead of {expected:016x}); \
         leave published memory alone until the payload has ended"
    )]
    Modified { at: Box<Place>, found: u64, expected: u64 },
    #[error("{at}: no connection for its bytes")]
    Connect { at: Box<Place>, source: ConnectError },
    #[error("{at}: its bytes could not be moved")]
    Transfer { at: Box<Place>, source: TransferError },
    #[error(
        "{at}: not there within {waited:?}; its producer is alive but silent: raise the deadline, or look at the producer"
    )]
    Deadline { at: Box<Place>, waited: Duration },
    #[error("{at}: stopped: {reason}")]
    Stopped { at: Box<Place>, reason: Failure },
    #[error("{at}: this process's connector is closed; make a new one")]
    Closed { at: Box<Place> },
}

impl Classify for ConsumeError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::DestinationCount { .. } | Self::DestinationSize { .. } => ErrorClass::Invalid,
            Self::NoTransport { .. } => ErrorClass::Unsupported,
            Self::Link { source, .. } => source.class(),
            Self::PeerLost { .. } => ErrorClass::Unavailable,
            Self::Failed { failure, .. } => failure.class,
            Self::Gone { .. } => ErrorClass::NotFound,
            Self::Claimed { .. } => ErrorClass::Conflict,
            Self::Denied { .. } => ErrorClass::Denied,
            Self::Modified { .. } => ErrorClass::Corrupt,
            Self::Connect { source, .. } => source.class(),
            Self::Transfer { source, .. } => source.class(),
            Self::Deadline { .. } => ErrorClass::Deadline,
            Self::Stopped { reason, .. } => reason.class,
            Self::Closed { .. } => ErrorClass::Cancelled,
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::DestinationCount { .. } | Self::DestinationSize { .. } => "consume.destination",
            Self::NoTransport { .. } => "transfer.unsupported",
            Self::Link { source, .. } => source.reason(),
            Self::PeerLost { .. } => "peer.lost",
            Self::Failed { .. } => "payload.failed",
            Self::Gone { .. } => "payload.gone",
            Self::Claimed { .. } => "payload.claimed",
            Self::Denied { .. } => "payload.capability",
            Self::Modified { .. } => "payload.modified",
            Self::Connect { source, .. } => source.reason(),
            Self::Transfer { source, .. } => source.reason(),
            Self::Deadline { .. } => "consume.deadline",
            Self::Stopped { .. } => "consume.stopped",
            Self::Closed { .. } => "connector.closed",
        }
    }

    fn details(&self) -> BTreeMap<String, String> {
        let Some(at) = self.place() else { return BTreeMap::new() };
        let details = [
            ("request", at.request.clone()),
            ("stage", at.stage.to_string()),
            ("payload", at.payload.to_string()),
            ("chunk", at.chunk.to_string()),
            ("chunks", at.chunks.to_string()),
            ("pid", at.pid.to_string()),
        ];
        details.map(|(name, value)| (name.to_owned(), value)).into()
    }

    fn to_failure(&self) -> Failure {
        let (class, details) = (self.class(), self.details());
        match self {
            // The producer's or the stopper's own reason says more than that there was one.
            Self::Failed { failure, .. } | Self::Stopped { reason: failure, .. } => {
                let mut all = failure.details.clone();
                all.extend(details);
                Failure {
                    class,
                    reason: failure.reason.clone(),
                    message: self.to_string(),
                    details: all,
                }
            }
            _ => Failure {
                class,
                reason: self.reason().to_owned(),
                message: chain(self),
                details,
            },
        }
    }
}

impl ConsumeError {
    /// Which chunk of which payload the error is about; `None` where the call itself was wrong.
    pub const fn place(&self) -> Option<&Place> {
        match self {
            Self::DestinationCount { .. } | Self::DestinationSize { .. } => None,
            Self::NoTransport { at, .. }
            | Self::Link { at, .. }
            | Self::PeerLost { at, .. }
            | Self::Failed { at, .. }
            | Self::Gone { at, .. }
            | Self::Claimed { at }
            | Self::Denied { at }
            | Self::Modified { at, .. }
            | Self::Connect { at, .. }
            | Self::Transfer { at, .. }
            | Self::Deadline { at, .. }
            | Self::Stopped { at, .. }
            | Self::Closed { at } => Some(at),
        }
    }

    /// The payload, where it is gone for good: its holder died, or does not have it any more. It must be produced
    /// again.
    pub fn lost(&self) -> Option<PayloadId> {
        match self {
            Self::PeerLost { at, .. } | Self::Gone { at, .. } => Some(at.payload),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    #[test]
    fn messages_say_where_and_what_to_do() {
        let at = || {
            Box::new(Place {
                request: "r".to_owned(),
                stage: StageName::new("encode").expect("a name"),
                payload: PayloadId(Uuid::from_u128(1)),
                chunk: 0,
                chunks: 3,
                pid: 7,
            })
        };
        let waited = Duration::from_secs(1);
        let why = "nobody consumed it in time";
        for (error, what) in [
            (ConsumeError::Deadline { at: at(), waited }, "raise the deadline"),
            (ConsumeError::Closed { at: at() }, "make a new one"),
            (ConsumeError::Gone { at: at(), why }, "produced again"),
        ] {
            let message = error.to_string();
            assert!(message.contains(what) && message.contains("chunk 0 of 3"), "{message}");
        }
    }
}
