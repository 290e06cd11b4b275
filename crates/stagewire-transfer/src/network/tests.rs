//! The control plane over TCP, with two hosts in one process and transports that only these tests have.

mod deaths;
mod strangers;

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::future::BoxFuture;
use stagewire_core::{ByteCount, Classify, ErrorClass, Incarnation};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use uuid::Uuid;

use super::*;
use crate::table::Hold;
use crate::wire::Place;
use crate::{Borrowed, HostOptions, RegisterOptions, TransferOptions};

const LIMIT: Duration = Duration::from_secs(10);

struct Side {
    network: Arc<Network>,
    peer: Peer,
    _dir: tempfile::TempDir,
}

async fn host(dir: &Path) -> Arc<Host> {
    let options = HostOptions {
        dir: dir.join("peers"),
        incarnation: Incarnation(Uuid::new_v4()),
        arena_limit: ByteCount(1 << 20),
    };
    Host::start(options).await.expect("a host")
}

async fn side(options: NetworkOptions) -> Side {
    let dir = tempfile::tempdir().expect("a directory");
    let host = host(dir.path()).await;
    let network = Network::start(host.clone(), options).await.expect("it listens");
    let kinds = [Kind::Tcp, Kind::Mooncake];
    let peer = Peer {
        incarnation: host.incarnation(),
        process: host.process(),
        socket: String::new(),
        transports: kinds.map(|kind| network.address(kind, b"more")).to_vec(),
    };
    Side {
        network,
        peer,
        _dir: dir,
    }
}

fn token(token: &str) -> NetworkOptions {
    NetworkOptions {
        token: Some(Secret::new(token)),
        ..NetworkOptions::default()
    }
}

async fn connect(from: &Side, to: &Side) -> Result<Arc<Link>, ConnectError> {
    let options = ConnectOptions::default();
    let (link, extra) = from.network.link(Kind::Tcp, &to.peer, &options).await?;
    assert_eq!(extra, b"more");
    Ok(link)
}

async fn until(what: &str, condition: impl Fn() -> bool) {
    let reached = async {
        while !condition() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(LIMIT, reached).await.expect(what);
}

fn register(side: &Side, kind: Kind, bytes: Vec<u8>) -> crate::Region {
    let memory = Borrowed::from(bytes).into();
    crate::shm::register(side.network.host(), kind, memory, &RegisterOptions::default(), None).expect("registered")
}

#[tokio::test]
async fn pins_are_held_and_let_go_over_tcp() {
    let (owner, reader) = (side(token("t")).await, side(token("t")).await);
    let region = register(&owner, Kind::Cma, vec![1; 100]);
    let link = connect(&reader, &owner).await.expect("connected");
    assert!(Arc::ptr_eq(&link, &connect(&reader, &owner).await.expect("connected")));
    let grip = link
        .pin(Kind::Tcp, &region.reference(), &TransferOptions::default())
        .await;
    let grip = grip.expect("pinned");
    assert_eq!((grip.place(), grip.len()), (Place::Served, 100));
    grip.confirm().await.expect("held");
    assert!(!region.is_idle());
    drop(grip);
    tokio::time::timeout(LIMIT, region.idle()).await.expect("let go");
    let (reference, options) = (region.reference(), TransferOptions::default());
    let refused = link.pin(Kind::Mooncake, &reference, &options).await;
    assert_eq!(
        refused.expect_err("of another transport").reason(),
        "transfer.transport"
    );
}

#[tokio::test]
async fn a_connection_that_ends_takes_its_pins_along() {
    let (owner, reader) = (
        side(NetworkOptions::default()).await,
        side(NetworkOptions::default()).await,
    );
    let region = register(&owner, Kind::Cma, vec![1; 100]);
    let link = connect(&reader, &owner).await.expect("connected");
    let options = TransferOptions::default();
    let grip = link
        .pin(Kind::Tcp, &region.reference(), &options)
        .await
        .expect("pinned");
    reader.network.shutdown().await;
    let error = grip.confirm().await.expect_err("shut down");
    assert_eq!(error.reason(), "peer.lost");
    drop((grip, link));
    tokio::time::timeout(LIMIT, region.idle()).await.expect("let go");

    let reader = side(NetworkOptions::default()).await;
    let link = connect(&reader, &owner).await.expect("connected");
    let grip = link
        .pin(Kind::Tcp, &region.reference(), &options)
        .await
        .expect("pinned");
    owner.network.shutdown().await;
    tokio::time::timeout(LIMIT, link.closed()).await.expect("noticed");
    assert_eq!(grip.confirm().await.expect_err("shut down").reason(), "peer.lost");
    tokio::time::timeout(LIMIT, region.idle()).await.expect("let go");
    drop(grip);
    let again = connect(&reader, &owner).await.expect_err("nobody listens");
    assert_eq!(again.reason(), "peer.lost", "{again}");
}

#[tokio::test]
async fn who_lacks_the_token_is_refused() {
    let (open, owner) = (side(NetworkOptions::default()).await, side(token("right")).await);
    for (from, to) in [
        (&side(token("wrong")).await, &owner),
        (&side(NetworkOptions::default()).await, &owner),
        (&side(token("any")).await, &open),
    ] {
        let error = connect(from, to).await.expect_err("no proof");
        assert_eq!(
            (error.class(), error.reason()),
            (ErrorClass::Unauthenticated, "connect.token"),
            "{error}"
        );
    }
    connect(&side(token("right")).await, &owner).await.expect("connected");
}

#[tokio::test]
async fn streams_of_another_protocol_are_greeted_like_all_others() {
    let (owner, reader) = (side(token("right")).await, side(token("right")).await);
    let open = async |from: &Side| from.network.open_stream(&owner.peer, &ConnectOptions::default()).await;
    let error = open(&reader).await.expect_err("nobody serves it");
    assert_eq!(error.reason(), "connect.refused", "{error}");
    let echo = |mut stream: TcpStream| async move {
        let (mut read, mut write) = stream.split();
        let _ = tokio::io::copy(&mut read, &mut write).await;
    };
    assert!(owner.network.serve_streams(echo));
    assert!(!owner.network.serve_streams(echo), "served twice");
    let error = open(&side(token("wrong")).await).await.expect_err("refused");
    assert!(matches!(error, ConnectError::Token { .. }), "{error}");
    let mut stream = open(&reader).await.expect("served");
    let mut heard = [0; 4];
    stream.write_all(b"echo").await.expect("sent");
    stream.read_exact(&mut heard).await.expect("heard");
    assert_eq!(&heard, b"echo");
    owner.network.shutdown().await;
    let ended = tokio::time::timeout(LIMIT, stream.read(&mut heard))
        .await
        .expect("in time");
    assert_eq!(ended.unwrap_or(0), 0, "it goes on");
}

#[tokio::test]
async fn open_addresses_need_a_token_and_a_name() {
    let dir = tempfile::tempdir().expect("a directory");
    let host = host(dir.path()).await;
    let bind = "0.0.0.0:0".parse().expect("an address");
    let start = async |options| match Network::start(host.clone(), options).await {
        Ok(network) => panic!("{network:?} listens"),
        Err(error) => error.reason(),
    };
    let options = NetworkOptions {
        bind,
        ..NetworkOptions::default()
    };
    assert_eq!(start(options).await, "network.token_missing");
    let options = NetworkOptions { bind, ..token("t") };
    assert_eq!(start(options).await, "network.advertise_missing");
}

#[tokio::test]
async fn another_life_of_a_peer_is_told_apart() {
    let (owner, reader) = (
        side(NetworkOptions::default()).await,
        side(NetworkOptions::default()).await,
    );
    let mut earlier = owner.peer.clone();
    earlier.incarnation = Incarnation(Uuid::new_v4());
    let options = ConnectOptions::default();
    let error = reader
        .network
        .link(Kind::Tcp, &earlier, &options)
        .await
        .expect_err("another life");
    assert_eq!(error.reason(), "peer.incarnation", "{error}");
}

/// Places regions at addresses of its own, and answers messages backwards.
#[derive(Default)]
struct Mirror {
    placed: AtomicU64,
    unpinned: AtomicU64,
    ended: AtomicU64,
}

impl Placer for Mirror {
    fn place(&self, hold: &Arc<Hold>) -> Result<Place, String> {
        if hold.memory().len() == 13 {
            return Err("thirteen".to_owned());
        }
        self.placed.fetch_add(1, Ordering::Relaxed);
        Ok(Place::Address(4711))
    }

    fn unpinned(&self, _hold: &Arc<Hold>) {
        self.unpinned.fetch_add(1, Ordering::Relaxed);
    }

    fn asked(&self, _session: u128, mut message: Vec<u8>) -> BoxFuture<'static, Result<Vec<u8>, String>> {
        message.reverse();
        Box::pin(async {
            if message.is_empty() {
                Err("nothing".to_owned())
            } else {
                Ok(message)
            }
        })
    }

    fn ended(&self, _session: u128) {
        self.ended.fetch_add(1, Ordering::Relaxed);
    }
}

#[tokio::test]
async fn a_transport_places_regions_and_answers_messages() {
    let (owner, reader) = (
        side(NetworkOptions::default()).await,
        side(NetworkOptions::default()).await,
    );
    let region = register(&owner, Kind::Mooncake, vec![1; 100]);
    let link = connect(&reader, &owner).await.expect("connected");
    let pin = async |region: &crate::Region| {
        let options = TransferOptions::default();
        link.pin(Kind::Mooncake, &region.reference(), &options).await
    };
    assert_eq!(
        pin(&region).await.expect_err("not running").reason(),
        "transfer.backend"
    );
    tokio::time::timeout(LIMIT, region.idle()).await.expect("not held");
    let mirror = Arc::new(Mirror::default());
    assert!(owner.network.set_placer(Kind::Mooncake, mirror.clone()));
    assert!(!owner.network.set_placer(Kind::Mooncake, mirror.clone()));
    let (first, second) = (pin(&region).await.expect("pinned"), pin(&region).await.expect("pinned"));
    assert_eq!(first.place(), Place::Address(4711));
    drop(first);
    until("the first is unpinned", || mirror.unpinned.load(Ordering::Relaxed) == 1).await;
    let unlucky = register(&owner, Kind::Mooncake, vec![1; 13]);
    let error = pin(&unlucky).await.expect_err("thirteen");
    assert!(error.to_string().contains("thirteen"), "{error}");
    assert!(unlucky.is_idle());

    let long: Vec<u8> = (0..wire::MAX_MESSAGE).map(|byte| byte as u8).collect();
    let ask = async |message: &[u8]| link.ask(Kind::Mooncake, message, Some(LIMIT)).await;
    let answers = futures::future::join_all((0..100).map(|_| ask(&long))).await;
    for answer in answers {
        assert!(answer.expect("answered").iter().rev().eq(&long));
    }
    let problem = |error: crate::link::AskError| error.of_transfer(0, "ask").to_string();
    assert!(problem(ask(b"").await.expect_err("nothing")).contains("nothing"));
    assert!(problem(ask(&[&long[..], &[0]].concat()).await.expect_err("too long")).contains("allowed"));

    drop((second, link));
    reader.network.shutdown().await;
    until("the session ended", || mirror.ended.load(Ordering::Relaxed) == 1).await;
    assert_eq!(mirror.unpinned.load(Ordering::Relaxed), 2);
}

/// Sends the bytes of the pin whose number it is told, again and again.
struct Sender;

impl LaneServer for Sender {
    fn serve(&self, mut stream: TcpStream, session: Arc<Session>) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            while let Ok(pin) = stream.read_u64_le().await {
                let len = session.hold(pin).map_or(0, |hold| hold.memory().len());
                if stream.write_u64_le(len).await.is_err() {
                    return;
                }
            }
        })
    }
}

#[tokio::test]
async fn lanes_see_the_pins_of_their_session_and_end_with_it() {
    let (owner, reader) = (side(token("t")).await, side(token("t")).await);
    let region = register(&owner, Kind::Cma, vec![1; 100]);
    let link = connect(&reader, &owner).await.expect("connected");
    let lanes = link.lanes().expect("over TCP");
    assert_eq!(
        lanes.open().await.expect_err("nobody serves lanes").reason(),
        "connect.refused"
    );
    assert!(owner.network.set_lanes(Arc::new(Sender)));
    let options = TransferOptions::default();
    let grip = link
        .pin(Kind::Tcp, &region.reference(), &options)
        .await
        .expect("pinned");
    let mut lane = lanes.open().await.expect("a lane");
    let mut ask = async |pin| {
        lane.write_u64_le(pin).await?;
        lane.read_u64_le().await
    };
    assert_eq!(ask(grip.pin()).await.expect("answered"), 100);
    assert_eq!(ask(grip.pin() + 1).await.expect("answered"), 0, "a pin of nobody");
    let other = side(token("t")).await;
    let foreign = connect(&other, &owner).await.expect("connected");
    let mut lane_of_other = foreign.lanes().expect("over TCP").open().await.expect("a lane");
    lane_of_other.write_u64_le(grip.pin()).await.expect("sent");
    assert_eq!(
        lane_of_other.read_u64_le().await.expect("answered"),
        0,
        "a pin of another session"
    );
    drop(grip);
    until("unpinned", || region.is_idle()).await;
    assert_eq!(ask(0).await.expect("answered"), 0, "a pin that ended");
    reader.network.shutdown().await;
    drop(link);
    let ended = async { while ask(0).await.is_ok() {} };
    tokio::time::timeout(LIMIT, ended)
        .await
        .expect("a lane ends with its session");
}
