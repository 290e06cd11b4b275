//! `tcp` between nodes of this machine: conformance, what it adds to it, and its faults.

mod late;
mod limits;
mod options;
mod proxy;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use stagewire_core::{ByteCount, Classify, ErrorClass, Record};
use stagewire_transfer::conformance::{Backend, Side, Violation, assert_conforms};
use stagewire_transfer::{ConnectOptions, NetworkOptions, Pinned, RegisterOptions, Target, TransferOptions};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};

use crate::child::Child;
use crate::oracle;
use crate::support::{self, Node, cma_works, run_dir};

/// Bytes that sides allow in flight with one peer.
const IN_FLIGHT: ByteCount = ByteCount(32 << 20);

pub(crate) struct OverTcp {
    pub(crate) dir: PathBuf,
    pub(crate) digest: bool,
}

#[async_trait]
impl Backend for OverTcp {
    fn in_flight_limit(&self) -> Option<ByteCount> {
        Some(IN_FLIGHT)
    }

    async fn side(&self) -> Result<Side, Violation> {
        let mut options = NetworkOptions::default();
        options.tcp.digest = self.digest;
        let node = Node::start_with(&self.dir, options).await;
        node.limit_in_flight(IN_FLIGHT);
        let (for_memory, for_regions) = (node.clone(), node.clone());
        Ok(Side {
            transport: node.transport("tcp"),
            peer: node.peer(),
            memory: Arc::new(move |bytes| support::memory(&for_memory, "tcp", bytes)),
            regions: Arc::new(move || for_regions.stats().regions),
            keep: Arc::new(node),
        })
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tcp_conforms_with_digests() {
    let (_parent, dir) = run_dir();
    let digest = true;
    assert_conforms(&OverTcp { dir, digest }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tcp_conforms_without_digests() {
    let (_parent, dir) = run_dir();
    let digest = false;
    assert_conforms(&OverTcp { dir, digest }).await;
}

#[test]
fn tcp_moves_what_the_oracle_says() {
    for digest in [true, false] {
        let (_parent, dir) = run_dir();
        oracle::agrees(&support::runtime(), &OverTcp { dir, digest }, oracle::CASES / 2);
    }
}

/// Pulls everything, and compares.
async fn pull(pinned: &dyn Pinned, expected: &[u8]) {
    let len = expected.len() as u64;
    let target = Target::allocate(len).expect("memory");
    let whole = [Record::contiguous(0, 0, len)];
    let pulled = pinned.pull(&whole, &target, TransferOptions::default()).await;
    pulled.expect("pulled");
    assert!(target.as_slice().expect("pulled") == expected, "other bytes");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tcp_pulls_what_was_registered_for_shm_or_cma() {
    let (_parent, dir) = run_dir();
    let (owner, reader) = (Node::start(&dir).await, Node::start(&dir).await);
    let remote = reader
        .transport("tcp")
        .connect(&owner.peer(), ConnectOptions::default())
        .await;
    let remote = remote.expect("connected");
    let bytes = support::bulk(3 << 20);
    for name in ["shm", "cma"] {
        if name == "cma" && !cma_works(&dir).await {
            continue;
        }
        let memory = support::memory(&owner, name, &bytes);
        let region = owner.transport(name).register(memory, RegisterOptions::default());
        let region = region.expect("registered");
        let pinned = remote.pin(&region.reference(), TransferOptions::default()).await;
        pull(&*pinned.expect("pinned"), &bytes).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_that_restarts_at_the_same_port_is_another_one() {
    let (_parent, dir) = run_dir();
    let reader = Node::start(&dir).await;
    let bytes = support::bulk(1 << 20);
    // A port that is free now.
    let port = TcpListener::bind("127.0.0.1:0")
        .await
        .and_then(|listener| listener.local_addr());
    let port = port.expect("a port").port();
    let (mut child, (old, region)) = Child::slow_producer(&dir, port, None, bytes.len()).await;
    let transport = reader.transport("tcp");
    let remote = transport
        .connect(&old, ConnectOptions::default())
        .await
        .expect("connected");
    let pinned = remote.pin(&region, TransferOptions::default()).await.expect("pinned");
    pull(&*pinned, &bytes).await;
    child.kill();
    child.gone().await;
    let closed = tokio::time::timeout(Duration::from_secs(1), remote.closed()).await;
    closed.expect("noticed");

    let (_child, (new, new_region)) = Child::slow_producer(&dir, port, None, bytes.len()).await;
    let error = transport
        .connect(&old, ConnectOptions::default())
        .await
        .expect_err("that one died");
    let found = (error.class(), error.reason());
    assert_eq!(found, (ErrorClass::Unavailable, "peer.incarnation"), "{error}");
    let byte = [Record::contiguous(0, 0, 1)];
    let target = Target::allocate(1).expect("memory");
    let error = pinned
        .pull(&byte, &target, TransferOptions::default())
        .await
        .expect_err("it died");
    assert_eq!(error.reason(), "peer.lost", "{error}");
    let remote = transport
        .connect(&new, ConnectOptions::default())
        .await
        .expect("connected");
    let pinned = remote
        .pin(&new_region, TransferOptions::default())
        .await
        .expect("pinned");
    pull(&*pinned, &bytes).await;
}

/// Garbage, silence and half a greeting, from many connections, while others pull.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_disturb_nobody() {
    let (_parent, dir) = run_dir();
    let (owner, reader) = (Node::start(&dir).await, Node::start(&dir).await);
    let bytes = support::bulk(2 << 20);
    let region = owner
        .transport("tcp")
        .register(support::memory(&owner, "tcp", &bytes), RegisterOptions::default());
    let region = region.expect("registered");
    let address = owner.network().local_addr();
    let mut strangers = Vec::new();
    for number in 0..60_usize {
        let mut stranger = TcpStream::connect(address).await.expect("it listens");
        let garbage = support::bulk(number * 131);
        // It may be cut off before it has said all.
        let _ = stranger.write_all(&garbage).await;
        strangers.push(stranger);
    }
    let remote = reader
        .transport("tcp")
        .connect(&owner.peer(), ConnectOptions::default())
        .await;
    let pinned = remote
        .expect("connected")
        .pin(&region.reference(), TransferOptions::default())
        .await;
    let pinned = pinned.expect("pinned");
    for _ in 0..5 {
        pull(&*pinned, &bytes).await;
    }
}
