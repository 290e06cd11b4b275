//! What the server says to workers, in the words of the protocol.

use std::time::Duration;

use stagewire_api::v1;
use stagewire_api::v1::server_message::Message;
use stagewire_core::{Failure, PayloadId, Token};
use stagewire_sched::{Offer, PayloadInfo};

pub(crate) fn offer(offer: Offer, files: Vec<v1::InputFile>) -> Message {
    Message::Offer(v1::Offer {
        token: Some(offer.token.into()),
        stage: offer.stage.to_string(),
        params: offer.params.to_string(),
        inputs: offer
            .inputs
            .into_iter()
            .map(|input| v1::Input {
                stage: input.stage.to_string(),
                payload: Some(payload(&input.payload)),
            })
            .collect(),
        output: Some(v1::Output {
            publish: offer.output.publish,
            stored: offer.output.stored,
            chunks: offer.output.chunks,
            chunk_dim: offer.output.chunk_dim,
            max_nbytes: offer.output.max_nbytes.map_or(0, |most| most.0),
        }),
        answer_within_ms: u64::try_from(offer.answer_within.as_millis()).unwrap_or(u64::MAX),
        files,
        member: offer.member.map(v1::Member::from),
        checkpoints: offer.checkpoints,
        checkpoint: offer.checkpoint.map(|kept| v1::Checkpoint {
            token: Some(kept.token.into()),
            payload: Some(payload(&kept.payload)),
            progress: Some(kept.progress.into()),
        }),
    })
}

fn payload(info: &PayloadInfo) -> v1::Payload {
    v1::Payload {
        id: info.id.0.as_bytes().to_vec(),
        handle: info.handle.as_slice().to_vec(),
        nbytes: info.nbytes.0,
        chunks: info.chunks,
        stored: info.stored,
    }
}

pub(crate) fn grant(token: Token) -> Message {
    Message::Grant(token.into())
}

pub(crate) fn accepted(token: Token) -> Message {
    Message::Accepted(token.into())
}

pub(crate) fn cancel(token: Token, failure: Failure) -> Message {
    Message::Cancel(v1::Cancel {
        token: Some(token.into()),
        failure: Some(failure.into()),
    })
}

pub(crate) fn yield_up(token: Token, failure: Failure) -> Message {
    Message::Yield(v1::Yield {
        token: Some(token.into()),
        failure: Some(failure.into()),
    })
}

pub(crate) fn refused(token: Token, failure: Failure) -> Message {
    Message::Refused(v1::Refused {
        token: Some(token.into()),
        failure: Some(failure.into()),
    })
}

pub(crate) fn release(payload: PayloadId) -> Message {
    Message::Release(payload.0.as_bytes().to_vec())
}

pub(crate) fn drain(within: Option<Duration>) -> Message {
    let deadline_ms = within.map(|within| u64::try_from(within.as_millis()).unwrap_or(u64::MAX));
    Message::Drain(v1::Drain { deadline_ms })
}
