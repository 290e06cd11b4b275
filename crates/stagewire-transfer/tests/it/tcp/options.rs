//! What can be set.

use std::net::{Ipv6Addr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::net::getpeername;
use rustix::net::sockopt::tcp_congestion;
use stagewire_core::{ByteCount, Classify, ErrorClass, Record};
use stagewire_transfer::{
    Borrowed, ConnectOptions, Memory, Network, NetworkOptions, RegisterOptions, Target, TcpOptions, TransferOptions,
    Writable,
};

use crate::support::{self, Node, run_dir};

/// A node with a region of these bytes, and one that has it pinned.
async fn pair(
    dir: &std::path::Path,
    options: NetworkOptions,
    memory: impl Into<Memory>,
) -> (Node, Node, Box<dyn stagewire_transfer::Pinned>) {
    let owner = Node::start_with(dir, options.clone()).await;
    let reader = Node::start_with(dir, options).await;
    let region = owner
        .transport("tcp")
        .register(memory.into(), RegisterOptions::default());
    let remote = reader
        .transport("tcp")
        .connect(&owner.peer(), ConnectOptions::default())
        .await;
    let reference = region.as_ref().expect("registered").reference();
    let pinned = remote
        .expect("connected")
        .pin(&reference, TransferOptions::default())
        .await;
    (owner, reader, pinned.expect("pinned"))
}

/// Congestion controls of the connections that this process has made to a node.
#[expect(unsafe_code, reason = "looks at descriptors by their numbers")]
fn connections(to: &Node) -> Vec<String> {
    let port = to.network().local_addr().port();
    let numbers = std::fs::read_dir("/proc/self/fd").expect("Linux");
    let numbers = numbers.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    let congestion = |number| {
        // SAFETY: only asked; where it was closed meanwhile, the kernel says so.
        let fd = unsafe { BorrowedFd::borrow_raw(number) };
        let peer: SocketAddr = getpeername(fd).ok()??.try_into().ok()?;
        (peer.port() == port).then(|| tcp_congestion(fd).expect("a TCP socket"))
    };
    numbers.filter_map(congestion).collect()
}

/// Pulls and pushes, alone and several at once, take as long as the bound says, within a tenth. A busy machine may be
/// slower now and then, but never faster.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_bound_on_bytes_per_second_holds() {
    const RATE: u64 = 20_000_000;
    let (_parent, dir) = run_dir();
    let mut options = NetworkOptions::default();
    options.tcp.send_rate = Some(ByteCount(RATE));
    let (_owner, _reader, pinned) = pair(&dir, options, Writable::allocate(RATE).expect("memory")).await;
    let (pinned, memory) = (&*pinned, Borrowed::from(support::bulk(RATE as usize)).into());
    let pull = async |parts: u64| {
        let target = &Target::allocate(RATE).expect("memory");
        let parts = (0..parts).map(|part| async move {
            let len = RATE / parts;
            let record = [Record::contiguous(part * len, part * len, len)];
            let pulled = pinned.pull(&record, target, TransferOptions::default()).await;
            pulled.expect("pulled");
        });
        futures::future::join_all(parts).await;
    };
    let push = async || {
        let whole = [Record::contiguous(0, 0, RATE)];
        let pushed = pinned.push(&whole, &memory, TransferOptions::default()).await;
        pushed.expect("pushed");
    };
    for what in ["a pull", "four pulls at once", "a push"] {
        let mut seconds = Vec::new();
        for _ in 0..5 {
            let begun = Instant::now();
            match what {
                "a push" => push().await,
                "a pull" => pull(1).await,
                _ => pull(4).await,
            }
            seconds.push(begun.elapsed().as_secs_f64());
            if seconds.last().is_some_and(|seconds| *seconds <= 1.1) {
                break;
            }
        }
        assert!(
            seconds.iter().all(|seconds| *seconds >= 0.9),
            "{what} took {seconds:?} s instead of 1 s"
        );
        assert!(
            seconds.iter().any(|seconds| *seconds <= 1.1),
            "{what} took {seconds:?} s instead of 1 s"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transfer_can_use_several_lanes() {
    let (_parent, dir) = run_dir();
    let options = NetworkOptions {
        tcp: TcpOptions {
            lanes: 4,
            spread_from: Some(ByteCount(1 << 20)),
            ..TcpOptions::default()
        },
        ..NetworkOptions::default()
    };
    let bytes = support::bulk(33 << 20);
    let (owner, reader, pinned) = pair(&dir, options, Borrowed::from(bytes.clone())).await;
    assert_eq!(connections(&owner).len(), 1, "the control connection");
    for _ in 0..3 {
        super::pull(&*pinned, &bytes).await;
    }
    assert_eq!(connections(&owner).len(), 5, "and four lanes");
    assert_eq!(reader.transport("tcp").stats().pulls, 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_name_of_a_congestion_control_is_checked() {
    let (_parent, dir) = run_dir();
    let host = support::start(&dir).await;
    let with = |name: &str| {
        let mut options = NetworkOptions::default();
        options.tcp.congestion = Some(name.to_owned());
        options
    };
    let error = Network::start(host.clone(), with("no-such-control"))
        .await
        .expect_err("the kernel has none");
    assert_eq!(
        (error.class(), error.reason()),
        (ErrorClass::Invalid, "network.congestion"),
        "{error}"
    );
    let allowed = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_allowed_congestion_control").expect("Linux");
    let message = error.to_string();
    assert!(
        allowed.split_whitespace().all(|name| message.contains(name)),
        "{message} lacks one of {allowed}"
    );
    let bytes = support::bulk(1 << 20);
    for name in allowed.split_whitespace() {
        let (owner, _reader, pinned) = pair(&dir, with(name), Borrowed::from(bytes.clone())).await;
        super::pull(&*pinned, &bytes).await;
        // One is the control connection, which stays as it is.
        let used = connections(&owner);
        assert!(used.iter().any(|found| found == name), "{used:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[expect(clippy::print_stderr, reason = "a skip must be visible")]
async fn ipv6() {
    let bind = (Ipv6Addr::LOCALHOST, 0).into();
    if let Err(error) = tokio::net::TcpListener::bind(bind).await {
        eprintln!("skipped: no IPv6 here: {error}");
        return;
    }
    let (_parent, dir) = run_dir();
    let options = NetworkOptions {
        bind,
        ..NetworkOptions::default()
    };
    let bytes = support::bulk(5 << 20);
    let (owner, _reader, pinned) = pair(&dir, options, Borrowed::from(bytes.clone())).await;
    assert!(owner.network().local_addr().is_ipv6());
    tokio::time::timeout(Duration::from_secs(20), super::pull(&*pinned, &bytes))
        .await
        .expect("in time");
}
