//! The way every push goes, whatever moves its bytes.

use std::sync::Arc;

use stagewire_core::{Device, Record};

use crate::budget::Spent;
use crate::copy::{Plan, Shape};
use crate::link::Grip;
use crate::transport::Direction;
use crate::{Memory, TransferError, TransferOptions};

/// Checks and plans a push, and has `transfer` do it while the peer lives and the deadline allows.
///
/// The plan's pieces have offsets in `src` as sources and offsets in the region as destinations. `transfer` succeeds once
/// the bytes are in the region and the pin was held until then. Dropped, it must keep `src`, and what the push spends, until
/// nothing reads `src`.
pub(crate) async fn push_with<F>(
    grip: &Arc<Grip>,
    records: &[Record],
    src: &Memory,
    options: &TransferOptions,
    shape: Shape,
    transfer: impl FnOnce(Plan, Spent) -> F,
) -> Result<(), TransferError>
where
    F: Future<Output = Result<(), TransferError>>,
{
    let link = grip.link();
    let meter = link.meter(grip.kind());
    let attempt = meter.begin(Direction::Push);
    if !grip.is_writable() {
        return Err(TransferError::ReadOnly {
            peer: link.peer(),
            region: grip.region(),
        });
    }
    let (plan, _) = Plan::new(records, src.len(), grip.len(), shape)?;
    let bytes = plan.bytes();
    let operation = async {
        let spent = link.budget().spend(grip.kind(), bytes).await;
        transfer(plan, spent).await
    };
    link.bounded("the push", grip.region(), options, operation).await?;
    attempt.succeeded(bytes);
    Ok(())
}

/// Refuses a source that is not in host memory.
pub(crate) fn host_memory(transport: &'static str, src: &Memory) -> Result<(), TransferError> {
    match src.device() {
        Device::Cpu => Ok(()),
        device => Err(TransferError::Device { transport, device }),
    }
}
