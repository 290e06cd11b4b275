//! Regions come and go while they are read.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures::future::join_all;
use stagewire_core::{Classify, ErrorClass, Record};
use stagewire_transfer::{Remote, Target, TransferError, TransferOptions};
use tokio::sync::Mutex;

use super::child::{Owner, Release};
use super::{End, for_each_transport, seeded};
use crate::child::Offer;
use crate::support::rounds;

for_each_transport! {
    regions_come_and_go_under_load: shm cma tcp mooncake nixl;
}

const AT_ONCE: usize = 8;
const LEN: usize = 40_000;

/// Rounds after which the times of release come again.
const CYCLE: usize = 20;

/// Each round has the owner register, which releases at some point of the transfer on its own, and checks every byte of
/// each pull that succeeded.
async fn regions_come_and_go_under_load(end: End) {
    let mut owner = Owner::start(&end);
    let (peer, first) = owner.register(0, LEN, Release::WhenAsked).await;
    let remote = end.connect(&peer).await;
    owner.release(first.region).await;
    let owner = Mutex::new(owner);
    let total = rounds(100, 1000);
    let (next, done, refused) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
    let worker = async || {
        loop {
            let round = next.fetch_add(1, Ordering::Relaxed);
            if round >= total {
                return;
            }
            let release = match round % CYCLE {
                0 => Release::AtOnce,
                step if step == CYCLE - 1 => Release::WhenAsked,
                step => Release::After(Duration::from_micros(50 * (step * step) as u64)),
            };
            let offer = owner.lock().await.register(round, LEN, release).await;
            let outcome = read(&*remote, &offer, round).await;
            match outcome {
                Ok(()) => {
                    assert_ne!(release, Release::AtOnce, "round {round}: it was released before");
                    done.fetch_add(1, Ordering::Relaxed)
                }
                Err(error) => {
                    assert_ne!(release, Release::WhenAsked, "round {round}: {error}");
                    assert_eq!(error.class(), ErrorClass::NotFound, "round {round}: {error}");
                    refused.fetch_add(1, Ordering::Relaxed)
                }
            };
            if release == Release::WhenAsked {
                owner.lock().await.release(offer.1.region).await;
            }
        }
    };
    join_all((0..AT_ONCE).map(|_| worker())).await;
    let (done, refused) = (done.into_inner(), refused.into_inner());
    assert_eq!(done + refused, total);
    owner.into_inner().owns_nothing().await;
    let stats = end.side.transport.stats();
    assert_eq!((stats.pulls, stats.in_flight_bytes), (2 * done as u64, 0), "{stats:?}");
}

/// Rows of 100 bytes in reverse, so that they are gathered and scattered; then all of it again as one.
async fn read(remote: &dyn Remote, (_, region): &Offer, round: usize) -> Result<(), TransferError> {
    let source = seeded(round, LEN);
    let pinned = remote.pin(region, TransferOptions::default()).await?;
    let target = Target::allocate(LEN as u64)?;
    let rows = (LEN / 100) as u64;
    let reverse = |row| Record::contiguous(row * 100, (rows - 1 - row) * 100, 100);
    let records: Vec<Record> = (0..rows).map(reverse).collect();
    pinned.pull(&records, &target, TransferOptions::default()).await?;
    let same = target.as_slice()?.chunks(100).rev().eq(source.chunks(100));
    assert!(same, "round {round}: other bytes");
    let target = Target::allocate(LEN as u64)?;
    let whole = [Record::contiguous(0, 0, LEN as u64)];
    pinned.pull(&whole, &target, TransferOptions::default()).await?;
    assert!(target.as_slice()? == source, "round {round}: other bytes");
    Ok(())
}
