//! The two ports of this process against peers that say nothing, too much, or the wrong thing.

use std::time::{Duration, Instant};

use serde_json::json;
use stagewire_core::{Classify, ErrorClass};
use stagewire_transfer::{
    Borrowed, ConnectOptions, Mooncake, MooncakeOptions, SegmentBuffer, TransferOptions, Writable,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use crate::mooncake::{Ours, owned, pull, whole};
use crate::mooncake_peer::{Engine, keyed, wheel_works};
use crate::support::until;

const SOON: Duration = Duration::from_secs(1);

/// The status that says yes, and the one that says no.
const DONE: &[u8] = b"\0\0\0\0VTCM";
const REJECTED: &[u8] = b"\x01\0\0\0VTCM";

fn frame(kind: u8, json: &str) -> Vec<u8> {
    let mut frame = (json.len() as u64 + 1).to_le_bytes().to_vec();
    frame.push(kind);
    frame.extend_from_slice(json.as_bytes());
    frame
}

fn request(operation: u8, buffer: SegmentBuffer) -> [u8; 24] {
    let mut bytes = [0; 24];
    bytes[..8].copy_from_slice(&buffer.len.to_le_bytes());
    bytes[8..16].copy_from_slice(&buffer.address.to_le_bytes());
    bytes[16] = operation;
    bytes
}

/// What a port answers until it closes the connection.
async fn answered(address: &str, message: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).await.expect("it listens");
    let talk = async {
        // It may close before it has read everything.
        let _ = stream.write_all(message).await;
        let _ = stream.shutdown().await;
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        answer
    };
    timeout(Duration::from_secs(10), talk)
        .await
        .expect("it answers or closes")
}

/// `host:port` of our data port, as our descriptor has it.
async fn data_port(ours: &Ours) -> String {
    let answer = answered(ours.mooncake.name(), &frame(1, "{}")).await;
    let descriptor: serde_json::Value = serde_json::from_slice(&answer[9..]).expect("JSON");
    assert_eq!(descriptor["tcp_proto_version"], 2);
    format!("127.0.0.1:{}", descriptor["tcp_data_port"])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn malformed_handshakes_get_no_answer_and_disturb_nobody() {
    let ours = Ours::start().await;
    let name = ours.mooncake.name();
    let too_long = [&(1_u64 << 40).to_le_bytes()[..], &[1, b'{']].concat();
    let truncated = [&100_u64.to_le_bytes()[..], b"\x01{}"].concat();
    let bad = [
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        vec![0; 64],
        too_long,
        truncated,
        frame(0, "{}"),
        frame(4, "{}"),
        frame(2, "{}"),
        frame(2, r#"{"name":"a","notify_msg":7}"#),
        frame(2, &"[".repeat(10_000)),
        vec![],
    ];
    for message in &bad {
        assert_eq!(answered(name, message).await, b"", "{message:?}");
        assert_eq!(
            answered(name, &frame(3, "{}")).await,
            frame(3, r#"{"status":"success"}"#)
        );
    }
    assert!(ours.mooncake.notifications().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_sockets_on_our_ports_delay_nobody() {
    let ours = Ours::start().await;
    let name = ours.mooncake.name();
    let data = data_port(&ours).await;
    let mut idle = Vec::new();
    for port in [name, name, &data, &data] {
        let mut stream = TcpStream::connect(port).await.expect("it listens");
        stream.write_all(&[7]).await.expect("one byte");
        idle.push(stream);
    }
    let (_region, exposed) = ours.expose(Borrowed::from(keyed(100_000, 4)));
    let begun = Instant::now();
    let other = Ours::start().await;
    let segment = other.open(name).await;
    assert_eq!(segment.buffers(), [exposed.buffer()]);
    assert!(pull(&segment, exposed.buffer()).await.expect("pulled") == keyed(100_000, 4));
    if wheel_works() {
        let mut engine = Engine::start().await;
        let begun = Instant::now();
        let address = exposed.buffer().address;
        let read = json!({"do": "read", "peer": name, "address": address, "size": 100_000, "key": 4});
        assert_eq!(engine.call(read).await["differs"], -1);
        assert!(begun.elapsed() < SOON, "an engine waited for {:?}", begun.elapsed());
    } else {
        assert!(begun.elapsed() < SOON, "we waited for {:?}", begun.elapsed());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_requests_are_refused_and_the_connection_closed() {
    let ours = Ours::start().await;
    let data = data_port(&ours).await;
    let (_region, exposed) = ours.expose(Borrowed::from(keyed(1000, 4)));
    let buffer = exposed.buffer();
    let SegmentBuffer { address, len } = buffer;
    let good = answered(&data, &request(0x80, buffer)).await;
    assert!(good[..8] == *DONE && good[8..] == keyed(1000, 4));
    // Version 1 knows no refusal, only the end.
    for operation in [0, 1] {
        assert_eq!(answered(&data, &request(operation, buffer)).await, b"");
    }
    let refused = [
        request(0x82, buffer),
        request(0xFF, buffer),
        request(0x81, buffer),
        request(0x80, SegmentBuffer { address, len: 0 }),
        request(0x80, SegmentBuffer { address, len: len + 1 }),
        request(
            0x80,
            SegmentBuffer {
                address: address - 1,
                len,
            },
        ),
        request(0x80, SegmentBuffer { address, len: u64::MAX }),
        request(
            0x80,
            SegmentBuffer {
                address: u64::MAX,
                len: 1,
            },
        ),
    ];
    for request in refused {
        let message = [&request[..], &keyed(1000, 9)].concat();
        assert_eq!(answered(&data, &message).await, REJECTED, "{request:?}");
    }
    let two = [request(0x80, buffer), request(0x80, SegmentBuffer { address, len: 5 })].concat();
    let answer = answered(&data, &two).await;
    assert_eq!(answer.len(), 8 + 1000 + 8 + 5, "requests that follow each other");
    assert!(answer[1016..] == keyed(1000, 4)[..5]);
    assert!(answered(&data, &[1; 10]).await.is_empty(), "half a request");
}

/// A write that its sender gave up long ago goes on when the memory has a new purpose.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_write_is_harmless() {
    let ours = Ours::start().await;
    let data = data_port(&ours).await;
    let len = 1 << 20;
    let mut memory = Writable::allocate(len).expect("memory");
    let (region, exposed) = ours.expose(memory.clone());
    let buffer = exposed.buffer();
    let mut late = TcpStream::connect(&data).await.expect("it listens");
    late.write_all(&request(0x81, buffer)).await.expect("sent");
    late.write_all(&[1; 1000]).await.expect("sent");
    until("the write is under way", || !region.is_idle()).await;
    assert!(memory.bytes().is_none(), "memory was shown while a peer writes to it");

    // The owner takes the memory back. As long as the write is not over, it does not get it.
    region.release();
    assert!(!region.is_idle());
    late.write_all(&[2; 1000]).await.expect("sent");
    timeout(SOON, region.idle()).await.expect("the write was ended");
    drop((region, exposed));
    let before = owned(&mut memory).await;
    let mut rest = Vec::new();
    // The end, or a reset: there is no status.
    let _ = timeout(SOON, late.read_to_end(&mut rest))
        .await
        .expect("the connection was closed");
    assert!(rest.is_empty(), "a write into released memory was confirmed: {rest:?}");

    // The same memory again: another address; the one of before is unknown, whoever uses it and for whatever.
    let (region, exposed) = ours.expose(memory.clone());
    assert_ne!(exposed.buffer().address, buffer.address);
    let write = [&request(0x81, buffer)[..], &vec![3; len as usize]].concat();
    assert_eq!(answered(&data, &write).await, REJECTED);
    drop((region, exposed));
    assert!(owned(&mut memory).await == before, "a late write landed");
}

/// Answers every handshake with one message.
async fn pretend(json: String) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let name = listener.local_addr().expect("bound").to_string();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut message = [0; 11];
            stream.read_exact(&mut message).await.expect("a question");
            stream.write_all(&frame(1, &json)).await.expect("it listens");
        }
    });
    name
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn peers_without_acknowledgements_are_refused() {
    let ours = Ours::start().await;
    let open = async |json: &str| {
        let opened = ours
            .mooncake
            .open(&pretend(json.to_owned()).await, ConnectOptions::default())
            .await;
        opened.expect_err("refused")
    };
    let old = open(r#"{"protocol":"tcp","tcp_data_port":1,"buffers":[]}"#).await;
    assert_eq!(
        (old.class(), old.reason()),
        (ErrorClass::Unsupported, "mooncake.version"),
        "{old}"
    );
    for json in [
        "",
        "[]",
        r#"{"protocol":"rdma"}"#,
        r#"{"protocol":"tcp","tcp_proto_version":2}"#,
    ] {
        let error = open(json).await;
        assert_eq!(
            (error.class(), error.reason()),
            (ErrorClass::Invalid, "mooncake.descriptor"),
            "{error}"
        );
    }
    // A peer that lies about its version: what it answers cannot be a status.
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("bound").port();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.expect("a client");
        stream.write_all(&[5; 100]).await.expect("it listens");
        std::future::pending::<()>().await;
    });
    let json = format!(r#"{{"protocol":"tcp","tcp_data_port":{port},"tcp_proto_version":2}}"#);
    let segment = ours.open(&pretend(json).await).await;
    let error = pull(&segment, SegmentBuffer { address: 1, len: 100 })
        .await
        .expect_err("no status");
    assert_eq!(
        (error.class(), error.reason()),
        (ErrorClass::Corrupt, "mooncake.protocol"),
        "{error}"
    );
}

/// A push whose answer never comes is in doubt, however the connection ended; a refused one is not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_push_without_its_answer_is_in_doubt() {
    let ours = Ours::start().await;
    let (source, records) = (Borrowed::from(keyed(1000, 3)).into(), whole(1000));
    let dst = SegmentBuffer {
        address: 4096,
        len: 1000,
    };
    let cases: [(&[u8], ErrorClass, &str); 4] = [
        (b"", ErrorClass::Unavailable, "transfer.in_doubt"),
        (b"\0\0\0", ErrorClass::Unavailable, "transfer.in_doubt"),
        (&[5; 8], ErrorClass::Unavailable, "transfer.in_doubt"),
        (REJECTED, ErrorClass::NotFound, "mooncake.rejected"),
    ];
    for (answer, class, reason) in cases {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = listener.local_addr().expect("bound").port();
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.expect("a client");
            // Before the answer, so that whoever has it finds nobody here.
            drop(listener);
            stream.read_exact(&mut [0; 1024]).await.expect("a request");
            stream.write_all(answer).await.expect("it listens");
        });
        let json = format!(r#"{{"protocol":"tcp","tcp_data_port":{port},"tcp_proto_version":2}}"#);
        let segment = ours.open(&pretend(json).await).await;
        let pushed = segment.push(dst, &records, &source, TransferOptions::default());
        let pushed = timeout(Duration::from_secs(10), pushed).await.expect("ends");
        let error = pushed.expect_err("no answer");
        assert_eq!((error.class(), error.reason()), (class, reason), "{error}");
        // Nobody listens any more: not a byte was sent.
        let pushed = segment.push(dst, &records, &source, TransferOptions::default());
        assert_eq!(pushed.await.expect_err("gone").reason(), "peer.lost");
    }
}

/// With one more, the answer to a metadata message would be too long, and nobody would get one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_more_regions_are_exposed_than_can_be_listed() {
    let (ours, other) = (Ours::start().await, Ours::start().await);
    let (region, first) = ours.expose(Borrowed::from(keyed(100, 4)));
    let mut exposed = vec![first];
    let error = loop {
        match ours.mooncake.expose(&region) {
            Ok(one) => exposed.push(one),
            Err(error) => break error,
        }
        assert!(exposed.len() < 1 << 16, "they cannot all fit into 1 MiB");
    };
    assert_eq!(
        (error.class(), error.reason()),
        (ErrorClass::Exhausted, "mooncake.full"),
        "{error}"
    );
    let segment = other.open(ours.mooncake.name()).await;
    assert_eq!(segment.buffers().len(), exposed.len());
    exposed.pop();
    ours.mooncake.expose(&region).expect("there is room again");
    region.release();
    let (_region, again) = ours.expose(Borrowed::from(keyed(100, 4)));
    assert!(pull(&segment, again.buffer()).await.expect("pulled") == keyed(100, 4));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_that_leaves_64_bit_addresses_is_not_asked_for() {
    let (ours, other) = (Ours::start().await, Ours::start().await);
    let segment = ours.open(other.mooncake.name()).await;
    let buffer = SegmentBuffer {
        address: u64::MAX - 10,
        len: 1000,
    };
    let error = pull(&segment, buffer).await.expect_err("nothing is there");
    assert_eq!(error.reason(), "mooncake.rejected", "{error}");
    let (source, records) = (Borrowed::from(vec![1; 1000]).into(), whole(1000));
    let pushed = segment.push(buffer, &records, &source, TransferOptions::default());
    let error = pushed.await.expect_err("nothing is there");
    assert_eq!(error.reason(), "mooncake.rejected", "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_ended_while_idle_is_made_again() {
    let (ours, other) = (Ours::start().await, Ours::start().await);
    let (_region, exposed) = other.expose(Borrowed::from(keyed(1000, 4)));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("bound").port();
    let data = data_port(&other).await;
    // Between the two: cuts each connection after its first answer.
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let mut server = TcpStream::connect(&data).await.expect("it listens");
            let mut bytes = [0; 1008];
            client.read_exact(&mut bytes[..24]).await.expect("a request");
            server.write_all(&bytes[..24]).await.expect("it listens");
            server.read_exact(&mut bytes).await.expect("an answer");
            client.write_all(&bytes).await.expect("it listens");
        }
    });
    let json = format!(r#"{{"protocol":"tcp","tcp_data_port":{port},"tcp_proto_version":2}}"#);
    let segment = ours.open(&pretend(json).await).await;
    for _ in 0..3 {
        assert!(pull(&segment, exposed.buffer()).await.expect("pulled") == keyed(1000, 4));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_interface_needs_an_address_for_others() {
    let mut options = MooncakeOptions::default();
    assert_eq!(options.bind.to_string(), "127.0.0.1:0");
    options.bind = "0.0.0.0:0".parse().expect("an address");
    let error = Ours::start_with(options.clone()).await.err().expect("nothing to tell");
    assert_eq!(
        (error.class(), error.reason()),
        (ErrorClass::Invalid, "mooncake.advertise"),
        "{error}"
    );
    options.advertise = Some("127.0.0.1".parse().expect("an address"));
    let everywhere = Ours::start_with(options.clone()).await.expect("it listens");
    assert!(everywhere.mooncake.name().starts_with("127.0.0.1:"));
    options.bind = everywhere.mooncake.name().parse().expect("an address");
    let error = Ours::start_with(options.clone()).await.err().expect("in use");
    assert_eq!(
        (error.class(), error.reason()),
        (ErrorClass::Unavailable, "mooncake.bind"),
        "{error}"
    );
    let error = Mooncake::start(everywhere.network.clone(), MooncakeOptions::default()).await;
    let error = error.expect_err("one host, one pair of ports");
    assert_eq!(
        (error.class(), error.reason()),
        (ErrorClass::Conflict, "mooncake.started"),
        "{error}"
    );
    everywhere.host.shutdown().await;
    everywhere.mooncake.shutdown().await;
    TcpStream::connect(everywhere.mooncake.name())
        .await
        .expect_err("it was shut down");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ours_over_ipv6() {
    let ours = Ours::start().await;
    let options = MooncakeOptions {
        bind: "[::1]:0".parse().expect("an address"),
        ..MooncakeOptions::default()
    };
    let Ok(other) = Ours::start_with(options).await else {
        return skip_ipv6();
    };
    let segment = ours.open(other.mooncake.name()).await;
    segment.probe(ConnectOptions::default()).await.expect("alive");
    let (_region, exposed) = other.expose(Borrowed::from(keyed(1000, 4)));
    assert!(pull(&segment, exposed.buffer()).await.expect("pulled") == keyed(1000, 4));
}

#[expect(clippy::print_stderr, reason = "a skip must be visible")]
fn skip_ipv6() {
    eprintln!("skipped: this machine has no ::1");
}

/// The clock stands still except where everybody waits for it.
#[tokio::test]
async fn half_a_request_does_not_hold_its_connection() {
    let ours = Ours::start().await;
    let mut stream = TcpStream::connect(data_port(&ours).await).await.expect("it listens");
    stream.write_all(&[0; 10]).await.expect("sent");
    tokio::time::pause();
    let begun = tokio::time::Instant::now();
    let end = timeout(Duration::from_secs(60), stream.read(&mut [0; 1])).await;
    assert_eq!(end.expect("closed").expect("in order"), 0);
    assert!(begun.elapsed() >= Duration::from_secs(20), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn peers_that_are_slow_are_served_to_the_end() {
    const MIB: usize = 1 << 20;
    let ours = Ours::start().await;
    let len = 24 * MIB;
    let (_region, exposed) = ours.expose(Borrowed::from(keyed(len, 4)));
    let mut memory = Writable::allocate(MIB as u64).expect("memory");
    let (region, writable) = ours.expose(memory.clone());
    let data = data_port(&ours).await;
    let mut reader = TcpStream::connect(&data).await.expect("it listens");
    reader.write_all(&request(0x80, exposed.buffer())).await.expect("sent");
    tokio::time::pause();
    // Of what is sent in one go, too little in the time in which a peer that does nothing is cut off.
    let mut status = [0; 8];
    reader.read_exact(&mut status).await.expect("a status");
    assert_eq!(status, *DONE);
    let mut read = vec![0; len];
    for part in read.chunks_mut(MIB) {
        tokio::time::sleep(Duration::from_secs(10)).await;
        reader.read_exact(part).await.expect("it is served");
    }
    assert!(read == keyed(len, 4));
    let mut writer = TcpStream::connect(&data).await.expect("it listens");
    writer.write_all(&request(0x81, writable.buffer())).await.expect("sent");
    // Never as much as a connection usually waits for before it is readable.
    let bytes = keyed(MIB, 5);
    for part in bytes.chunks(100 << 10) {
        writer.write_all(part).await.expect("it is heard");
        tokio::time::sleep(Duration::from_secs(20)).await;
    }
    writer.read_exact(&mut status).await.expect("a status");
    assert_eq!(status, *DONE);
    drop((region, writable));
    assert!(owned(&mut memory).await == bytes);
}
