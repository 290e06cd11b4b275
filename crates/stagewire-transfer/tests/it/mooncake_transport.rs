//! Mooncake's protocol between processes of ours, behind the `Transport` trait.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use stagewire_core::{Classify, ErrorClass, Record};
use stagewire_transfer::conformance::{Backend, Side, Violation, assert_conforms};
use stagewire_transfer::{
    Borrowed, ConnectOptions, Memory, Pinned, RegisterOptions, Remote, Target, TransferError, TransferOptions,
    Transport, Writable,
};
use tokio::time::{sleep, timeout};

use crate::mooncake::{Ours, owned, whole};
use crate::mooncake_child::Owner;
use crate::mooncake_peer::keyed;
use crate::{oracle, support};

const LEN: u64 = 24 << 20;
const ROUNDS: u64 = 10;
const NOTICED_WITHIN: Duration = Duration::from_secs(1);

const SHORT: TransferOptions = TransferOptions {
    deadline: Some(Duration::from_millis(500)),
};

pub(crate) struct Mooncakes;

#[async_trait]
impl Backend for Mooncakes {
    async fn side(&self) -> Result<Side, Violation> {
        let ours = Arc::new(Ours::start().await);
        let for_regions = ours.clone();
        Ok(Side {
            transport: ours.mooncake.clone(),
            peer: ours.peer(),
            memory: Arc::new(|bytes| Borrowed::from(bytes.to_vec()).into()),
            regions: Arc::new(move || for_regions.host.stats().regions),
            keep: ours,
        })
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mooncake_conforms() {
    assert_conforms(&Mooncakes).await;
}

#[test]
fn mooncake_moves_what_the_oracle_says() {
    oracle::agrees(&support::runtime(), &Mooncakes, oracle::CASES / 2);
}

async fn remote(reader: &Ours, owner: &stagewire_core::Peer) -> Arc<dyn Remote> {
    let connected = reader.mooncake.connect(owner, ConnectOptions::default()).await;
    connected.expect("connected")
}

async fn pin(remote: &dyn Remote, region: &stagewire_core::RegionRef) -> Box<dyn Pinned> {
    remote.pin(region, TransferOptions::default()).await.expect("pinned")
}

fn is_lost(error: &TransferError) {
    let found = (error.class(), error.reason());
    assert_eq!(found, (ErrorClass::Unavailable, "peer.lost"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pushes_arrive_exactly_and_only_where_they_may() {
    let (owner, pusher) = (Ours::start().await, Ours::start().await);
    let remote = remote(&pusher, &owner.peer()).await;
    let len = 4 << 20;
    let mut memory = Writable::allocate(len).expect("memory");
    let register = |memory: Memory| {
        owner
            .mooncake
            .register(memory, RegisterOptions::default())
            .expect("registered")
    };
    let region = register(memory.clone().into());
    let pinned = pin(&*remote, &region.reference()).await;
    let source: Memory = Borrowed::from(keyed(len as usize, 7)).into();
    // Rows of 1000 bytes, further apart there than here; then the bytes between them.
    let rows = Record {
        src_offset: 0,
        dst_offset: 0,
        width: 1000,
        rows: 300,
        src_pitch: 1000,
        dst_pitch: 2000,
    };
    let between = Record {
        src_offset: 300_000,
        dst_offset: 1000,
        ..rows
    };
    let rest = Record::contiguous(600_000, 600_000, len - 600_000);
    for records in [&[rows][..], &[between, rest]] {
        pinned
            .push(records, &source, TransferOptions::default())
            .await
            .expect("pushed");
    }
    let (mut expected, bytes) = (keyed(len as usize, 7), keyed(len as usize, 7));
    for row in 0..300 {
        expected[2000 * row..][..1000].copy_from_slice(&bytes[1000 * row..][..1000]);
        expected[2000 * row + 1000..][..1000].copy_from_slice(&bytes[300_000 + 1000 * row..][..1000]);
    }
    let stats = pusher.mooncake.stats();
    assert_eq!(
        (stats.pushes, stats.pushed_bytes, stats.failed, stats.in_flight_bytes),
        (2, len, 0, 0)
    );

    let beyond = pinned
        .push(&[Record::contiguous(0, 1, len)], &source, TransferOptions::default())
        .await;
    assert_eq!(beyond.expect_err("out of bounds").reason(), "transfer.bounds");
    let read_only = register(Borrowed::from(vec![1; 100]).into());
    let other = pin(&*remote, &read_only.reference()).await;
    let denied = other
        .push(&whole(100), &source, TransferOptions::default())
        .await
        .expect_err("read-only");
    assert_eq!(
        (denied.class(), denied.reason()),
        (ErrorClass::Denied, "transfer.read_only"),
        "{denied}"
    );
    let target = Target::allocate(100).expect("memory");
    other
        .pull(&whole(100), &target, TransferOptions::default())
        .await
        .expect("readable");
    assert_eq!(target.as_slice().expect("pulled"), [1; 100]);

    drop((pinned, region));
    assert!(owned(&mut memory).await == expected);
}

/// Pulls and pushes again and again until each has failed.
async fn until_errors(readable: &dyn Pinned, writable: &dyn Pinned) -> (TransferError, TransferError) {
    let expected = support::bulk(LEN as usize);
    let source: Memory = Borrowed::from(keyed(LEN as usize, 7)).into();
    let pulls = async {
        let mut target = Target::allocate(LEN).expect("memory");
        loop {
            if let Err(error) = readable.pull(&whole(LEN), &target, TransferOptions::default()).await {
                assert!(
                    target.is_idle() && target.slice(0..1).is_err(),
                    "a failed pull counts as written"
                );
                return error;
            }
            assert!(target.as_slice().expect("pulled") == expected, "other bytes");
            target.reset().expect("idle");
        }
    };
    let pushes = async {
        loop {
            if let Err(error) = writable.push(&whole(LEN), &source, TransferOptions::default()).await {
                return error;
            }
        }
    };
    tokio::join!(pulls, pushes)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_is_killed_during_pulls_and_pushes() {
    let reader = Ours::start().await;
    for round in 0..ROUNDS {
        let mut owner = Owner::start(LEN as usize).await;
        let remote = remote(&reader, &owner.peer).await;
        let (readable, writable) = (
            pin(&*remote, &owner.readable).await,
            pin(&*remote, &owner.writable).await,
        );
        let target = Target::allocate(LEN).expect("memory");
        readable
            .pull(&whole(LEN), &target, TransferOptions::default())
            .await
            .expect("alive");
        let killer = async {
            // At another point of a transfer in each round.
            sleep(Duration::from_micros(1500 * round)).await;
            owner.kill();
            Instant::now()
        };
        let ended = async { tokio::join!(until_errors(&*readable, &*writable), killer) };
        let ((pulled, pushed), at) = timeout(Duration::from_secs(20), ended).await.expect("ends");
        assert!(at.elapsed() <= NOTICED_WITHIN, "noticed after {:?}", at.elapsed());
        is_lost(&pulled);
        is_lost(&pushed);
        assert!(!remote.is_alive());
        let gone = reader.mooncake.connect(&owner.peer, ConnectOptions::default()).await;
        assert_eq!(gone.expect_err("nobody is there").reason(), "peer.lost");
    }
    let stats = reader.mooncake.stats();
    assert_eq!((stats.in_flight_bytes, stats.waiting), (0, 0), "{stats:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_stops_and_goes_on() {
    let (reader, owner) = (Ours::start().await, Owner::start(LEN as usize).await);
    let remote = remote(&reader, &owner.peer).await;
    let (readable, writable) = (
        pin(&*remote, &owner.readable).await,
        pin(&*remote, &owner.writable).await,
    );
    let mut target = Target::allocate(LEN).expect("memory");
    readable
        .pull(&whole(LEN), &target, TransferOptions::default())
        .await
        .expect("alive");
    target.reset().expect("idle");
    let source: Memory = Borrowed::from(keyed(LEN as usize, 7)).into();
    owner.stop().await;
    let begun = Instant::now();
    let records = whole(LEN);
    let (pulled, pushed) = tokio::join!(
        readable.pull(&records, &target, SHORT),
        writable.push(&records, &source, SHORT)
    );
    assert!(
        begun.elapsed() < Duration::from_millis(900),
        "500 ms took {:?}",
        begun.elapsed()
    );
    let (pulled, pushed) = (
        pulled.expect_err("it stands still"),
        pushed.expect_err("it stands still"),
    );
    assert_eq!(
        (pulled.class(), pulled.reason()),
        (ErrorClass::Deadline, "transfer.deadline"),
        "{pulled}"
    );
    assert_eq!(
        (pushed.class(), pushed.reason()),
        (ErrorClass::Unavailable, "transfer.in_doubt"),
        "{pushed}"
    );
    assert!(target.is_idle() && target.slice(0..1).is_err());
    owner.go_on();
    readable
        .pull(&records, &target, TransferOptions::default())
        .await
        .expect("it goes on");
    assert!(target.as_slice().expect("pulled") == support::bulk(LEN as usize));
    writable
        .push(&records, &source, TransferOptions::default())
        .await
        .expect("it goes on");
}

/// A push that its sender gave up holds the memory until its connection is over, and not one byte lands after that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_push_given_up_never_lands_in_memory_that_has_a_new_purpose() {
    let (owner, pusher) = (Ours::start().await, Ours::start().await);
    let remote = remote(&pusher, &owner.peer()).await;
    let source: Memory = Borrowed::from(keyed(LEN as usize, 7)).into();
    let mut memory = Writable::allocate(LEN).expect("memory");
    for round in (0..50).cycle().take(support::rounds(50, 1000)) {
        let region = owner
            .mooncake
            .register(memory.clone().into(), RegisterOptions::default());
        let region = region.expect("registered");
        let pinned = pin(&*remote, &region.reference()).await;
        let records = whole(LEN);
        let pushed = timeout(
            Duration::from_micros(100 * round),
            pinned.push(&records, &source, TransferOptions::default()),
        );
        // Done or not: both happen.
        drop(pushed.await);
        drop(pinned);
        region.release();
        timeout(NOTICED_WITHIN, region.idle()).await.expect("the pin ends");
        drop(region);
        let before = owned(&mut memory).await;
        // A second reading after more work of the same server, which a late byte would have used.
        let probe = owner
            .mooncake
            .register(Borrowed::from(vec![1; 10]).into(), RegisterOptions::default());
        let probe = probe.expect("registered");
        let target = Target::allocate(10).expect("memory");
        let pulled = pin(&*remote, &probe.reference()).await;
        pulled
            .pull(&whole(10), &target, TransferOptions::default())
            .await
            .expect("alive");
        assert!(memory.bytes().expect("ours alone") == before, "a byte landed late");
    }
}
