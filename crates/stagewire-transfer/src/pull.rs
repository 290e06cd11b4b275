//! The way every pull goes, whatever moves its bytes.

use std::sync::atomic::Ordering;

use stagewire_core::{Device, Record};

use crate::batch::record_reading;
use crate::copy::{self, MoveError, Mover, Plan, Shape};
use crate::link::Grip;
use crate::target::Claim;
use crate::transport::{Attempt, Direction};
use crate::{Target, TransferError, TransferOptions};

/// A pull that is checked and planned, of which no byte has moved. Dropped, it has failed.
struct Pull<'a> {
    grip: &'a Grip,
    attempt: Attempt<'a>,
    plan: Plan,
    claim: Claim,
}

impl<'a> Pull<'a> {
    fn begin(grip: &'a Grip, records: &[Record], dst: &Target, shape: Shape) -> Result<Self, TransferError> {
        let attempt = grip.link().meter(grip.kind()).begin(Direction::Pull);
        let (plan, written) = Plan::new(records, grip.len(), dst.len(), shape)?;
        let claim = dst.claim(written)?;
        Ok(Self {
            grip,
            attempt,
            plan,
            claim,
        })
    }

    /// Copies on this thread, before anything else happens on it: there is nothing to watch, to wait for, or to bound.
    fn at_once(self, records: &[Record], mover: &impl Mover) -> Result<(), TransferError> {
        copy::at_once(&self.plan, mover, &self.claim).map_err(|error| failed(self.grip, records, error))?;
        let bytes = self.plan.bytes();
        succeeded(self.grip, self.attempt, self.claim, bytes);
        Ok(())
    }

    /// Has `transfer` fill the claim, as [`pull_with`] says.
    async fn by<F>(
        self,
        options: &TransferOptions,
        transfer: impl FnOnce(Plan, Claim) -> F,
    ) -> Result<(), TransferError>
    where
        F: Future<Output = Result<Claim, TransferError>>,
    {
        let Self {
            grip,
            attempt,
            plan,
            mut claim,
        } = self;
        let (link, bytes) = (grip.link(), plan.bytes());
        let operation = async {
            claim.spend(link.budget().spend(grip.kind(), bytes).await);
            transfer(plan, claim).await
        };
        let claim = link.bounded("the pull", grip.region(), options, operation).await?;
        succeeded(grip, attempt, claim, bytes);
        Ok(())
    }
}

/// Every byte is exact: they count.
fn succeeded(grip: &Grip, attempt: Attempt<'_>, claim: Claim, bytes: u64) {
    claim.commit();
    attempt.succeeded(bytes);
    grip.link().counters().copied_bytes.fetch_add(bytes, Ordering::Relaxed);
}

/// Checks and plans a pull, has `transfer` fill the claim while the peer lives and the deadline allows, and commits.
///
/// `transfer` gives the claim back once every byte is exact and the pin was proven to be held until then: by
/// [`Grip::still_held`], by [`Grip::confirm`], or because the owner itself sent the bytes under that pin. Dropped, it
/// must not give up the claim before nothing writes to its bytes any more.
pub(crate) async fn pull_with<F>(
    grip: &Grip,
    records: &[Record],
    dst: &Target,
    options: &TransferOptions,
    shape: Shape,
    transfer: impl FnOnce(Plan, Claim) -> F,
) -> Result<(), TransferError>
where
    F: Future<Output = Result<Claim, TransferError>>,
{
    Pull::begin(grip, records, dst, shape)?.by(options, transfer).await
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

/// A pull whose bytes a [`Mover`] copies: at once where it is short, else on blocking threads.
pub(crate) async fn pull<M: Mover>(
    grip: &Grip,
    records: &[Record],
    dst: &Target,
    options: &TransferOptions,
    shape: Shape,
    mover: M,
) -> Result<(), TransferError> {
    host_memory(grip.kind().name(), dst)?;
    // Short pulls wait for nothing: a task with very many of them lets others have their turn all the same.
    tokio::task::consume_budget().await;
    let pull = Pull::begin(grip, records, dst, shape)?;
    if copy::is_short(&pull.plan) {
        return pull.at_once(records, &mover);
    }
    let copied = pull.by(options, |plan, claim| async move {
        let copied = copy::run(plan, mover, claim).await;
        copied.map_err(|error| failed(grip, records, error))
    });
    // In a box of its own, so that a short pull carries nothing of it.
    Box::pin(copied).await
}

/// The error that a failed copy means.
fn failed(grip: &Grip, records: &[Record], error: MoveError) -> TransferError {
    let (link, region) = (grip.link(), grip.region());
    match error {
        MoveError::Lost => link.peer_lost(),
        _ if !link.is_alive() => link.peer_lost(),
        MoveError::Unreadable { offset } => TransferError::Unreadable {
            peer: link.peer(),
            pid: link.process().pid,
            region,
            record: record_reading(records, offset),
            offset,
        },
        MoveError::Os(error) => TransferError::Io {
            peer: link.peer(),
            region,
            what: "copy",
            error,
        },
    }
}
