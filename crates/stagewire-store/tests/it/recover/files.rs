//! Stores with files that are opened again.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Signal, kill_process};
use stagewire_core::{ByteCount, Classify, ErrorClass};
use stagewire_store::{
    DurableOptions, HostStore, OpenError, Recovery, Retention, SpillOptions, Store, StoreError, StoreOptions, TokenGate,
};
use stagewire_transfer::Host;
use tempfile::TempDir;

use super::child::{keeper, keeper_of};
use super::{dir, host, id};
use crate::world::{Disk, PAGE, PATIENCE, check, fetch, files, put, skip, until};

/// Objects of one page each, in a store of fewer.
const OBJECTS: u64 = 12;
const ROOM: u64 = 4;

fn options(dir: &Path) -> StoreOptions {
    let mut options = StoreOptions::new(ByteCount(ROOM * PAGE), Arc::new(TokenGate::open()));
    options.durable = Some(DurableOptions {
        dir: dir.join("data"),
        keeper: keeper(),
    });
    options.spill = Some(SpillOptions {
        dir: dir.join("spill"),
        quota: ByteCount(100 * PAGE),
    });
    options
}

async fn open(dir: &TempDir) -> (Arc<Host>, HostStore, Recovery) {
    let host = host(dir.path()).await;
    let (store, recovery) = HostStore::open(&host, options(dir.path())).await.expect("it opens");
    (host, store, recovery)
}

/// Waits until nothing of a store that was dropped is left.
pub(super) async fn ended(dir: &TempDir) {
    until("the store has ended", || {
        let lock = std::fs::File::open(dir.path().join("data/store.lock")).expect("it is there");
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_ok()
    })
    .await;
}

async fn filled(dir: &TempDir) -> (Arc<Host>, HostStore) {
    let (host, store, _) = open(dir).await;
    for n in 0..OBJECTS {
        let put = put(&store, id(n.into()), n, &[PAGE - n, 0], Retention::Held, PATIENCE).await;
        put.expect("others move to files");
    }
    (host, store)
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_in_memory_and_in_files_are_there_again() {
    let dir = dir();
    let (host, store) = filled(&dir).await;
    // One comes back into memory, and one is deleted.
    check(&*store.get(id(0)).await.expect("it comes back"), 0, &[PAGE, 0]);
    store.delete(id(3), None).await.expect("it is there");
    let spilled = store.usage().spilled.objects;
    assert!(spilled >= OBJECTS - ROOM - 1, "{}", store.usage());
    drop((store, host));
    ended(&dir).await;

    let (host, store, recovery) = open(&dir).await;
    assert_eq!(recovery.files.objects, spilled);
    assert_eq!(
        (recovery.survivors.len() as u64, recovery.lost.objects),
        (OBJECTS - 1, 0)
    );
    assert_eq!(store.usage().spill.expect("it has one").used, ByteCount(spilled * PAGE));
    for n in (0..OBJECTS).filter(|n| *n != 3) {
        fetch(&store, id(n.into()), n, &[PAGE - n, 0])
            .await
            .expect("it survived");
        check(&*store.get(id(n.into())).await.expect("it survived"), n, &[PAGE - n, 0]);
    }
    let gone = store.get(id(3)).await.expect_err("it was deleted");
    assert!(matches!(gone, StoreError::NotFound { .. }), "{gone}");
    store.close().await.expect("the keeper ends");
    assert!(files(&dir.path().join("spill")).is_empty(), "files are left");
    drop((store, host));
    ended(&dir).await;
    let (_host, store, recovery) = open(&dir).await;
    assert_eq!(recovery.survivors, [], "something came back");
    store.close().await.expect("the keeper ends");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_in_files_survives_the_memory() {
    let dir = dir();
    let (host, store) = filled(&dir).await;
    let spilled = store.usage().spilled.objects;
    let lost = files(&dir.path().join("spill")).remove(0);
    drop((store, host));
    ended(&dir).await;
    let keeper = keeper_of(dir.path()).expect("it has a keeper");
    kill_process(keeper, Signal::KILL).expect("it runs");
    until("the keeper has ended", || keeper_of(dir.path()).is_none()).await;
    std::fs::remove_file(lost).expect("it is there");

    let (_host, store, recovery) = open(&dir).await;
    assert_eq!(
        (recovery.files.objects, recovery.lost.objects),
        (spilled - 1, OBJECTS - spilled + 1)
    );
    for survivor in &recovery.survivors {
        let n = survivor.payload.0.as_u128() as u64;
        fetch(&store, survivor.payload, n, &[PAGE - n, 0])
            .await
            .expect("it survived");
    }
    for n in 0..OBJECTS {
        match store.delete(id(n.into()), None).await {
            Ok(()) | Err(StoreError::NotFound { .. }) => {}
            Err(other) => panic!("{other}"),
        }
        let again = put(
            &store,
            id(n.into()),
            n + 50,
            &[1],
            Retention::Held,
            Duration::from_secs(20),
        )
        .await;
        again.expect("the key is free");
    }
    store.close().await.expect("the keeper ends");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_without_the_files_of_the_one_before_is_refused() {
    let dir = dir();
    drop(filled(&dir).await);
    ended(&dir).await;
    let host = host(dir.path()).await;
    let mut without = options(dir.path());
    without.spill = None;
    let refused = HostStore::open(&host, without).await.expect_err("it has files");
    assert!(matches!(refused, OpenError::NoSpill { .. }), "{refused}");
    assert_eq!(refused.reason(), "store.no_spill");
    let (store, recovery) = HostStore::open(&host, options(dir.path()))
        .await
        .expect("nothing was lost");
    assert_eq!(recovery.survivors.len() as u64, OBJECTS);
    store.close().await.expect("the keeper ends");
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_that_the_index_still_names_is_not_used_again() {
    const ALL: u64 = 400;
    let dir = dir();
    let data = dir.path().join("data");
    std::fs::create_dir(&data).expect("made");
    let Some(disk) = Disk::mount(&data, 64 * PAGE) else {
        return skip("a full disk needs the right to mount one");
    };
    let host = host(dir.path()).await;
    let mut options = options(dir.path());
    options.limit = ByteCount(ALL * PAGE);
    options.spill = None;
    let (store, _) = HostStore::open(&host, options.clone()).await.expect("it opens");
    for n in 0..ALL {
        let put = put(&store, id(n.into()), n, &[PAGE], Retention::Held, PATIENCE).await;
        put.expect("there is room");
    }
    let filler = data.join("filler");
    let full = std::fs::write(&filler, vec![0; 64 * PAGE as usize]);
    full.expect_err("the disk is full");

    let mut deleted = 0;
    while store.delete(id(deleted.into()), None).await.is_ok() {
        deleted += 1;
    }
    let usage = store.usage();
    assert_eq!(usage.draining.objects, 1, "{usage}");
    assert_eq!(usage.used(), ByteCount((ALL - deleted) * PAGE), "{usage}");
    let gone = store.get(id(deleted.into())).await;
    assert!(matches!(gone, Err(StoreError::NotFound { .. })), "{gone:?}");

    std::fs::remove_file(filler).expect("it is there");
    let put = put(&store, id(1000), 1, &[(deleted + 1) * PAGE], Retention::Held, PATIENCE).await;
    put.expect("the room is free once the index is written");
    assert_eq!(store.usage().draining.objects, 0);
    drop((store, host));
    ended(&dir).await;

    let host = super::host(dir.path()).await;
    let (store, recovery) = HostStore::open(&host, options).await.expect("it opens");
    assert_eq!(recovery.survivors.len() as u64, ALL - deleted);
    fetch(&store, id(1000), 1, &[(deleted + 1) * PAGE])
        .await
        .expect("it is there");
    store.close().await.expect("it closes");
    drop((store, host));
    drop(disk);
}

#[tokio::test(flavor = "multi_thread")]
async fn files_of_another_store_are_left_alone() {
    let dir = dir();
    let (host, store) = filled(&dir).await;
    drop((store, host));
    ended(&dir).await;
    let before = files(&dir.path().join("spill"));

    let host = super::host(dir.path()).await;
    let mut other = options(dir.path());
    other.durable.as_mut().expect("it is one").dir = dir.path().join("other");
    let error = HostStore::open(&host, other)
        .await
        .expect_err("the files are not its own");
    assert_eq!((error.class(), error.reason()), (ErrorClass::Conflict, "spill.foreign"));
    assert_eq!(files(&dir.path().join("spill")), before);
    drop(host);

    let (_host, store, recovery) = open(&dir).await;
    assert_eq!(recovery.survivors.len() as u64, OBJECTS);
    store.close().await.expect("it closes");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_store_that_does_not_open_leaves_no_keeper() {
    let dir = dir();
    let host = host(dir.path()).await;
    std::fs::write(dir.path().join("spill"), "not a directory").expect("written");
    let refused = HostStore::open(&host, options(dir.path())).await;
    refused.expect_err("there is no place for its files");
    until("its keeper has ended", || keeper_of(dir.path()).is_none()).await;
}
