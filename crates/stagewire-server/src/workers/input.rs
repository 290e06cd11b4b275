//! What workers say, in the words of the scheduler.

use std::time::Duration;

use stagewire_api::v1::worker_message::Message;
use stagewire_api::{WireError, v1};
use stagewire_core::{ByteCount, Chunking, ErrorClass, Failure, Handover, Incarnation, PayloadId, StageName, Token};
use stagewire_sched::{DrainScope, Input, PayloadInfo};
use uuid::Uuid;

/// Longest unit of progress, in bytes; more is cut.
const UNIT: usize = 32;
/// Longest path of a hand-over, in bytes; more is cut.
const PATH: usize = 32;
/// Most bytes that one payload can have: sums of as many of them as a server may know fit into 64 bits.
const LARGEST: ByteCount = ByteCount(1 << 40);

/// What follows from a message.
pub(super) enum Said {
    /// These, at once.
    Inputs(Vec<Input>),
    /// The attempt cannot go on: its worker says what cannot be.
    Refused { token: Token, failure: Failure },
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

/// Why a payload cannot be what its worker says.
fn impossible(payload: &v1::Payload) -> Option<Failure> {
    let (chunks, nbytes) = (payload.chunks, ByteCount(payload.nbytes));
    let possible = (1..=Chunking::MAX).contains(&chunks) && nbytes <= LARGEST;
    (!possible).then(|| {
        let message = format!(
            "the worker published {chunks} chunks of {nbytes} in total; a payload has 1 to {} chunks and at most \
             {LARGEST}. Does the worker run the same version of Stagewire as the server?",
            Chunking::MAX
        );
        Failure::new(ErrorClass::Internal, "protocol.malformed", message)
    })
}

/// The payload in the words of the scheduler, or why it cannot be what its worker says.
fn payload(payload: v1::Payload) -> Result<Result<PayloadInfo, Failure>, WireError> {
    if let Some(failure) = impossible(&payload) {
        return Ok(Err(failure));
    }
    Ok(Ok(PayloadInfo {
        id: payload_id("payload.id", &payload.id)?,
        nbytes: ByteCount(payload.nbytes),
        chunks: payload.chunks,
        stored: payload.stored,
        handle: payload.handle.into(),
    }))
}

/// Hand-overs are for people: one that cannot have happened is left out, and harms nobody.
fn handovers(
    worker: Incarnation,
    handovers: Vec<v1::Handover>,
    stages: &[StageName],
) -> Result<Vec<Handover>, WireError> {
    let mut kept = Vec::with_capacity(handovers.len());
    for handover in handovers {
        let mut handover = Handover::try_from(handover)?;
        let possible = stages.contains(&handover.from)
            && handover.chunk < handover.chunks
            && handover.chunks <= Chunking::MAX
            && handover.nbytes <= LARGEST.0
            && handover.begin <= handover.end;
        if !possible {
            tracing::warn!(%worker, ?handover, "a worker reports a hand-over that cannot have happened");
            continue;
        }
        if handover.path.len() > PATH {
            handover.path = handover.path.chars().take(PATH / 4).collect();
        }
        kept.push(handover);
    }
    Ok(kept)
}

/// Reads one message of a worker of a pipeline with these stages. Nothing in what it returns is larger than can be.
///
/// # Errors
/// [`WireError`] where it is not what the protocol says; the stream is ended then.
pub(super) fn read(worker: Incarnation, message: Message, stages: &[StageName]) -> Result<Said, WireError> {
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
            let token = token(published.token)?;
            match self::payload(payload)? {
                Ok(payload) => one(Input::Published { worker, token, payload }),
                Err(failure) => Ok(Said::Refused { token, failure }),
            }
        }
        Message::Completed(completed) => {
            let token = token(completed.token)?;
            let handovers = handovers(worker, completed.handovers, stages)?;
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
        Message::Checkpoint(checkpoint) => {
            let payload = checkpoint.payload.ok_or(WireError::Missing { field: "payload" })?;
            let token = token(checkpoint.token)?;
            match self::payload(payload)? {
                Ok(payload) => one(Input::Checkpointed {
                    worker,
                    token,
                    payload,
                    progress: progress(checkpoint.progress.unwrap_or_default()),
                }),
                Err(failure) => Ok(Said::Refused { token, failure }),
            }
        }
        Message::Yielded(yielded) => {
            let token = token(yielded.token)?;
            match yielded.payload.map(payload).transpose()?.transpose() {
                Ok(payload) => one(Input::Yielded {
                    worker,
                    token,
                    payload,
                    progress: progress(yielded.progress.unwrap_or_default()),
                }),
                Err(failure) => Ok(Said::Refused { token, failure }),
            }
        }
        Message::Drain(drain) => one(Input::Drain {
            scope: DrainScope::Worker(worker),
            within: drain.deadline_ms.map(Duration::from_millis),
        }),
    }
}

#[cfg(test)]
mod tests {
    use stagewire_core::{Attempt, Epoch, JobId, Timestamp, TransferMode};

    use super::*;

    fn handover() -> Handover {
        Handover {
            payload: PayloadId(Uuid::from_u128(1)),
            from: StageName::new("encode").unwrap(),
            chunk: 2,
            chunks: 3,
            nbytes: 7,
            mode: TransferMode::P2p,
            path: "shm".to_owned(),
            begin: Timestamp(5),
            end: Timestamp(5),
        }
    }

    fn kept(handovers: Vec<Handover>) -> Vec<Handover> {
        let completed = v1::Completed {
            token: Some(v1::Token::from(Token {
                epoch: Epoch(1),
                job: JobId(Uuid::from_u128(2)),
                attempt: Attempt(1),
            })),
            result: None,
            handovers: handovers.into_iter().map(v1::Handover::from).collect(),
        };
        let worker = Incarnation(Uuid::from_u128(3));
        match read(worker, Message::Completed(completed), &[handover().from]) {
            Ok(Said::Inputs(inputs)) => match &inputs[..] {
                [Input::Completed { handovers, .. }] => handovers.clone(),
                other => panic!("{other:?}"),
            },
            _ => panic!("a completion is an input"),
        }
    }

    #[test]
    fn a_handover_that_cannot_have_happened_is_left_out() {
        let cases: [fn(&mut Handover); 5] = [
            |wrong| wrong.from = StageName::new("elsewhere").unwrap(),
            |wrong| wrong.chunk = 3,
            |wrong| (wrong.chunk, wrong.chunks) = (u32::MAX - 1, u32::MAX),
            |wrong| wrong.nbytes = u64::MAX,
            |wrong| wrong.begin = Timestamp(6),
        ];
        for change in cases {
            let mut wrong = handover();
            change(&mut wrong);
            assert_eq!(kept(vec![wrong.clone(), handover()]), [handover()], "{wrong:?}");
        }
        let long = Handover {
            path: "x".repeat(1000),
            ..handover()
        };
        assert_eq!(kept(vec![long])[0].path.len(), PATH / 4);
    }
}
