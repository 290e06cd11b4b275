use futures::future::join_all;
use futures::{SinkExt, StreamExt};
use stagewire_core::{Capability, Manifest, PayloadId, PayloadKind, StageName, TransferMode};
use stagewire_transfer::listen_unix;
use tokio::time::timeout;
use tokio_util::codec::Framed;

use super::*;
use crate::wire::{self, Greeting};
use crate::{Connector, ConnectorOptions};

const PATIENCE: Duration = Duration::from_secs(20);

/// A holder that greets who connects, and reads no further before it is told to.
struct Still {
    peer: Peer,
    go_on: Arc<tokio::sync::Notify>,
    /// How many requests it has read by its end.
    read: tokio::task::JoinHandle<usize>,
}

fn still(like: &Peer, dir: &std::path::Path) -> Still {
    let (listener, socket) = listen_unix(&dir.join("still.ctl")).expect("a socket");
    let peer = Peer {
        incarnation: Incarnation(uuid::Uuid::new_v4()),
        socket: socket.path().to_string_lossy().into_owned(),
        ..like.clone()
    };
    let go_on = Arc::new(tokio::sync::Notify::new());
    let going = Arc::clone(&go_on);
    let read = tokio::spawn(async move {
        let _socket = socket;
        let (stream, _) = listener.accept().await.expect("it connects");
        let mut frames = Framed::new(stream, wire::codec());
        frames.next().await.expect("a hello").expect("a frame");
        frames.send(wire::encode(&Greeting::Welcome)).await.expect("it reads");
        going.notified().await;
        let mut read = 0;
        while let Some(Ok(_)) = frames.next().await {
            read += 1;
        }
        read
    });
    Still { peer, go_on, read }
}

fn handle(holder: &Peer) -> Handle {
    Handle {
        payload: PayloadId(uuid::Uuid::new_v4()),
        request: "r".to_owned(),
        stage: StageName::new("denoise").expect("a name"),
        manifest: Manifest::new(PayloadKind::Latent, Vec::new()).expect("no names"),
        mode: TransferMode::P2p,
        holder: holder.clone(),
        capability: Capability::from_random([7; 16]),
        regions: Vec::new(),
    }
}

/// However many ask, and however often: what waits to be sent is bounded, and so is what is read once the holder goes on.
#[tokio::test(flavor = "multi_thread")]
async fn requests_to_a_holder_that_stands_still_do_not_pile_up() {
    const ROUNDS: usize = 10;
    const AT_ONCE: usize = 500;
    let dir = tempfile::tempdir().expect("a directory");
    let options = ConnectorOptions::new(dir.path().join("run"), StageName::new("decode").expect("a name"));
    let connector = Connector::start(options).await.expect("a connector");
    let Still { peer, go_on, read } = still(connector.peer(), &dir.path().join("run/peers"));
    let shared = connector.shared();
    // It greets one connection, which nobody with a deadline is to give up.
    let link = timeout(PATIENCE, shared.links().to(&peer)).await;
    drop(link.expect("at once").expect("it is connected"));
    let mut longest = 0;
    for _ in 0..ROUNDS {
        let asking = (0..AT_ONCE).map(|n| {
            let peer = &peer;
            let ask = async move {
                let link = shared.links().to(peer).await.expect("it is connected");
                let handle = handle(peer);
                if n % 2 == 0 {
                    link.watch(&handle, false, false).first_word().await;
                } else {
                    let Handle {
                        payload, capability, ..
                    } = handle;
                    let token = None;
                    let release = |id| Request::Release {
                        id,
                        payload,
                        capability,
                        token,
                    };
                    link.ask(release).await;
                }
            };
            timeout(Duration::from_millis(50), ask)
        });
        for asked in join_all(asking).await {
            assert!(asked.is_err(), "nobody answers");
        }
        let link = timeout(PATIENCE, shared.links().connected(&peer))
            .await
            .expect("at once");
        longest = longest.max(link.expect("it is connected").outbox.waiting());
    }
    assert!(longest > 0, "the socket took everything, so that nothing was tried");
    assert!(longest < ROUNDS * AT_ONCE / 4, "{longest} requests wait");
    go_on.notify_one();
    let link = timeout(PATIENCE, shared.links().to(&peer)).await.expect("it goes on");
    drop(link);
    connector.close().await;
    let read = timeout(PATIENCE, read).await.expect("it ends").expect("no panic");
    assert!(read < ROUNDS * AT_ONCE / 2, "{read} requests reached it");
}
