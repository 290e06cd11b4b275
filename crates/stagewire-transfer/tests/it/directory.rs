//! The socket directory, strangers on the socket, orderly ends.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::Duration;

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen,
    recv, send,
};
use stagewire_core::{Classify, ErrorClass, Incarnation};
use stagewire_transfer::{
    ConnectOptions, Host, HostOptions, RegisterOptions, RegisterProblem, StartError, TransferOptions, listen_unix,
    sweep,
};
use tokio::time::timeout;
use uuid::Uuid;

use crate::support::{self, ARENA, memory, peer, run_dir, start, until};

fn options(dir: &Path) -> HostOptions {
    HostOptions {
        dir: dir.to_owned(),
        incarnation: Incarnation(Uuid::from_u128(0x0123_4567_89ab_cdef << 64)),
        arena_limit: ARENA,
    }
}

const NAME: &str = "0123456789abcdef.data";

fn files(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).expect("readable");
    let mut names: Vec<String> = entries
        .map(|entry| entry.expect("readable").file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

#[tokio::test]
async fn the_directory_is_private_and_the_socket_goes_with_the_host() {
    let (_parent, dir) = run_dir();
    let host = Host::start(options(&dir)).await.expect("starts");
    assert_eq!(fs::metadata(&dir).expect("made").permissions().mode() & 0o777, 0o700);
    assert_eq!(files(&dir), [NAME]);
    assert!(matches!(
        Host::start(options(&dir)).await,
        Err(StartError::InUse { .. })
    ));
    host.shutdown().await;
    assert!(files(&dir).is_empty());
    let host = Host::start(options(&dir)).await.expect("starts again");
    drop(host);
    assert!(files(&dir).is_empty(), "left by a drop");
}

#[tokio::test]
async fn a_directory_that_others_can_enter_is_refused() {
    let (parent, dir) = run_dir();
    fs::create_dir(&dir).expect("made");
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o750)).expect("mine");
    let error = Host::start(options(&dir)).await.expect_err("others can enter");
    assert_eq!(error.class(), ErrorClass::Denied, "{error}");
    assert!(error.to_string().contains("mode is 750"), "{error}");
    let file = parent.path().join("file");
    fs::write(&file, "").expect("written");
    assert!(Host::start(options(&file)).await.is_err());
    let long = parent.path().join("x".repeat(100));
    let error = Host::start(options(&long)).await.expect_err("too long");
    assert_eq!(error.reason(), "socket.path_too_long", "{error}");
}

#[tokio::test]
async fn sockets_of_the_dead_are_replaced_and_swept() {
    let (_parent, dir) = run_dir();
    assert!(sweep(&dir).expect("a missing directory holds none").is_empty());
    let host = start(&dir).await;
    let ctl = listen_unix(&dir.join("living.ctl")).expect("listens");
    // Std leaves the file when a listener is dropped, as a killed process does.
    for dead in ["dead.data", "dead.ctl", NAME, "starting.data.new", "other.sock"] {
        drop(UnixListener::bind(dir.join(dead)).expect("bound"));
    }
    fs::write(dir.join("file.data"), "not a socket").expect("written");
    let again = Host::start(options(&dir))
        .await
        .expect("takes the place of the dead one");
    let mut swept = sweep(&dir).expect("readable");
    swept.sort();
    assert_eq!(swept, [dir.join("dead.ctl"), dir.join("dead.data")]);
    let own = format!("{}.data", &host.incarnation().0.simple().to_string()[..16]);
    let mut expected = vec![
        NAME,
        "file.data",
        "living.ctl",
        "other.sock",
        "starting.data.new",
        own.as_str(),
    ];
    expected.sort_unstable();
    assert_eq!(files(&dir), expected);
    drop((again, ctl));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_on_the_socket_disturb_nobody() {
    let (_parent, dir) = run_dir();
    let (owner, reader) = (Host::start(options(&dir)).await.expect("starts"), start(&dir).await);
    let address = SocketAddrUnix::new(dir.join(NAME)).expect("short");
    let stranger = || {
        let kind = SocketType::SEQPACKET;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None);
        let socket = socket.expect("a socket");
        connect(&socket, &address).expect("connects");
        socket
    };
    let _silent = [stranger(), stranger(), stranger()];
    for greeting in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        b"SWD\n\x09\x00",
        b"SWD\n\x01\x00\xff",
        &[0; 100_000],
    ] {
        let socket = stranger();
        send(&socket, greeting, SendFlags::NOSIGNAL).expect("sent");
        let mut answer = [0; 256];
        // An answer in the form of this version, or a closed connection; then, in any case, the end.
        while recv(&socket, &mut answer, RecvFlags::empty()).is_ok_and(|(read, _)| read > 0) {
            assert_eq!(answer[..6], *b"SWD\n\x02\x00");
        }
    }
    let memory = memory(&owner, "shm", &support::bulk(4096));
    let region = owner
        .shm()
        .register(memory, RegisterOptions::default())
        .expect("registered");
    let remote = reader
        .shm()
        .connect(&peer(&owner), ConnectOptions::default())
        .await
        .expect("connected");
    remote
        .pin(&region.reference(), TransferOptions::default())
        .await
        .expect("pinned");
}

/// A peer of another version, played by a bare socket.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_of_another_version_is_told_apart() {
    let (_parent, dir) = run_dir();
    let (owner, reader) = (Host::start(options(&dir)).await.expect("starts"), start(&dir).await);
    let target = peer(&owner);
    owner.shutdown().await;
    let flags = SocketFlags::CLOEXEC;
    let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("a socket");
    bind(&listener, &SocketAddrUnix::new(dir.join(NAME)).expect("short")).expect("bound");
    listen(&listener, 1).expect("listens");
    let other = tokio::task::spawn_blocking(move || {
        let socket = accept_with(&listener, flags).expect("accepted");
        send(&socket, b"SWD\n\x09\x00whatever", SendFlags::NOSIGNAL).expect("sent");
        // Until the reader has hung up.
        let mut hello = [0; 256];
        while recv(&socket, &mut hello, RecvFlags::empty()).is_ok_and(|(read, _)| read > 0) {}
    });
    let error = reader
        .shm()
        .connect(&target, ConnectOptions::default())
        .await
        .expect_err("another version");
    assert_eq!(
        (error.class(), error.reason()),
        (ErrorClass::Unsupported, "connect.version"),
        "{error}"
    );
    assert!(
        error.to_string().contains("version 9") && error.to_string().contains("version 2"),
        "{error}"
    );
    other.await.expect("no panic");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_connection_serves_all_who_need_the_peer() {
    let (_parent, dir) = run_dir();
    let (owner, reader) = (start(&dir).await, start(&dir).await);
    let target = peer(&owner);
    let connect = || async {
        reader
            .shm()
            .connect(&target, ConnectOptions::default())
            .await
            .expect("connected")
    };
    let remotes = futures::future::join_all((0..20).map(|_| connect())).await;
    assert_eq!((reader.stats().connections, owner.stats().connections), (1, 1));
    drop(remotes);
    connect().await;
    assert_eq!(reader.stats().connections, 1, "not kept");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_ends_connections_but_not_the_memory_that_is_pinned() {
    let (_parent, dir) = run_dir();
    let (owner, reader) = (start(&dir).await, start(&dir).await);
    let bytes = support::bulk(1 << 20);
    let region = owner
        .shm()
        .register(memory(&owner, "shm", &bytes), RegisterOptions::default())
        .expect("registered");
    let remote = reader
        .shm()
        .connect(&peer(&owner), ConnectOptions::default())
        .await
        .expect("connected");
    let pinned = remote
        .pin(&region.reference(), TransferOptions::default())
        .await
        .expect("pinned");
    let mapping = pinned.map().await.expect("mapped");
    let reference = region.reference();
    drop(region);
    owner.shutdown().await;
    timeout(Duration::from_secs(1), remote.closed()).await.expect("told");
    let error = remote
        .pin(&reference, TransferOptions::default())
        .await
        .expect_err("shut down");
    assert_eq!(error.class(), ErrorClass::Unavailable, "{error}");
    let again = reader.shm().connect(&peer(&owner), ConnectOptions::default()).await;
    assert_eq!(again.expect_err("shut down").reason(), "peer.lost");
    // The extent is not given to anybody else while the reader looks at it.
    let fill = owner.arena().allocate(ARENA.0 - (1 << 20)).expect("all the rest");
    assert!(owner.arena().allocate(1).is_err(), "pinned memory was given away");
    assert!(*mapping == *bytes, "pinned memory changed");
    drop((mapping, pinned, remote, fill));
    until("the memory is free", || owner.stats().allocated_bytes == 0).await;
    let refused = owner
        .shm()
        .register(memory(&owner, "shm", &bytes), RegisterOptions::default());
    assert_eq!(refused.expect_err("shut down").problem(), &RegisterProblem::ShutDown);
    until("the connections are gone", || {
        owner.stats().connections + reader.stats().connections == 0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_unmap_segments_that_their_owner_gave_up() {
    let (_parent, dir) = run_dir();
    let (owner, reader) = (start(&dir).await, start(&dir).await);
    let remote = reader
        .shm()
        .connect(&peer(&owner), ConnectOptions::default())
        .await
        .expect("connected");
    for _ in 0..3 {
        let memory = memory(&owner, "shm", &support::bulk(4096));
        let region = owner
            .shm()
            .register(memory, RegisterOptions::default())
            .expect("registered");
        let pinned = remote
            .pin(&region.reference(), TransferOptions::default())
            .await
            .expect("pinned");
        assert_eq!(*pinned.map().await.expect("mapped"), *support::bulk(4096));
        assert_eq!(reader.stats().mapped_bytes, ARENA.0);
        drop((pinned, region));
        until("the extent is free", || owner.stats().allocated_bytes == 0).await;
        assert_eq!(reader.stats().mapped_bytes, ARENA.0, "kept for the next region");
        owner.arena().trim();
        assert_eq!(owner.stats().segment_bytes, 0);
        until("the reader has unmapped it", || reader.stats().mapped_bytes == 0).await;
    }
}
