//! Many writers and readers of the same few keys.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use stagewire_core::ByteCount;
use stagewire_store::{HostStore, NewObject, Retention, Store, StoreError};
use stagewire_transfer::Target;

use crate::world::{PAGE, PATIENCE, World, count, id, pattern, until};

const KEYS: u64 = 24;
const TASKS: u64 = 8;

/// Bytes of the object under a key; each key has its size.
fn size(key: u64) -> u64 {
    8 + (key % 4) * PAGE + key
}

/// Says which of the objects of a key it is, and follows from that.
fn content(key: u64, version: u64) -> Vec<u8> {
    let mut bytes = version.to_le_bytes().to_vec();
    bytes.extend(pattern(version, size(key) - 8));
    bytes
}

fn check(key: u64, bytes: &[u8]) {
    let (version, _) = bytes.split_first_chunk().expect("8 bytes");
    assert!(
        bytes == content(key, u64::from_le_bytes(*version)),
        "bytes of different objects in one"
    );
}

/// A small generator, so that each task has steps of its own.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides
    }
}

#[derive(Default)]
struct Counts {
    sealed: AtomicU64,
    deleted: AtomicU64,
}

async fn work(store: HostStore, counts: Arc<Counts>, task: u64, steps: u64) {
    let mut dice = Dice(task + 1);
    for step in 0..steps {
        let key = dice.roll(KEYS);
        let payload = id(key.into());
        match dice.roll(10) {
            0..4 => {
                let mut object = NewObject::new(payload, [ByteCount(size(key))]);
                object.wait = PATIENCE;
                object.retention = match dice.roll(4) {
                    0 => Retention::Cached {
                        cost: Duration::from_millis(dice.roll(100)),
                    },
                    1 => Retention::SoftPinned,
                    _ => Retention::Held,
                };
                let mut draft = match store.create(object).await {
                    Ok(draft) => draft,
                    Err(StoreError::Exists { .. }) => continue,
                    Err(other) => panic!("{other}"),
                };
                let bytes = draft.bytes_mut(0).expect("it is there");
                bytes.copy_from_slice(&content(key, task * steps + step + 1));
                if dice.roll(10) == 0 {
                    continue;
                }
                match draft.seal().await {
                    Ok(object) => {
                        counts.sealed.fetch_add(1, Ordering::Relaxed);
                        check(key, object.part(0).expect("it is there"));
                    }
                    // Another task deleted it while it was written.
                    Err(StoreError::NotFound { .. }) => {}
                    Err(other) => panic!("{other}"),
                }
            }
            4..6 => match store.get(payload).await {
                Ok(object) => {
                    check(key, object.part(0).expect("it is there"));
                    tokio::task::yield_now().await;
                    check(key, object.part(0).expect("it is there"));
                }
                Err(StoreError::NotFound { .. } | StoreError::NotSealed { .. }) => {}
                Err(other) => panic!("{other}"),
            },
            6..8 => {
                let target = Arc::new(Target::allocate(size(key)).expect("memory"));
                match store.fetch(payload, &[Arc::clone(&target)]).await {
                    Ok(()) => check(key, target.as_slice().expect("filled")),
                    Err(StoreError::NotFound { .. } | StoreError::NotSealed { .. }) => {}
                    Err(other) => panic!("{other}"),
                }
            }
            _ => match store.get(payload).await {
                // A draft that is deleted counts as never sealed: only sealed objects are deleted here.
                Ok(object) => {
                    drop(object);
                    if store.delete(payload, None).await.is_ok() {
                        counts.deleted.fetch_add(1, Ordering::Relaxed);
                    }
                }
                Err(StoreError::NotFound { .. } | StoreError::NotSealed { .. }) => {}
                Err(other) => panic!("{other}"),
            },
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn many_writers_and_readers_each_get_whole_objects() {
    let world = World::new().await;
    // The largest objects that all tasks may hold at once, and no more.
    let store = world.spilling(TASKS * 5, 1 << 20).await;
    let counts = Arc::<Counts>::default();
    let steps = count(400, 10_000).into();
    let tasks: Vec<_> = (0..TASKS)
        .map(|task| tokio::spawn(work(store.clone(), Arc::clone(&counts), task, steps)))
        .collect();
    for task in tasks {
        task.await.expect("no panic");
    }
    let mut left = 0;
    for key in 0..KEYS {
        match store.get(id(key.into())).await {
            Ok(object) => check(key, object.part(0).expect("it is there")),
            Err(StoreError::NotFound { .. }) => continue,
            Err(other) => panic!("{other}"),
        }
        store.delete(id(key.into()), None).await.expect("it is there");
        left += 1;
    }
    let (sealed, deleted) = (
        counts.sealed.load(Ordering::Relaxed),
        counts.deleted.load(Ordering::Relaxed),
    );
    let stats = store.stats();
    assert!(
        deleted + stats.evicted.objects + left >= sealed,
        "of {sealed} objects, {deleted} were deleted: {stats:?}"
    );
    until("nothing is left", || {
        let usage = store.usage();
        usage.used() == ByteCount(0) && usage.spill.is_some_and(|spill| spill.used == ByteCount(0))
    })
    .await;
    assert_eq!((world.host.stats().allocated_bytes, world.host.stats().regions), (0, 0));
    assert!(world.files().is_empty(), "files are left");
}
