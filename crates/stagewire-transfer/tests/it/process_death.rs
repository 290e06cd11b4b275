//! SIGKILL of either side: a typed error within a second, no other bytes, nothing left behind.

use std::time::{Duration, Instant};

use stagewire_core::{Classify, ErrorClass, Incarnation, Record};
use stagewire_transfer::{
    ConnectOptions, Host, Pinned, RegisterOptions, Remote, Target, TransferError, TransferOptions, sweep,
};
use tokio::time::timeout;
use uuid::Uuid;

use crate::child::Child;
use crate::support::{self, Node, cma_works, run_dir, until};

const LEN: usize = 24 << 20;
const ROUNDS: usize = 10;
const NOTICED_WITHIN: Duration = Duration::from_secs(1);

fn is_lost(error: &dyn Classify) {
    let found = (error.class(), error.reason());
    assert_eq!(found, (ErrorClass::Unavailable, "peer.lost"), "{error}");
}

fn nothing_left(reader: &Host) {
    let stats = reader.stats();
    assert_eq!((stats.connections, stats.mapped_bytes), (0, 0), "{stats:?}");
}

/// Pulls again and again; gives the number of pulls that succeeded, all exact, and the error that ended it.
async fn pull_until_error(pinned: &dyn Pinned, expected: &[u8], mut after: impl FnMut(usize)) -> TransferError {
    let mut target = Target::allocate(LEN as u64).expect("memory");
    let whole = [Record::contiguous(0, 0, LEN as u64)];
    for round in 0.. {
        if let Err(error) = pinned.pull(&whole, &target, TransferOptions::default()).await {
            assert!(target.slice(0..1).is_err(), "a failed pull counts as written");
            return error;
        }
        assert!(target.as_slice().expect("pulled") == expected, "other bytes");
        after(round);
        target.reset().expect("idle");
    }
    unreachable!("the loop ends with an error")
}

async fn producer_dies_during_pulls(name: &str) {
    let (_parent, dir) = run_dir();
    if name == "cma" && !cma_works(&dir).await {
        return;
    }
    let expected = support::bulk(LEN);
    for round in 0..ROUNDS {
        let reader = Node::start(&dir).await;
        let (mut child, (peer, region)) = Child::producer(&dir, name, LEN).await;
        let remote = reader
            .transport(name)
            .connect(&peer, ConnectOptions::default())
            .await
            .expect("connected");
        let pinned = remote.pin(&region, TransferOptions::default()).await.expect("pinned");
        let (kill, killed) = tokio::sync::oneshot::channel();
        let mut kill = Some(kill);
        let pulls = pull_until_error(&*pinned, &expected, |done| {
            if done == round % 3
                && let Some(kill) = kill.take()
            {
                kill.send(()).expect("somebody waits");
            }
        });
        let killer = async {
            killed.await.expect("told after a pull");
            // At another point of the next pull in each round.
            tokio::time::sleep(Duration::from_micros(300 * round as u64)).await;
            child.kill();
            Instant::now()
        };
        let (error, at) = timeout(Duration::from_secs(20), async { tokio::join!(pulls, killer) })
            .await
            .expect("ends");
        assert!(at.elapsed() <= NOTICED_WITHIN, "noticed after {:?}", at.elapsed());
        is_lost(&error);
        after_death(&reader, &*remote, pinned).await;
        child.gone().await;
        let connect = reader.transport(name).connect(&peer, ConnectOptions::default()).await;
        is_lost(&connect.expect_err("nobody is there"));
        assert_eq!(sweep(&dir).expect("readable").len(), 1);
        reader.shutdown().await;
        assert_eq!(std::fs::read_dir(&dir).expect("readable").count(), 0, "files were left");
    }
}

/// Every later use says the same, and nothing is left once the pin is dropped.
async fn after_death(reader: &Host, remote: &dyn Remote, pinned: Box<dyn Pinned>) {
    let closed = timeout(NOTICED_WITHIN, remote.closed()).await.expect("noticed");
    // A dying process closes its sockets a little before it counts as dead, longer before it on a busy machine.
    assert!(
        closed.contains("died") || closed.contains("closed the connection"),
        "{closed}"
    );
    assert!(!remote.is_alive());
    let target = Target::allocate(1).expect("memory");
    let byte = [Record::contiguous(0, 0, 1)];
    let pull = pinned.pull(&byte, &target, TransferOptions::default());
    is_lost(&pull.await.expect_err("it is dead"));
    drop(pinned);
    until("connection and mapping are gone", || reader.stats().mapped_bytes == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shm_producer_dies_during_pulls() {
    producer_dies_during_pulls("shm").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cma_producer_dies_during_pulls() {
    producer_dies_during_pulls("cma").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mapping_outlives_its_producer() {
    let (_parent, dir) = run_dir();
    let reader = Node::start(&dir).await;
    let (mut child, (peer, region)) = Child::producer(&dir, "shm", LEN).await;
    let remote = reader
        .shm()
        .connect(&peer, ConnectOptions::default())
        .await
        .expect("connected");
    let pinned = remote.pin(&region, TransferOptions::default()).await.expect("pinned");
    let mapping = pinned.map().await.expect("mapped");
    child.kill();
    timeout(NOTICED_WITHIN, remote.closed()).await.expect("noticed");
    is_lost(&pinned.map().await.expect_err("it is dead"));
    child.gone().await;
    assert!(*mapping == *support::bulk(LEN), "the bytes changed");
    drop((mapping, pinned, remote));
    until("nothing is left", || reader.stats().connections == 0).await;
    nothing_left(&reader);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pin_in_flight_ends_with_its_peer() {
    let (_parent, dir) = run_dir();
    let reader = Node::start(&dir).await;
    let (mut child, (peer, region)) = Child::producer(&dir, "shm", 4096).await;
    let remote = reader
        .shm()
        .connect(&peer, ConnectOptions::default())
        .await
        .expect("connected");
    child.stop().await;
    let options = TransferOptions { deadline: None };
    let pin = tokio::spawn(async move { remote.pin(&region, options).await.map(drop) });
    until("the request is sent", || !pin.is_finished()).await;
    child.kill();
    let at = Instant::now();
    let error = timeout(NOTICED_WITHIN, pin).await.expect("noticed").expect("no panic");
    is_lost(&error.expect_err("it is dead"));
    assert!(at.elapsed() <= NOTICED_WITHIN);
}

/// A fork keeps the sockets of its parent open: only the pidfd tells that the parent died.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_producer_that_forked_dies_as_any_other() {
    let (_parent, dir) = run_dir();
    let reader = Node::start(&dir).await;
    let (mut child, (peer, region)) = Child::producer(&dir, "shm", 4096).await;
    let remote = reader
        .shm()
        .connect(&peer, ConnectOptions::default())
        .await
        .expect("connected");
    let pinned = remote.pin(&region, TransferOptions::default()).await.expect("pinned");
    let fork = child.fork().await;
    child.kill();
    let closed = timeout(NOTICED_WITHIN, remote.closed()).await.expect("noticed");
    assert_eq!(closed, "its process died");
    is_lost(&pinned.map().await.expect_err("it is dead"));
    drop(fork);
}

/// It lives on under its number, and a fork keeps its sockets open: only its memory tells.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_producer_that_executes_another_program_is_lost() {
    let (_parent, dir) = run_dir();
    if !cma_works(&dir).await {
        return;
    }
    let expected = support::bulk(LEN);
    let reader = Node::start(&dir).await;
    let (mut child, (peer, region)) = Child::producer(&dir, "cma", LEN).await;
    let remote = reader
        .transport("cma")
        .connect(&peer, ConnectOptions::default())
        .await
        .expect("connected");
    let pinned = remote.pin(&region, TransferOptions::default()).await.expect("pinned");
    let fork = child.fork().await;
    let pulls = pull_until_error(&*pinned, &expected, |_| {});
    let (error, ()) = timeout(Duration::from_secs(20), async { tokio::join!(pulls, child.execute()) })
        .await
        .expect("ends");
    is_lost(&error);
    drop(fork);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_pins_of_a_reader_that_forked_end_with_it() {
    let (_parent, dir) = run_dir();
    let owner = Node::start(&dir).await;
    let memory = support::memory(&owner, "shm", &support::bulk(4096));
    let region = owner
        .shm()
        .register(memory, RegisterOptions::default())
        .expect("registered");
    let mut child = Child::reader(&dir, "shm", &(owner.peer(), region.reference())).await;
    let fork = child.fork().await;
    assert!(!region.is_idle());
    child.kill();
    timeout(NOTICED_WITHIN, region.idle()).await.expect("noticed");
    drop(fork);
}

async fn reader_dies(name: &str) {
    let (_parent, dir) = run_dir();
    if name == "cma" && !cma_works(&dir).await {
        return;
    }
    let owner = Node::start(&dir).await;
    for _ in 0..ROUNDS {
        let memory = support::memory(&owner, name, &support::bulk(1 << 20));
        let region = owner
            .transport(name)
            .register(memory, RegisterOptions::default())
            .expect("registered");
        let mut child = Child::reader(&dir, name, &(owner.peer(), region.reference())).await;
        assert_eq!((owner.stats().pins_held, region.is_idle()), (1, false));
        region.release();
        assert_eq!(owner.stats().regions, 1, "released under a pin");
        child.kill();
        timeout(NOTICED_WITHIN, region.idle()).await.expect("noticed");
        drop(region);
        child.gone().await;
        assert_eq!(sweep(&dir).expect("readable").len(), 1, "the reader's own socket");
    }
    until("the connections are gone", || owner.stats().connections == 0).await;
    let stats = owner.stats();
    assert_eq!(
        (stats.pins_held, stats.regions, stats.allocated_bytes),
        (0, 0, 0),
        "{stats:?}"
    );
    assert_eq!((stats.pins_served, stats.registrations), (ROUNDS as u64, ROUNDS as u64));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shm_pins_end_with_their_reader() {
    reader_dies("shm").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cma_pins_end_with_their_reader() {
    reader_dies("cma").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tcp_producer_dies_during_pulls() {
    producer_dies_during_pulls("tcp").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tcp_pins_end_with_their_reader() {
    reader_dies("tcp").await;
}

/// The socket of a peer has its name from the first half of its incarnation, so a successor may get the same one.
async fn a_successor_on_the_same_socket_is_another_one(name: &str) {
    let (_parent, dir) = run_dir();
    if name == "cma" && !cma_works(&dir).await {
        return;
    }
    let reader = Node::start(&dir).await;
    let transport = reader.transport(name);
    let [before, after] = [1, 2].map(|life| Incarnation(Uuid::from_u128(0x0123_4567_89ab_cdef << 64 | life)));
    let (mut child, (old, region)) = Child::producer_as(&dir, before, name, LEN).await;
    let remote = transport.connect(&old, ConnectOptions::default()).await;
    let remote = remote.expect("connected");
    let pinned = remote.pin(&region, TransferOptions::default()).await.expect("pinned");
    child.kill();
    child.gone().await;
    timeout(NOTICED_WITHIN, remote.closed()).await.expect("noticed");

    let (_child, (new, new_region)) = Child::producer_as(&dir, after, name, LEN).await;
    assert_eq!(new.transports[0], old.transports[0], "another socket");
    let error = transport.connect(&old, ConnectOptions::default()).await;
    let error = error.expect_err("that one died");
    let found = (error.class(), error.reason());
    assert_eq!(found, (ErrorClass::Unavailable, "peer.incarnation"), "{error}");
    let target = Target::allocate(LEN as u64).expect("memory");
    let whole = [Record::contiguous(0, 0, LEN as u64)];
    is_lost(
        &pinned
            .pull(&whole, &target, TransferOptions::default())
            .await
            .expect_err("it died"),
    );
    let remote = transport.connect(&new, ConnectOptions::default()).await;
    let remote = remote.expect("connected");
    let stale = remote.pin(&region, TransferOptions::default()).await;
    let stale = stale.expect_err("of the life before");
    assert!(
        [ErrorClass::NotFound, ErrorClass::Denied].contains(&stale.class()),
        "{stale}"
    );
    let pinned = remote
        .pin(&new_region, TransferOptions::default())
        .await
        .expect("pinned");
    let pulled = pinned.pull(&whole, &target, TransferOptions::default()).await;
    pulled.expect("pulled");
    assert!(target.as_slice().expect("pulled") == support::bulk(LEN), "other bytes");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shm_successor_on_the_same_socket_is_another_one() {
    a_successor_on_the_same_socket_is_another_one("shm").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cma_successor_on_the_same_socket_is_another_one() {
    a_successor_on_the_same_socket_is_another_one("cma").await;
}

/// Its memory went while it was registered, which its owner had promised not to let happen.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_that_went_under_a_pin_fails_the_record_that_needs_it() {
    let (_parent, dir) = run_dir();
    if !cma_works(&dir).await {
        return;
    }
    let reader = Node::start(&dir).await;
    let (mut child, (peer, region)) = Child::producer(&dir, "cma", LEN).await;
    let connected = reader.transport("cma").connect(&peer, ConnectOptions::default()).await;
    let pinned = connected
        .expect("connected")
        .pin(&region, TransferOptions::default())
        .await;
    let pinned = pinned.expect("pinned");
    child.hide().await;
    let target = Target::allocate(LEN as u64).expect("memory");
    // Short rows, which are copied at once, and long ones, which two threads copy.
    for width in [4096, 1 << 20] {
        let record = |at: u64| Record::contiguous(at, (LEN as u64 - at) / 2, width);
        let (half, end) = (LEN as u64 / 2, LEN as u64 - (8 << 20));
        let batch = [record(0), record(half - width), record(end), record(half / 2)];
        let error = pinned.pull(&batch, &target, TransferOptions::default()).await;
        let error = error.expect_err("it cannot be read");
        assert_eq!(
            (error.reason(), error.record()),
            ("transfer.unreadable", Some(2)),
            "{error}"
        );
        assert!(target.is_idle() && target.slice(0..1).is_err(), "it counts as written");
        let good = [batch[0], batch[1], batch[3]];
        let target = Target::allocate(LEN as u64).expect("memory");
        let pulled = pinned.pull(&good, &target, TransferOptions::default()).await;
        pulled.expect("the other half is there");
    }
}
