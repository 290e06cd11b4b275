use std::collections::BTreeMap;

use stagewire_api::AttachError;
use stagewire_core::{ByteCount, Classify, ErrorClass, Failure, SchemaError, StageName, Token};

use crate::error::chain;
use crate::{ConsumeError, PublishError, PutError, StartError};

/// Why a worker did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each variant is the step that failed")]
pub enum WorkerError {
    #[error("the worker's connector did not start")]
    Start(#[from] StartError),
    #[error("the worker could not attach to the server")]
    Attach(#[from] AttachError),
}

impl Classify for WorkerError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Start(error) => error.class(),
            Self::Attach(error) => error.class(),
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::Start(error) => error.reason(),
            Self::Attach(error) => error.reason(),
        }
    }
}

/// The attempt must stop.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("attempt {token} must stop: {reason}")]
pub struct Cancelled {
    /// The attempt.
    pub token: Token,
    /// Why.
    pub reason: Failure,
}

impl Classify for Cancelled {
    fn class(&self) -> ErrorClass {
        self.reason.class
    }

    fn reason(&self) -> &'static str {
        "attempt.cancelled"
    }

    fn to_failure(&self) -> Failure {
        self.reason.clone()
    }
}

/// Why a checkpoint was not saved.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each variant is the step that failed")]
pub enum SaveError {
    #[error("it is not allowed")]
    Output(#[from] SchemaError),
    #[error("it was not published")]
    Publish(#[from] PublishError),
    #[error("it did not get into the store")]
    Put(#[from] PutError),
}

impl Classify for SaveError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Output(error) => error.class(),
            Self::Publish(error) => error.class(),
            Self::Put(error) => error.class(),
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::Output(error) => error.reason(),
            Self::Publish(error) => error.reason(),
            Self::Put(error) => error.reason(),
        }
    }

    fn details(&self) -> BTreeMap<String, String> {
        match self {
            Self::Put(error) => error.details(),
            _ => BTreeMap::new(),
        }
    }

    fn to_failure(&self) -> Failure {
        match self {
            Self::Output(error) => error.to_failure(),
            Self::Publish(error) => error.to_failure(),
            Self::Put(error) => error.to_failure(),
        }
    }
}

/// Why a task could not do something.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum TaskError {
    #[error(transparent)]
    Cancelled(#[from] Cancelled),
    #[error("attempt {token} has no input from stage {stage}; it has {inputs}")]
    NoInput {
        token: Token,
        stage: StageName,
        inputs: String,
    },
    #[error("attempt {token} must name the stage to read from; it has {inputs}")]
    WhichInput { token: Token, inputs: String },
    #[error("the input of attempt {token} cannot be read")]
    Consume { token: Token, source: Box<ConsumeError> },
    #[error("the output of attempt {token} of stage {stage} is not allowed")]
    Output {
        token: Token,
        stage: StageName,
        source: SchemaError,
    },
    #[error(
        "the output of attempt {token} of stage {stage} has {nbytes}, and at most {limit} are allowed: raise \"max-payload\" \
         of the stage, or make less of it"
    )]
    TooLarge {
        token: Token,
        stage: StageName,
        nbytes: ByteCount,
        limit: ByteCount,
    },
    #[error("the output of attempt {token} was not published")]
    Publish { token: Token, source: Box<PublishError> },
    #[error("the output of attempt {token} did not get into the store")]
    Put { token: Token, source: Box<PutError> },
    #[error("the checkpoint of attempt {token} was not saved")]
    Checkpoint { token: Token, source: Box<SaveError> },
    #[error("attempt {token} has no checkpoint to go on from")]
    NoCheckpoint { token: Token },
    #[error("stage {stage} takes no checkpoints of attempt {token}: declare `checkpoint = true` for it")]
    NoCheckpoints { token: Token, stage: StageName },
    #[error("attempt {token} has opened no output")]
    NotOpen { token: Token },
    #[error("attempt {token} has an output already")]
    AlreadyOpen { token: Token },
    #[error("attempt {token} has ended already")]
    Ended { token: Token },
    #[error("the completion of attempt {token} was refused: {failure}")]
    Refused { token: Token, failure: Failure },
}

impl Classify for TaskError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Cancelled(error) => error.class(),
            Self::NoInput { .. }
            | Self::WhichInput { .. }
            | Self::NoCheckpoint { .. }
            | Self::NoCheckpoints { .. }
            | Self::TooLarge { .. }
            | Self::NotOpen { .. }
            | Self::AlreadyOpen { .. } => ErrorClass::Invalid,
            Self::Consume { source, .. } => source.class(),
            Self::Output { source, .. } => source.class(),
            Self::Publish { source, .. } => source.class(),
            Self::Put { source, .. } => source.class(),
            Self::Checkpoint { source, .. } => source.class(),
            Self::Ended { .. } => ErrorClass::Conflict,
            Self::Refused { failure, .. } => failure.class,
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::Cancelled(error) => Classify::reason(error),
            Self::NoInput { .. } | Self::WhichInput { .. } => "task.no_input",
            Self::Consume { source, .. } => source.reason(),
            Self::Output { source, .. } => source.reason(),
            Self::Publish { source, .. } => source.reason(),
            Self::Put { source, .. } => source.reason(),
            Self::Checkpoint { source, .. } => source.reason(),
            Self::NoCheckpoint { .. } | Self::NoCheckpoints { .. } => "task.checkpoint",
            Self::TooLarge { .. } => "payload.max_payload",
            Self::NotOpen { .. } | Self::AlreadyOpen { .. } => "task.output",
            Self::Ended { .. } => "task.ended",
            Self::Refused { .. } => "attempt.refused",
        }
    }

    fn details(&self) -> BTreeMap<String, String> {
        match self {
            Self::Consume { source, .. } => source.details(),
            Self::Put { source, .. } => source.details(),
            Self::Checkpoint { source, .. } => source.details(),
            Self::Refused { failure, .. } => failure.details.clone(),
            Self::TooLarge { nbytes, limit, .. } => [("nbytes", nbytes), ("limit", limit)]
                .map(|(name, bytes)| (name.to_owned(), bytes.0.to_string()))
                .into(),
            _ => BTreeMap::new(),
        }
    }

    fn to_failure(&self) -> Failure {
        let inner = match self {
            Self::Cancelled(error) => return error.to_failure(),
            Self::Consume { source, .. } => source.to_failure(),
            Self::Put { source, .. } => source.to_failure(),
            Self::Checkpoint { source, .. } => source.to_failure(),
            Self::Refused { failure, .. } => failure.clone(),
            _ => Failure {
                class: self.class(),
                reason: self.reason().to_owned(),
                message: String::new(),
                details: self.details(),
            },
        };
        Failure {
            message: chain(self),
            ..inner
        }
    }
}
