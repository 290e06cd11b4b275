//! Stores whose process is killed: what they sealed is there again.

mod child;
mod files;
mod leave;
mod space;

use std::collections::BTreeMap;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Signal, kill_process};
use stagewire_core::{ByteCount, Classify, ErrorClass, Incarnation, PayloadId, Peer};
use stagewire_store::{
    DurableOptions, HostStore, NewObject, OpenError, Recovery, SpillOptions, Store, StoreError, StoreOptions, TokenGate,
};
use stagewire_transfer::{ConnectOptions, Host, HostOptions, TransferOptions};
use tempfile::TempDir;
use uuid::Uuid;

use crate::world;
use child::{Child, keeper, pattern};

const MIB: u64 = 1 << 20;
const LIMIT: ByteCount = ByteCount(64 * MIB);
/// A fraction of what the random test keeps.
const SMALL: ByteCount = ByteCount(4 * MIB);
/// How often the random test kills, in CI and in full.
const ROUNDS: (u32, u32) = (25, 500);

fn id(n: u128) -> PayloadId {
    PayloadId(Uuid::from_u128(n))
}

/// A host in `dir`, for a store or for a reader.
async fn host(dir: &Path) -> Arc<Host> {
    let options = HostOptions {
        dir: dir.join("peers"),
        incarnation: Incarnation(Uuid::new_v4()),
        arena_limit: HostStore::arena_limit(LIMIT),
    };
    Host::start(options).await.expect("a host")
}

/// A store in `dir`; with files and little memory where there is a directory for them.
async fn open(dir: &Path, limit: ByteCount) -> Result<(Arc<Host>, HostStore, Recovery), OpenError> {
    let host = host(dir).await;
    let mut options = StoreOptions::new(limit, Arc::new(TokenGate::open()));
    options.durable = Some(DurableOptions {
        dir: dir.join("data"),
        keeper: keeper(),
    });
    let spill = dir.join("spill");
    if spill.exists() {
        options.limit = SMALL;
        options.spill = Some(SpillOptions {
            dir: spill,
            quota: LIMIT,
        });
    }
    let (store, recovery) = HostStore::open(&host, options).await?;
    Ok((host, store, recovery))
}

async fn reopen(dir: &TempDir) -> (Arc<Host>, HostStore, Recovery) {
    open(dir.path(), LIMIT).await.expect("it opens")
}

async fn check(store: &HostStore, n: u128, len: u64, seed: u64) {
    let object = store.get(id(n)).await.unwrap_or_else(|error| panic!("{error}"));
    assert!(
        object.part(0) == Some(&*pattern(seed, len)),
        "object {n} has other bytes"
    );
    assert_eq!(object.part(1), Some([].as_slice()));
}

async fn put(store: &HostStore, n: u128, len: u64, seed: u64) -> Result<(), StoreError> {
    let mut draft = store
        .create(NewObject::new(id(n), [ByteCount(len), ByteCount(0)]))
        .await?;
    draft.bytes_mut(0)?.copy_from_slice(&pattern(seed, len));
    draft.seal().await.map(drop)
}

fn dir() -> TempDir {
    tempfile::tempdir().expect("a directory")
}

/// Waits until no keeper listens in `dir`, and nobody holds the lock of one.
fn no_keeper(dir: &TempDir) {
    let socket = dir.path().join("data/keeper.sock");
    let begin = std::time::Instant::now();
    while socket.exists() {
        assert!(begin.elapsed() < Duration::from_secs(20), "the keeper is still there");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_sealed_survives_kill_9_of_the_process_and_its_group() {
    let dir = dir();
    let mut child = Child::start(dir.path());
    let sizes = [1, 4095, 4096, 4097, 100_000, 5 * MIB, 9 * MIB];
    for (n, len) in (1..).zip(sizes) {
        child.seal(n, len, n as u64);
    }
    child.seal(20, 1000, 20);
    child.delete(20);
    child.seal(21, 1000, 21);
    child.delete(21);
    child.seal(21, 2000, 22);
    child.draft(30, 3 * MIB);
    child.kill_group();

    let (_host, store, recovery) = reopen(&dir).await;
    assert_eq!(recovery.survivors.len(), sizes.len() + 1);
    assert_eq!(recovery.lost.objects + recovery.expired.objects, 0);
    for (n, len) in (1..).zip(sizes) {
        check(&store, n, len, n as u64).await;
    }
    check(&store, 21, 2000, 22).await;
    for n in [20, 30] {
        assert!(
            matches!(store.get(id(n)).await, Err(StoreError::NotFound { .. })),
            "{n} came back"
        );
        put(&store, n, 777, 9).await.expect("the key is free");
        check(&store, n, 777, 9).await;
    }
    let error = put(&store, 1, 5, 5).await.expect_err("it is there");
    assert!(matches!(error, StoreError::Exists { sealed: true, .. }), "{error}");
    let label = recovery.survivors.iter().find(|survivor| survivor.payload == id(1));
    assert_eq!(label.expect("it survived").label, b"label of 1");
    store.close().await.expect("the keeper ends");
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_stays_behind_after_an_orderly_end() {
    let dir = dir();
    let (host, store, recovery) = reopen(&dir).await;
    assert_eq!(recovery.survivors, []);
    put(&store, 1, 5 * MIB, 1).await.expect("room");
    store.close().await.expect("the keeper ends");
    no_keeper(&dir);
    assert_eq!(store.usage().used(), ByteCount(0));
    drop((store, host));
    let (_host, store, recovery) = reopen(&dir).await;
    assert_eq!((recovery.survivors.len(), recovery.lost.objects), (0, 0));
    put(&store, 1, 5, 1).await.expect("the key is free");
    store.close().await.expect("the keeper ends");
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_without_store_and_keeper_is_gone_and_counted() {
    let dir = dir();
    let mut child = Child::start(dir.path());
    child.seal(1, 10_000, 1);
    child.seal(2, 0, 2);
    let keeper = child.keeper();
    // Both at once: a keeper alone is replaced.
    child.stop();
    kill_process(keeper, Signal::KILL).expect("it runs");
    child.kill_group();
    let (_host, store, recovery) = reopen(&dir).await;
    assert_eq!((recovery.lost.objects, recovery.lost.nbytes), (1, ByteCount(12_288)));
    assert_eq!(recovery.survivors.len(), 1, "an object of no bytes needs no memory");
    assert!(store.get(id(1)).await.is_err());
    put(&store, 1, 10, 3).await.expect("the key is free");
    store.close().await.expect("the keeper ends");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_keeper_that_dies_is_replaced_at_once() {
    let dir = dir();
    let mut child = Child::start(dir.path());
    child.seal(1, 10_000, 1);
    let first = child.keeper();
    kill_process(first, Signal::KILL).expect("it runs");
    let second = child.another_keeper(first);
    assert_ne!(first, second);
    child.kill_group();
    let (_host, store, recovery) = reopen(&dir).await;
    assert_eq!((recovery.survivors.len(), recovery.lost.objects), (1, 0));
    check(&store, 1, 10_000, 1).await;
    store.close().await.expect("the keeper ends");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_of_the_dead_process_keeps_its_bytes() {
    let dir = dir();
    let mut child = Child::start(dir.path());
    child.seal(1, MIB, 1);
    child.seal(2, MIB, 2);
    let (peer, region): (Peer, _) = child.region(1);
    let reader = host(dir.path()).await;
    let remote = reader
        .shm()
        .connect(&peer, ConnectOptions::default())
        .await
        .expect("it listens");
    let pin = remote
        .pin(&region, TransferOptions::default())
        .await
        .expect("it is there");
    let mapping = pin.map().await.expect("shared memory");
    child.kill_group();

    let (_host, store, recovery) = reopen(&dir).await;
    assert_eq!(recovery.survivors.len(), 2);
    // The new process knows nothing of the reader: it deletes the object, and fills itself with others.
    store.delete(id(1), None).await.expect("it is there");
    let mut n = 100;
    while put(&store, n, MIB, 0xEE).await.is_ok() {
        n += 1;
    }
    assert!(n > 150, "{n}");
    assert!(*mapping == *pattern(1, MIB), "what a reader looks at was written over");
    check(&store, 2, MIB, 2).await;
    // The last object of the old segment goes, and with it the store's own hold on it.
    store.delete(id(2), None).await.expect("it is there");
    assert!(*mapping == *pattern(1, MIB), "what a reader looks at was taken away");
    store.close().await.expect("the keeper ends");
    assert!(
        *mapping == *pattern(1, MIB),
        "what a reader looks at went with the keeper"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_segment_of_which_little_is_left_is_not_kept() {
    let dir = dir();
    let mut child = Child::start(dir.path());
    for n in 1..=40 {
        child.seal(n, MIB, n as u64);
    }
    for n in (1..=40).filter(|n| n % 5 != 0) {
        child.delete(n);
    }
    child.kill_group();
    let (host, store, recovery) = reopen(&dir).await;
    assert_eq!((recovery.moved.objects, recovery.adopted.objects), (8, 0));
    for n in (1..=8).map(|n| n * 5) {
        check(&store, n, MIB, n as u64).await;
    }
    assert!(
        host.arena().stats().resident_bytes <= 9 * MIB,
        "{:?}",
        host.arena().stats()
    );
    // Moved objects survive the next kill as well: the index and the keeper know the new place.
    drop((store, host));
    let (host, store, recovery) = reopen(&dir).await;
    assert_eq!(recovery.survivors.len(), 8);
    for n in (1..=8).map(|n| n * 5) {
        check(&store, n, MIB, n as u64).await;
    }
    let mut n = 100;
    while put(&store, n, MIB, 1).await.is_ok() {
        n += 1;
    }
    assert_eq!(n, 156, "all of the store can be used");
    assert!(host.arena().stats().resident_bytes <= 2 * LIMIT.0);
    store.close().await.expect("the keeper ends");
}

#[tokio::test(flavor = "multi_thread")]
async fn time_goes_on_while_a_store_is_dead() {
    let dir = dir();
    let mut child = Child::start(dir.path());
    child.seal_for(1, 1000, 1, Duration::from_millis(1));
    child.seal_for(2, 1000, 2, Duration::from_secs(3600));
    child.kill_group();
    std::thread::sleep(Duration::from_millis(5));
    let (_host, store, recovery) = reopen(&dir).await;
    let left: Vec<_> = recovery.survivors.iter().map(|survivor| survivor.expires).collect();
    assert_eq!(left.len(), 1);
    assert!(left[0].is_some_and(|left| left > Duration::from_secs(3500) && left <= Duration::from_secs(3600)));
    check(&store, 2, 1000, 2).await;
    store.close().await.expect("the keeper ends");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_has_one_store_of_one_user() {
    let dir = dir();
    let mut child = Child::start(dir.path());
    child.seal(1, 10_000, 1);
    let error = open(dir.path(), LIMIT).await.map(drop).expect_err("somebody uses it");
    assert!(matches!(error, OpenError::InUse { .. }), "{error}");
    child.kill_group();
    let error = open(dir.path(), ByteCount(4096))
        .await
        .map(drop)
        .expect_err("too small");
    assert!(
        matches!(
            error,
            OpenError::Smaller {
                held: ByteCount(12_288),
                ..
            }
        ),
        "{error}"
    );

    use std::os::unix::fs::PermissionsExt;
    let data = dir.path().join("data");
    std::fs::set_permissions(&data, std::fs::Permissions::from_mode(0o750)).expect("changed");
    let error = open(dir.path(), LIMIT).await.map(drop).expect_err("open to a group");
    assert_eq!(error.class(), ErrorClass::Denied, "{error}");
    std::fs::set_permissions(&data, std::fs::Permissions::from_mode(0o700)).expect("changed");

    // A damaged index is refused, and nothing is touched: the payload is there once it is repaired.
    let index = data.join("index.journal");
    let whole = std::fs::read(&index).expect("there");
    let mut damaged = whole.clone();
    damaged.extend_from_slice(&whole[16..]);
    damaged[40] ^= 1;
    std::fs::write(&index, &damaged).expect("written");
    let error = open(dir.path(), LIMIT).await.map(drop).expect_err("damaged");
    assert_eq!(error.class(), ErrorClass::Corrupt, "{error}");
    assert!(error.to_string().contains("at byte 16"), "{error}");
    std::fs::write(&index, &whole).expect("written");
    let (_host, store, _) = reopen(&dir).await;
    check(&store, 1, 10_000, 1).await;
    store.close().await.expect("the keeper ends");
}

#[expect(clippy::print_stdout, reason = "a measurement is there to be read")]
#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement, to be run alone: prints how long it takes to take over 1,000 objects of 1 GiB together"]
async fn time_to_recover() {
    let (dir, limit, len) = (dir(), ByteCount(2 << 30), (1 << 30) / 1000);
    let start = || async {
        let options = HostOptions {
            dir: dir.path().join("peers"),
            incarnation: Incarnation(Uuid::new_v4()),
            arena_limit: HostStore::arena_limit(limit),
        };
        let host = Host::start(options).await.expect("a host");
        let mut options = StoreOptions::new(limit, Arc::new(TokenGate::open()));
        options.durable = Some(DurableOptions {
            dir: dir.path().join("data"),
            keeper: keeper(),
        });
        let (store, recovery) = HostStore::open(&host, options).await.expect("it opens");
        (host, store, recovery)
    };
    let (host, store, _) = start().await;
    for n in 0..1000 {
        put(&store, n, len, 1).await.expect("room");
    }
    drop((store, host));
    for _ in 0..5 {
        let (host, store, recovery) = start().await;
        assert_eq!(recovery.adopted.objects, 1000);
        println!(
            "adopted 1,000 objects of {} in {:?}",
            recovery.adopted.nbytes, recovery.took
        );
        drop((store, host));
    }
    let (host, store, _) = start().await;
    for n in (0..1000).filter(|n| n % 5 > 1) {
        store.delete(id(n), None).await.expect("it is there");
    }
    drop((store, host));
    let (_host, store, recovery) = start().await;
    println!(
        "moved {} objects of {} in {:?}",
        recovery.moved.objects, recovery.moved.nbytes, recovery.took
    );
    store.close().await.expect("the keeper ends");
}

/// Killed at random moments, in the middle of whatever it does, and opened by the next process again and again.
#[tokio::test(flavor = "multi_thread")]
async fn killed_at_any_moment() {
    kill_again_and_again(&dir()).await;
}

/// The same, while objects move to files and back all the time: six times as much is kept as there is memory.
#[tokio::test(flavor = "multi_thread")]
async fn killed_while_objects_move() {
    let dir = dir();
    let spill = dir.path().join("spill");
    std::fs::DirBuilder::new().mode(0o700).create(&spill).expect("made");
    let files = kill_again_and_again(&dir).await;
    assert!(files > 0, "nothing was in a file");
    assert!(world::files(&spill).is_empty(), "files are left");
}

/// Returns how many objects were in files when their store was killed.
async fn kill_again_and_again(dir: &TempDir) -> u64 {
    let full = std::env::var_os("STAGEWIRE_SOAK").is_some();
    let rounds = if full { ROUNDS.1 } else { ROUNDS.0 };
    let mut random = Random(rounds.into());
    let mut files = 0;
    // What was acknowledged; and what may have happened, where the answer was lost.
    let mut there: BTreeMap<u128, (u64, u64)> = BTreeMap::new();
    for round in 0..rounds {
        let child = Child::start(dir.path());
        let doubt = child.work_until_killed(&mut random, &mut there, round);
        let (host, store, recovery) = reopen(dir).await;
        assert_eq!((recovery.lost.objects, recovery.expired.objects), (0, 0));
        files += recovery.files.objects;
        for (n, (len, seed)) in there.clone() {
            if Some(n) != doubt.key() {
                check(&store, n, len, seed).await;
            }
        }
        doubt.settle(&store, &mut there).await;
        assert_eq!(recovery.survivors.len(), there.len(), "round {round}");
        // It dies as the child did: without a word.
        drop((store, host));
        files::ended(dir).await;
    }
    let (_host, store, _) = reopen(dir).await;
    for n in there.into_keys() {
        store.delete(id(n), None).await.expect("it is there");
    }
    store.close().await.expect("the keeper ends");
    files
}

/// Small and seeded; good enough to choose with.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}
