use std::sync::Arc;
use std::time::Duration;

use stagewire_core::Incarnation;
use tokio::sync::oneshot;

use super::{Link, Waiting};
use crate::wire::{Kind, MAX_MESSAGE, Refusal, Request};
use crate::{ConnectError, TransferError};

/// Why the other half of a transport did not answer a message.
#[derive(Debug)]
pub(crate) enum AskError {
    /// The peer is gone, or does not answer in time.
    Transfer(TransferError),
    /// It says no, or the message is too long.
    Refused {
        kind: Kind,
        peer: Incarnation,
        problem: String,
    },
}

impl AskError {
    /// As the error of a transfer from or to a region.
    pub(crate) fn of_transfer(self, region: u64, what: &'static str) -> TransferError {
        match self {
            Self::Transfer(TransferError::Deadline { peer, pid, after, .. }) => TransferError::Deadline {
                peer,
                pid,
                region,
                what,
                after,
            },
            Self::Transfer(error) => error,
            Self::Refused { kind, peer, problem } => TransferError::Backend {
                transport: kind.name(),
                peer,
                region,
                what,
                record: None,
                problem,
            },
        }
    }

    /// As the error of connecting.
    pub(crate) fn of_connect(self, peer: Incarnation) -> ConnectError {
        match self {
            Self::Transfer(TransferError::Deadline { after, .. }) => ConnectError::Deadline { peer, after },
            Self::Transfer(error) => ConnectError::Gone {
                peer,
                how: error.to_string(),
            },
            Self::Refused { problem, .. } => ConnectError::Refused { peer, problem },
        }
    }
}

impl Link {
    /// Sends a message of at most [`MAX_MESSAGE`] bytes to the other half of a transport, and gives its answer.
    ///
    /// # Cancel safety
    /// A dropped future leaves open whether the message arrives.
    pub(crate) async fn ask(
        self: &Arc<Self>,
        kind: Kind,
        message: &[u8],
        deadline: Option<Duration>,
    ) -> Result<Vec<u8>, AskError> {
        let peer = self.peer;
        let refused = |problem| AskError::Refused { kind, peer, problem };
        if message.len() > MAX_MESSAGE {
            let problem = format!("a message of {} bytes; {MAX_MESSAGE} are allowed", message.len());
            return Err(refused(problem));
        }
        let message = message.to_vec();
        let answer = async {
            let (answer, answered) = oneshot::channel();
            let request = self.expect(Waiting::Ask(answer))?;
            self.send(&Request::Ask { request, kind, message }).await?;
            answered.await.map_err(|_| self.peer_lost())
        };
        let options = crate::TransferOptions { deadline };
        let answer = self.bounded("an answer", 0, &options, answer).await;
        match answer.map_err(AskError::Transfer)? {
            Ok(answer) => Ok(answer),
            Err(Refusal::Backend { problem }) => Err(refused(problem)),
            Err(refusal) => Err(refused(format!("{refusal:?}"))),
        }
    }
}
