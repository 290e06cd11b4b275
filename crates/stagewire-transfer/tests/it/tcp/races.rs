//! Regions come and go under load.

use std::sync::atomic::{AtomicUsize, Ordering};

use futures::future::join_all;
use stagewire_core::{Classify, ErrorClass, Record};
use stagewire_transfer::{Borrowed, ConnectOptions, RegisterOptions, Target, TransferOptions};

use crate::support::{self, Node, run_dir};

const ROUNDS: usize = 1000;
const AT_ONCE: usize = 8;
const LEN: usize = 40_000;

/// Each round registers, hands out, releases at some point of the transfer, and checks every byte of each pull that
/// succeeded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_regions_come_and_go_under_load() {
    let (_parent, dir) = run_dir();
    let (owner, reader) = (Node::start(&dir).await, Node::start(&dir).await);
    let remote = reader
        .transport("tcp")
        .connect(&owner.peer(), ConnectOptions::default())
        .await;
    let remote = remote.expect("connected");
    let bytes = support::bulk(LEN + ROUNDS);
    let (done, refused) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let round = |round: usize| {
        let (owner, remote, bytes, done, refused) = (&owner, &remote, &bytes, &done, &refused);
        async move {
            let source = &bytes[round..round + LEN];
            let memory = Borrowed::from(source.to_vec()).into();
            let region = owner.transport("tcp").register(memory, RegisterOptions::default());
            let region = region.expect("registered");
            let reference = region.reference();
            let release = async {
                for _ in 0..round % 13 {
                    tokio::task::yield_now().await;
                }
                drop(region);
            };
            let pull = async {
                let pinned = remote.pin(&reference, TransferOptions::default()).await?;
                let target = Target::allocate(LEN as u64)?;
                // Rows of 100 bytes in reverse, so that they are gathered and scattered; then all of it again as one.
                let rows = (LEN / 100) as u64;
                let reverse = |row| Record::contiguous(row * 100, (rows - 1 - row) * 100, 100);
                let records: Vec<Record> = (0..rows).map(reverse).collect();
                pinned.pull(&records, &target, TransferOptions::default()).await?;
                let found = target.as_slice()?;
                let same = found.chunks(100).rev().eq(source.chunks(100));
                assert!(same, "round {round}: other bytes");
                let target = Target::allocate(LEN as u64)?;
                let whole = [Record::contiguous(0, 0, LEN as u64)];
                pinned.pull(&whole, &target, TransferOptions::default()).await?;
                assert!(target.as_slice()? == source, "round {round}: other bytes");
                Ok::<(), stagewire_transfer::TransferError>(())
            };
            match futures::future::join(pull, release).await.0 {
                Ok(()) => done.fetch_add(1, Ordering::Relaxed),
                Err(error) => {
                    assert_eq!(error.class(), ErrorClass::NotFound, "round {round}: {error}");
                    refused.fetch_add(1, Ordering::Relaxed)
                }
            };
        }
    };
    for rounds in (0..ROUNDS).collect::<Vec<_>>().chunks(AT_ONCE) {
        join_all(rounds.iter().copied().map(round)).await;
    }
    let (done, refused) = (done.into_inner(), refused.into_inner());
    assert_eq!(done + refused, ROUNDS);
    assert!(done > 0, "no pull ever succeeded");
    support::until("nothing is left", || {
        owner.stats().regions == 0 && owner.stats().pins_held == 0
    })
    .await;
    let stats = reader.transport("tcp").stats();
    assert_eq!((stats.pulls, stats.in_flight_bytes), (2 * done as u64, 0), "{stats:?}");
}
