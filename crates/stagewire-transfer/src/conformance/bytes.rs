//! Bytes arrive exactly.

use std::sync::Arc;

use futures::future::try_join_all;
use stagewire_core::{Chunking, Classify, DType, ErrorClass, Record, TensorSpec};

use super::{Checked, Pair, Random, ensure, pattern, violation};
use crate::{Target, TransferOptions};

/// Pulls the records into a target of `dst_len` bytes and compares with the same copies made byte by byte.
async fn pull_and_compare(pair: &Pair, source: &[u8], records: &[Record], dst_len: u64) -> Checked {
    let region = pair.register(source)?;
    let pinned = pair.pin(&region.reference()).await?;
    let target = Target::allocate(dst_len).map_err(violation)?;
    let pulled = pinned.pull(records, &target, TransferOptions::default()).await;
    pulled.map_err(violation)?;
    let rows = records
        .iter()
        .flat_map(|record| record.row_offsets().map(|offsets| (offsets, record.width)));
    for ((src, dst), width) in rows {
        let found = target.slice(dst..dst + width).map_err(violation)?;
        let expected = &source[src as usize..(src + width) as usize];
        ensure!(
            found == expected,
            "{width} bytes from {src} to {dst} arrived changed ({} records)",
            records.len()
        );
    }
    Ok(())
}

pub(super) async fn whole_regions_arrive_exactly(pair: &Pair) -> Checked {
    for len in [1, 4095, 256 << 10, (256 << 10) + 1, (4 << 20) - 1, (9 << 20) + 3] {
        let source = pattern(len, len as u64);
        let whole = Record::contiguous(0, 0, len as u64);
        pull_and_compare(pair, &source, &[whole], len as u64).await?;
    }
    Ok(())
}

pub(super) async fn strided_chunks_arrive_exactly(pair: &Pair) -> Checked {
    for channels in [16, 32, 128] {
        let latent = TensorSpec::new(DType::BF16, [1, channels, 21, 30, 52]).map_err(violation)?;
        let source = pattern(latent.nbytes().0 as usize, channels);
        let chunking = Chunking::new(2, 8).map_err(violation)?;
        for index in 0..chunking.count() {
            let chunk = chunking.slice(&latent, index).map_err(violation)?;
            pull_and_compare(pair, &source, &[chunk.run.record()], source.len() as u64).await?;
        }
    }
    Ok(())
}

pub(super) async fn random_records_arrive_exactly(pair: &Pair) -> Checked {
    let source = pattern(1 << 20, 7);
    let mut random = Random(11);
    for _ in 0..50 {
        // Each record has its own part of the target, so that none overlaps another.
        let mut records = Vec::new();
        let mut dst_offset = random.below(100);
        for _ in 0..=random.below(20) {
            let (width, rows) = (1 + random.below(3000), 1 + random.below(40));
            let (src_pitch, dst_pitch) = (random.below(4000), width + random.below(500));
            let src_offset = random.below((1 << 20) - (rows - 1) * src_pitch - width);
            let record = Record {
                src_offset,
                dst_offset,
                width,
                rows,
                src_pitch,
                dst_pitch,
            };
            dst_offset += rows * dst_pitch;
            records.push(record);
        }
        pull_and_compare(pair, &source, &records, dst_offset).await?;
    }
    Ok(())
}

pub(super) async fn a_batch_of_5000_records_arrives_exactly(pair: &Pair) -> Checked {
    let source = pattern(5000 * 200, 5);
    // In reverse, so that no two can be merged into one.
    let record = |index: u64| Record::contiguous(index * 200, (4999 - index) * 150, 150);
    let records: Vec<Record> = (0..5000).map(record).collect();
    pull_and_compare(pair, &source, &records, 5000 * 150).await
}

pub(super) async fn many_pulls_at_once_arrive_exactly(pair: &Pair) -> Checked {
    let source = pattern(5 << 20, 3);
    let region = pair.register(&source)?;
    let pinned: Arc<dyn crate::Pinned> = pair.pin(&region.reference()).await?.into();
    let (pinned, source) = (&pinned, &source);
    let pull = |index: u64| async move {
        let (offset, len) = (index * 100_000, (index % 3 + 1) * 1_000_000);
        let target = Target::allocate(len).map_err(violation)?;
        let records = [Record::contiguous(offset, 0, len)];
        let pulled = pinned.pull(&records, &target, TransferOptions::default()).await;
        pulled.map_err(violation)?;
        let expected = &source[offset as usize..(offset + len) as usize];
        ensure!(
            target.as_slice().map_err(violation)? == expected,
            "pull {index} arrived changed"
        );
        Ok(())
    };
    try_join_all((0..16).map(pull)).await.map(drop)
}

pub(super) async fn a_mapping_shows_the_bytes_or_the_error_says_what_instead(pair: &Pair) -> Checked {
    let source = pattern(100_000, 9);
    let region = pair.register(&source)?;
    let pinned = pair.pin(&region.reference()).await?;
    ensure!(pinned.len() == 100_000, "a pin of 100000 bytes says {}", pinned.len());
    match pinned.map().await {
        Ok(mapping) => ensure!(*mapping == *source, "a mapping shows other bytes"),
        Err(error) => {
            let may_map = pair.reader.transport.abilities().map;
            ensure!(!may_map, "a transport that can map does not: {error}");
            ensure!(
                error.class() == ErrorClass::Unsupported,
                "map without the ability is {}: {error}",
                error.class()
            );
        }
    }
    Ok(())
}
