use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use stagewire_core::{ByteCount, Classify, ErrorClass, Failure, Handle, Lease, PayloadId, Peer, StageName};
use stagewire_transfer::{ArenaError, CmaUnavailable, MooncakeError, NixlUnavailable, RegisterError};

use crate::LinkError;

/// Why a connector did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum StartError {
    #[error("the transports of this process did not start")]
    Host(#[source] stagewire_transfer::StartError),
    #[error("the tcp transport of this process did not start")]
    Network(#[source] stagewire_transfer::StartError),
    #[error("no transport is named; name one at least of shm, cma, tcp, mooncake and nixl")]
    NoTransport,
    #[error("the kernel forbids cma, and nothing else is named; name shm as well, where memory is copied to")]
    Cma(#[source] CmaUnavailable),
    #[error("the mooncake transport of this process did not start")]
    Mooncake(#[source] MooncakeError),
    #[error("the nixl transport of this process did not start")]
    Nixl(#[source] NixlUnavailable),
    #[error("the payload socket of this process cannot be opened")]
    Socket(#[source] stagewire_transfer::StartError),
}

impl Classify for StartError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Host(error) | Self::Network(error) | Self::Socket(error) => error.class(),
            Self::NoTransport => ErrorClass::Invalid,
            Self::Cma(error) => error.class(),
            Self::Mooncake(error) => error.class(),
            Self::Nixl(error) => error.class(),
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::Host(error) | Self::Network(error) | Self::Socket(error) => error.reason(),
            Self::NoTransport => "connector.transports",
            Self::Cma(error) => error.reason(),
            Self::Mooncake(error) => error.reason(),
            Self::Nixl(error) => error.reason(),
        }
    }
}

/// Why a payload was not published, or a chunk not shown.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum PublishError {
    #[error("request {request:?}: the manifest names {expected} tensors, the memory of {found} was given")]
    TensorCount {
        request: String,
        expected: usize,
        found: usize,
    },
    #[error("request {request:?}: tensor {index} has {found} of memory, its shape and dtype need {expected}")]
    TensorSize {
        request: String,
        index: usize,
        found: ByteCount,
        expected: ByteCount,
    },
    #[error("request {request:?}: no room for a copy of tensor {index} ({nbytes}) in the arena")]
    Arena {
        request: String,
        index: usize,
        nbytes: ByteCount,
        source: ArenaError,
    },
    #[error("request {request:?}: tensor {index} is memory that peers may write, but a payload never changes")]
    Writable { request: String, index: usize },
    #[error("request {request:?}: tensor {index} cannot be offered to other processes")]
    Register {
        request: String,
        index: usize,
        source: RegisterError,
    },
    #[error("request {request:?}: a payload of lease {lease} {why}")]
    Lease {
        request: String,
        lease: Lease,
        why: &'static str,
    },
    #[error("request {request:?}: it is to go to a store, and there is none; start one, or publish with mode p2p")]
    NoStore { request: String },
    #[error("request {request:?}: chunk {chunk} does not exist, the payload has {chunks}")]
    NoSuchChunk { request: String, chunk: u32, chunks: u32 },
    #[error("request {request:?}: chunk {chunk} cannot be shown, the payload has ended: {end}")]
    Ended {
        request: String,
        chunk: u32,
        end: &'static str,
    },
    #[error("request {request:?}: the connector is closed")]
    Closed { request: String },
}

impl Classify for PublishError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::TensorCount { .. }
            | Self::TensorSize { .. }
            | Self::Writable { .. }
            | Self::Lease { .. }
            | Self::NoSuchChunk { .. } => ErrorClass::Invalid,
            Self::Arena { source, .. } => source.class(),
            Self::Register { source, .. } => source.class(),
            Self::NoStore { .. } => ErrorClass::Unsupported,
            Self::Ended { .. } => ErrorClass::Conflict,
            Self::Closed { .. } => ErrorClass::Cancelled,
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::TensorCount { .. } | Self::TensorSize { .. } => "publish.tensors",
            Self::Writable { .. } => "publish.writable",
            Self::Arena { source, .. } => source.reason(),
            Self::Register { source, .. } => source.reason(),
            Self::Lease { .. } => "payload.lease",
            Self::NoStore { .. } => "store.none",
            Self::NoSuchChunk { .. } => "payload.chunks",
            Self::Ended { .. } => "publish.ended",
            Self::Closed { .. } => "connector.closed",
        }
    }
}

/// Which payload was to go to which store: what every error of that says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PutPlace {
    /// The request.
    pub request: String,
    /// Stage that produced the payload.
    pub stage: StageName,
    /// The payload.
    pub payload: PayloadId,
    /// Process of the store, where one was asked.
    pub store: Option<u32>,
}

impl PutPlace {
    pub(crate) fn new(handle: &Handle, store: Option<&Peer>) -> Box<Self> {
        Box::new(Self {
            request: handle.request.clone(),
            stage: handle.stage.clone(),
            payload: handle.payload,
            store: store.map(|store| store.process.pid),
        })
    }
}

impl fmt::Display for PutPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            request,
            stage,
            payload,
            store,
        } = self;
        write!(f, "request {request:?}, stage {stage}, payload {payload}")?;
        match store {
            Some(pid) => write!(f, ", store at process {pid}"),
            None => Ok(()),
        }
    }
}

/// Why a payload did not get into the store. The payload is where it was.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum PutError {
    #[error("{at}: it cannot go to a store: this connector knows none; start one, and tell the connector where it is")]
    NoStore { at: Box<PutPlace> },
    #[error("{at}: it was given up before it was in the store")]
    Cancelled { at: Box<PutPlace> },
    #[error("{at}: this process does not hold it")]
    NotHeld { at: Box<PutPlace> },
    #[error("{at}: the store cannot be talked to")]
    Link { at: Box<PutPlace>, source: LinkError },
    #[error("{at}: the store went away before it had answered; ask again once a store runs")]
    StoreLost { at: Box<PutPlace> },
    #[error("{at}: the store did not answer within {waited:?}; raise the deadline, or look at the store")]
    Deadline { at: Box<PutPlace>, waited: Duration },
    #[error("{at}: the store refused it: {failure}")]
    Refused { at: Box<PutPlace>, failure: Failure },
    #[error("{at}: the process that should keep a store answers {answer}")]
    Protocol { at: Box<PutPlace>, answer: &'static str },
}

impl PutError {
    /// Which payload was to go where.
    pub const fn place(&self) -> &PutPlace {
        match self {
            Self::NoStore { at }
            | Self::Cancelled { at }
            | Self::NotHeld { at }
            | Self::Link { at, .. }
            | Self::StoreLost { at }
            | Self::Deadline { at, .. }
            | Self::Refused { at, .. }
            | Self::Protocol { at, .. } => at,
        }
    }
}

impl Classify for PutError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::NoStore { .. } => ErrorClass::Unsupported,
            Self::NotHeld { .. } => ErrorClass::NotFound,
            Self::Cancelled { .. } => ErrorClass::Cancelled,
            Self::Link { source, .. } => source.class(),
            Self::StoreLost { .. } => ErrorClass::Unavailable,
            Self::Deadline { .. } => ErrorClass::Deadline,
            Self::Refused { failure, .. } => failure.class,
            Self::Protocol { .. } => ErrorClass::Internal,
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::NoStore { .. } => "store.none",
            Self::NotHeld { .. } => "payload.gone",
            Self::Cancelled { .. } => "publish.cancelled",
            Self::Link { source, .. } => source.reason(),
            Self::StoreLost { .. } => "store.lost",
            Self::Deadline { .. } => "store.deadline",
            Self::Refused { .. } => "store.refused",
            Self::Protocol { .. } => "protocol.malformed",
        }
    }

    fn details(&self) -> BTreeMap<String, String> {
        let mut details = match self {
            Self::Refused { failure, .. } => failure.details.clone(),
            _ => BTreeMap::new(),
        };
        let at = self.place();
        let named = [
            ("request", at.request.clone()),
            ("stage", at.stage.to_string()),
            ("payload", at.payload.to_string()),
        ];
        let pid = at.store.map(|pid| ("store_pid", pid.to_string()));
        details.extend(
            named
                .into_iter()
                .chain(pid)
                .map(|(name, value)| (name.to_owned(), value)),
        );
        details
    }

    fn to_failure(&self) -> Failure {
        // The store's own reason says more than that it refused.
        let reason = match self {
            Self::Refused { failure, .. } => failure.reason.clone(),
            _ => self.reason().to_owned(),
        };
        Failure {
            class: self.class(),
            reason,
            message: chain(self),
            details: self.details(),
        }
    }
}

/// Why a payload could not be released where it is held.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum ReleaseError {
    #[error(
        "request {request:?}, payload {payload}: the handle's capability is not the payload's; it is forged or damaged"
    )]
    Denied { request: String, payload: PayloadId },
    #[error("request {request:?}, payload {payload}: its holder does not let it be ended from here: {}", .failure.message)]
    Refused {
        request: String,
        payload: PayloadId,
        failure: Failure,
    },
    #[error(
        "request {request:?}, payload {payload}: its holder did not answer within {waited:?}; look at process {pid}"
    )]
    Silent {
        request: String,
        payload: PayloadId,
        pid: u32,
        waited: Duration,
    },
    #[error(
        "request {request:?}, payload {payload}: the store that had it, process {pid}, has died, and none came in its place \
         within {waited:?}; one that does has the payload again: release it then"
    )]
    StoreLost {
        request: String,
        payload: PayloadId,
        pid: u32,
        waited: Duration,
    },
    #[error("request {request:?}, payload {payload}: its holder cannot be talked to")]
    Link {
        request: String,
        payload: PayloadId,
        source: LinkError,
    },
}

impl Classify for ReleaseError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Denied { .. } => ErrorClass::Denied,
            Self::Refused { failure, .. } => failure.class,
            Self::Silent { .. } => ErrorClass::Deadline,
            Self::StoreLost { .. } => ErrorClass::Unavailable,
            Self::Link { source, .. } => source.class(),
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::Denied { .. } => "payload.capability",
            Self::Refused { .. } => "release.refused",
            Self::Silent { .. } => "peer.silent",
            Self::StoreLost { .. } => "store.lost",
            Self::Link { source, .. } => source.reason(),
        }
    }
}

/// An error and what caused it, in one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut message = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        message = format!("{message}: {error}");
        source = error.source();
    }
    message
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    #[test]
    fn messages_of_puts_say_where_and_what_to_do() {
        let at = |store| {
            Box::new(PutPlace {
                request: "r 7".to_owned(),
                stage: StageName::new("denoise").expect("a name"),
                payload: PayloadId(Uuid::from_u128(1)),
                store,
            })
        };
        let waited = Duration::from_secs(1);
        for (error, what) in [
            (PutError::NoStore { at: at(None) }, "start one"),
            (PutError::StoreLost { at: at(Some(42)) }, "ask again"),
            (
                PutError::Deadline {
                    at: at(Some(42)),
                    waited,
                },
                "raise the deadline",
            ),
        ] {
            let message = error.to_string();
            for part in [what, "\"r 7\"", "denoise", &error.place().payload.to_string()] {
                assert!(message.contains(part), "{part:?} is not in {message:?}");
            }
            assert_eq!(
                message.contains("process 42"),
                error.place().store.is_some(),
                "{message}"
            );
            assert_eq!(error.details()["request"], "r 7");
        }
    }
}
