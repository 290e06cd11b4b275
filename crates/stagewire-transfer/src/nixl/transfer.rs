//! Pulls and pushes of pinned regions.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use stagewire_core::{Device, Record};
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::agent::{Op, Space, Span, Stretch};
use super::reader::{NixlPeer, Use};
use super::worker::{Fault, Job, Progress};
use crate::budget::Spent;
use crate::copy::{Piece, Plan, Shape};
use crate::link::Grip;
use crate::pull::pull_with;
use crate::push::push_with;
use crate::target::Claim;
use crate::wire::Kind;
use crate::{Mapping, Memory, Pinned, Target, TransferError, TransferOptions};

/// The worker cuts jobs itself.
const SHAPE: Shape = Shape {
    large_from: u64::MAX,
    max_rows: u64::MAX,
};

/// How long after an error of NIXL the control connection may take to tell that the peer is gone.
const DEATH_AFTER_ERROR: Duration = Duration::from_millis(200);

/// What the worker keeps while bytes may move.
pub(super) enum Held {
    Pull {
        claim: Claim,
        #[expect(dead_code, reason = "held, never looked at")]
        pin: Arc<Pin>,
    },
    Push {
        #[expect(dead_code, reason = "held, never looked at")]
        memory: Memory,
        #[expect(dead_code, reason = "held, never looked at")]
        pin: Arc<Pin>,
        #[expect(dead_code, reason = "held, never looked at")]
        spent: Spent,
    },
}

/// A pinned region, and what NIXL knows of it.
#[derive(Debug)]
pub(super) struct Pin {
    grip: Arc<Grip>,
    peer: Arc<NixlPeer>,
    remote: Span,
    _in_use: Use,
}

#[derive(Debug)]
pub(super) struct NixlPinned {
    pin: Arc<Pin>,
}

impl NixlPinned {
    pub(super) fn new(grip: Grip, peer: Arc<NixlPeer>, in_use: Use, remote: Span) -> Self {
        let grip = Arc::new(grip);
        Self {
            pin: Arc::new(Pin {
                grip,
                peer,
                remote,
                _in_use: in_use,
            }),
        }
    }

    /// Has the worker move the bytes of a plan.
    async fn run(
        &self,
        op: Op,
        local: Span,
        plan: &Plan,
        held: Held,
        progress: Arc<Progress>,
    ) -> Result<Held, TransferError> {
        let Pin { peer, remote, grip, .. } = &*self.pin;
        let stretch = |piece: Piece| {
            let Piece { src, dst, len } = piece;
            let (local, remote) = if op == Op::Read { (dst, src) } else { (src, dst) };
            Stretch { local, remote, len }
        };
        let (done, finished) = oneshot::channel();
        let job = Job {
            peer: peer.name().clone(),
            op,
            local,
            remote: *remote,
            stretches: plan.pieces().into_iter().map(stretch).collect(),
            held,
            progress,
            done: Some(done),
        };
        match peer.worker().run(job, finished).await {
            Ok(held) => Ok(held),
            Err(fault) => Err(self.failed(grip, &fault).await),
        }
    }

    /// The error that a fault means: that of the peer where it died of the same cause.
    async fn failed(&self, grip: &Grip, fault: &Fault) -> TransferError {
        let link = grip.link();
        if timeout(DEATH_AFTER_ERROR, link.closed()).await.is_ok() {
            return link.peer_lost();
        }
        TransferError::Backend {
            transport: Kind::Nixl.name(),
            peer: link.peer(),
            region: grip.region(),
            what: "move bytes",
            record: None,
            problem: fault.to_string(),
        }
    }
}

#[async_trait]
impl Pinned for NixlPinned {
    fn len(&self) -> u64 {
        self.pin.grip.len()
    }

    async fn pull(&self, records: &[Record], dst: &Target, options: TransferOptions) -> Result<(), TransferError> {
        let grip = &self.pin.grip;
        let span = span(dst.device(), dst.as_ptr().addr().get() as u64, dst.len());
        pull_with(grip, records, dst, &options, SHAPE, |plan, claim| async move {
            if plan.bytes() == 0 {
                return Ok(claim);
            }
            let pin = self.pin.clone();
            let held = Held::Pull { claim, pin };
            let held = self.run(Op::Read, span, &plan, held, Arc::default()).await?;
            // The owner keeps the memory as it is until this reader has forgotten its metadata, which the pin prevents, or
            // until long after the control connection broke. So there is nothing to ask.
            grip.still_held()?;
            let Held::Pull { claim, .. } = held else {
                unreachable!("the worker gives back what it was given");
            };
            Ok(claim)
        })
        .await
    }

    async fn push(&self, records: &[Record], src: &Memory, options: TransferOptions) -> Result<(), TransferError> {
        let grip = &self.pin.grip;
        let span = span(src.device(), src.as_ptr().addr().get() as u64, src.len());
        let progress = Arc::new(Progress::default());
        let bytes = records.iter().map(Record::nbytes).fold(0, u64::saturating_add);
        let pushed = push_with(grip, records, src, &options, SHAPE, |plan, spent| {
            let progress = progress.clone();
            async move {
                if plan.bytes() == 0 {
                    return Ok(());
                }
                let held = Held::Push {
                    memory: src.clone(),
                    pin: self.pin.clone(),
                    spent,
                };
                self.run(Op::Write, span, &plan, held, progress).await?;
                grip.confirm().await
            }
        });
        pushed.await.map_err(|error| in_doubt(error, &progress, grip, bytes))
    }

    async fn map(&self) -> Result<Mapping, TransferError> {
        Err(TransferError::Unsupported {
            transport: Kind::Nixl.name(),
            ability: "map",
            instead: "pull instead, or use shm on one host",
        })
    }
}

/// A push that failed after its first request was posted may have written, and may still write.
fn in_doubt(error: TransferError, progress: &Progress, grip: &Grip, bytes: u64) -> TransferError {
    let posted = match &error {
        TransferError::Deadline { .. } | TransferError::Backend { .. } | TransferError::Released { .. } => {
            !progress.call_off()
        }
        // What a dead process had as memory is gone with it.
        TransferError::PeerLost { .. } => !progress.call_off() && !grip.link().is_dead(),
        _ => false,
    };
    if !posted {
        return error;
    }
    TransferError::InDoubt {
        peer: grip.link().peer(),
        pid: grip.link().process().pid,
        region: grip.region(),
        bytes,
        how: error.to_string(),
    }
}

/// Memory of this process; the worker numbers it.
fn span(device: Device, address: u64, len: u64) -> Span {
    Span {
        space: space(device),
        number: 0,
        address,
        len,
    }
}

pub(super) fn space(device: Device) -> Space {
    match device {
        Device::Cpu => Space::Host,
        Device::Cuda(ordinal) => Space::Cuda(ordinal),
    }
}
