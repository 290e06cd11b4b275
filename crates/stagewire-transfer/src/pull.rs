//! The way every pull goes, whatever moves its bytes.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use stagewire_core::{Device, Record};

use crate::copy::{self, MoveError, Mover, Plan, Shape};
use crate::link::Grip;
use crate::target::Claim;
use crate::transport::Direction;
use crate::{Target, TransferError, TransferOptions};

/// Checks and plans a pull, has `transfer` fill the claim while the peer lives and the deadline allows, and commits.
///
/// `transfer` gives the claim back once every byte is exact and the pin was proven to be held until then: by
/// [`Grip::still_held`], by [`Grip::confirm`], or because the owner itself sent the bytes under that pin. Dropped, it
/// must not give up the claim before nothing writes to its bytes any more.
pub(crate) async fn pull_with<F>(
    grip: &Arc<Grip>,
    records: &[Record],
    dst: &Target,
    options: &TransferOptions,
    shape: Shape,
    transfer: impl FnOnce(Plan, Claim) -> F,
) -> Result<(), TransferError>
where
    F: Future<Output = Result<Claim, TransferError>>,
{
    let link = grip.link();
    let meter = link.meter(grip.kind());
    let attempt = meter.begin(Direction::Pull);
    let (plan, written) = Plan::new(records, grip.len(), dst.len(), shape)?;
    let mut claim = dst.claim(written)?;
    let bytes = plan.bytes();
    let operation = async {
        claim.spend(link.budget().spend(grip.kind(), bytes).await);
        transfer(plan, claim).await
    };
    let claim = link.bounded("the pull", grip.region(), options, operation).await?;
    claim.commit();
    attempt.succeeded(bytes);
    link.counters().copied_bytes.fetch_add(bytes, Ordering::Relaxed);
    Ok(())
}

/// What transports answer of which nobody maps the memory.
pub(crate) fn no_map(transport: &'static str) -> TransferError {
    TransferError::Unsupported {
        transport,
        ability: "map",
        instead: "pull instead",
    }
}

/// Refuses a destination that is not in host memory.
pub(crate) fn host_memory(transport: &'static str, dst: &Target) -> Result<(), TransferError> {
    match dst.device() {
        Device::Cpu => Ok(()),
        device => Err(TransferError::Device { transport, device }),
    }
}

/// A pull whose bytes a [`Mover`] copies, on blocking threads.
pub(crate) async fn pull<M: Mover>(
    grip: &Arc<Grip>,
    records: &[Record],
    dst: &Target,
    options: &TransferOptions,
    shape: Shape,
    mover: M,
) -> Result<(), TransferError> {
    host_memory(grip.kind().name(), dst)?;
    let (link, region) = (grip.link(), grip.region());
    pull_with(grip, records, dst, options, shape, |plan, claim| async move {
        let claim = copy::run(plan, mover, claim).await.map_err(|error| match error {
            MoveError::Lost => link.peer_lost(),
            _ if !link.is_alive() => link.peer_lost(),
            MoveError::Unreadable { offset } => TransferError::Unreadable {
                peer: link.peer(),
                pid: link.process().pid,
                region,
                offset,
            },
            MoveError::Os(error) => TransferError::Io {
                peer: link.peer(),
                region,
                what: "copy",
                error,
            },
        })?;
        grip.still_held()?;
        Ok(claim)
    })
    .await
}
