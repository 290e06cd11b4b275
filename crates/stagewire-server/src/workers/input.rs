//! What workers say, in the words of the scheduler.

use stagewire_api::v1::worker_message::Message;
use stagewire_api::{WireError, v1};
use stagewire_core::{ByteCount, ErrorClass, Failure, Handover, Incarnation, PayloadId, Token};
use stagewire_sched::{Input, PayloadInfo};
use uuid::Uuid;

/// Longest unit of progress, in bytes; more is cut.
const UNIT: usize = 32;

/// What follows from a message.
pub(super) enum Said {
    /// These, at once.
    Inputs(Vec<Input>),
    /// The result of a last stage has to be fetched first.
    Result {
        token: Token,
        result: v1::Payload,
        handovers: Vec<Handover>,
    },
}

fn token(token: Option<v1::Token>) -> Result<Token, WireError> {
    token.ok_or(WireError::Missing { field: "token" })?.try_into()
}

fn failure(failure: Option<v1::Failure>) -> Failure {
    failure
        .map(Failure::from)
        .unwrap_or_else(|| Failure::new(ErrorClass::Internal, "stage.failed", "the worker gave no reason"))
}

fn payload_id(field: &'static str, bytes: &[u8]) -> Result<PayloadId, WireError> {
    let len = bytes.len();
    Uuid::from_slice(bytes)
        .map(PayloadId)
        .map_err(|_| WireError::IdLength { field, len })
}

fn progress(progress: v1::Progress) -> stagewire_core::Progress {
    let mut progress = stagewire_core::Progress::from(progress);
    if progress.unit.len() > UNIT {
        progress.unit = progress.unit.chars().take(UNIT / 4).collect();
    }
    progress
}

/// Reads one message.
///
/// # Errors
/// [`WireError`] where it is not what the protocol says; the stream is ended then.
pub(super) fn read(worker: Incarnation, message: Message) -> Result<Said, WireError> {
    let one = |input| Ok(Said::Inputs(vec![input]));
    match message {
        Message::Hello(_) => Err(WireError::Missing {
            field: "anything but a second hello",
        }),
        Message::Accept(accepted) => one(Input::Accept {
            worker,
            token: accepted.try_into()?,
        }),
        Message::Decline(decline) => one(Input::Decline {
            worker,
            token: token(decline.token)?,
            failure: failure(decline.failure),
        }),
        Message::Renew(renew) => {
            let inputs = renew.attempts.into_iter().map(|attempt| {
                Ok(Input::Renew {
                    worker,
                    token: token(attempt.token)?,
                    sequence: attempt.sequence,
                    progress: attempt.progress.map(progress),
                })
            });
            Ok(Said::Inputs(inputs.collect::<Result<_, WireError>>()?))
        }
        Message::Published(published) => {
            let payload = published.payload.ok_or(WireError::Missing { field: "payload" })?;
            one(Input::Published {
                worker,
                token: token(published.token)?,
                payload: PayloadInfo {
                    id: payload_id("payload.id", &payload.id)?,
                    nbytes: ByteCount(payload.nbytes),
                    chunks: payload.chunks,
                    stored: payload.stored,
                    handle: payload.handle.into(),
                },
            })
        }
        Message::Completed(completed) => {
            let token = token(completed.token)?;
            let handovers = completed.handovers.into_iter().map(Handover::try_from);
            let handovers = handovers.collect::<Result<_, _>>()?;
            match completed.result {
                None => one(Input::Completed {
                    worker,
                    token,
                    result: None,
                    handovers,
                }),
                Some(result) => Ok(Said::Result {
                    token,
                    result,
                    handovers,
                }),
            }
        }
        Message::Failed(failed) => one(Input::Failed {
            worker,
            token: token(failed.token)?,
            failure: failure(failed.failure),
            lost: match failed.lost_payload.as_slice() {
                [] => None,
                bytes => Some(payload_id("lost_payload", bytes)?),
            },
        }),
        Message::Stopped(stopped) => one(Input::Stopped {
            worker,
            token: stopped.try_into()?,
        }),
    }
}
