//! Who connects without being a peer, or stops behaving like one, disturbs nobody else.

use std::net::{IpAddr, Ipv6Addr};
use std::time::Instant;

use tokio::net::TcpListener;

use super::*;
use crate::wire::{Challenge, Hello, MAX_FRAME, Request, Role, Welcome};

/// A bare connection, past the owner's challenge.
async fn stranger(side: &Side) -> (TcpStream, Challenge) {
    let mut socket = TcpStream::connect(side.network.local_addr()).await.expect("it listens");
    let frame = read_frame(&mut socket).await.expect("a challenge");
    (socket, wire::decode_versioned(&frame).expect("of this version"))
}

async fn read_frame(socket: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let read = async {
        let len = socket.read_u32_le().await?;
        let mut frame = vec![0; len as usize];
        socket.read_exact(&mut frame).await?;
        Ok(frame)
    };
    tokio::time::timeout(LIMIT, read).await.expect("an answer or an end")
}

async fn write_frame(socket: &mut TcpStream, frame: &[u8]) {
    let mut bytes = (frame.len() as u32).to_le_bytes().to_vec();
    bytes.extend_from_slice(frame);
    socket.write_all(&bytes).await.expect("sent");
}

fn hello(side: &Side, role: Role, proof: Option<[u8; 32]>) -> Vec<u8> {
    wire::encode_versioned(&Hello {
        expects: side.peer.incarnation,
        process: side.peer.process,
        host: "elsewhere".to_owned(),
        role,
        proof,
    })
}

/// Reads until the owner ends the connection.
async fn ended(socket: &mut TcpStream) {
    let end = async { while socket.read(&mut [0; 256]).await.is_ok_and(|read| read > 0) {} };
    tokio::time::timeout(LIMIT, end).await.expect("the owner ends it");
}

#[tokio::test]
async fn garbage_instead_of_a_greeting_is_cut_off_at_once() {
    let owner = side(NetworkOptions::default()).await;
    let oversized = (MAX_FRAME as u32 + 1).to_le_bytes();
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 100], &[255; 100], &oversized] {
        let (mut socket, _) = stranger(&owner).await;
        // The owner may have closed it before all was sent.
        let _ = socket.write_all(garbage).await;
        let begin = Instant::now();
        ended(&mut socket).await;
        assert!(
            begin.elapsed() < Duration::from_secs(3),
            "it took a timeout to refuse {garbage:?}"
        );
    }
    // Half a greeting, and then nothing more.
    let (mut socket, _) = stranger(&owner).await;
    socket.write_all(&[50, 0, 0, 0, b'S']).await.expect("sent");
    drop(socket);
    let reader = side(NetworkOptions::default()).await;
    connect(&reader, &owner).await.expect("others are served");
}

#[tokio::test]
async fn greetings_that_do_not_fit_are_answered_with_the_reason() {
    let owner = side(token("t")).await;
    let mut other_version = hello(&owner, Role::Control, None);
    other_version[4] = 9;
    let problem = async |greeting: &[u8]| {
        let (mut socket, _) = stranger(&owner).await;
        write_frame(&mut socket, greeting).await;
        let frame = read_frame(&mut socket).await.expect("an answer");
        ended(&mut socket).await;
        wire::decode_versioned::<Welcome>(&frame).expect("of this version")
    };
    match problem(&other_version).await {
        Welcome::Refused { problem } => assert!(problem.contains("version 9"), "{problem}"),
        other => panic!("{other:?}"),
    }
    let lane = Role::Lane { session: 7 };
    for role in [Role::Control, lane] {
        let answer = problem(&hello(&owner, role, None)).await;
        assert!(matches!(answer, Welcome::Token { .. }), "{answer:?}");
        let answer = problem(&hello(&owner, role, Some([7; 32]))).await;
        assert!(matches!(answer, Welcome::Token { .. }), "{answer:?}");
    }
    let (mut socket, challenge) = stranger(&owner).await;
    let key = Key::new(&Secret::new("t"));
    let proof = key.prove(&challenge, owner.peer.incarnation);
    write_frame(&mut socket, &hello(&owner, lane, Some(proof))).await;
    let frame = read_frame(&mut socket).await.expect("an answer");
    let answer = wire::decode_versioned::<Welcome>(&frame).expect("of this version");
    assert!(
        matches!(answer, Welcome::Refused { .. }),
        "a lane of no session: {answer:?}"
    );
    // A proof that was heard before is good for nothing.
    let (mut socket, _) = stranger(&owner).await;
    write_frame(&mut socket, &hello(&owner, Role::Control, Some(proof))).await;
    let frame = read_frame(&mut socket).await.expect("an answer");
    let answer = wire::decode_versioned::<Welcome>(&frame).expect("of this version");
    assert!(matches!(answer, Welcome::Token { .. }), "{answer:?}");
}

#[tokio::test]
async fn idle_connections_keep_nobody_out() {
    let (owner, reader) = (
        side(NetworkOptions::default()).await,
        side(NetworkOptions::default()).await,
    );
    let mut idle = Vec::new();
    for _ in 0..300 {
        idle.push(stranger(&owner).await.0);
    }
    let begin = Instant::now();
    connect(&reader, &owner).await.expect("connected");
    let took = begin.elapsed();
    assert!(
        took < Duration::from_secs(3),
        "300 idle connections kept a peer waiting for {took:?}"
    );
    // Those that came first have made room.
    ended(&mut idle[0]).await;
}

/// A reader past its greeting that nobody taught the protocol.
async fn bare_reader(owner: &Side) -> TcpStream {
    let (mut socket, _) = stranger(owner).await;
    write_frame(&mut socket, &hello(owner, Role::Control, None)).await;
    let frame = read_frame(&mut socket).await.expect("an answer");
    let answer = wire::decode_versioned::<Welcome>(&frame).expect("of this version");
    assert!(matches!(answer, Welcome::Open { .. }), "{answer:?}");
    socket
}

#[tokio::test]
async fn a_reader_that_breaks_the_protocol_loses_its_pins_and_nobody_else_does() {
    let (owner, reader) = (
        side(NetworkOptions::default()).await,
        side(NetworkOptions::default()).await,
    );
    let (pinned, other) = (
        register(&owner, Kind::Cma, vec![1; 100]),
        register(&owner, Kind::Cma, vec![2; 100]),
    );
    let link = connect(&reader, &owner).await.expect("connected");
    let options = TransferOptions::default();
    let grip = link.pin(Kind::Tcp, &other.reference(), &options).await.expect("pinned");
    for broken in [&[255; 20][..], &[200; 4]] {
        let mut socket = bare_reader(&owner).await;
        let reference = pinned.reference();
        let pin = Request::Pin {
            request: 1,
            kind: Kind::Tcp,
            region: reference.region,
            generation: reference.generation,
            capability: reference.capability,
        };
        write_frame(&mut socket, &wire::encode(&pin)).await;
        read_frame(&mut socket).await.expect("pinned");
        assert!(!pinned.is_idle());
        if broken.len() == 20 {
            write_frame(&mut socket, broken).await;
        } else {
            // Announces a frame above the limit.
            socket.write_all(broken).await.expect("sent");
        }
        ended(&mut socket).await;
        tokio::time::timeout(LIMIT, pinned.idle()).await.expect("let go");
    }
    grip.confirm().await.expect("still held");
}

#[tokio::test]
async fn owners_that_are_none_are_told_apart() {
    let reader = side(NetworkOptions::default()).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let address = NetworkAddress {
        host: String::new(),
        sockets: vec![listener.local_addr().expect("bound")],
        extra: Vec::new(),
    };
    let mut peer = reader.peer.clone();
    peer.transports[0].address = wire::encode_versioned(&address);
    let answers: [(&[u8], &str); 5] = [
        (b"", "peer.lost"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "peer.lost"),
        (b"\x0d\x00\x00\x00HTTP/1.1 400\n", "connect.refused"),
        (b"\x06\x00\x00\x00SWD\n\x09\x00", "connect.version"),
        (b"\x03\x00\x00\x00SW", "peer.lost"),
    ];
    for (answer, reason) in answers {
        let serve = async {
            let (mut socket, _) = listener.accept().await.expect("accepted");
            socket.write_all(answer).await.expect("sent");
        };
        let options = ConnectOptions::default();
        let (connected, ()) = tokio::join!(reader.network.link(Kind::Tcp, &peer, &options), serve);
        let error = connected.expect_err("no peer");
        assert_eq!(error.reason(), reason, "{answer:?}: {error}");
    }
    // One that accepts and says nothing.
    let options = ConnectOptions {
        deadline: Duration::from_millis(200),
    };
    let error = reader
        .network
        .link(Kind::Tcp, &peer, &options)
        .await
        .expect_err("silence");
    assert_eq!(error.reason(), "connect.deadline", "{error}");
}

#[tokio::test]
#[expect(clippy::print_stderr, reason = "a skip must be visible")]
async fn peers_meet_over_ipv6() {
    if let Err(error) = TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).await {
        eprintln!("skipped: no IPv6 here: {error}");
        return;
    }
    let bind = SocketAddr::new(IpAddr::V6(Ipv6Addr::LOCALHOST), 0);
    let owner = side(NetworkOptions {
        bind,
        ..NetworkOptions::default()
    })
    .await;
    assert!(owner.network.local_addr().is_ipv6());
    let region = register(&owner, Kind::Cma, vec![1; 100]);
    let reader = side(NetworkOptions::default()).await;
    let link = connect(&reader, &owner).await.expect("connected");
    let grip = link
        .pin(Kind::Tcp, &region.reference(), &TransferOptions::default())
        .await;
    grip.expect("pinned").confirm().await.expect("held");
}
