use std::sync::Arc;
use std::time::Duration;

use stagewire_core::{ByteCount, Peer, Record};
use stagewire_store::{NewObject, ObjectState, Store, StoreError, TokenGate, conformance};
use stagewire_transfer::{ConnectOptions, Host, Memory, RegisterOptions, TransferOptions};

use crate::world::{World, id, start};

fn peer(host: &Arc<Host>) -> Peer {
    Peer {
        incarnation: host.incarnation(),
        process: host.process(),
        socket: String::new(),
        transports: vec![host.shm().address()],
    }
}

#[tokio::test]
async fn the_host_store_conforms() {
    let mut worlds = Vec::new();
    for _ in 0..15 {
        worlds.push(World::new().await);
    }
    let mut next = worlds.iter();
    conformance::run(|limit| {
        let store = next
            .next()
            .expect("a world for each check")
            .store(limit, TokenGate::open());
        async move { store }
    })
    .await;
    for world in &worlds {
        assert_eq!(
            (world.host.stats().allocated_bytes, world.host.stats().regions),
            (0, 0),
            "something is left"
        );
    }
}

/// With files, the store keeps all its promises of what goes and what stays: nothing moves there without need.
#[tokio::test]
async fn the_host_store_with_files_conforms() {
    let pages = conformance::LIMIT.0 / 4096;
    let world = World::new().await;
    conformance::objects_come_back_exact(&world.spilling(pages, pages).await).await;
    conformance::put_if_absent_is_truthful(&(Arc::new(world.spilling(pages, pages).await) as _)).await;
    conformance::readers_keep_what_they_read(&world.spilling(pages, pages).await).await;
    conformance::fetched_bytes_are_exact(&world.spilling(pages, pages).await).await;
    conformance::deadlines_are_fixed(&world.spilling(pages, pages).await).await;
}

#[tokio::test]
async fn the_host_store_checks_tokens() {
    let world = World::new().await;
    let store = world.store(ByteCount(1 << 20), TokenGate::closed());
    conformance::tokens_are_checked(&store, store.gate()).await;
}

#[tokio::test]
async fn a_deleted_object_counts_until_the_last_pin_of_another_process_ends() {
    let world = World::new().await;
    let store = world.store(ByteCount(4096), TokenGate::open());
    let mut draft = store
        .create(NewObject::new(id(1), [ByteCount(1000)]))
        .await
        .expect("room");
    draft.bytes_mut(0).expect("there").fill(7);
    let region = draft.seal().await.expect("complete").regions()[0]
        .clone()
        .expect("it has bytes");

    let reader = start(&world.dir).await;
    let remote = reader
        .shm()
        .connect(&peer(&world.host), ConnectOptions::default())
        .await
        .expect("it listens");
    let pin = remote
        .pin(&region, TransferOptions::default())
        .await
        .expect("it is there");
    let mapping = pin.map().await.expect("shared memory");
    drop(pin);
    store.delete(id(1), None).await.expect("it is there");
    assert!(
        remote.pin(&region, TransferOptions::default()).await.is_err(),
        "a deleted object was pinned"
    );

    let usage = store.usage();
    assert_eq!(usage.largest[0].state, ObjectState::Draining);
    let full = store
        .create(NewObject::new(id(2), [ByteCount(1)]))
        .await
        .expect_err("the reader holds it");
    assert!(full.to_string().contains("gone but still read"), "{full}");
    assert!(mapping.iter().all(|byte| *byte == 7));

    let mut patient = NewObject::new(id(2), [ByteCount(1)]);
    patient.wait = Duration::from_secs(20);
    drop(mapping);
    store.create(patient).await.expect("the reader has let go");
}

#[tokio::test]
async fn drafts_are_pulled_into_and_sealed_only_when_every_byte_came() {
    let world = World::new().await;
    let store = world.store(ByteCount(4096), TokenGate::open());
    let producer = start(&world.dir).await;
    let mut source = producer.arena().allocate(100).expect("room");
    source.fill(9);
    let region = producer
        .shm()
        .register(Memory::Arena(source.freeze()), RegisterOptions::default())
        .expect("its own");
    let remote = world
        .host
        .shm()
        .connect(&peer(&producer), ConnectOptions::default())
        .await
        .expect("it listens");
    let pin = remote
        .pin(&region.reference(), TransferOptions::default())
        .await
        .expect("it is there");

    for (pulled, complete) in [(99, false), (100, true)] {
        let mut draft = store
            .create(NewObject::new(id(1), [ByteCount(100)]))
            .await
            .expect("room");
        let target = draft.target(0).expect("it has bytes");
        pin.pull(&[Record::contiguous(0, 0, pulled)], &target, TransferOptions::default())
            .await
            .expect("alive");
        assert!(
            matches!(draft.bytes_mut(0), Err(StoreError::Busy { .. })),
            "two writers"
        );
        drop(target);
        match draft.seal().await {
            Ok(object) if complete => assert_eq!(object.part(0), Some([9; 100].as_slice())),
            Err(StoreError::Unwritten { part: 0, .. }) if !complete => {}
            other => panic!("{pulled} bytes pulled: {other:?}"),
        }
    }
}

#[tokio::test]
async fn a_draft_with_a_target_in_use_is_not_sealed() {
    let world = World::new().await;
    let store = world.store(ByteCount(4096), TokenGate::open());
    let mut draft = store
        .create(NewObject::new(id(1), [ByteCount(0), ByteCount(10)]))
        .await
        .expect("room");
    assert!(
        matches!(draft.target(0), Err(StoreError::NoSuchPart { .. })),
        "a part of no bytes"
    );
    let _target = draft.target(1).expect("it has bytes");
    assert!(draft.seal().await.is_err());
    assert!(store.get(id(1)).await.is_err());
}

#[tokio::test]
async fn the_books_show_what_the_arena_gave() {
    let world = World::new().await;
    let store = world.store(ByteCount(1 << 20), TokenGate::open());
    let mut drafts = Vec::new();
    for n in 0..64 {
        let parts = [1, 0, 4096, 4097].map(ByteCount);
        drafts.push(store.create(NewObject::new(id(n), parts)).await.expect("room"));
    }
    assert_eq!(store.usage().used(), ByteCount(1 << 20));
    assert_eq!(world.host.stats().allocated_bytes, 1 << 20);
    let full = store.create(NewObject::new(id(64), [ByteCount(1)])).await;
    assert!(matches!(full, Err(StoreError::Exhausted { .. })), "{full:?}");
}

#[tokio::test]
async fn a_writer_waits_for_an_arena_that_is_full() {
    let world = World::new().await;
    let store = world.store(ByteCount(1 << 20), TokenGate::open());
    let arena = world.host.arena();
    let most = arena.allocate(arena.limit().0 - 4096).expect("all but a page");
    let parts = [ByteCount(1), ByteCount(1)];
    let hasty = store.create(NewObject::new(id(1), parts)).await;
    assert!(matches!(hasty, Err(StoreError::Arena { .. })), "{hasty:?}");
    assert_eq!(
        store.usage().used(),
        ByteCount(0),
        "a draft without memory kept its room"
    );

    let mut patient = NewObject::new(id(1), parts);
    patient.wait = Duration::from_secs(20);
    let (draft, ()) = tokio::join!(store.create(patient), async {
        // It has the room of its draft, and waits for the arena.
        while store.usage().drafts.objects == 0 {
            tokio::task::yield_now().await;
        }
        assert_eq!(
            world.host.stats().allocated_bytes,
            arena.limit().0 - 4096,
            "a part alone"
        );
        drop(most);
    });
    draft.expect("there is room now");
}
