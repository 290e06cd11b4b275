//! Batches of records over each transport's real path, against copies made byte by byte.

use std::fmt;
use std::time::Duration;

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use stagewire_core::{Classify, Record};
use stagewire_transfer::conformance::{Backend, Side};
use stagewire_transfer::{
    Borrowed, ConnectOptions, RegisterOptions, Remote, Target, TransferError, TransferOptions, Writable,
};
use tokio::runtime::Runtime;

/// Batches of each direction, where one costs little.
pub(crate) const CASES: u32 = 128;

/// A batch for a source and a destination of these lengths.
#[derive(Clone)]
struct Batch {
    src_len: u64,
    dst_len: u64,
    records: Vec<Record>,
}

impl fmt::Debug for Batch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes to {}: {:#?}", self.src_len, self.dst_len, self.records)
    }
}

/// One record of a legal batch: its destination begins so far behind the one before.
#[derive(Debug, Clone)]
struct Layout {
    gap: u64,
    width: u64,
    rows: u64,
    src_pitch: u64,
    dst_gap: u64,
    src: prop::sample::Index,
}

fn layout() -> impl Strategy<Value = Layout> {
    let any_index = any::<prop::sample::Index>();
    (0_u64..8, 0_u64..40, 0_u64..6, 0_u64..50, 0_u64..10, any_index).prop_map(
        |(gap, width, rows, src_pitch, dst_gap, src)| Layout {
            gap,
            width,
            rows,
            src_pitch,
            dst_gap,
            src,
        },
    )
}

/// Numbers at which sums and products go wrong.
fn edge() -> impl Strategy<Value = u64> {
    prop_oneof![
        0_u64..400,
        (0_u64..70).prop_map(|less| u64::MAX - less),
        (0_u32..64).prop_map(|bit| 1 << bit),
        (0_u64..5).prop_map(|more| (u64::MAX / 3).wrapping_add(more)),
    ]
}

/// Mostly legal batches, of few bytes up to some MiB, in any order; half of them with one number changed.
fn batch() -> impl Strategy<Value = Batch> {
    let scale = prop_oneof![6 => Just(1_u64), 2 => Just(997), 1 => Just(5_003)];
    let change = prop::option::of((any::<prop::sample::Index>(), 0_usize..9, edge()));
    let layouts = prop::collection::vec(layout(), 0..9);
    (layouts, 1_u64..300, 0_u64..9, scale, change)
        .prop_map(|(layouts, src_len, slack, scale, change)| {
            let src_len = src_len * scale;
            let mut dst_offset = 0;
            let mut records = Vec::new();
            for layout in layouts {
                let (width, src_pitch) = (layout.width * scale, layout.src_pitch * scale);
                let span = layout.rows.saturating_sub(1) * src_pitch + width;
                let room = (src_len + 1).saturating_sub(span);
                if room == 0 {
                    continue;
                }
                let dst_pitch = width + layout.dst_gap * scale;
                dst_offset += layout.gap;
                records.push(Record {
                    src_offset: layout.src.index(room as usize) as u64,
                    dst_offset,
                    width,
                    rows: layout.rows,
                    src_pitch,
                    dst_pitch,
                });
                dst_offset += layout.rows.max(1) * dst_pitch;
            }
            if let Some((which, field, value)) = change
                && !records.is_empty()
            {
                let count = records.len();
                let record = &mut records[which.index(count)];
                let fields = [
                    &mut record.src_offset,
                    &mut record.dst_offset,
                    &mut record.width,
                    &mut record.rows,
                    &mut record.src_pitch,
                    &mut record.dst_pitch,
                ];
                // One in three lands anywhere in the destination, often on another record.
                let value = if field < 6 { value } else { value % (dst_offset + 1) };
                let field = if field < 6 { field } else { 1 };
                for (index, changed) in fields.into_iter().enumerate() {
                    if index == field {
                        *changed = value;
                    }
                }
            }
            let dst_len = (dst_offset + slack).max(1);
            (src_len, dst_len, records)
        })
        .prop_flat_map(|(src_len, dst_len, records)| {
            Just(records).prop_shuffle().prop_map(move |records| Batch {
                src_len,
                dst_len,
                records,
            })
        })
}

/// What must become of a batch: the bytes of the destination that are written, or the reason of the refusal.
fn oracle(batch: &Batch, source: &[u8]) -> Result<Vec<Option<u8>>, &'static str> {
    let ends = |offset: u64, pitch: u64, record: &Record| {
        let last = u128::from(record.rows.max(1) - 1) * u128::from(pitch);
        u128::from(offset) + last + u128::from(record.width)
    };
    for record in &batch.records {
        let bytes = u128::from(record.width) * u128::from(record.rows);
        if bytes > u128::from(u64::MAX)
            || ends(record.src_offset, record.src_pitch, record) > u128::from(batch.src_len)
            || ends(record.dst_offset, record.dst_pitch, record) > u128::from(batch.dst_len)
            || record.rows > 1 && record.dst_pitch < record.width
        {
            return Err("transfer.bounds");
        }
    }
    let mut written = vec![None; batch.dst_len as usize];
    for record in batch.records.iter().filter(|record| record.width > 0) {
        for row in 0..record.rows {
            for byte in 0..record.width {
                let src = record.src_offset + row * record.src_pitch + byte;
                let dst = record.dst_offset + row * record.dst_pitch + byte;
                if written[dst as usize].replace(source[src as usize]).is_some() {
                    return Err("transfer.overlap");
                }
            }
        }
    }
    Ok(written)
}

/// Bytes that differ from their neighbours near and far, and are never 0.
fn source(len: u64) -> Vec<u8> {
    (0..len).map(|at| (at % 251 + at / 251 % 3 + 1) as u8).collect()
}

fn failed(error: impl fmt::Display) -> TestCaseError {
    TestCaseError::fail(error.to_string())
}

/// Pulls, and looks at every byte of the target.
async fn pull(remote: &dyn Remote, owner: &Side, batch: &Batch) -> Result<(), TestCaseError> {
    let source = source(batch.src_len);
    let memory = (owner.memory)(&source);
    let region = owner.transport.register(memory, RegisterOptions::default());
    let region = region.map_err(failed)?;
    let pinned = remote.pin(&region.reference(), TransferOptions::default()).await;
    let target = Target::allocate(batch.dst_len).map_err(failed)?;
    let options = TransferOptions::default();
    let result = pinned.map_err(failed)?.pull(&batch.records, &target, options).await;
    let expected = oracle(batch, &source);
    agree(&result, expected.as_ref().err().copied())?;
    prop_assert!(target.is_idle(), "the pull ended and still writes");
    let expected = expected.unwrap_or_else(|_| vec![None; batch.dst_len as usize]);
    for run in runs(&expected) {
        let (start, end) = (run.start as u64, run.end as u64);
        match expected[run.start] {
            Some(_) => {
                let found = target.slice(start..end).map_err(failed)?;
                let wanted = expected[run].iter().flatten();
                prop_assert!(wanted.eq(found), "other bytes at {}..{}", start, end);
            }
            None => {
                for at in [start, start.midpoint(end), end - 1] {
                    prop_assert!(target.slice(at..at + 1).is_err(), "byte {} was never asked for", at);
                }
            }
        }
    }
    Ok(())
}

/// Pushes, and looks at every byte of the region.
async fn push(remote: &dyn Remote, owner: &Side, batch: &Batch) -> Result<(), TestCaseError> {
    let source = source(batch.src_len);
    let mut memory = Writable::allocate(batch.dst_len).map_err(failed)?;
    let region = owner
        .transport
        .register(memory.clone().into(), RegisterOptions::default());
    let region = region.map_err(failed)?;
    let pinned = remote.pin(&region.reference(), TransferOptions::default()).await;
    let pinned = pinned.map_err(failed)?;
    let from = Borrowed::from(source.clone()).into();
    let result = pinned.push(&batch.records, &from, TransferOptions::default()).await;
    drop((pinned, region));
    let expected = oracle(batch, &source);
    agree(&result, expected.as_ref().err().copied())?;
    let found = owned(&mut memory).await?;
    let wanted = match expected {
        Ok(expected) => expected.into_iter().map(Option::unwrap_or_default).collect(),
        Err(_) => vec![0; batch.dst_len as usize],
    };
    prop_assert!(found == wanted, "other bytes in the region");
    Ok(())
}

/// What memory holds, once nobody else does.
async fn owned(memory: &mut Writable) -> Result<Vec<u8>, TestCaseError> {
    let alone = async {
        loop {
            if let Some(bytes) = memory.bytes() {
                return bytes.to_vec();
            }
            tokio::task::yield_now().await;
        }
    };
    let limit = Duration::from_secs(10);
    tokio::time::timeout(limit, alone)
        .await
        .map_err(|_| failed("somebody still holds the memory"))
}

fn agree(result: &Result<(), TransferError>, refusal: Option<&str>) -> Result<(), TestCaseError> {
    let found = result.as_ref().err().map(TransferError::reason);
    prop_assert_eq!(found, refusal, "{:?}", result);
    Ok(())
}

/// Runs of bytes that are all written, or all not.
fn runs(expected: &[Option<u8>]) -> Vec<std::ops::Range<usize>> {
    let mut at = 0;
    let runs = expected.chunk_by(|one, other| one.is_some() == other.is_some());
    runs.map(|run| {
        at += run.len();
        at - run.len()..at
    })
    .collect()
}

/// Runs so many batches over a backend: pulls, and pushes where it can push.
///
/// # Panics
/// Where the backend and the oracle disagree, with the smallest batch that shows it.
pub(crate) fn agrees(runtime: &Runtime, backend: &dyn Backend, cases: u32) {
    let (owner, reader) = runtime.block_on(async {
        let owner = backend.side().await.expect("a side");
        (owner, backend.side().await.expect("a side"))
    });
    let connected = reader.transport.connect(&owner.peer, ConnectOptions::default());
    let remote = runtime.block_on(connected).expect("connected");
    let check = |direction: &str, test: &dyn Fn(Batch) -> Result<(), TestCaseError>| {
        let mut runner = TestRunner::new(Config {
            cases,
            failure_persistence: None,
            ..Config::default()
        });
        let outcome = runner.run(&batch(), test);
        outcome.unwrap_or_else(|error| panic!("{direction} over {}: {error}", owner.transport.name()));
    };
    check("pull", &|batch| runtime.block_on(pull(&*remote, &owner, &batch)));
    if reader.transport.abilities().push {
        check("push", &|batch| runtime.block_on(push(&*remote, &owner, &batch)));
    }
}

/// The oracle itself sees all three outcomes often.
#[test]
fn batches_are_of_all_kinds() {
    let mut runner = TestRunner::deterministic();
    let mut seen = std::collections::BTreeMap::new();
    for _ in 0..500 {
        let batch = batch().new_tree(&mut runner).expect("a batch").current();
        let outcome = match oracle(&batch, &source(batch.src_len)) {
            Ok(written) if written.iter().all(Option::is_none) => "nothing to do",
            Ok(_) => "written",
            Err(reason) => reason,
        };
        *seen.entry(outcome).or_insert(0) += 1;
    }
    for outcome in ["written", "transfer.bounds", "transfer.overlap"] {
        assert!(seen.get(outcome).is_some_and(|count| *count >= 15), "{seen:?}");
    }
}
