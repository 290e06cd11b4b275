//! Stores that leave what they have to the next one.

use rustix::process::{Signal, kill_process};
use stagewire_core::{ByteCount, Classify};
use stagewire_store::{NewObject, Share, Store, StoreError};

use super::child::keeper_of;
use super::files::ended;
use super::{LIMIT, MIB, check, dir, id, no_keeper, put, reopen};

#[tokio::test(flavor = "multi_thread")]
async fn what_is_sealed_is_left_and_nothing_is_done_any_more() {
    let dir = dir();
    let (host, store, _) = reopen(&dir).await;
    for n in 1..=3 {
        put(&store, n, MIB, n as u64).await.expect("room");
    }
    store.delete(id(3), None).await.expect("it is there");
    let read = store.get(id(1)).await.expect("it is there");
    let draft = store.create(NewObject::new(id(4), [ByteCount(5)])).await.expect("room");
    let keeper = keeper_of(dir.path()).expect("it has one");

    let left = store.leave().await.expect("it leaves");
    assert_eq!((left.objects, left.nbytes), (2, ByteCount(2 * MIB)));
    assert_eq!(store.leave().await.expect("it has left"), Share::default());
    store.close().await.expect("it has left: this ends nothing");
    assert!(matches!(draft.seal().await, Err(StoreError::Closed)));
    assert!(matches!(store.delete(id(1), None).await, Err(StoreError::Closed)));
    assert!(matches!(store.get(id(1)).await, Err(StoreError::Closed)));
    let error = put(&store, 5, 10, 5).await.expect_err("it has left");
    assert_eq!(error.reason(), "store.closed");
    assert!(!store.remove(id(1)), "it is the next one's");
    assert_eq!(read.part(0).map(<[u8]>::len), Some(MIB as usize), "who reads goes on");
    drop((read, store));

    // The process goes on, and uses its arena for other things.
    let mut extents = Vec::new();
    while let Ok(mut extent) = host.arena().allocate(MIB) {
        extent.fill(0xEE);
        extents.push(extent);
    }
    assert!(extents.len() > 64, "{}", extents.len());
    ended(&dir).await;
    let (_host, store, recovery) = reopen(&dir).await;
    assert_eq!((recovery.survivors.len(), recovery.lost.objects), (2, 0));
    assert_eq!(
        keeper_of(dir.path()),
        Some(keeper),
        "the memory has had one keeper throughout"
    );
    for n in [1, 2] {
        check(&store, n, MIB, n as u64).await;
    }
    for n in [3, 4, 5] {
        assert!(store.get(id(n)).await.is_err(), "{n} came back");
    }
    store.close().await.expect("the keeper ends");
    no_keeper(&dir);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_has_nothing_to_leave_leaves_nothing() {
    let dir = dir();
    let (host, store, _) = reopen(&dir).await;
    put(&store, 1, MIB, 1).await.expect("room");
    store.delete(id(1), None).await.expect("it is there");
    assert_eq!(store.leave().await.expect("it ends"), Share::default());
    no_keeper(&dir);
    assert_eq!(keeper_of(dir.path()), None);
    drop((store, host));

    ended(&dir).await;
    // Nor does one that is dropped without a word.
    let (host, store, _) = reopen(&dir).await;
    put(&store, 1, MIB, 1).await.expect("room");
    store.delete(id(1), None).await.expect("it is there");
    assert!(keeper_of(dir.path()).is_some());
    drop((store, host));
    no_keeper(&dir);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_keeper_that_dies_at_the_last_moment_is_replaced() {
    let dir = dir();
    for n in 1..=5 {
        let (host, store, recovery) = reopen(&dir).await;
        assert_eq!(recovery.lost.objects, 0);
        put(&store, n, LIMIT.0 / 16, n as u64).await.expect("room");
        kill_process(keeper_of(dir.path()).expect("it has one"), Signal::KILL).expect("it runs");
        let left = store.leave().await.expect("another one has it");
        assert_eq!(u128::from(left.objects), n);
        drop((store, host));
        ended(&dir).await;
    }
    let (_host, store, _) = reopen(&dir).await;
    for n in 1..=5 {
        check(&store, n, LIMIT.0 / 16, n as u64).await;
    }
    store.close().await.expect("the keeper ends");
}
