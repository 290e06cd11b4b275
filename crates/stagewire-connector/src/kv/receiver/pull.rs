//! From a part of a chunk to bytes in the receiver's pages.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures::{StreamExt, TryStreamExt};
use stagewire_core::{Classify, ErrorClass, Failure, Record};
use stagewire_kv::{PlanRequest, PlannedRecord};
use stagewire_transfer::TransferOptions;

use super::super::cache::CachePlace;
use super::super::incoming::Part;
use super::pack;
use super::room::Running;
use super::source::{Source, Up};

/// Rows of one pull at most. More would only make the list longer that is checked at once.
const ROWS: u64 = 1 << 16;
/// Bytes of one pull at most, unless it is one record.
const BYTES: u64 = 64 << 20;
/// Pulls of one room from one writer at a time.
const AT_A_TIME: usize = 4;

/// Records between one region and one target.
#[derive(Debug, Default)]
struct Batch {
    records: Vec<Record>,
    rows: u64,
    nbytes: u64,
}

/// Pulls a part. Returns its bytes once all of them are exact.
pub(super) async fn pull(
    room: &Running,
    rank: u32,
    source: &Source,
    part: &Part,
    tables: &[Arc<Vec<i64>>],
) -> Result<u64, Failure> {
    let up = source.up().await?;
    let batches = plan(room, rank, &up, part, tables)?;
    let nbytes = batches.iter().map(|(_, batch)| batch.nbytes).sum();
    let pulls = batches.into_iter().map(|((region, target), batch)| {
        let (up, target) = (&up, &room.inner.targets[target]);
        async move {
            let left = room.left();
            let held = up.region(source, region, left).await?;
            let options = TransferOptions { deadline: Some(left) };
            if held.strided {
                let pulled = held.pinned.pull(&batch.records, target, options).await;
                pulled.map_err(|error| source.failed(up, error))
            } else {
                pack::pull(room, (source, up), region, &batch.records, target, &options).await
            }
        }
    });
    let pulls = futures::stream::iter(pulls).buffer_unordered(AT_A_TIME);
    pulls.try_collect::<()>().await?;
    Ok(nbytes)
}

type Batches = Vec<((usize, usize), Batch)>;

fn plan(room: &Running, rank: u32, up: &Arc<Up>, part: &Part, tables: &[Arc<Vec<i64>>]) -> Result<Batches, Failure> {
    let (inner, spec) = (&room.inner, &room.spec);
    let components = &inner.engine.geometry().components;
    let mut request = PlanRequest::new(rank, inner.me.rank, spec.seq_len);
    request.tokens = part.tokens;
    request.exact_window = spec.exact_window;
    let named = part
        .components
        .iter()
        .map(|&index| components[index as usize].name.as_str());
    request.components = Some(named.clone().collect());
    for (&index, name) in part.components.iter().zip(named) {
        if let Some(pages) = spec.pages.get(name) {
            request.dst_pages.insert(name, pages);
        }
        if let Some(pages) = tables.get(index as usize) {
            request.src_pages.insert(name, pages);
        }
        if let Some(&prefix) = spec.prefix.get(name) {
            request.prefix.insert(name, prefix);
        }
    }
    let plan = room.pair.plan(&request).map_err(|error| error.to_failure())?;
    let records = plan.records().map_err(|error| error.to_failure())?;
    let mut batches: Batches = Vec::new();
    let mut open: BTreeMap<(usize, usize), usize> = BTreeMap::new();
    for planned in records {
        let (between, record) = place(room, up, &planned)?;
        let (rows, nbytes) = (record.rows, record.nbytes());
        let fits = |at: &usize| {
            let batch = &batches[*at].1;
            batch.rows + rows <= ROWS && batch.nbytes + nbytes <= BYTES
        };
        let at = match open.get(&between).copied().filter(fits) {
            Some(at) => at,
            None => {
                batches.push((between, Batch::default()));
                open.insert(between, batches.len() - 1);
                batches.len() - 1
            }
        };
        let batch = &mut batches[at].1;
        batch.records.push(record);
        batch.rows += rows;
        batch.nbytes += nbytes;
    }
    Ok(batches)
}

/// Where a planned record is in the registered memory of both sides. One that leaves its buffer is refused: the bytes
/// beside it are another layer's.
fn place(room: &Running, up: &Up, planned: &PlannedRecord) -> Result<((usize, usize), Record), Failure> {
    let PlannedRecord {
        component, kv, record, ..
    } = *planned;
    let from = up.buffers().get((component, kv, planned.src_layer));
    let to = room.inner.buffers.get((component, kv, planned.dst_layer));
    let outside = |side: &str, problem: String| {
        let name = &room.inner.engine.geometry().components[component as usize].name;
        let message = format!("component {name:?}, kv {kv}: {problem} at {side}; see its page table");
        Failure::new(ErrorClass::Invalid, "kv.outside", message)
            .with("component", name)
            .with("side", side)
    };
    let (Some(from), Some(to)) = (from, to) else {
        return Err(outside("one side", format!("there is no buffer for {planned:?}")));
    };
    let check = |place: CachePlace, offset: u64, pitch: u64, side: &str| {
        let alone = Record {
            src_offset: offset,
            dst_offset: offset,
            src_pitch: pitch,
            dst_pitch: pitch,
            ..record
        };
        let inside = alone.check(place.nbytes, place.nbytes);
        inside.map_err(|error| outside(side, error.to_string()))
    };
    check(from, record.src_offset, record.src_pitch, "prefill")?;
    check(to, record.dst_offset, record.dst_pitch, "decode")?;
    let moved = Record {
        src_offset: record.src_offset + from.offset,
        dst_offset: record.dst_offset + to.offset,
        ..record
    };
    Ok(((from.memory, to.memory), moved))
}
