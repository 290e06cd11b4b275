//! Strided records over a transport that moves runs of bytes only: through scratch, on one side.
//!
//! The narrow side is contiguous, so one copy is enough: the sender gathers where its side is strided, this side scatters
//! where its own is. Where neither is contiguous, or there is no scratch, the transport moves row by row.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use futures::future::BoxFuture;
use futures::stream::{self, StreamExt, TryStreamExt};
use stagewire_core::{Device, Failure, Record};
use stagewire_transfer::{Memory, Pinned, Target, TransferError, TransferOptions};

use super::super::protocol::{Answer, Body};
use super::room::Running;
use super::source::{Source, Up};

/// Bytes that go through scratch together, unless they are one record's.
const SCRATCH: u64 = 8 << 20;

/// So often at a time: while some are gathered or spread, others are on their way.
const AT_A_TIME: usize = 2;

/// Records of one pull, by the side that packs them.
#[derive(Debug, Default)]
struct Sides {
    gather: Vec<Record>,
    scatter: Vec<Record>,
    /// Runs of bytes, and what is contiguous nowhere.
    rest: Vec<Record>,
}

impl Sides {
    fn of(records: &[Record]) -> Self {
        let mut sides = Self::default();
        for &record in records {
            let list = match (record.src_pitch == record.width, record.dst_pitch == record.width) {
                _ if record.rows == 1 => &mut sides.rest,
                (false, true) => &mut sides.gather,
                (true, false) => &mut sides.scatter,
                _ => &mut sides.rest,
            };
            list.push(record);
        }
        sides
    }
}

/// A pull over a transport to which each row costs what a run does.
pub(super) async fn pull(
    room: &Running,
    (source, up): (&Source, &Arc<Up>),
    region: usize,
    records: &[Record],
    target: &Target,
    options: &TransferOptions,
) -> Result<(), Failure> {
    let sides = Sides::of(records);
    let pinned = &up.region(source, region, room.left()).await?.pinned;
    let rows = &async |records: &[Record]| {
        let pulled = pinned.pull(records, target, options.clone()).await;
        pulled.map_err(|error| source.failed(up, error))
    };
    if !sides.rest.is_empty() {
        rows(&sides.rest).await?;
    }
    let here = portions(&sides.scatter).map(|records| (records, false));
    let there = portions(&sides.gather).map(|records| (records, true));
    let mut moves: Vec<BoxFuture<'_, Result<(), Failure>>> = Vec::new();
    for (records, is_there) in here.chain(there) {
        moves.push(Box::pin(async move {
            let packed = if is_there {
                gather(room, (source, up), region, records, target, options).await?
            } else {
                let scattered = scatter(room, pinned, records, target, options).await;
                scattered.map_err(|error| source.failed(up, error))?
            };
            if !packed {
                return rows(records).await;
            }
            let nbytes = records.iter().map(Record::nbytes).sum();
            room.packed.fetch_add(nbytes, Ordering::Relaxed);
            Ok(())
        }));
    }
    let moves = stream::iter(moves).buffer_unordered(AT_A_TIME);
    moves.try_collect().await
}

/// Records that go through scratch at a time; one that has more bytes goes alone.
fn portions(mut records: &[Record]) -> impl Iterator<Item = &[Record]> {
    std::iter::from_fn(move || {
        let mut nbytes = 0_u64;
        let fitting = records.iter().take_while(|record| {
            nbytes = nbytes.saturating_add(record.nbytes());
            nbytes <= SCRATCH
        });
        let count = fitting.count().max(1).min(records.len());
        let (portion, rest) = records.split_at(count);
        records = rest;
        (!portion.is_empty()).then_some(portion)
    })
}

/// Pulls whole runs into scratch here, and spreads their rows. False where there is no scratch.
async fn scatter(
    room: &Running,
    pinned: &Arc<dyn Pinned>,
    records: &[Record],
    target: &Target,
    options: &TransferOptions,
) -> Result<bool, TransferError> {
    if target.device() != Device::Cpu {
        return Ok(false);
    }
    let nbytes = records.iter().map(Record::nbytes).sum();
    let Ok(scratch) = room.inner.shared.host().arena().allocate(nbytes) else {
        return Ok(false);
    };
    let scratch = Target::from(scratch);
    let (mut runs, mut spread) = (Vec::with_capacity(records.len()), Vec::with_capacity(records.len()));
    let mut at = 0;
    for record in records {
        runs.push(Record::contiguous(record.src_offset, at, record.nbytes()));
        spread.push(Record {
            src_offset: at,
            ..*record
        });
        at += record.nbytes();
    }
    pinned.pull(&runs, &scratch, options.clone()).await?;
    // A copy that was given up still holds it; there was none.
    let Ok(scratch) = scratch.into_extent() else {
        return Ok(false);
    };
    target.copy(&spread, &Memory::from(scratch)).await?;
    Ok(true)
}

/// Has the sender gather rows into scratch there, and pulls them as runs. False where it has no scratch.
async fn gather(
    room: &Running,
    (source, up): (&Source, &Arc<Up>),
    region: usize,
    records: &[Record],
    target: &Target,
    options: &TransferOptions,
) -> Result<bool, Failure> {
    let (mut rows, mut runs) = (Vec::with_capacity(records.len()), Vec::with_capacity(records.len()));
    let mut at = 0;
    for record in records {
        rows.push(Record {
            dst_offset: at,
            ..*record
        });
        runs.push(Record::contiguous(at, record.dst_offset, record.nbytes()));
        at += record.nbytes();
    }
    let attempt = room.attempt;
    let body = Body::Gather {
        room: room.spec.room,
        attempt,
        region: u32::try_from(region).unwrap_or(u32::MAX),
        records: rows,
    };
    let (id, scratch) = match source.ask(&body).await? {
        Answer::Gathered { id, region } => (id, region),
        Answer::Refused(failure) => return Err(failure),
        _ => return Ok(false),
    };
    let pinned = source.pin(&scratch, room.left()).await?;
    let pulled = pinned.pinned.pull(&runs, target, options.clone()).await;
    drop(pinned);
    let body = Body::Free { attempt, id };
    // Where it is not heard, the scratch goes with the attempt.
    let freed = source.ask(&body).await;
    pulled.map_err(|error| source.failed(up, error))?;
    freed.map(|_| true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_side_that_is_strided_packs() {
        let record = |src_pitch, dst_pitch, rows| Record {
            src_offset: 0,
            dst_offset: 0,
            width: 4,
            rows,
            src_pitch,
            dst_pitch,
        };
        let records = [
            record(8, 4, 2),
            record(4, 8, 2),
            record(8, 8, 2),
            record(8, 4, 1),
            record(4, 4, 2),
        ];
        let sides = Sides::of(&records);
        assert_eq!(sides.gather, records[..1]);
        assert_eq!(sides.scatter, records[1..2]);
        assert_eq!(sides.rest, records[2..]);
    }

    #[test]
    fn portions_leave_nothing_out() {
        let records = [SCRATCH / 2, SCRATCH / 2, 1, 2 * SCRATCH, 1].map(|len| Record::contiguous(0, 0, len));
        let lens: Vec<usize> = portions(&records).map(<[_]>::len).collect();
        assert_eq!(lens, [2, 1, 1, 1]);
        assert_eq!(portions(&[]).count(), 0);
    }
}
