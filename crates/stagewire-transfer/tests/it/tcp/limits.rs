//! What one peer may have open: one more is refused to it, with both numbers, and others do not notice.

use std::time::Duration;

use stagewire_core::{ByteCount, Classify, ErrorClass, Record};
use stagewire_transfer::{
    Borrowed, ConnectError, ConnectOptions, Network, NetworkLimits, NetworkOptions, Pinned, Region, RegisterOptions,
    Remote, Target, TransferError, TransferOptions,
};

use crate::child::Child;
use crate::support::{self, Node, run_dir};

/// Small enough to be reached, and all different.
const LIMITS: NetworkLimits = NetworkLimits {
    sessions: 5,
    sessions_per_process: 4,
    lanes: 2,
    pins: 3,
};

struct Owner {
    node: Node,
    region: Region,
    bytes: Vec<u8>,
}

impl Owner {
    async fn start(dir: &std::path::Path, send_rate: Option<ByteCount>) -> Self {
        let mut options = NetworkOptions {
            limits: LIMITS,
            ..NetworkOptions::default()
        };
        options.tcp.send_rate = send_rate;
        let node = Node::start_with(dir, options).await;
        let bytes = support::bulk(1 << 20);
        let memory = Borrowed::from(bytes.clone()).into();
        let region = node.transport("tcp").register(memory, RegisterOptions::default());
        Self {
            node,
            region: region.expect("registered"),
            bytes,
        }
    }

    async fn remote(&self, reader: &Node) -> Result<std::sync::Arc<dyn Remote>, ConnectError> {
        let transport = reader.transport("tcp");
        transport.connect(&self.node.peer(), ConnectOptions::default()).await
    }

    async fn pin(&self, remote: &dyn Remote) -> Result<Box<dyn Pinned>, TransferError> {
        remote.pin(&self.region.reference(), TransferOptions::default()).await
    }

    /// A reader of its own that pulls everything.
    async fn serves(&self, reader: &Node) {
        let remote = self.remote(reader).await.expect("connected");
        let pinned = self.pin(&*remote).await.expect("pinned");
        super::pull(&*pinned, &self.bytes).await;
    }
}

fn refused<T>(outcome: Result<T, impl Classify + std::fmt::Display>, reason: &str, held: u64) {
    let Err(error) = outcome else {
        panic!("one more than {held} was let in");
    };
    let found = (error.class(), error.reason());
    assert_eq!(found, (ErrorClass::Exhausted, reason), "{error}");
    let message = error.to_string();
    let numbers = format!("has {held} ");
    assert!(
        message.contains(&numbers) && message.contains(&format!("takes {held} ")),
        "{message}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_are_limited_for_each_process_and_for_all() {
    let (_parent, dir) = run_dir();
    let owner = Owner::start(&dir, None).await;
    let mut readers = Vec::new();
    for _ in 0..LIMITS.sessions_per_process {
        let reader = Node::start(&dir).await;
        let remote = owner.remote(&reader).await.expect("connected");
        readers.push((reader, remote));
    }
    let one_more = Node::start(&dir).await;
    refused(owner.remote(&one_more).await, "connect.full", 4);
    // Another process is let in, and those that are in are served.
    let address = (owner.node.peer(), owner.region.reference());
    let mut other = Child::reader(&dir, "tcp", &address).await;
    assert_eq!(other.pull_within(Duration::from_secs(10)).await, None);
    owner.serves(&readers[0].0).await;
    // Now there are as many as there may be of all processes together. Whoever leaves makes room.
    let (left, remote) = readers.pop().expect("four");
    left.network().shutdown().await;
    drop((left, remote));
    support::until("its session is over", || owner.node.stats().connections == 4).await;
    let mut third = Child::reader(&dir, "tcp", &address).await;
    assert_eq!(third.pull_within(Duration::from_secs(10)).await, None);
    refused(owner.remote(&one_more).await, "connect.full", 5);
    drop(other);
    let room = async {
        while owner.remote(&one_more).await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    let room = tokio::time::timeout(Duration::from_secs(10), room).await;
    room.expect("whoever leaves makes room");
    owner.serves(&one_more).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pins_of_a_session_are_limited() {
    let (_parent, dir) = run_dir();
    let (owner, reader, other) = (
        Owner::start(&dir, None).await,
        Node::start(&dir).await,
        Node::start(&dir).await,
    );
    let remote = owner.remote(&reader).await.expect("connected");
    let mut pins = Vec::new();
    for _ in 0..LIMITS.pins {
        pins.push(owner.pin(&*remote).await.expect("pinned"));
    }
    refused(owner.pin(&*remote).await, "transfer.full", 3);
    owner.serves(&other).await;
    super::pull(&*pins[0], &owner.bytes).await;
    pins.pop();
    // The word that it let go is on its way before the next one.
    owner.pin(&*remote).await.expect("there is room again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lanes_of_a_session_are_limited() {
    let (_parent, dir) = run_dir();
    // Pulls last for a second and more.
    let owner = Owner::start(&dir, Some(ByteCount(1 << 20))).await;
    let mut options = NetworkOptions::default();
    options.tcp.lanes = 3;
    let (greedy, other) = (Node::start_with(&dir, options).await, Node::start(&dir).await);
    let remote = owner.remote(&greedy).await.expect("connected");
    let pinned = owner.pin(&*remote).await.expect("pinned");
    let len = 500_000;
    let pull = async || {
        let target = Target::allocate(len).expect("memory");
        let record = [Record::contiguous(0, 0, len)];
        pinned.pull(&record, &target, TransferOptions::default()).await
    };
    let (one, two, three) = tokio::join!(pull(), pull(), pull());
    let outcomes = [one, two, three];
    let (pulled, failed): (Vec<_>, Vec<_>) = outcomes.into_iter().partition(Result::is_ok);
    assert_eq!(pulled.len(), 2, "{failed:?}");
    for outcome in failed {
        refused(outcome, "transfer.full", 2);
    }
    // The lanes that are open go on, and so do others.
    pull().await.expect("pulled");
    owner.serves(&other).await;
}

/// Each network serves its own lanes, by its own options.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_networks_of_one_host_have_options_of_their_own() {
    const RATE: u64 = 4 << 20;
    let (_parent, dir) = run_dir();
    let host = support::start(&dir).await;
    let bytes = support::bulk(2 << 20);
    let mut free = NetworkOptions::default();
    free.tcp.digest = false;
    let mut bound = NetworkOptions::default();
    bound.tcp.send_rate = Some(ByteCount(RATE));
    let mut took = Vec::new();
    let (mut networks, mut regions) = (Vec::new(), Vec::new());
    for options in [free, bound] {
        let network = Network::start(host.clone(), options).await.expect("it listens");
        let memory = Borrowed::from(bytes.clone()).into();
        let region = network.tcp().register(memory, RegisterOptions::default());
        regions.push(region.expect("registered"));
        networks.push(network);
    }
    for (network, region) in networks.iter().zip(&regions) {
        let mut peer = support::peer(&host);
        peer.transports.push(network.tcp().address());
        let mut options = NetworkOptions::default();
        options.tcp.digest = false;
        let reader = Node::start_with(&dir, options).await;
        let remote = reader.transport("tcp").connect(&peer, ConnectOptions::default()).await;
        let pinned = remote
            .expect("connected")
            .pin(&region.reference(), TransferOptions::default())
            .await;
        let began = std::time::Instant::now();
        super::pull(&*pinned.expect("pinned"), &bytes).await;
        took.push(began.elapsed());
    }
    let bound = Duration::from_secs_f64(0.9 * bytes.len() as f64 / RATE as f64);
    assert!(took[0] < bound, "the one without a bound took {took:?}");
    assert!(took[1] >= bound, "the one with a bound took {took:?}");
}
