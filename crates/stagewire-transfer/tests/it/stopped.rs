//! What needs the word of a stopped peer ends by the deadline; copies of memory that it pinned need none. When it goes
//! on, nothing was lost.

use std::time::{Duration, Instant};

use stagewire_core::{Classify, ErrorClass, Record};
use stagewire_transfer::{ConnectOptions, Target, TransferOptions};

use crate::child::Child;
use crate::support::{self, Node, cma_works, run_dir};

const LEN: usize = 1 << 20;

async fn stopped_producer(name: &str) {
    let (_parent, dir) = run_dir();
    if name == "cma" && !cma_works(&dir).await {
        return;
    }
    let reader = Node::start(&dir).await;
    let (mut child, (peer, region)) = Child::producer(&dir, name, LEN).await;
    let transport = reader.transport(name);
    let remote = transport
        .connect(&peer, ConnectOptions::default())
        .await
        .expect("connected");
    let pinned = remote.pin(&region, TransferOptions::default()).await.expect("pinned");
    let mut target = Target::allocate(LEN as u64).expect("memory");
    let whole = [Record::contiguous(0, 0, LEN as u64)];
    let short = TransferOptions {
        deadline: Some(Duration::from_millis(200)),
    };

    child.stop().await;
    let begun = Instant::now();
    let error = remote.pin(&region, short.clone()).await.expect_err("it stands still");
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    assert_eq!(
        (error.class(), error.reason()),
        (ErrorClass::Deadline, "transfer.deadline"),
        "{error}"
    );
    assert!(error.to_string().contains("200ms"), "{error}");
    pinned
        .pull(&whole, &target, short)
        .await
        .expect("it has the memory pinned");
    assert!(target.as_slice().expect("pulled") == support::bulk(LEN), "other bytes");
    assert!(remote.is_alive(), "a stopped process is not dead");

    child.go_on();
    target.reset().expect("idle");
    pinned
        .pull(&whole, &target, TransferOptions::default())
        .await
        .expect("it goes on");
    assert!(target.as_slice().expect("pulled") == support::bulk(LEN), "other bytes");
    drop(pinned);
    // A pin and its end come back in order, so that all earlier ends have arrived by then.
    drop(remote.pin(&region, TransferOptions::default()).await.expect("pinned"));
    child.release().await;
    child.holds_become((0, 0, 0)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shm_producer_stops() {
    stopped_producer("shm").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cma_producer_stops() {
    stopped_producer("cma").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_connection_to_a_stopped_peer_ends_by_its_deadline() {
    let (_parent, dir) = run_dir();
    let reader = Node::start(&dir).await;
    let (child, (peer, _)) = Child::producer(&dir, "shm", 4096).await;
    child.stop().await;
    let deadline = Duration::from_millis(200);
    let error = reader
        .shm()
        .connect(&peer, ConnectOptions { deadline })
        .await
        .expect_err("it stands still");
    assert_eq!(error.class(), ErrorClass::Deadline, "{error}");
    child.go_on();
    reader
        .shm()
        .connect(&peer, ConnectOptions::default())
        .await
        .expect("it goes on");
}

/// More ends of pins than the socket buffer holds, while the owner does not read: none is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ends_of_pins_wait_for_a_stopped_owner() {
    let (_parent, dir) = run_dir();
    let reader = Node::start(&dir).await;
    let (mut child, (peer, region)) = Child::producer(&dir, "shm", 4096).await;
    let remote = reader
        .shm()
        .connect(&peer, ConnectOptions::default())
        .await
        .expect("connected");
    let mut pins = Vec::new();
    for _ in 0..2000 {
        pins.push(remote.pin(&region, TransferOptions::default()).await.expect("pinned"));
    }
    assert_eq!(child.holds().await.0, 2000);
    child.stop().await;
    drop(pins);
    child.go_on();
    child.holds_become((0, 1, 4096)).await;
}
