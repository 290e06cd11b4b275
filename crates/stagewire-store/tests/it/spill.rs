use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use stagewire_core::{ByteCount, Classify, ErrorClass};
use stagewire_store::{
    HostStore, OpenError, Retention, SpillFault, SpillOptions, Store, StoreError, StoreOptions, TokenGate,
};
use stagewire_transfer::{Borrowed, Target};

use crate::world::{Disk, PAGE, PATIENCE, World, check, fetch, files, id, pattern, put, skip, until};

const HELD: Retention = Retention::Held;

/// Parts of one, some, and no whole pages.
fn parts(n: u64) -> Vec<u64> {
    match n % 4 {
        0 => vec![4 * PAGE],
        1 => vec![2 * PAGE + 1, 0, 5],
        2 => vec![1, PAGE - 1, PAGE, 100],
        _ => vec![3 * PAGE + 17],
    }
}

/// Two objects of 4 pages in a store of 4: one of them is in a file.
async fn one_in_a_file(world: &World) -> HostStore {
    let store = world.spilling(4, 100).await;
    for n in 0..2 {
        put(&store, id(n), n as u64, &[4 * PAGE], HELD, PATIENCE)
            .await
            .expect("the first one moves");
    }
    assert_eq!((world.files().len(), store.usage().spilled.objects), (1, 1));
    store
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenth_of_the_working_set_fits_and_nothing_unread_is_lost() {
    const OBJECTS: u64 = 100;
    let world = World::new().await;
    let pages = OBJECTS * 4 / 10;
    let store = world.spilling(pages, OBJECTS * 10).await;
    let done = Arc::new(AtomicBool::new(false));
    let sampler = std::thread::spawn({
        let (host, store, done) = (Arc::clone(&world.host), store.clone(), Arc::clone(&done));
        move || {
            let mut most = 0;
            while !done.load(Ordering::Relaxed) {
                let (allocated, used) = (host.stats().allocated_bytes, store.usage().used().0);
                most = most.max(allocated).max(used);
                std::thread::sleep(Duration::from_micros(100));
            }
            most
        }
    });
    for n in 0..OBJECTS {
        put(&store, id(n.into()), n, &parts(n), HELD, PATIENCE)
            .await
            .expect("others move to files");
    }
    assert!(store.usage().spilled.objects >= OBJECTS / 2, "{}", store.usage());
    for n in (0..OBJECTS).rev() {
        fetch(&store, id(n.into()), n, &parts(n))
            .await
            .expect("nothing is lost");
    }
    for n in 0..OBJECTS {
        let object = store.get(id(n.into())).await.expect("nothing is lost");
        check(&*object, n, &parts(n));
    }
    let stats = store.stats();
    assert_eq!(stats.evicted.objects, 0);
    assert!(stats.restored.objects >= OBJECTS / 2, "{stats:?}");
    for n in 0..OBJECTS {
        fetch(&store, id(n.into()), n, &parts(n))
            .await
            .expect("nothing is lost");
        store.delete(id(n.into()), None).await.expect("it is there");
    }
    done.store(true, Ordering::Relaxed);
    let most = sampler.join().expect("no panic");
    assert!(most <= pages * PAGE, "{most} bytes of {pages} pages were resident");
    until("all files are gone", || world.files().is_empty()).await;
    until("the quota is free", || {
        store.usage().spill.expect("it has one").used == ByteCount(0)
    })
    .await;
    assert_eq!((store.usage().used(), world.host.stats().regions), (ByteCount(0), 0));
}

#[tokio::test]
async fn files_are_private_and_gone_with_their_objects_and_with_the_store() {
    let world = World::new().await;
    let store = one_in_a_file(&world).await;
    let mode = |path: &Path| fs::metadata(path).expect("there").permissions().mode() & 0o7777;
    let file = world.files().remove(0);
    assert_eq!((mode(&world.spill_dir()), mode(&file)), (0o700, 0o600));
    assert_eq!(fs::metadata(&file).expect("there").len(), 4 * PAGE);
    let name = file.file_name().and_then(|name| name.to_str()).expect("a name");
    assert!(name.starts_with(&id(0).0.simple().to_string()), "{name}");

    store.delete(id(0), None).await.expect("it is there");
    until("the file is gone", || world.files().is_empty()).await;
    put(&store, id(0), 5, &[4 * PAGE], HELD, PATIENCE)
        .await
        .expect("the key is free");
    assert_eq!(world.files().len(), 1, "the other one");
    fetch(&store, id(0), 5, &[4 * PAGE])
        .await
        .expect("the second of its key");
    drop(store);
    until("the store has ended", || world.files().is_empty()).await;
}

#[tokio::test]
async fn what_an_earlier_store_left_is_swept_and_foreign_files_stay() {
    let world = World::new().await;
    let dir = world.spill_dir();
    drop(world.spilling(4, 4).await);
    let orphan = dir.join(format!("{}-{:016x}.spill", id(7).0.simple(), 1));
    let foreign = dir.join("notes.spill");
    fs::write(&orphan, b"left").expect("written");
    fs::write(&foreign, b"not ours").expect("written");
    let store = world.spilling(4, 4).await;
    assert_eq!(files(&dir), [foreign]);
    assert_eq!(store.usage().spill.expect("it has one").used, ByteCount(0));
}

#[tokio::test]
async fn a_directory_that_others_can_use_is_refused() {
    let world = World::new().await;
    let open = |dir: &Path| {
        let mut options = StoreOptions::new(ByteCount(PAGE), Arc::new(TokenGate::open()));
        options.spill = Some(SpillOptions {
            dir: dir.to_owned(),
            quota: ByteCount(PAGE),
        });
        let host = Arc::clone(&world.host);
        async move { fault(HostStore::open(&host, options).await) }
    };
    let store = world.spilling(1, 1).await;
    let used = open(&world.spill_dir()).await;
    assert!(matches!(used, SpillFault::InUse { .. }), "{used}");
    assert_eq!((used.class(), used.reason()), (ErrorClass::Conflict, "spill.in_use"));
    drop(store);

    let shared = world.dir.path().join("shared");
    fs::create_dir(&shared).expect("made");
    fs::set_permissions(&shared, fs::Permissions::from_mode(0o750)).expect("changed");
    let insecure = open(&shared).await;
    assert!(matches!(insecure, SpillFault::Insecure { .. }), "{insecure}");
    let link = world.dir.path().join("link");
    std::os::unix::fs::symlink(world.spill_dir(), &link).expect("made");
    let linked = open(&link).await;
    assert!(matches!(linked, SpillFault::Dir { what: "open", .. }), "{linked}");
}

fn fault<T: std::fmt::Debug>(opened: Result<T, OpenError>) -> SpillFault {
    match opened.expect_err("refused") {
        OpenError::Spill(fault) => fault,
        other => panic!("{other}"),
    }
}

/// What a crash or a bad disk does to a file, and what a reader is told.
#[tokio::test]
async fn torn_and_lost_writes_are_errors_and_never_other_bytes() {
    type Damage = fn(&Path);
    fn at(file: &Path, offset: u64, bytes: &[u8]) {
        let file = fs::OpenOptions::new().write(true).open(file).expect("it is there");
        file.write_all_at(bytes, offset).expect("written");
    }
    fn cut(file: &Path, len: u64) {
        let file = fs::OpenOptions::new().write(true).open(file).expect("it is there");
        file.set_len(len).expect("cut");
    }
    let damages: [(&str, Damage); 7] = [
        ("a page of zeros", |file| at(file, PAGE, &[0; PAGE as usize])),
        ("a bit", |file| {
            let bytes = fs::read(file).expect("readable");
            at(file, 9999, &[bytes[9999] ^ 16]);
        }),
        ("the last byte", |file| {
            let bytes = fs::read(file).expect("readable");
            at(file, 4 * PAGE - 1, &[!bytes[4 * PAGE as usize - 1]]);
        }),
        ("two pages swapped", |file| {
            let bytes = fs::read(file).expect("readable");
            let (first, second) = bytes.split_at(PAGE as usize);
            at(file, 0, &second[..PAGE as usize]);
            at(file, PAGE, first);
        }),
        ("cut at a page", |file| cut(file, 2 * PAGE)),
        ("cut within a page", |file| cut(file, 2 * PAGE + 100)),
        ("empty", |file| cut(file, 0)),
    ];
    for (what, damage) in damages {
        let world = World::new().await;
        let store = one_in_a_file(&world).await;
        let file = world.files().remove(0);
        let before = fs::read(&file).expect("readable");
        damage(&file);
        for restore in [false, true, false] {
            let target = Arc::new(Target::allocate(4 * PAGE).expect("memory"));
            let error = match restore {
                true => store.get(id(0)).await.map(drop),
                false => store.fetch(id(0), &[Arc::clone(&target)]).await,
            };
            let error = error.expect_err(what);
            let StoreError::Corrupt {
                payload,
                file: named,
                written,
                found,
            } = &error
            else {
                panic!("{what}: {error}")
            };
            assert_eq!((*payload, named, error.class()), (id(0), &file, ErrorClass::Corrupt));
            let text = error.to_string();
            assert!(written != found && text.contains(&written.to_string()) && text.contains(&found.to_string()));
            assert!(target.as_slice().is_err(), "{what}: bytes were shown");
            assert!(target.is_idle(), "{what}: the destination is still claimed");
        }
        fetch(&store, id(1), 1, &[4 * PAGE]).await.expect("another object");
        // The same bytes again are good again.
        fs::write(&file, before).expect("written");
        check(&*store.get(id(0)).await.expect("as it was"), 0, &[4 * PAGE]);
    }
}

#[tokio::test]
async fn files_that_were_swapped_or_lost_are_errors() {
    let world = World::new().await;
    let store = world.spilling(4, 100).await;
    for n in 0..3 {
        put(&store, id(n), n as u64, &[4 * PAGE], HELD, PATIENCE)
            .await
            .expect("others move");
    }
    let files = world.files();
    let [first, second] = &files[..] else {
        panic!("{files:?}")
    };
    let aside = world.dir.path().join("aside");
    for (from, to) in [(first, &aside), (second, first), (&aside, second)] {
        fs::rename(from, to).expect("moved");
    }
    for n in 0..2 {
        let error = fetch(&store, id(n), n as u64, &[4 * PAGE])
            .await
            .expect_err("of another object");
        assert!(matches!(error, StoreError::Corrupt { .. }), "{error}");
    }
    fs::remove_file(first).expect("it is there");
    let lost = fetch(&store, id(0), 0, &[4 * PAGE]).await.expect_err("it is gone");
    assert_eq!(
        (lost.class(), lost.reason()),
        (ErrorClass::Corrupt, "spill.lost"),
        "{lost}"
    );
    std::os::unix::fs::symlink(second, first).expect("made");
    let linked = fetch(&store, id(0), 0, &[4 * PAGE])
        .await
        .expect_err("a link is not followed");
    assert_eq!(linked.reason(), "spill.lost", "{linked}");
    for n in 0..3 {
        store.delete(id(n), None).await.expect("it can be deleted");
    }
    until("the store is empty", || {
        store.usage().spill.expect("it has one").used == ByteCount(0)
    })
    .await;
    put(&store, id(0), 9, &[4 * PAGE], HELD, PATIENCE)
        .await
        .expect("the key can be used again");
}

#[tokio::test]
async fn the_quota_is_kept_and_the_rest_stays_in_memory() {
    let world = World::new().await;
    let store = world.spilling(4, 4).await;
    for n in 0..2 {
        put(&store, id(n), n as u64, &[4 * PAGE], HELD, PATIENCE)
            .await
            .expect("one fits into a file");
    }
    let full = put(&store, id(2), 2, &[PAGE], HELD, Duration::from_millis(50)).await;
    let full = full.expect_err("memory and files are full");
    assert!(matches!(full, StoreError::Exhausted { .. }), "{full}");
    assert!(
        full.to_string()
            .contains("1 in files (16.0 KiB); 16.0 KiB of 16.0 KiB of files"),
        "{full}"
    );
    for n in 0..2 {
        fetch(&store, id(n), n as u64, &[4 * PAGE])
            .await
            .expect("nothing is lost");
    }
    store.delete(id(0), None).await.expect("it is there");
    put(&store, id(2), 2, &[PAGE], HELD, PATIENCE)
        .await
        .expect("there is room in files");
}

#[tokio::test]
async fn a_write_that_fails_leaves_the_object_in_memory_and_says_why() {
    let world = World::new().await;
    let store = world.spilling(4, 100).await;
    fs::remove_dir(world.spill_dir()).expect("empty");
    put(&store, id(0), 0, &[4 * PAGE], HELD, PATIENCE)
        .await
        .expect("there is room");
    let full = put(&store, id(1), 1, &[PAGE], HELD, Duration::from_secs(1)).await;
    let full = full.expect_err("nothing can move");
    let fault = store
        .usage()
        .spill
        .and_then(|spill| spill.fault)
        .expect("a write failed");
    assert!(matches!(fault, SpillFault::Io { what: "create", .. }), "{fault}");
    assert!(full.to_string().contains(&fault.to_string()), "{full}");
    check(&*store.get(id(0)).await.expect("it stayed"), 0, &[4 * PAGE]);
    assert_eq!((store.usage().spilled.objects, store.stats().spilled.objects), (0, 0));
    let soft = put(&store, id(1), 1, &[PAGE], HELD, Duration::ZERO).await;
    assert!(soft.is_err(), "room out of nowhere");
    store.delete(id(0), None).await.expect("it is there");
    put(&store, id(1), 1, &[PAGE], HELD, PATIENCE)
        .await
        .expect("there is room");
}

#[tokio::test]
async fn a_full_disk_leaves_the_object_in_memory_and_says_so() {
    let world = World::new().await;
    let dir = world.spill_dir();
    fs::create_dir(&dir).expect("made");
    let Some(disk) = Disk::mount(&dir, 8 * PAGE) else {
        return skip("a full disk needs the right to mount one");
    };
    let store = world.spilling(16, 1000).await;
    put(&store, id(0), 0, &[16 * PAGE], HELD, PATIENCE)
        .await
        .expect("there is room");
    let full = put(&store, id(1), 1, &[PAGE], HELD, Duration::from_secs(1)).await;
    let full = full.expect_err("the disk is too small");
    let fault = store
        .usage()
        .spill
        .and_then(|spill| spill.fault)
        .expect("a write failed");
    assert_eq!(
        (fault.class(), fault.reason()),
        (ErrorClass::Exhausted, "spill.no_space")
    );
    assert!(full.to_string().contains("No space left"), "{full}");
    assert_eq!(world.files(), [] as [&Path; 0], "half a file was left");
    fetch(&store, id(0), 0, &[16 * PAGE]).await.expect("it stayed");
    drop(store);
    drop(disk);
}

#[tokio::test]
async fn any_destination_is_filled_from_a_file() {
    let world = World::new().await;
    let store = world.spilling(2100, 100_000).await;
    let sizes = [3 * PAGE + 5, 0, 1, 2 * 1024 * PAGE];
    put(&store, id(0), 0, &sizes, HELD, PATIENCE)
        .await
        .expect("there is room");
    put(&store, id(1), 1, &[2100 * PAGE], HELD, PATIENCE)
        .await
        .expect("the other moves");
    assert_eq!(store.usage().spilled.objects, 1);
    for shift in [0, 1, 8, 512] {
        let owners: Vec<_> = sizes
            .iter()
            .map(|len| Borrowed::from(vec![7; *len as usize + 8192]))
            .collect();
        let targets: Vec<_> = owners
            .iter()
            .zip(sizes)
            .map(|(owner, len)| {
                let start = owner.as_ptr().as_ptr();
                let skip = start.align_offset(PAGE as usize) + shift;
                // SAFETY: inside the memory of the owner, which the target keeps, and nobody else looks at it.
                #[expect(unsafe_code, reason = "destinations at any address")]
                let target = unsafe {
                    Target::new(
                        std::ptr::NonNull::new(start.add(skip)).expect("not null"),
                        len as usize,
                        Arc::new(owner.clone()),
                    )
                };
                Arc::new(target)
            })
            .collect();
        store.fetch(id(0), &targets).await.expect("it is in a file");
        for (part, (target, len)) in targets.iter().zip(sizes).enumerate() {
            assert!(
                target.as_slice().expect("filled") == pattern(part as u64, len),
                "part {part}, {shift} off a page"
            );
        }
    }
    assert_eq!(store.stats().restored.objects, 0, "a fetch brought it back");
    let wrong = [Arc::new(Target::allocate(1).expect("memory"))];
    let error = store.fetch(id(0), &wrong).await.expect_err("four parts");
    assert!(matches!(error, StoreError::Destinations { .. }), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_of_an_object_that_moves_keep_reading() {
    let world = World::new().await;
    let store = one_in_a_file(&world).await;
    // Many ask at once: it is brought back once, and the other one moves.
    let readers: Vec<_> = (0..16)
        .map(|_| {
            let store = store.clone();
            tokio::spawn(async move { store.get(id(0)).await.expect("it comes back") })
        })
        .collect();
    let mut objects = Vec::new();
    for reader in readers {
        objects.push(reader.await.expect("no panic"));
    }
    assert_eq!((store.stats().restored.objects, store.usage().spilled.objects), (1, 1));
    let busy = put(&store, id(2), 2, &[PAGE], HELD, Duration::from_millis(50)).await;
    assert!(busy.is_err(), "an object that is read was moved");
    for object in &objects {
        check(&**object, 0, &[4 * PAGE]);
    }
    drop(objects);
    put(&store, id(2), 2, &[PAGE], HELD, PATIENCE)
        .await
        .expect("nobody reads it now");
    fetch(&store, id(0), 0, &[4 * PAGE]).await.expect("it moved again");
    assert!(fs::metadata(world.spill_dir()).expect("there").mode() & 0o077 == 0);
}

#[tokio::test]
async fn an_object_in_a_file_expires_and_its_file_goes() {
    let world = World::new().await;
    let store = world.spilling(4, 100).await;
    let mut object = stagewire_store::NewObject::new(id(0), [ByteCount(4 * PAGE)]);
    object.expires = Some(Duration::from_millis(1500));
    store
        .create(object)
        .await
        .expect("room")
        .seal()
        .await
        .expect("complete");
    put(&store, id(1), 1, &[4 * PAGE], HELD, PATIENCE)
        .await
        .expect("it moves");
    assert_eq!(store.usage().spilled.objects, 1);
    until("it has expired", || store.stats().expired.objects == 1).await;
    until("its file is gone", || world.files().is_empty()).await;
    let gone = store.get(id(0)).await.expect_err("it is over");
    assert!(matches!(gone, StoreError::NotFound { .. }), "{gone}");
    assert_eq!(store.usage().spilled.objects, 0);
}
