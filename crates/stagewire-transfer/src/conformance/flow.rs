//! What is under way is bounded, counted, and ends in time.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures::future::{join, join_all};
use stagewire_core::{Classify, ErrorClass, Record};

use super::{Checked, Pair, Violation, ensure, pattern, violation};
use crate::{Pinned, Target, TransferOptions};

/// Tries of what a busy machine may hide: a copy between two processes may be done before anything else happens.
const ROUNDS: u32 = 20;

fn within(deadline: Duration) -> TransferOptions {
    TransferOptions {
        deadline: Some(deadline),
    }
}

pub(super) async fn a_full_budget_pushes_back(pair: &Pair) -> Checked {
    let limit = pair.in_flight_limit()?;
    let len = limit / 2 + 1;
    let source = pattern(len as usize, 2);
    let region = pair.register(&source)?;
    let pinned = pair.pin(&region.reference()).await?;
    for _ in 0..ROUNDS {
        if six_pulls_wait(pair, &*pinned, &source, limit).await? {
            return Ok(());
        }
    }
    Err(Violation(
        "six pulls of half the budget each, again and again, and none waited".to_owned(),
    ))
}

/// Six pulls of a region at once. Says whether one of them waited.
async fn six_pulls_wait(pair: &Pair, pinned: &dyn Pinned, source: &[u8], limit: u64) -> Result<bool, Violation> {
    let len = source.len() as u64;
    let stats = || pair.reader.transport.stats();
    let pulls = join_all((0..6).map(|index| async move {
        let target = Target::allocate(len).map_err(violation)?;
        let whole = [Record::contiguous(0, 0, len)];
        let pulled = pinned.pull(&whole, &target, TransferOptions::default()).await;
        pulled.map_err(|error| Violation(format!("pull {index} of 6: {error}")))?;
        ensure!(
            target.as_slice().map_err(violation)? == source,
            "pull {index} arrived changed"
        );
        Ok::<(), Violation>(())
    }));
    let mut pulls = pin!(pulls);
    let (mut most, mut waited) = (0, false);
    let outcomes = std::future::poll_fn(|context| {
        let polled = pulls.as_mut().poll(context);
        let stats = stats();
        most = most.max(stats.in_flight_bytes);
        waited |= stats.waiting > 0;
        polled
    });
    outcomes.await.into_iter().collect::<Result<Vec<()>, Violation>>()?;
    ensure!(most <= limit, "{most} bytes were in flight, {limit} are allowed");
    Ok(waited)
}

pub(super) async fn who_waits_too_long_is_told_so(pair: &Pair) -> Checked {
    let limit = pair.in_flight_limit()?;
    let source = pattern(limit as usize, 2);
    let region = pair.register(&source)?;
    let pinned = pair.pin(&region.reference()).await?;
    for _ in 0..ROUNDS {
        if second_is_late(&*pinned, &source, limit).await? {
            return Ok(());
        }
    }
    Err(Violation(format!("pulls of {limit} bytes always end where they begin")))
}

/// Pulls a second time while a first pull fills the budget. False where the first was done at once.
async fn second_is_late(pinned: &dyn Pinned, source: &[u8], limit: u64) -> Result<bool, Violation> {
    let whole = [Record::contiguous(0, 0, limit)];
    let (first, second) = (
        Target::allocate(limit).map_err(violation)?,
        Target::allocate(limit).map_err(violation)?,
    );
    // Begun, and then not looked at: it keeps what it has in flight.
    let mut holding = pin!(pinned.pull(&whole, &first, TransferOptions::default()));
    let begun = holding.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    if let Poll::Ready(pulled) = begun {
        pulled.map_err(violation)?;
        return Ok(false);
    }
    match pinned.pull(&whole, &second, within(Duration::from_millis(50))).await {
        Ok(()) => return Err(Violation("a pull overtook one that fills the budget".to_owned())),
        Err(error) => ensure!(
            error.class() == ErrorClass::Deadline,
            "a pull that waited too long is {}: {error}",
            error.class()
        ),
    }
    ensure!(second.is_idle(), "a pull that never began writes");
    holding.await.map_err(violation)?;
    ensure!(
        first.as_slice().map_err(violation)? == source,
        "the pull that held the budget arrived changed"
    );
    let pulled = pinned.pull(&whole, &second, TransferOptions::default()).await;
    pulled.map(|()| true).map_err(violation)
}

pub(super) async fn a_pull_without_time_is_late_or_exact(pair: &Pair) -> Checked {
    let source = pattern(3 << 20, 6);
    let len = source.len() as u64;
    let region = pair.register(&source)?;
    let pinned = pair.pin(&region.reference()).await?;
    let mut target = Target::allocate(len).map_err(violation)?;
    for records in [[Record::contiguous(0, 0, 10)], [Record::contiguous(0, 0, len)]] {
        match pinned.pull(&records, &target, within(Duration::ZERO)).await {
            Ok(()) => {}
            Err(error) => {
                ensure!(
                    error.class() == ErrorClass::Deadline,
                    "a pull without time is {}: {error}",
                    error.class()
                );
                ensure!(target.slice(0..10).is_err(), "bytes of a late pull are shown");
            }
        }
        while !target.is_idle() {
            tokio::task::yield_now().await;
        }
        target.reset().map_err(violation)?;
        let pulled = pinned.pull(&records, &target, TransferOptions::default()).await;
        pulled.map_err(|error| Violation(format!("after one that was late: {error}")))?;
        let pulled = records[0].width;
        ensure!(
            target.slice(0..pulled).map_err(violation)? == &source[..pulled as usize],
            "other bytes after a late pull"
        );
        target.reset().map_err(violation)?;
    }
    Ok(())
}

pub(super) async fn transfers_are_counted(pair: &Pair) -> Checked {
    let stats = || pair.reader.transport.stats();
    let before = stats();
    let region = pair.register(&pattern(1000, 1))?;
    let pinned = pair.pin(&region.reference()).await?;
    let target = Target::allocate(1000).map_err(violation)?;
    let (left, right) = ([Record::contiguous(0, 0, 300)], [Record::contiguous(300, 300, 700)]);
    let pull = |records| pinned.pull(records, &target, TransferOptions::default());
    let (left, right) = join(pull(&left), pull(&right)).await;
    left.and(right).map_err(violation)?;
    let outside = [Record::contiguous(999, 0, 2)];
    ensure!(pull(&outside).await.is_err(), "a pull beyond the end succeeded");
    let after = stats();
    let counted = (
        after.pulls - before.pulls,
        after.pulled_bytes - before.pulled_bytes,
        after.failed - before.failed,
    );
    ensure!(
        counted == (2, 1000, 1),
        "2 pulls of 1000 bytes and a failure are counted as {counted:?}"
    );
    ensure!(
        (after.waiting, after.in_flight_bytes) == (0, 0),
        "nothing is under way, and {} wait and {} bytes are in flight",
        after.waiting,
        after.in_flight_bytes
    );
    Ok(())
}
