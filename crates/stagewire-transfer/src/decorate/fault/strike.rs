//! How each mishap comes about.

use std::io;
use std::ptr::NonNull;
use std::slice;
use std::sync::{Arc, Mutex, PoisonError};

use stagewire_core::{Device, Record, RegionRef};
use tokio::time::sleep;

use super::{Far, FaultyPinned, Mishap, Operation};
use crate::copy::{Plan, Shape};
use crate::decorate::bytes;
use crate::decorate::far::whole_deadline;
use crate::mapping::Keep;
use crate::target::Claim;
use crate::{Borrowed, Mapping, Memory, Pinned, Target, TransferError, TransferOptions};

pub(super) async fn pin(
    mishap: &Mishap,
    far: &Far,
    region: &RegionRef,
    options: TransferOptions,
) -> Result<Box<dyn Pinned>, TransferError> {
    let remote = far.remote();
    match mishap {
        Mishap::Drop => Err(far.wait_in_vain(Operation::Pin, region.region, &options).await),
        Mishap::Delay(by) => {
            let left = far.wait(Operation::Pin, region.region, &options, sleep(*by)).await?;
            remote.pin(region, left).await.map_err(whole_deadline(&options))
        }
        Mishap::Duplicate => {
            let pinned = remote.pin(region, options.clone()).await?;
            drop(remote.pin(region, options).await);
            Ok(pinned)
        }
        Mishap::Cut { .. } => {
            drop(remote.pin(region, options).await?);
            Err(cut(far, region.region, 0))
        }
        Mishap::Corrupt { byte } => {
            let bit = 1 << (byte % 64);
            let other = RegionRef {
                region: region.region ^ bit,
                ..region.clone()
            };
            remote.pin(&other, options).await
        }
        Mishap::Fail(with) => Err(with.error()),
    }
}

pub(super) async fn pull(
    mishap: &Mishap,
    pinned: &FaultyPinned,
    records: &[Record],
    dst: &Target,
    options: TransferOptions,
) -> Result<(), TransferError> {
    let FaultyPinned { inner, region, far, .. } = pinned;
    match mishap {
        Mishap::Drop => Err(far.wait_in_vain(Operation::Pull, *region, &options).await),
        Mishap::Delay(by) => {
            let left = far.wait(Operation::Pull, *region, &options, sleep(*by)).await?;
            let pulled = inner.pull(records, dst, left).await;
            pulled.map_err(whole_deadline(&options))
        }
        Mishap::Duplicate => {
            let copy = Target::allocate(dst.len())?;
            inner.pull(records, &copy, options.clone()).await?;
            inner.pull(records, dst, options).await
        }
        Mishap::Cut { after } => {
            let beneath = Beneath::new(pinned, records, dst)?;
            let first = first_bytes(records, *after);
            inner.pull(&first, &beneath.target, options).await?;
            Err(cut(far, *region, bytes(&first)))
        }
        Mishap::Corrupt { byte } => {
            let beneath = Beneath::new(pinned, records, dst)?;
            inner.pull(records, &beneath.target, options).await?;
            if let Some(at) = locate(records, *byte, |record| (record.dst_offset, record.dst_pitch)) {
                // SAFETY: a byte that the claim covers, so that nobody else reads or writes it, and that the pull, which
                // has ended, has written.
                unsafe { *dst.as_ptr().add(at as usize).as_ptr() ^= 1 };
            }
            beneath.commit();
            Ok(())
        }
        Mishap::Fail(with) => Err(with.error()),
    }
}

pub(super) async fn push(
    mishap: &Mishap,
    pinned: &FaultyPinned,
    records: &[Record],
    src: &Memory,
    options: TransferOptions,
) -> Result<(), TransferError> {
    let FaultyPinned { inner, region, far, .. } = pinned;
    match mishap {
        Mishap::Drop => Err(far.wait_in_vain(Operation::Push, *region, &options).await),
        Mishap::Delay(by) => {
            let left = far.wait(Operation::Push, *region, &options, sleep(*by)).await?;
            let pushed = inner.push(records, src, left).await;
            pushed.map_err(whole_deadline(&options))
        }
        Mishap::Duplicate => {
            inner.push(records, src, options.clone()).await?;
            inner.push(records, src, options).await
        }
        Mishap::Cut { after } => {
            check(records, src.len(), inner.len())?;
            let first = first_bytes(records, *after);
            inner.push(&first, src, options).await?;
            Err(TransferError::InDoubt {
                peer: far.peer(),
                pid: far.pid(),
                region: *region,
                bytes: bytes(records),
                how: format!("the push was cut after {} bytes, as planned", bytes(&first)),
            })
        }
        Mishap::Corrupt { byte } => {
            check(records, src.len(), inner.len())?;
            let at = locate(records, *byte, |record| (record.src_offset, record.src_pitch));
            inner.push(records, &altered(pinned, src, at)?, options).await
        }
        Mishap::Fail(with) => Err(with.error()),
    }
}

pub(super) async fn map(mishap: &Mishap, pinned: &FaultyPinned) -> Result<Mapping, TransferError> {
    let FaultyPinned { inner, region, far, .. } = pinned;
    let unbounded = TransferOptions { deadline: None };
    match mishap {
        Mishap::Drop => Err(far.wait_in_vain(Operation::Map, *region, &unbounded).await),
        Mishap::Delay(by) => {
            far.wait(Operation::Map, *region, &unbounded, sleep(*by)).await?;
            inner.map().await
        }
        Mishap::Duplicate => {
            drop(inner.map().await?);
            inner.map().await
        }
        Mishap::Cut { .. } => {
            drop(inner.map().await?);
            Err(cut(far, *region, 0))
        }
        Mishap::Corrupt { byte } => {
            let mapping = inner.map().await?;
            let mut copy = mapping.to_vec();
            if let Some(at) = byte.checked_rem(copy.len() as u64) {
                copy[at as usize] ^= 1;
            }
            let (ptr, len) = (NonNull::from(copy.as_slice()).cast(), copy.len());
            // SAFETY: the copy is kept, and never changes any more.
            Ok(unsafe { Mapping::new(ptr, len, Arc::new(Copy(copy, mapping))) })
        }
        Mishap::Fail(with) => Err(with.error()),
    }
}

/// An altered copy and the mapping that it stands for, whose pin it keeps.
struct Copy(
    #[expect(dead_code, reason = "held, never looked at")] Vec<u8>,
    #[expect(dead_code, reason = "held, never looked at")] Mapping,
);

impl Keep for Copy {}

/// The same memory as a target of which it has claimed the bytes of a batch: the transport below fills it, and what was
/// filled shows above only if the claim is committed. The claim is held until nothing writes below any more.
struct Beneath {
    target: Target,
    claim: Arc<Mutex<Option<Claim>>>,
}

impl Beneath {
    fn new(pinned: &FaultyPinned, records: &[Record], dst: &Target) -> Result<Self, TransferError> {
        on_host(pinned, dst.device())?;
        let (_, rows) = Plan::new(records, pinned.inner.len(), dst.len(), SHAPE)?;
        let claim = Arc::new(Mutex::new(Some(dst.claim(rows)?)));
        // SAFETY: the claim, which is the owner, keeps the memory and reserves the bytes of the batch until everything
        // that writes below has ended. No other bytes are pulled below: only records of the batch are.
        let target = unsafe { Target::new(dst.as_ptr(), dst.len() as usize, claim.clone()) };
        Ok(Self { target, claim })
    }

    fn commit(self) {
        let claim = self.claim.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(claim) = claim {
            claim.commit();
        }
    }
}

/// Only checked with, never copied by.
const SHAPE: Shape = Shape {
    large_from: u64::MAX,
    max_rows: u64::MAX,
};

/// Refuses what the transport below would refuse, before a part of it is done.
fn check(records: &[Record], src_len: u64, dst_len: u64) -> Result<(), TransferError> {
    Plan::new(records, src_len, dst_len, SHAPE).map(drop)
}

fn on_host(pinned: &FaultyPinned, device: Device) -> Result<(), TransferError> {
    let transport = pinned.fate.transport;
    match device {
        Device::Cpu => Ok(()),
        device => Err(TransferError::Device { transport, device }),
    }
}

/// A copy of the memory with one bit of one byte changed.
fn altered(pinned: &FaultyPinned, memory: &Memory, at: Option<u64>) -> Result<Memory, TransferError> {
    on_host(pinned, memory.device())?;
    // SAFETY: initialised host memory of this length, kept by the caller. Nobody writes to bytes that are being pushed.
    let mut copy = unsafe { slice::from_raw_parts(memory.as_ptr().as_ptr(), memory.len() as usize) }.to_vec();
    if let Some(at) = at {
        copy[at as usize] ^= 1;
    }
    Ok(Borrowed::from(copy).into())
}

fn cut(far: &Far, region: u64, after: u64) -> TransferError {
    TransferError::Io {
        peer: far.peer(),
        region,
        what: "finish the transfer",
        error: io::Error::new(
            io::ErrorKind::ConnectionReset,
            format!("cut after {after} bytes, as planned"),
        ),
    }
}

/// Records of the first `limit` bytes of a batch that was checked.
fn first_bytes(records: &[Record], limit: u64) -> Vec<Record> {
    let mut left = limit;
    let mut first = Vec::new();
    for record in records {
        let rows = record.rows.min(left.checked_div(record.width).unwrap_or(record.rows));
        if rows > 0 {
            first.push(Record { rows, ..*record });
            left -= rows * record.width;
        }
        if rows < record.rows {
            let rest = Record {
                src_offset: record.src_offset + rows * record.src_pitch,
                dst_offset: record.dst_offset + rows * record.dst_pitch,
                width: left,
                rows: 1,
                ..*record
            };
            first.extend((left > 0).then_some(rest));
            break;
        }
    }
    first
}

/// Offset of the nth byte of a batch that was checked, modulo its bytes, on the side whose offset and pitch are given.
fn locate(records: &[Record], nth: u64, side: impl Fn(&Record) -> (u64, u64)) -> Option<u64> {
    let mut left = nth.checked_rem(bytes(records))?;
    for record in records {
        if left < record.nbytes() {
            let (offset, pitch) = side(record);
            return Some(offset + left / record.width * pitch + left % record.width);
        }
        left -= record.nbytes();
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn destinations(records: &[Record]) -> Vec<u64> {
        let row = |record: &Record| {
            let width = record.width;
            record.row_offsets().flat_map(move |(_, dst)| dst..dst + width)
        };
        records.iter().flat_map(row).collect()
    }

    #[test]
    fn a_batch_is_cut_and_altered_at_any_byte() {
        let strided = Record {
            src_offset: 5,
            dst_offset: 100,
            width: 3,
            rows: 4,
            src_pitch: 7,
            dst_pitch: 10,
        };
        let empty = Record { width: 0, ..strided };
        let batch = [
            Record::contiguous(0, 0, 2),
            empty,
            strided,
            Record::contiguous(50, 50, 2),
        ];
        let all = destinations(&batch);
        for limit in 0..=all.len() {
            let first = first_bytes(&batch, limit as u64);
            assert_eq!(destinations(&first), all[..limit], "{limit} bytes");
        }
        assert_eq!(destinations(&first_bytes(&batch, u64::MAX)), all);
        for nth in 0..40 {
            let at = locate(&batch, nth, |record| (record.dst_offset, record.dst_pitch));
            assert_eq!(at, Some(all[nth as usize % all.len()]), "byte {nth}");
        }
        assert_eq!(
            locate(&[empty], 1, |record| (record.dst_offset, record.dst_pitch)),
            None
        );
    }
}
