use std::fmt;

use stagewire_core::{
    Attempt, Classify, Epoch, ErrorClass, Failure, Handover, Incarnation, JobId, Member, NameError, PayloadId,
    Progress, StageName, Timestamp, Token, TransferMode,
};
use uuid::Uuid;

use crate::v1;

/// A message that is not what the protocol says.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum WireError {
    #[error("{field} is missing")]
    Missing { field: &'static str },
    #[error("{field} has {len} bytes, an id has 16")]
    IdLength { field: &'static str, len: usize },
    #[error("{field} is not a stage name")]
    Name { field: &'static str, source: NameError },
}

impl Classify for WireError {
    fn class(&self) -> ErrorClass {
        ErrorClass::Invalid
    }

    fn reason(&self) -> &'static str {
        "protocol.malformed"
    }
}

fn id(field: &'static str, bytes: &[u8]) -> Result<Uuid, WireError> {
    Uuid::from_slice(bytes).map_err(|_| WireError::IdLength {
        field,
        len: bytes.len(),
    })
}

fn name(field: &'static str, text: &str) -> Result<StageName, WireError> {
    StageName::new(text).map_err(|source| WireError::Name { field, source })
}

/// The member of a message that must be there.
pub(crate) fn required<T>(field: &'static str, value: Option<T>) -> Result<T, WireError> {
    value.ok_or(WireError::Missing { field })
}

/// Reads a payload id of 16 bytes.
///
/// # Errors
/// [`WireError::IdLength`].
pub(crate) fn payload_id(field: &'static str, bytes: &[u8]) -> Result<PayloadId, WireError> {
    id(field, bytes).map(PayloadId)
}

impl From<Token> for v1::Token {
    fn from(token: Token) -> Self {
        Self {
            epoch: token.epoch.0,
            job: token.job.0.as_bytes().to_vec(),
            attempt: token.attempt.0,
        }
    }
}

impl TryFrom<v1::Token> for Token {
    type Error = WireError;

    fn try_from(token: v1::Token) -> Result<Self, WireError> {
        let job = JobId(id("token.job", &token.job)?);
        Ok(Self {
            epoch: Epoch(token.epoch),
            job,
            attempt: Attempt(token.attempt),
        })
    }
}

impl From<Failure> for v1::Failure {
    fn from(failure: Failure) -> Self {
        let class = failure.class.name().to_owned();
        Self {
            class,
            reason: failure.reason,
            message: failure.message,
            details: failure.details,
        }
    }
}

impl From<v1::Failure> for Failure {
    /// A class that this build does not know reads as [`ErrorClass::Internal`].
    fn from(failure: v1::Failure) -> Self {
        let class = ErrorClass::from_name(&failure.class).unwrap_or(ErrorClass::Internal);
        Self {
            class,
            reason: failure.reason,
            message: failure.message,
            details: failure.details,
        }
    }
}

impl From<Progress> for v1::Progress {
    fn from(progress: Progress) -> Self {
        Self {
            done: progress.done,
            total: progress.total,
            unit: progress.unit,
        }
    }
}

impl From<v1::Progress> for Progress {
    fn from(progress: v1::Progress) -> Self {
        Self {
            done: progress.done,
            total: progress.total,
            unit: progress.unit,
        }
    }
}

impl From<Handover> for v1::Handover {
    fn from(handover: Handover) -> Self {
        Self {
            payload: handover.payload.0.as_bytes().to_vec(),
            from: handover.from.to_string(),
            chunk: handover.chunk,
            chunks: handover.chunks,
            nbytes: handover.nbytes,
            stored: handover.mode == TransferMode::Store,
            path: handover.path,
            begin: handover.begin.0,
            end: handover.end.0,
        }
    }
}

impl TryFrom<v1::Handover> for Handover {
    type Error = WireError;

    fn try_from(handover: v1::Handover) -> Result<Self, WireError> {
        Ok(Self {
            payload: payload_id("handover.payload", &handover.payload)?,
            from: name("handover.from", &handover.from)?,
            chunk: handover.chunk,
            chunks: handover.chunks,
            nbytes: handover.nbytes,
            mode: if handover.stored {
                TransferMode::Store
            } else {
                TransferMode::P2p
            },
            path: handover.path,
            begin: Timestamp(handover.begin),
            end: Timestamp(handover.end),
        })
    }
}

impl v1::Hello {
    /// The worker's incarnation.
    ///
    /// # Errors
    /// [`WireError::IdLength`].
    pub fn incarnation(&self) -> Result<Incarnation, WireError> {
        id("hello.incarnation", &self.incarnation).map(Incarnation)
    }

    /// The worker's place in a group, where it is in one.
    ///
    /// # Errors
    /// [`WireError::Name`].
    pub fn member(&self) -> Result<Option<Member>, WireError> {
        self.member.clone().map(Member::try_from).transpose()
    }

    /// The stage that the worker serves.
    ///
    /// # Errors
    /// [`WireError::Name`].
    pub fn stage(&self) -> Result<StageName, WireError> {
        name("hello.stage", &self.stage)
    }

    /// Attempts that go on, and payloads whose bytes are still at the worker.
    ///
    /// # Errors
    /// [`WireError::IdLength`].
    pub fn carried(&self) -> Result<(Vec<Token>, Vec<PayloadId>), WireError> {
        let running = self
            .running
            .iter()
            .cloned()
            .map(Token::try_from)
            .collect::<Result<_, _>>()?;
        let holding = self
            .holding
            .iter()
            .map(|bytes| payload_id("hello.holding", bytes))
            .collect::<Result<_, _>>()?;
        Ok((running, holding))
    }
}

impl v1::Payload {
    /// The payload's id.
    ///
    /// # Errors
    /// [`WireError::IdLength`].
    pub fn payload_id(&self) -> Result<PayloadId, WireError> {
        payload_id("payload.id", &self.id)
    }
}

impl v1::Input {
    /// Stage that produced the input.
    ///
    /// # Errors
    /// [`WireError::Name`].
    pub fn stage(&self) -> Result<StageName, WireError> {
        name("input.stage", &self.stage)
    }
}

impl From<Member> for v1::Member {
    fn from(member: Member) -> Self {
        Self {
            group: member.group.to_string(),
            rank: member.rank,
            world: member.world,
        }
    }
}

impl TryFrom<v1::Member> for Member {
    type Error = WireError;

    fn try_from(member: v1::Member) -> Result<Self, WireError> {
        Ok(Self {
            group: name("member.group", &member.group)?,
            rank: member.rank,
            world: member.world,
        })
    }
}

/// Shows everything but the handle, which holds capabilities.
impl fmt::Debug for v1::Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Payload")
            .field("id", &self.payload_id().ok())
            .field("nbytes", &self.nbytes)
            .field("chunks", &self.chunks)
            .field("stored", &self.stored)
            .finish_non_exhaustive()
    }
}

/// Shows everything but the address of the store, which holds capabilities.
impl fmt::Debug for v1::Welcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Welcome")
            .field("epoch", &self.epoch)
            .field("renew_interval_ms", &self.renew_interval_ms)
            .field("linger_ms", &self.linger_ms)
            .finish_non_exhaustive()
    }
}
