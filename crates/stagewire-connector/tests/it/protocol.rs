//! Handles and frames that are not what they should be.

use bytes::Bytes;
use futures::{SinkExt, StreamExt};
use stagewire_connector::{Connector, ConsumeError, ConsumeOptions, LinkError, Owner, StartError};
use stagewire_core::{Capability, Classify, ErrorClass, Incarnation, PayloadId};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio_util::codec::{Framed, LengthDelimitedCodec};
use uuid::Uuid;

use crate::bundle::Bundle;
use crate::second::Ask;
use crate::{PATIENCE, World, all_gone, options};

/// The version on the wire, written out: a change of it has to be meant.
const VERSION: u8 = 7;

#[tokio::test(flavor = "multi_thread")]
async fn forged_capabilities_are_refused() {
    let world = World::new().await;
    let mut second = world.second().await;
    for bundle in [Bundle::one(&[10]), Bundle::one(&[10]).borrowed()] {
        let handle = second.publish(&bundle, Owner::Orchestrator).await;
        let forged = Capability::from_random([7; 16]);

        let mut payload = handle.clone();
        payload.capability = forged;
        let mut consumer = world
            .connector
            .consume(payload, ConsumeOptions::within(PATIENCE))
            .expect("a consumer");
        let error = consumer.next().await.expect_err("forged");
        assert!(matches!(error, ConsumeError::Denied { .. }), "{error}");
        assert_eq!(
            (error.class(), error.reason()),
            (ErrorClass::Denied, "payload.capability")
        );

        let mut region = handle.clone();
        region.regions[0].capability = forged;
        let mut consumer = world
            .connector
            .consume(region, ConsumeOptions::within(PATIENCE))
            .expect("a consumer");
        let error = consumer.next().await.expect_err("forged");
        assert_eq!(error.class(), ErrorClass::Denied, "{error}");

        let mut unknown = handle.clone();
        unknown.payload = PayloadId(Uuid::new_v4());
        let mut consumer = world
            .connector
            .consume(unknown, ConsumeOptions::within(PATIENCE))
            .expect("a consumer");
        let error = consumer.next().await.expect_err("no such payload");
        assert!(matches!(error, ConsumeError::Gone { .. }), "{error}");

        // The true one still works.
        let mut consumer = world
            .connector
            .consume(handle.clone(), ConsumeOptions::within(PATIENCE))
            .expect("a consumer");
        bundle.check(&consumer.fetch_all().await.expect("alive").tensors, None);
        assert!(!format!("{handle:?}").contains("07, 07"), "a capability is shown");
        second
            .done(Ask::Release {
                payload: handle.payload,
            })
            .await;
    }
    second.all_gone().await;
    all_gone(&world.connector).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn another_life_of_the_holder_has_lost_the_payload() {
    let world = World::new().await;
    let mut second = world.second().await;
    let mut handle = second.publish(&Bundle::one(&[10]), Owner::Orchestrator).await;
    handle.holder.incarnation = Incarnation(Uuid::new_v4());
    let mut consumer = world
        .connector
        .consume(handle, ConsumeOptions::within(PATIENCE))
        .expect("a consumer");
    let error = consumer.next().await.expect_err("another process");
    assert!(matches!(error, ConsumeError::PeerLost { .. }), "{error}");
    assert!(error.to_string().contains("started anew"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn rubbish_ends_its_own_connection_only() {
    let world = World::new().await;
    let mut second = world.second().await;
    let bundle = Bundle::one(&[10]);
    let handle = second.publish(&bundle, Owner::Orchestrator).await;
    for rubbish in [
        b"GET / HTTP/1.1\r\n\r\n".as_slice(),
        &[0xFF; 64],
        &[0, 0, 0, 3, 1, 2, 3],
        &[0, 0, 0, 0],
    ] {
        let mut stream = UnixStream::connect(&handle.holder.socket).await.expect("it listens");
        stream.write_all(rubbish).await.expect("it reads");
        stream.shutdown().await.expect("half closed");
        let mut answer = Vec::new();
        // Closed or reset, whichever the kernel says.
        let _ = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer))
            .await
            .expect("it hangs up");
    }
    let mut consumer = world
        .connector
        .consume(handle, ConsumeOptions::within(PATIENCE))
        .expect("a consumer");
    bundle.check(&consumer.fetch_all().await.expect("it serves on").tensors, None);
}

/// A hello as it is on the wire, of this version and of another.
fn hello(version: u8, to: Incarnation) -> Vec<u8> {
    let body = (
        (*b"SWC\n", u16::from(version)),
        (Uuid::new_v4(), (std::process::id(), 0_u64), to.0),
    );
    postcard::to_stdvec(&body).expect("plain data")
}

#[tokio::test(flavor = "multi_thread")]
async fn another_version_is_told_ours() {
    let world = World::new().await;
    let peer = world.connector.peer();
    // 0 is the welcome, 1 names the version.
    for (version, expected) in [(VERSION, vec![0]), (VERSION - 1, vec![1, VERSION])] {
        let stream = UnixStream::connect(&peer.socket).await.expect("it listens");
        let mut frames = Framed::new(stream, LengthDelimitedCodec::new());
        frames
            .send(Bytes::from(hello(version, peer.incarnation)))
            .await
            .expect("it reads");
        let answer = tokio::time::timeout(PATIENCE, frames.next())
            .await
            .expect("in time")
            .expect("an answer");
        assert_eq!(answer.expect("a frame").to_vec(), expected);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_of_another_version_is_named() {
    let world = World::new().await;
    let mut second = world.second().await;
    let mut handle = second.publish(&Bundle::one(&[10]), Owner::Orchestrator).await;
    let path = world.dir.path().join("other.ctl");
    let listener = UnixListener::bind(&path).expect("a socket");
    handle.holder.socket = path.to_string_lossy().into_owned();
    handle.holder.incarnation = Incarnation(Uuid::new_v4());
    let other = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.expect("a connection");
        let mut frames = Framed::new(stream, LengthDelimitedCodec::new());
        frames.next().await.expect("a hello").expect("a frame");
        frames.send(Bytes::from_static(&[1, 9])).await.expect("it reads");
    });
    let mut consumer = world
        .connector
        .consume(handle, ConsumeOptions::within(PATIENCE))
        .expect("a consumer");
    let error = consumer.next().await.expect_err("another version");
    let ConsumeError::Link {
        source: LinkError::Version { found, expected, .. },
        ..
    } = &error
    else {
        panic!("{error:?}");
    };
    assert_eq!((*found, *expected), (9, u16::from(VERSION)));
    assert_eq!((error.class(), error.lost()), (ErrorClass::Unsupported, None));
    other.await.expect("no panic");
}

#[tokio::test]
async fn a_connector_that_cannot_start_leaves_nothing() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut long = options(&dir, "decode");
    long.run_dir = dir.path().join("x".repeat(120));
    let error = Connector::start(long).await.expect_err("too long for a socket");
    assert!(matches!(error, StartError::Host(_)), "{error:?}");
    assert_eq!(
        (error.class(), error.reason()),
        (ErrorClass::Invalid, "socket.path_too_long")
    );

    let file = dir.path().join("file");
    std::fs::write(&file, "not a directory").expect("written");
    let mut blocked = options(&dir, "decode");
    blocked.run_dir = file;
    Connector::start(blocked).await.expect_err("not a directory");
}
