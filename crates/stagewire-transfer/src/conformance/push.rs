//! What is pushed lands exactly, where it may, or nowhere.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Waker};
use std::time::Duration;

use stagewire_core::{Classify, ErrorClass, Record};
use tokio::time::timeout;

use super::{Checked, Pair, Random, Violation, ensure, is, pattern, violation};
use crate::{Borrowed, Memory, Pinned, Region, RegisterOptions, Target, TransferOptions, Writable};

/// Memory of the owner that peers may write, filled with zeros, registered.
fn writable(pair: &Pair, len: u64) -> Result<(Writable, Region), Violation> {
    let memory = Writable::allocate(len).map_err(violation)?;
    let region = pair
        .owner
        .transport
        .register(memory.clone().into(), RegisterOptions::default());
    let registered = |error| Violation(format!("registering {len} writable bytes: {error}"));
    Ok((memory, region.map_err(registered)?))
}

fn source(bytes: &[u8]) -> Memory {
    Borrowed::from(bytes.to_vec()).into()
}

async fn push(pinned: &dyn Pinned, records: &[Record], src: &Memory) -> Checked {
    let pushed = pinned.push(records, src, TransferOptions::default()).await;
    pushed.map_err(|error| Violation(format!("pushing {} records: {error}", records.len())))
}

/// What is in the memory once nobody may write it any more.
async fn settled(
    pair: &Pair,
    mut memory: Writable,
    region: Region,
    pinned: Box<dyn Pinned>,
) -> Result<Vec<u8>, Violation> {
    drop((pinned, region));
    pair.regions_become(0).await?;
    // A transport may keep memory for longer than its region: until no peer can write it by what it knows.
    let settled = async {
        loop {
            if let Some(bytes) = memory.bytes() {
                return bytes.to_vec();
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let late = |_| Violation("memory of a region that is gone is held for ever".to_owned());
    timeout(Duration::from_secs(20), settled).await.map_err(late)
}

/// Pushes the records into zeros, and compares with the same copies made byte by byte.
async fn push_and_compare(pair: &Pair, bytes: &[u8], records: &[Record], len: u64) -> Checked {
    let (memory, region) = writable(pair, len)?;
    let pinned = pair.pin(&region.reference()).await?;
    push(&*pinned, records, &source(bytes)).await?;
    let found = settled(pair, memory, region, pinned).await?;
    let mut expected = vec![0; found.len()];
    for record in records {
        for (src, dst) in record.row_offsets() {
            let (src, dst, width) = (src as usize, dst as usize, record.width as usize);
            expected[dst..dst + width].copy_from_slice(&bytes[src..src + width]);
        }
    }
    let differs = found
        .iter()
        .zip(&expected)
        .position(|(found, expected)| found != expected);
    ensure!(
        differs.is_none(),
        "after {} records, byte {} of {len} is another one",
        records.len(),
        differs.unwrap_or_default()
    );
    Ok(())
}

pub(super) async fn pushed_bytes_land_exactly(pair: &Pair) -> Checked {
    for len in [1, 4095, (256 << 10) + 1, (9 << 20) + 3] {
        let bytes = pattern(len, len as u64);
        let whole = Record::contiguous(0, 0, len as u64);
        push_and_compare(pair, &bytes, &[whole], len as u64).await?;
    }
    Ok(())
}

pub(super) async fn strided_pushes_land_exactly(pair: &Pair) -> Checked {
    let bytes = pattern(1 << 20, 7);
    let mut random = Random(12);
    for _ in 0..10 {
        let mut records = Vec::new();
        let mut dst_offset = random.below(100);
        for _ in 0..=random.below(8) {
            let (width, rows) = (1 + random.below(3000), 1 + random.below(40));
            let (src_pitch, dst_pitch) = (random.below(4000), width + random.below(500));
            let src_offset = random.below((1 << 20) - (rows - 1) * src_pitch - width);
            records.push(Record {
                src_offset,
                dst_offset,
                width,
                rows,
                src_pitch,
                dst_pitch,
            });
            dst_offset += rows * dst_pitch;
        }
        push_and_compare(pair, &bytes, &records, dst_offset).await?;
    }
    Ok(())
}

pub(super) async fn what_was_pushed_is_pulled(pair: &Pair) -> Checked {
    let bytes = pattern(100_000, 3);
    let (_memory, region) = writable(pair, 100_000)?;
    let pinned = pair.pin(&region.reference()).await?;
    let whole = [Record::contiguous(0, 0, 100_000)];
    push(&*pinned, &whole, &source(&bytes)).await?;
    let target = Target::allocate(100_000).map_err(violation)?;
    let pulled = pinned.pull(&whole, &target, TransferOptions::default()).await;
    pulled.map_err(violation)?;
    ensure!(
        target.as_slice().map_err(violation)? == bytes,
        "other bytes are pulled than were pushed"
    );
    Ok(())
}

pub(super) async fn a_push_into_a_read_only_region_is_denied(pair: &Pair) -> Checked {
    let bytes = pattern(1000, 1);
    let region = pair.register(&bytes)?;
    let pinned = pair.pin(&region.reference()).await?;
    let whole = [Record::contiguous(0, 0, 1000)];
    let pushed = pinned
        .push(&whole, &source(&[9; 1000]), TransferOptions::default())
        .await;
    match pushed {
        Ok(()) => return Err(Violation("a read-only region was written".to_owned())),
        Err(error) => is(&error, ErrorClass::Denied, "transfer.read_only")?,
    }
    let target = Target::allocate(1000).map_err(violation)?;
    let pulled = pinned.pull(&whole, &target, TransferOptions::default()).await;
    pulled.map_err(violation)?;
    ensure!(
        target.as_slice().map_err(violation)? == bytes,
        "a refused push changed the region"
    );
    Ok(())
}

pub(super) async fn pushes_outside_source_or_region_write_nothing(pair: &Pair) -> Checked {
    let (memory, region) = writable(pair, 1000)?;
    let pinned = pair.pin(&region.reference()).await?;
    let src = source(&[9; 1000]);
    let good = Record::contiguous(0, 0, 10);
    let bounds = "transfer.bounds";
    for (bad, reason) in [
        (Record::contiguous(1, 20, 1000), bounds),
        (Record::contiguous(0, 991, 10), bounds),
        (Record::contiguous(u64::MAX, 20, 10), bounds),
        (Record::contiguous(0, u64::MAX - 5, 10), bounds),
        (Record::contiguous(500, 9, 10), "transfer.overlap"),
    ] {
        match pinned.push(&[good, bad], &src, TransferOptions::default()).await {
            Ok(()) => return Err(Violation(format!("{bad:?} was pushed"))),
            Err(error) => is(&error, ErrorClass::Invalid, reason)?,
        }
    }
    let found = settled(pair, memory, region, pinned).await?;
    ensure!(found.iter().all(|byte| *byte == 0), "a refused push wrote something");
    Ok(())
}

pub(super) async fn dropped_pushes_leave_nothing_behind(pair: &Pair) -> Checked {
    let bytes = pattern(2 << 20, 8);
    let len = bytes.len() as u64;
    let (memory, region) = writable(pair, len)?;
    let pinned = pair.pin(&region.reference()).await?;
    let (src, whole) = (source(&bytes), [Record::contiguous(0, 0, len)]);
    for _ in 0..10 {
        let dropped = pin!(pinned.push(&whole, &src, TransferOptions::default()));
        let _ = dropped.poll(&mut Context::from_waker(Waker::noop()));
    }
    push(&*pinned, &whole, &src).await?;
    let found = settled(pair, memory, region, pinned).await?;
    ensure!(found == bytes, "other bytes after dropped pushes");
    Ok(())
}

pub(super) async fn memory_that_peers_write_is_registered_once(pair: &Pair) -> Checked {
    let (memory, region) = writable(pair, 1000)?;
    let again = || {
        let memory = Memory::Writable(memory.clone());
        pair.owner.transport.register(memory, RegisterOptions::default())
    };
    match again() {
        Ok(_) => return Err(Violation("the same writable bytes are in two regions".to_owned())),
        Err(error) => is(&error, ErrorClass::Conflict, "register.overlap")?,
    }
    drop(region);
    pair.regions_become(0).await?;
    again().map(drop).map_err(violation)
}

pub(super) async fn a_transport_without_push_says_what_instead(pair: &Pair) -> Checked {
    let region = pair.register(&[1; 100])?;
    let pinned = pair.pin(&region.reference()).await?;
    let whole = [Record::contiguous(0, 0, 100)];
    match pinned
        .push(&whole, &source(&[9; 100]), TransferOptions::default())
        .await
    {
        Ok(()) => Err(Violation("it pushes, and says that it cannot".to_owned())),
        Err(error) => {
            ensure!(
                error.class() == ErrorClass::Unsupported,
                "push without the ability is {}: {error}",
                error.class()
            );
            Ok(())
        }
    }
}
