//! Stores whose index cannot be written, and whose machine loses its power.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Instant;

use rustix::process::{Pid, Signal, kill_process};
use stagewire_core::{Classify, ErrorClass, Incarnation};
use stagewire_transfer::HostOptions;
use tempfile::TempDir;
use uuid::Uuid;

use super::*;
use crate::journal::Place;
use crate::journal::faults::{Disk, Faults};
use crate::{DurableOptions, OpenError, Recovery, SpillFault, SpillOptions, StoreOptions};

const PAGE: u64 = 4096;
/// Objects of a page each that are in memory at most.
const ROOM: u64 = 4;
const PATIENCE: Duration = Duration::from_secs(30);

fn id(n: u64) -> PayloadId {
    PayloadId(Uuid::from_u128(n.into()))
}

fn bytes(seed: u64) -> Vec<u8> {
    (0..PAGE)
        .map(|at| (seed.wrapping_mul(31).wrapping_add(at.wrapping_mul(seed | 1)) >> 3) as u8)
        .collect()
}

struct World {
    dir: TempDir,
    store: HostStore,
    recovery: Recovery,
    disk: Disk,
}

async fn open(dir: &Path) -> Result<(HostStore, Recovery), OpenError> {
    let options = HostOptions {
        dir: dir.join("peers"),
        incarnation: Incarnation(Uuid::new_v4()),
        arena_limit: HostStore::arena_limit(ByteCount(ROOM * PAGE)),
    };
    let host = Host::start(options).await.expect("a host");
    let mut options = StoreOptions::new(ByteCount(ROOM * PAGE), Arc::new(TokenGate::open()));
    options.durable = Some(DurableOptions {
        dir: dir.join("data"),
        keeper: crate::keeper::test_command(),
    });
    options.spill = Some(SpillOptions {
        dir: dir.join("spill"),
        quota: ByteCount(1000 * PAGE),
    });
    HostStore::open(&host, options).await
}

impl World {
    async fn new() -> Self {
        Self::open(tempfile::tempdir().expect("a directory")).await
    }

    async fn open(dir: TempDir) -> Self {
        let (store, recovery) = open(dir.path()).await.expect("it opens");
        let disk = store.inner.durable.as_ref().expect("it is one").journal.disk.clone();
        Self {
            dir,
            store,
            recovery,
            disk,
        }
    }

    /// The process ends without a word, and another one follows.
    async fn killed(self) -> Self {
        Self::open(self.gone().await).await
    }

    async fn gone(self) -> TempDir {
        let Self { dir, store, .. } = self;
        drop(store);
        let lock = dir.path().join("data/store.lock");
        until("the store has ended", || {
            let lock = std::fs::File::open(&lock).expect("it is there");
            rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_ok()
        })
        .await;
        dir
    }

    fn fail(&self, faults: Faults) {
        self.disk.set(faults);
    }

    fn heal(&self) {
        self.fail(Faults::default());
    }

    async fn put(&self, n: u64, wait: Duration) -> Result<(), StoreError> {
        let mut object = NewObject::new(id(n), [ByteCount(PAGE)]);
        object.wait = wait;
        let mut draft = self.store.create(object).await?;
        draft.bytes_mut(0)?.copy_from_slice(&bytes(n));
        draft.seal().await.map(drop)
    }

    /// Finds no room, as what is to move does not. Says why, once that is known: nothing is tried again for a second then.
    async fn put_in_vain(&self) -> (StoreError, SpillFault) {
        let fault = || self.store.usage().spill.and_then(|spill| spill.fault);
        let begun = self.put(ROOM, Duration::from_millis(300)).await;
        begun.expect_err("it does not move");
        until("that has failed", || fault().is_some()).await;
        let full = self.put(ROOM, Duration::ZERO).await.expect_err("nothing has moved");
        (full, fault().expect("that has failed"))
    }

    async fn fill(&self, objects: std::ops::Range<u64>) {
        for n in objects {
            self.put(n, PATIENCE).await.expect("others move to files");
        }
    }

    /// Reads it where it is.
    async fn fetch(&self, n: u64) -> Result<(), StoreError> {
        let target = Arc::new(Target::allocate(PAGE).expect("memory"));
        self.store.fetch(id(n), &[Arc::clone(&target)]).await?;
        assert!(
            target.as_slice().expect("filled") == bytes(n),
            "object {n} has other bytes"
        );
        Ok(())
    }

    async fn get(&self, n: u64) -> Result<(), StoreError> {
        let object = self.store.get(id(n)).await?;
        assert!(object.part(0) == Some(&*bytes(n)), "object {n} has other bytes");
        Ok(())
    }

    async fn all_there(&self, objects: impl IntoIterator<Item = u64>) {
        for n in objects {
            self.fetch(n)
                .await
                .unwrap_or_else(|error| panic!("object {n}: {error}"));
        }
    }

    /// The objects that are in files, once nothing moves any more.
    async fn in_files(&self) -> BTreeMap<PayloadId, String> {
        until("nothing moves", || {
            self.store.usage().spill.expect("it has files").queue == 0
        })
        .await;
        files(&self.store.inner.durable.as_ref().expect("it is one").journal.ledger())
    }

    fn spill_files(&self) -> BTreeSet<String> {
        spill_files(&self.dir.path().join("spill"))
    }
}

fn files(ledger: &crate::journal::Ledger) -> BTreeMap<PayloadId, String> {
    let files = ledger
        .entries()
        .iter()
        .filter_map(|(payload, entry)| match &entry.place {
            Place::File { name, .. } => Some((*payload, name.clone())),
            Place::Memory(_) => None,
        });
    files.collect()
}

fn spill_files(dir: &Path) -> BTreeSet<String> {
    let names = std::fs::read_dir(dir).expect("a directory");
    let names = names.map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8"));
    names.filter(|name| name.ends_with(".spill")).collect()
}

async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < PATIENCE, "waited in vain until {what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

fn assert_index<T: fmt::Debug>(result: Result<T, StoreError>) {
    let error = result.expect_err("the index cannot be written");
    assert!(matches!(error, StoreError::Index { .. }), "{error}");
    assert_eq!(error.class(), ErrorClass::Unavailable, "{error}");
}

const TORN: Faults = Faults {
    write: Some(9),
    panic: false,
    cut: false,
    sync: false,
    sync_dir: false,
};
const NO_SYNC: Faults = Faults {
    write: None,
    panic: false,
    cut: false,
    sync: true,
    sync_dir: false,
};

#[tokio::test(flavor = "multi_thread")]
async fn what_the_index_cannot_be_told_is_an_error_and_nothing_else_is_lost() {
    for cut in [false, true] {
        let world = World::new().await;
        world.fill(0..2).await;
        world.fail(Faults { cut, ..TORN });
        assert_index(world.put(2, PATIENCE).await);
        assert_index(world.store.delete(id(0), None).await);
        assert!(
            matches!(world.fetch(0).await, Err(StoreError::NotFound { .. })),
            "it is gone"
        );
        assert!(
            matches!(world.fetch(2).await, Err(StoreError::NotFound { .. })),
            "it never came"
        );
        world.all_there([1]).await;
        world.heal();
        world.put(2, PATIENCE).await.expect("the key and the room are free");
        let world = world.killed().await;
        world.all_there([1, 2]).await;
        assert_eq!(world.recovery.survivors.len(), 2, "what was deleted came back");
        world.store.close().await.expect("it ends");

        // Killed before it can be told: what was not acknowledged may be either.
        let world = World::new().await;
        world.fill(0..2).await;
        world.fail(Faults { cut, ..TORN });
        assert_index(world.put(2, PATIENCE).await);
        assert_index(world.store.delete(id(0), None).await);
        let world = world.killed().await;
        world.all_there([1]).await;
        assert!(
            matches!(world.fetch(2).await, Err(StoreError::NotFound { .. })),
            "half an object"
        );
        match world.fetch(0).await {
            Ok(()) | Err(StoreError::NotFound { .. }) => {}
            Err(other) => panic!("{other}"),
        }
        world.store.close().await.expect("it ends");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_stay_in_memory_where_the_index_cannot_name_their_file() {
    for faults in [TORN, NO_SYNC] {
        let world = World::new().await;
        world.fill(0..ROOM).await;
        world.fail(faults);
        let (full, fault) = world.put_in_vain().await;
        assert!(matches!(full, StoreError::Exhausted { .. }), "{full}");
        assert_eq!(
            (fault.class(), fault.reason()),
            (ErrorClass::Unavailable, "spill.io"),
            "{fault}"
        );
        assert!(full.to_string().contains(&fault.to_string()), "{full}");
        assert_eq!(world.in_files().await, BTreeMap::new(), "the index names a file");
        until("the file is gone", || world.spill_files().is_empty()).await;
        world.all_there(0..ROOM).await;
        // Killed, all of them are there; healed, they move.
        let world = world.killed().await;
        assert_eq!(world.recovery.lost.objects, 0);
        world.all_there(0..ROOM).await;
        world.fail(faults);
        let _ = world.put(ROOM, Duration::from_millis(50)).await;
        world.heal();
        world.put(ROOM, PATIENCE).await.expect("the next try goes well");
        world.all_there(0..=ROOM).await;
        world.store.close().await.expect("it ends");
    }
}

/// The thread that has written the file tells the store. A defect there is nobody's loss, and the next try goes well.
#[tokio::test(flavor = "multi_thread")]
async fn a_panic_on_the_way_into_a_file_leaves_the_object_in_memory() {
    let world = World::new().await;
    world.fill(0..ROOM).await;
    world.fail(Faults {
        panic: true,
        ..Faults::default()
    });
    let (full, fault) = world.put_in_vain().await;
    assert_eq!(
        (fault.class(), fault.reason()),
        (ErrorClass::Internal, "spill.defect"),
        "{fault}"
    );
    assert!(full.to_string().contains(&fault.to_string()), "{full}");
    assert_eq!(world.in_files().await, BTreeMap::new(), "the index names a file");
    until("the file is gone", || world.spill_files().is_empty()).await;
    world.all_there(0..ROOM).await;
    world.put(ROOM, PATIENCE).await.expect("the next try goes well");
    world.all_there(0..=ROOM).await;
    let world = world.killed().await;
    assert_eq!(world.recovery.lost.objects, 0);
    world.all_there(0..=ROOM).await;
    world.store.close().await.expect("it ends");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_that_cannot_come_back_stays_in_its_file() {
    let world = World::new().await;
    world.fill(0..ROOM + 1).await;
    let (spilled, _) = world.in_files().await.pop_first().expect("one is in a file");
    let n = spilled.0.as_u128() as u64;
    let other = (0..=ROOM).find(|other| *other != n).expect("others");
    world.store.delete(id(other), None).await.expect("room for it");
    world.fail(TORN);
    assert_index(world.get(n).await);
    world.all_there([n]).await;
    world.heal();
    world.get(n).await.expect("it comes back");
    let world = world.killed().await;
    world.all_there((0..=ROOM).filter(|n| *n != other)).await;
    world.store.close().await.expect("it ends");
}

/// Its file goes only once the index on the disk does not name it any more.
#[tokio::test(flavor = "multi_thread")]
async fn the_file_of_what_comes_back_is_there_until_that_is_on_the_disk() {
    let world = World::new().await;
    world.fill(0..ROOM + 1).await;
    let (spilled, name) = world.in_files().await.pop_first().expect("one is in a file");
    let n = spilled.0.as_u128() as u64;
    let other = (0..=ROOM).find(|other| *other != n).expect("others");
    world.store.delete(id(other), None).await.expect("room for it");
    world.fail(NO_SYNC);
    world.get(n).await.expect("it comes back");
    // The index cannot be synced, nor is the file removed, whatever else happens.
    let durable = Arc::clone(world.store.inner.durable.as_ref().expect("it is one"));
    durable.journal.sync().expect_err("it fails");
    let (disk, index) = (world.disk.clone(), world.dir.path().join("data/index.journal"));
    drop(durable);
    let dir = world.gone().await;
    assert!(
        spill_files(&dir.path().join("spill")).contains(&name),
        "the only safe copy is gone"
    );
    kill_keeper(dir.path()).await;
    disk.lose_power(&index, 0, |_| false);
    let world = World::open(dir).await;
    world.all_there([n]).await;
    world.store.close().await.expect("it ends");
}

/// The keeper of a store that is gone.
async fn kill_keeper(dir: &Path) {
    let lock: PathBuf = dir.join("data/keeper.lock").canonicalize().expect("it had a keeper");
    let keeper = || {
        let processes = std::fs::read_dir("/proc").expect("Linux");
        let pids = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
        pids.filter(|pid| *pid != std::process::id() as i32).find(|pid| {
            let files = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten();
            let mut links = files.filter_map(|file| std::fs::read_link(file.ok()?.path()).ok());
            links.any(|link| link == lock)
        })
    };
    if let Some(pid) = keeper() {
        kill_process(Pid::from_raw(pid).expect("a pid"), Signal::KILL).expect("it runs");
    }
    until("the keeper has ended", || keeper().is_none()).await;
}

/// The machine loses its power at some moment, and with it memory, what was not synced of the index, and of the files that
/// nobody was told of, in any order. What was in a file, and known to be, is there; no other byte is ever shown.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_in_files_survives_a_loss_of_power_with_torn_and_lost_writes() {
    let rounds = if std::env::var_os("STAGEWIRE_SOAK").is_some() {
        200
    } else {
        10
    };
    let mut random = 1_u64;
    let mut below = move |bound: u64| {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % bound
    };
    let (mut survived, mut refused, mut torn) = (0, 0, 0);
    for round in 0..rounds {
        let world = World::new().await;
        let mut next = 100 * round;
        let mut there = BTreeSet::new();
        for _ in 0..10 + below(20) {
            let some = |there: &BTreeSet<u64>, at: u64| there.iter().nth(at as usize % there.len()).copied();
            match below(6) {
                0..3 => {
                    next += 1;
                    world.put(next, PATIENCE).await.expect("others move to files");
                    there.insert(next);
                }
                3 if !there.is_empty() => {
                    let n = some(&there, below(1000)).expect("not empty");
                    world.get(n).await.expect("it is there");
                }
                4 if !there.is_empty() => {
                    let n = some(&there, below(1000)).expect("not empty");
                    world.store.delete(id(n), None).await.expect("it is there");
                    there.remove(&n);
                }
                _ => {}
            }
        }
        // What is in a file by the store's own books is so for the disk.
        let in_files = world.in_files().await;
        let safe = files(&world.disk.safe());
        for (payload, name) in &in_files {
            // A restore may be on its way to the disk, in either order.
            assert_eq!(
                safe.get(payload),
                Some(name),
                "{payload} left the memory before the index was synced"
            );
        }
        let (disk, index) = (world.disk.clone(), world.dir.path().join("data/index.journal"));
        let dir = world.gone().await;
        kill_keeper(dir.path()).await;
        let spill = dir.path().join("spill");
        for name in spill_files(&spill) {
            if !safe.values().any(|named| *named == name) {
                // Nobody was told of it: half of it is there.
                torn += 1;
                std::fs::write(spill.join(name), vec![0; below(PAGE) as usize]).expect("written");
            }
        }
        let (cut, kept) = (below(200) as usize, below(4));
        disk.lose_power(&index, cut, |sector| !(sector as u64 + kept).is_multiple_of(4));
        let (store, recovery) = match open(dir.path()).await {
            Ok(opened) => opened,
            Err(error) => {
                // With a reason, and a repair would find everything.
                assert_eq!(error.class(), ErrorClass::Corrupt, "{error}");
                refused += 1;
                assert!(in_files.values().all(|name| spill.join(name).exists()));
                continue;
            }
        };
        let disk = store.inner.durable.as_ref().expect("it is one").journal.disk.clone();
        let world = World {
            dir,
            store,
            recovery,
            disk,
        };
        for payload in in_files.keys() {
            let n = payload.0.as_u128() as u64;
            world
                .fetch(n)
                .await
                .unwrap_or_else(|error| panic!("round {round}, object {n}: {error}"));
            survived += 1;
        }
        for survivor in &world.recovery.survivors {
            // A delete that was not synced may be undone; the bytes are right all the same.
            let n = survivor.payload.0.as_u128() as u64;
            world
                .fetch(n)
                .await
                .unwrap_or_else(|error| panic!("round {round}, object {n}: {error}"));
        }
        for n in there {
            if world.fetch(n).await.is_err() {
                world.put(n, PATIENCE).await.expect("the key is free");
            }
        }
        world.store.close().await.expect("it ends");
    }
    assert!(
        survived > rounds && refused < rounds / 2,
        "{survived} survived, {refused} refused, {torn} torn"
    );
}

/// Who waits for memory that is free in pieces waits no longer than it said, whatever goes on.
#[tokio::test(flavor = "multi_thread")]
async fn memory_is_gathered_within_the_deadline() {
    let world = World::new().await;
    let arena = world.store.inner.host.arena();
    let mut others = Vec::new();
    while let Ok(extent) = arena.allocate(PAGE) {
        others.push(extent);
    }
    // Somebody gathers memory, and takes long.
    let _turn = Arc::clone(&world.store.inner.gathering).lock_owned().await;
    for wait in [Duration::ZERO, Duration::from_millis(300)] {
        let put = tokio::time::timeout(PATIENCE, world.put(1, wait)).await;
        let error = put.expect("it waits for ever").expect_err("no memory");
        assert!(matches!(error, StoreError::Arena { .. }), "{error}");
    }
    drop(others);
    world.put(1, Duration::ZERO).await.expect("there is memory again");
    world.store.close().await.expect("it ends");
}

/// Who ends a store second does not return before it has ended.
#[expect(
    clippy::await_holding_lock,
    reason = "the others are to wait for it, on threads of their own"
)]
#[tokio::test(flavor = "multi_thread")]
async fn a_store_has_ended_for_everybody_at_once() {
    let world = World::new().await;
    world.fill(0..2).await;
    let first = world.store.inner.ending.lock().expect("no panic");
    let mut others = [false, true].map(|leaves| {
        let store = world.store.clone();
        tokio::spawn(async move {
            match leaves {
                true => drop(store.leave().await.expect("it leaves")),
                false => store.close().await.expect("it ends"),
            }
        })
    });
    for other in &mut others {
        let early = tokio::time::timeout(Duration::from_millis(50), other).await;
        assert!(early.is_err(), "it has not ended yet");
    }
    drop(first);
    for other in others {
        tokio::time::timeout(PATIENCE, other)
            .await
            .expect("it ends")
            .expect("no panic");
    }
    let world = World::open(world.gone().await).await;
    let survivors = world.recovery.survivors.len();
    assert!(survivors == 0 || survivors == 2, "{survivors}: some of it");
    world.store.close().await.expect("it ends");
}
