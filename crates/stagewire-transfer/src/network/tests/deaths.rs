//! Peers that are killed or started anew, as real processes: this test binary again, to run [`child`] alone.

use std::io::Write;
use std::process::Stdio;
use std::time::Instant;

use stagewire_core::RegionRef;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

use super::*;

const ROLE: &str = "STAGEWIRE_TEST_NETWORK_ROLE";

/// Marks the line of a child that is meant for its parent.
const MARK: &str = "@@";

/// What a child needs to know.
#[derive(serde::Serialize, serde::Deserialize)]
enum Orders {
    /// Owns a region, and listens here.
    Own(SocketAddr),
    /// Pins this region.
    Pin(Peer, RegionRef),
}

type Offer = Option<(Peer, RegionRef)>;

/// Not a test: what the children run.
#[tokio::test]
#[expect(clippy::print_stdout, reason = "the parent reads it")]
async fn child() {
    let Ok(orders) = std::env::var(ROLE) else {
        return;
    };
    let (say, offer): (_, Offer) = match from_hex(&orders) {
        Orders::Own(bind) => {
            let owner = side(NetworkOptions {
                bind,
                ..NetworkOptions::default()
            })
            .await;
            let region = register(&owner, Kind::Cma, vec![1; 100]);
            let offer = (owner.peer.clone(), region.reference());
            (Some((owner, Some(region), None)), Some(offer))
        }
        Orders::Pin(peer, region) => {
            let reader = side(NetworkOptions::default()).await;
            let (link, _) = reader
                .network
                .link(Kind::Tcp, &peer, &ConnectOptions::default())
                .await
                .expect("connected");
            let grip = link.pin(Kind::Tcp, &region, &TransferOptions::default()).await;
            (Some((reader, None, Some(grip.expect("pinned")))), None)
        }
    };
    println!("{MARK}{}", to_hex(&offer));
    std::io::stdout().flush().expect("written");
    let _keep = say;
    std::future::pending::<()>().await;
}

async fn spawn(orders: &Orders) -> (Child, Offer) {
    let mut child = Command::new(std::env::current_exe().expect("this binary"))
        .args(["--exact", "network::tests::deaths::child", "--nocapture"])
        .env(ROLE, to_hex(orders))
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("the child starts");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let offer = async {
        loop {
            let line = lines.next_line().await.expect("its output").expect("the child ended");
            if let Some((_, text)) = line.split_once(MARK) {
                return from_hex(text);
            }
        }
    };
    let offer = tokio::time::timeout(LIMIT, offer).await.expect("the child is ready");
    (child, offer)
}

fn to_hex<T: serde::Serialize>(value: &T) -> String {
    wire::encode(value).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex<T: serde::de::DeserializeOwned>(text: &str) -> T {
    let digits = text.trim().as_bytes().chunks(2);
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).expect("digits"), 16).expect("digits");
    wire::decode(&digits.map(byte).collect::<Vec<u8>>()).expect("as it was sent")
}

/// Invariant 2 of the design: within one second.
const NOTICED: Duration = Duration::from_secs(1);

fn any_port() -> SocketAddr {
    NetworkOptions::default().bind
}

/// Says that the peer is on another host, where its process means nothing.
fn from_afar(peer: &Peer) -> Peer {
    let mut peer = peer.clone();
    let mut address: NetworkAddress = wire::address_of(Kind::Tcp, &peer).expect("an address");
    address.host = "elsewhere".to_owned();
    peer.transports[0].address = wire::encode_versioned(&address);
    peer
}

#[tokio::test]
async fn a_killed_owner_is_noticed_at_once_and_its_successor_is_another() {
    let reader = side(NetworkOptions::default()).await;
    for far in [false, true] {
        let (mut child, offer) = spawn(&Orders::Own(any_port())).await;
        let (mut peer, region) = offer.expect("an offer");
        if far {
            peer = from_afar(&peer);
        }
        let options = ConnectOptions::default();
        let (link, _) = reader
            .network
            .link(Kind::Tcp, &peer, &options)
            .await
            .expect("connected");
        let grip = link
            .pin(Kind::Tcp, &region, &TransferOptions::default())
            .await
            .expect("pinned");
        grip.confirm().await.expect("alive");
        let killed = Instant::now();
        child.kill().await.expect("killed");
        tokio::time::timeout(NOTICED, link.closed()).await.expect("noticed");
        assert_eq!(grip.confirm().await.expect_err("dead").reason(), "peer.lost");
        let again = reader
            .network
            .link(Kind::Tcp, &peer, &options)
            .await
            .expect_err("nobody listens");
        assert_eq!(again.reason(), "peer.lost", "{again}");
        assert!(killed.elapsed() < NOTICED, "it took {:?}", killed.elapsed());

        let address: NetworkAddress = wire::address_of(Kind::Tcp, &peer).expect("an address");
        let (_successor, offer) = spawn(&Orders::Own(address.sockets[0])).await;
        let error = reader
            .network
            .link(Kind::Tcp, &peer, &options)
            .await
            .expect_err("another life");
        assert_eq!(error.reason(), "peer.incarnation", "{error}");
        let (peer, region) = offer.expect("an offer");
        let (link, _) = reader
            .network
            .link(Kind::Tcp, &peer, &options)
            .await
            .expect("connected");
        let pinned = link.pin(Kind::Tcp, &region, &TransferOptions::default()).await;
        pinned.expect("pinned").confirm().await.expect("alive");
    }
}

#[tokio::test]
async fn the_pins_of_a_killed_reader_end_at_once() {
    let owner = side(NetworkOptions::default()).await;
    let region = register(&owner, Kind::Cma, vec![1; 100]);
    let orders = Orders::Pin(owner.peer.clone(), region.reference());
    let (mut child, _) = spawn(&orders).await;
    assert!(!region.is_idle());
    child.kill().await.expect("killed");
    tokio::time::timeout(NOTICED, region.idle()).await.expect("let go");
}
