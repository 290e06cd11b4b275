use std::future;
use std::sync::Arc;
use std::time::Duration;

use stagewire_core::{Incarnation, Peer};
use tokio::time::{Instant, timeout};

use super::Operation;
use crate::{Remote, TransferError, TransferOptions};

/// The peer at the far end, to wait for as a transport has to: only while it lives and the deadline allows.
#[derive(Debug, Clone)]
pub(super) struct Far {
    remote: Arc<dyn Remote>,
    peer: Incarnation,
    pid: u32,
}

impl Far {
    pub(super) fn new(remote: Arc<dyn Remote>, peer: &Peer) -> Self {
        let (peer, pid) = (peer.incarnation, peer.process.pid);
        Self { remote, peer, pid }
    }

    pub(super) fn remote(&self) -> &Arc<dyn Remote> {
        &self.remote
    }

    pub(super) fn peer(&self) -> Incarnation {
        self.peer
    }

    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    /// Waits, and tells what is left of the deadline.
    pub(super) async fn wait(
        &self,
        operation: Operation,
        region: u64,
        options: &TransferOptions,
        pause: impl Future<Output = ()>,
    ) -> Result<TransferOptions, TransferError> {
        let began = Instant::now();
        let unless_lost = async {
            tokio::select! {
                biased;
                () = pause => Ok(()),
                how = self.remote.closed() => Err(TransferError::PeerLost { peer: self.peer, pid: self.pid, how }),
            }
        };
        let Some(after) = options.deadline else {
            unless_lost.await?;
            return Ok(options.clone());
        };
        match timeout(after, unless_lost).await {
            Ok(waited) => waited?,
            Err(_) => return Err(self.late(operation, region, after)),
        }
        let deadline = Some(after.saturating_sub(began.elapsed()));
        Ok(TransferOptions { deadline })
    }

    /// Waits until the deadline or the loss of the peer.
    pub(super) async fn wait_in_vain(
        &self,
        operation: Operation,
        region: u64,
        options: &TransferOptions,
    ) -> TransferError {
        match self.wait(operation, region, options, future::pending()).await {
            Err(error) => error,
            Ok(_) => unreachable!("the pause never ends"),
        }
    }

    fn late(&self, operation: Operation, region: u64, after: Duration) -> TransferError {
        TransferError::Deadline {
            peer: self.peer,
            pid: self.pid,
            region,
            what: match operation {
                Operation::Pin => "the pin",
                Operation::Push => "the push",
                Operation::Map => "the mapping",
                _ => "the pull",
            },
            after,
        }
    }
}

/// Names the caller's deadline in an error of an operation that was given what was left of it.
pub(super) fn whole_deadline(options: &TransferOptions) -> impl Fn(TransferError) -> TransferError + use<> {
    let whole = options.deadline;
    move |error| match (error, whole) {
        (
            TransferError::Deadline {
                peer,
                pid,
                region,
                what,
                ..
            },
            Some(after),
        ) => TransferError::Deadline {
            peer,
            pid,
            region,
            what,
            after,
        },
        (error, _) => error,
    }
}
