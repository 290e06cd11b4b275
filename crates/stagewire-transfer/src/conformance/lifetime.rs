//! Memory stays as long as a transfer may touch it, and no longer.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use futures::future::join;
use stagewire_core::{Classify, ErrorClass, Record};

use super::{Checked, Pair, ensure, pattern, violation};
use crate::{Target, TransferOptions};

/// Polls once and drops.
fn poll_and_drop<T>(future: impl Future<Output = T>) -> Poll<T> {
    pin!(future).poll(&mut Context::from_waker(Waker::noop()))
}

pub(super) async fn a_released_region_takes_no_new_pins(pair: &Pair) -> Checked {
    let region = pair.register(&[1; 100])?;
    let pinned = pair.pin(&region.reference()).await?;
    ensure!(!region.is_idle(), "a pinned region says that it is idle");
    region.release();
    let again = pair.remote.pin(&region.reference(), TransferOptions::default()).await;
    let refused = again.err().map(|error| (error.class(), error.reason()));
    let expected = Some((ErrorClass::NotFound, "transfer.region_released"));
    ensure!(
        refused == expected,
        "a released region was pinned, or refused as {refused:?}"
    );
    drop(pinned);
    region.idle().await;
    pair.regions_become(0).await
}

pub(super) async fn pins_keep_memory_until_the_last_one_ends(pair: &Pair) -> Checked {
    let source = pattern(300_000, 4);
    let region = pair.register(&source)?;
    let first = pair.pin(&region.reference()).await?;
    let second = pair.pin(&region.reference()).await?;
    drop(region);
    drop(first);
    // Whatever takes the place of memory given back too early shows in the bytes.
    let _others = [
        pair.register(&pattern(300_000, 5))?,
        pair.register(&pattern(300_000, 6))?,
    ];
    ensure!((pair.owner.regions)() == 3, "the memory went with a pin left");
    let target = Target::allocate(300_000).map_err(violation)?;
    let pulled = second
        .pull(
            &[Record::contiguous(0, 0, 300_000)],
            &target,
            TransferOptions::default(),
        )
        .await;
    pulled.map_err(violation)?;
    ensure!(
        target.as_slice().map_err(violation)? == source,
        "released memory changed under a pin"
    );
    drop(second);
    pair.regions_become(2).await
}

pub(super) async fn mappings_keep_memory_until_the_last_one_ends(pair: &Pair) -> Checked {
    let source = pattern(300_000, 4);
    let region = pair.register(&source)?;
    let pinned = pair.pin(&region.reference()).await?;
    let first = pinned.map().await.map_err(violation)?;
    let second = first.clone();
    drop((region, pinned, first));
    let _other = pair.register(&pattern(300_000, 5))?;
    ensure!((pair.owner.regions)() == 2, "the memory went with a mapping left");
    ensure!(*second == *source, "released memory changed under a mapping");
    drop(second);
    pair.regions_become(1).await
}

pub(super) async fn dropped_pins_leave_nothing_behind(pair: &Pair) -> Checked {
    let region = pair.register(&[1; 100])?;
    let reference = region.reference();
    for _ in 0..50 {
        let _ = poll_and_drop(pair.remote.pin(&reference, TransferOptions::default()));
    }
    // One connection serves in order: when this pin is granted, the others were.
    drop(pair.pin(&reference).await?);
    region.idle().await;
    drop(region);
    pair.regions_become(0).await
}

pub(super) async fn dropped_pulls_leave_nothing_behind(pair: &Pair) -> Checked {
    let source = pattern(12 << 20, 8);
    let len = source.len() as u64;
    let region = pair.register(&source)?;
    let pinned = pair.pin(&region.reference()).await?;
    let mut target = Target::allocate(len).map_err(violation)?;
    let whole = [Record::contiguous(0, 0, len)];
    for _ in 0..10 {
        // A pull may be that quick; then there was nothing to drop.
        if poll_and_drop(pinned.pull(&whole, &target, TransferOptions::default())).is_pending() {
            ensure!(
                target.slice(0..len).is_err(),
                "a pull that nobody awaited counts as done"
            );
        }
        while !target.is_idle() {
            tokio::task::yield_now().await;
        }
        target.reset().map_err(violation)?;
    }
    let pulled = pinned.pull(&whole, &target, TransferOptions::default()).await;
    pulled.map_err(violation)?;
    ensure!(
        target.as_slice().map_err(violation)? == source,
        "other bytes after dropped pulls"
    );
    drop((pinned, region));
    pair.regions_become(0).await
}

pub(super) async fn release_never_races_a_pull(pair: &Pair) -> Checked {
    for round in 0..200_u64 {
        let source = pattern(20_000, round);
        let region = pair.register(&source)?;
        let reference = region.reference();
        let release = async {
            for _ in 0..round % 7 {
                tokio::task::yield_now().await;
            }
            drop(region);
            // Takes the place of memory given back too early.
            pair.register(&pattern(20_000, round + 1000))
        };
        let pull = async {
            let pinned = pair.remote.pin(&reference, TransferOptions::default()).await?;
            let target = Target::allocate(20_000)?;
            let records = [Record::contiguous(0, 0, 20_000)];
            pinned.pull(&records, &target, TransferOptions::default()).await?;
            Ok::<_, crate::TransferError>(target)
        };
        let (released, pulled) = join(release, pull).await;
        drop(released?);
        match pulled {
            Ok(target) => {
                ensure!(
                    target.as_slice().map_err(violation)? == source,
                    "round {round}: other bytes"
                );
            }
            Err(error) => ensure!(error.class() == ErrorClass::NotFound, "round {round}: {error}"),
        }
    }
    pair.regions_become(0).await
}
