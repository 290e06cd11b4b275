//! What is free of a store is free after a restart as well.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use stagewire_core::{ByteCount, Incarnation};
use stagewire_store::{DurableOptions, HostStore, Recovery, Retention, Store, StoreError, StoreOptions, TokenGate};
use stagewire_transfer::{Host, HostOptions};
use uuid::Uuid;

use super::child::keeper;
use super::files::ended;
use super::{MIB, Random, dir, id};
use crate::world::{PAGE, check, put};

const LIMIT: u64 = 32 * MIB;
/// Restarts of the random test, in CI and in full.
const LIVES: (u32, u32) = (12, 200);
/// What a life does.
const STEPS: u32 = 60;

/// A store with an arena of `arena` bytes.
async fn open(dir: &Path, arena: u64) -> (Arc<Host>, HostStore, Recovery) {
    let host = Host::start(HostOptions {
        dir: dir.join("peers"),
        incarnation: Incarnation(Uuid::new_v4()),
        arena_limit: ByteCount(arena),
    });
    let host = host.await.expect("a host");
    let mut options = StoreOptions::new(ByteCount(LIMIT), Arc::new(TokenGate::open()));
    options.durable = Some(DurableOptions {
        dir: dir.join("data"),
        keeper: keeper(),
    });
    let (store, recovery) = HostStore::open(&host, options).await.expect("it opens");
    (host, store, recovery)
}

async fn put_now(store: &HostStore, n: u64, nbytes: u64, retention: Retention) -> Result<(), StoreError> {
    let parts = [nbytes, 0];
    let put = put(store, id(n.into()), n, &parts, retention, Duration::ZERO);
    put.await.map(drop)
}

const CACHED: Retention = Retention::Cached {
    cost: Duration::from_secs(1),
};

/// The memory of dead processes, of which little is used, is there for the next objects, and the cache stays.
#[tokio::test(flavor = "multi_thread")]
async fn what_dead_processes_wasted_is_used_again() {
    let dir = dir();
    let arena = LIMIT + LIMIT / 4;
    let mut kept = Vec::new();
    for life in 0..6 {
        let (host, store, recovery) = open(dir.path(), arena).await;
        assert_eq!(recovery.survivors.len(), kept.len());
        // Nothing is sparse enough to be moved while it opens: half of what follows is deleted in the next life.
        let mut n = life * 1000;
        while store.usage().used().0 < LIMIT {
            n += 1;
            let retention = if n % 16 == 0 { CACHED } else { Retention::Held };
            put_now(&store, n, MIB / 4, retention)
                .await
                .unwrap_or_else(|error| panic!("object {n} fits: {error}; {:?}", host.arena().stats()));
            kept.push(n);
        }
        assert_eq!(store.stats().evicted.objects, 0, "it all fits");
        drop((store, host));
        ended(&dir).await;
        let (host, store, recovery) = open(dir.path(), arena).await;
        assert_eq!((recovery.survivors.len(), recovery.lost.objects), (kept.len(), 0));
        let (stay, go): (Vec<_>, Vec<_>) = kept.into_iter().partition(|n| n % 16 == 0);
        for n in go {
            store.delete(id(n.into()), None).await.expect("it is there");
        }
        kept = stay;
        drop((store, host));
        ended(&dir).await;
        if life % 2 == 0 {
            continue;
        }
        // In the same life as the deletes, too.
        let (host, store, _) = open(dir.path(), arena).await;
        let free = LIMIT - store.usage().used().0;
        put_now(&store, 1, free / 4, Retention::Held).await.expect("it fits");
        store.delete(id(1), None).await.expect("it is there");
        for n in &kept {
            check(
                &*store.get(id((*n).into())).await.expect("it is there"),
                *n,
                &[MIB / 4, 0],
            );
        }
        drop((store, host));
        ended(&dir).await;
    }
    let (_host, store, _) = open(dir.path(), arena).await;
    store.close().await.expect("the keeper ends");
}

/// Who reads in a segment of the process before keeps it there, and everything else goes on.
#[tokio::test(flavor = "multi_thread")]
async fn a_segment_that_is_read_stays() {
    let dir = dir();
    let arena = LIMIT + LIMIT / 4;
    let (host, store, _) = open(dir.path(), arena).await;
    for n in 0..LIMIT / MIB {
        put_now(&store, n, MIB, Retention::Held).await.expect("it fits");
    }
    drop((store, host));
    ended(&dir).await;
    let (host, store, _) = open(dir.path(), arena).await;
    let read = store.get(id(0)).await.expect("it is there");
    let held = store.get(id(4)).await.expect("it is there");
    for n in (0..LIMIT / MIB).filter(|n| n % 4 != 0) {
        store.delete(id(n.into()), None).await.expect("it is there");
    }
    let adopted = host.arena().adopted().len();
    let mut n = 100;
    while put_now(&store, n, MIB / 2, Retention::Held).await.is_ok() {
        n += 1;
    }
    assert_eq!(n, 100 + 48, "{:?}", host.arena().stats());
    let left = host.arena().adopted().len();
    assert!((2..adopted).contains(&left), "{left} of {adopted}");
    check(&*read, 0, &[MIB, 0]);
    check(&*held, 4, &[MIB, 0]);
    for n in (0..LIMIT / MIB).filter(|n| n % 4 == 0) {
        check(&*store.get(id(n.into())).await.expect("it is there"), n, &[MIB, 0]);
    }
    drop((read, held));
    store.close().await.expect("the keeper ends");
}

/// Whatever was put, deleted and adopted before: what fits goes in and takes nothing away, and what does not fit takes no
/// more away than it needs, and nothing where that would not be enough.
#[tokio::test(flavor = "multi_thread")]
async fn what_fits_goes_in_and_takes_nothing_away() {
    let full = std::env::var_os("STAGEWIRE_SOAK").is_some();
    let lives = if full { LIVES.1 } else { LIVES.0 };
    let dir = dir();
    let mut random = Random(lives.into());
    // Bytes, and whether it is cached.
    let mut there: BTreeMap<u64, (u64, bool)> = BTreeMap::new();
    let mut n = 0;
    for life in 0..lives {
        // As every store of this size has it.
        let arena = HostStore::arena_limit(ByteCount(LIMIT)).0;
        let (host, store, recovery) = open(dir.path(), arena).await;
        assert_eq!((recovery.survivors.len(), recovery.lost.objects), (there.len(), 0));
        for _ in 0..STEPS {
            let many = there.len() as u64;
            if many > 0 && random.below(5) < 2 {
                let at = random.below(many) as usize;
                let gone = *there.keys().nth(at).expect("it is below their number");
                there.remove(&gone);
                store.delete(id(gone.into()), None).await.expect("it is there");
                continue;
            }
            n += 1;
            let nbytes = (1 + random.below(32)) * 16 * PAGE;
            let retention = [CACHED, Retention::Held][random.below(2) as usize];
            let cached: u64 = there
                .values()
                .filter(|(_, cached)| *cached)
                .map(|(nbytes, _)| nbytes)
                .sum();
            let short = (store.usage().used().0 + nbytes).saturating_sub(LIMIT);
            let done = put_now(&store, n, nbytes, retention).await;
            let gone: Vec<u64> = there.keys().copied().filter(|n| !store.has(id((*n).into()))).collect();
            let gone: Vec<(u64, bool)> = gone.iter().filter_map(|n| there.remove(n)).collect();
            let evicted: u64 = gone.iter().map(|(nbytes, _)| nbytes).sum();
            assert!(gone.iter().all(|(_, cached)| *cached), "life {life}, object {n}");
            let stats = host.arena().stats();
            if short > cached {
                assert!(done.is_err(), "life {life}, object {n}: beyond the limit");
                assert_eq!(evicted, 0, "life {life}, object {n}: for nothing");
                continue;
            }
            done.unwrap_or_else(|error| panic!("life {life}, object {n}: {error}; {stats:?}"));
            there.insert(n, (nbytes, retention == CACHED));
            let largest = gone.iter().map(|(nbytes, _)| *nbytes).max().unwrap_or(0);
            assert!(
                evicted >= short && (evicted - largest < short || evicted == 0),
                "life {life}, object {n}: {evicted} bytes went for {short}; {stats:?}"
            );
        }
        for (n, (nbytes, _)) in &there {
            let object = store.get(id((*n).into())).await;
            check(&*object.expect("it is there"), *n, &[*nbytes, 0]);
        }
        drop((store, host));
        ended(&dir).await;
    }
    let (_host, store, _) = open(dir.path(), LIMIT + LIMIT / 4).await;
    store.close().await.expect("the keeper ends");
}
