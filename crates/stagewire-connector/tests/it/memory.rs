//! Memory that is published again and again, and producers that write where they must not.

use std::collections::BTreeSet;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use stagewire_connector::{Connector, ConsumeError, ConsumeOptions, OnChunk, PublishSpec};
use stagewire_core::{Classify, ErrorClass, Lease};
use stagewire_transfer::{Borrowed, Memory, Target};
use tokio::time::Instant;

use crate::bundle::{Bundle, CONSUMED};
use crate::second::Ask;
use crate::{PATIENCE, World, all_gone};

fn latent() -> Bundle {
    Bundle::one(&[8, 1000]).cut(0, 8)
}

/// Memory whose bytes can be changed behind the back of who reads it. Each byte is an atomic of its own, so that the test
/// itself races with nobody.
#[expect(unsafe_code, reason = "what a producer does that breaks its promise")]
fn shared(bytes: &[u8]) -> (Arc<Vec<AtomicU64>>, Memory) {
    assert_eq!(bytes.len() % 8, 0);
    let words = bytes
        .chunks_exact(8)
        .map(|word| AtomicU64::new(u64::from_ne_bytes(word.try_into().expect("8"))));
    let words: Arc<Vec<AtomicU64>> = Arc::new(words.collect());
    let start = std::ptr::NonNull::from(words.as_slice()).cast();
    // SAFETY: the vector is as long as that and is kept as the owner.
    let memory = unsafe { Borrowed::new(start, bytes.len(), Arc::clone(&words) as _) };
    (words, memory.into())
}

fn fill(words: &[AtomicU64], bytes: &[u8]) {
    for (word, bytes) in words.iter().zip(bytes.chunks_exact(8)) {
        word.store(u64::from_ne_bytes(bytes.try_into().expect("8")), Ordering::Release);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tensor_that_is_changed_after_it_was_shown_is_caught() {
    let world = World::new().await;
    let bundle = latent();
    let bytes = bundle.bytes(0, 32_000);
    for chunk in [0, 5] {
        let (words, memory) = shared(&bytes);
        let spec = PublishSpec {
            digests: true,
            ..PublishSpec::new("request 7", bundle.manifest(), Lease::Pinned)
        };
        let publication = world.connector.publish(spec, vec![memory]).expect("room");
        let fetch = async || {
            let options = ConsumeOptions::within(PATIENCE);
            let mut consumer = world.connector.consume(publication.handle().clone(), options)?;
            let mut seen = 0;
            while consumer.next().await?.is_some() {
                seen += 1;
            }
            Ok::<_, ConsumeError>(seen)
        };
        assert_eq!(fetch().await.expect("nothing was changed"), 8);
        // One bit of one chunk.
        words[chunk * 500 + 7].fetch_xor(1 << 9, Ordering::Release);
        let error = fetch().await.expect_err("it was changed");
        assert!(matches!(error, ConsumeError::Modified { .. }), "{error}");
        assert_eq!(
            (error.class(), error.reason()),
            (ErrorClass::Corrupt, "payload.modified")
        );
        assert_eq!(error.place().expect("it says where").chunk, chunk as u32);
        world.connector.release(publication.handle().payload);
    }
    all_gone(&world.connector).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn digests_of_every_kind_of_bundle_agree() {
    let world = World::new().await;
    for bundle in [
        latent(),
        latent().borrowed(),
        Bundle::one(&[3, 0, 2]),
        Bundle::one(&[]),
        Bundle::one(&[2, 5, 3]).cut(1, 3),
    ] {
        for private in [false, true] {
            let spec = PublishSpec {
                digests: true,
                ..PublishSpec::new("request", bundle.manifest(), CONSUMED)
            };
            let memory = bundle.memory(world.connector.host().arena());
            let publication = world.connector.publish(spec, memory).expect("room");
            let options = ConsumeOptions {
                private,
                ..ConsumeOptions::within(PATIENCE)
            };
            let mut consumer = world
                .connector
                .consume(publication.handle().clone(), options)
                .expect("a consumer");
            bundle.check(&consumer.fetch_all().await.expect("nobody changed it").tensors, None);
        }
    }
    all_gone(&world.connector).await;
}

/// At its arrival, in whatever order, and not only when it is asked for.
#[tokio::test(flavor = "multi_thread")]
async fn each_chunk_is_told_once_as_it_comes() {
    let world = World::new().await;
    let mut second = world.second().await;
    for (bundle, private) in [(latent(), false), (latent(), true), (latent().borrowed(), false)] {
        let handle = second.open(&bundle, CONSUMED).await;
        let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
        let on_chunk = OnChunk::new({
            let bundle = bundle.clone();
            move |index, tensors| {
                bundle.check(tensors, Some(index));
                tell.send(index).expect("the test listens");
            }
        });
        let options = ConsumeOptions {
            private,
            on_chunk: Some(on_chunk),
            ..ConsumeOptions::within(PATIENCE)
        };
        let mut consumer = world.connector.consume(handle.clone(), options).expect("a consumer");
        let mut come = async |index: u32| {
            second.ready(&handle, index).await;
            let next = tokio::time::timeout(PATIENCE, told.recv()).await;
            assert_eq!(next.expect("it is told at once"), Some(index), "private: {private}");
        };
        // It waits for chunk 0, and is told of others meanwhile.
        let early = async {
            for index in [2, 1, 0] {
                come(index).await;
            }
        };
        let (first, ()) = tokio::join!(consumer.next(), early);
        bundle.check(&first.expect("alive").expect("ready").tensors, Some(0));
        // It is busy now.
        for index in [3, 4, 7, 6, 5] {
            come(index).await;
        }
        for index in 1..8 {
            let chunk = consumer.next().await.expect("alive").expect("ready");
            bundle.check(&chunk.tensors, Some(index));
        }
        assert!(consumer.next().await.expect("alive").is_none());
        assert!(told.try_recv().is_err(), "a chunk was told of twice");
    }
    second.all_gone().await;
}

/// Also where all are there from the beginning, and would be copied together.
#[tokio::test(flavor = "multi_thread")]
async fn chunks_of_a_slow_copy_are_told_one_by_one() {
    // 20 ms for each chunk.
    let world = World::with(|options| options.throttle.bytes_per_second = NonZeroU64::new(20_000_000)).await;
    let mut second = world.second().await;
    let bundle = Bundle::one(&[8, 400_000]).cut(0, 8);
    for whole in [true, false] {
        let handle = second.publish(&bundle, CONSUMED).await;
        let told = Arc::new(Mutex::new(Vec::new()));
        let on_chunk = OnChunk::new({
            let told = Arc::clone(&told);
            move |index, _| told.lock().expect("no panic").push((index, Instant::now()))
        });
        let options = ConsumeOptions {
            private: true,
            on_chunk: Some(on_chunk),
            ..ConsumeOptions::within(PATIENCE)
        };
        let mut consumer = world.connector.consume(handle, options).expect("a consumer");
        if whole {
            consumer.fetch_all().await.expect("alive");
        } else {
            while consumer.next().await.expect("alive").is_some() {}
        }
        let told = told.lock().expect("no panic");
        let chunks: BTreeSet<u32> = told.iter().map(|(index, _)| *index).collect();
        assert_eq!((told.len(), chunks.len()), (8, 8));
        for two in told.windows(2) {
            let between = two[1].1 - two[0].1;
            assert!(
                between > Duration::from_millis(10),
                "{between:?} before chunk {}",
                two[1].0
            );
        }
    }
    second.all_gone().await;
}

/// Nobody gets a chunk while somebody is still being told of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_chunk_is_returned_once_it_has_been_told() {
    let world = World::new().await;
    let mut second = world.second().await;
    for (bundle, private) in [(latent(), false), (latent(), true)] {
        let handle = second.open(&bundle, CONSUMED).await;
        let told = Arc::new(AtomicU32::new(0));
        let on_chunk = OnChunk::new({
            let told = Arc::clone(&told);
            move |_, _| {
                // Time enough to be overtaken.
                (0..100).for_each(|_| std::thread::yield_now());
                told.fetch_add(1, Ordering::Release);
            }
        });
        let options = ConsumeOptions {
            private,
            on_chunk: Some(on_chunk),
            ..ConsumeOptions::within(PATIENCE)
        };
        let mut consumer = world.connector.consume(handle.clone(), options).expect("a consumer");
        for index in 0..8 {
            let (chunk, ()) = tokio::join!(consumer.next(), second.ready(&handle, index));
            assert!(told.load(Ordering::Acquire) > index, "private: {private}");
            bundle.check(&chunk.expect("alive").expect("ready").tensors, Some(index));
        }
        assert!(consumer.next().await.expect("alive").is_none());
    }
    second.all_gone().await;
}

/// Registered once, published often: no registration, and no consumer ever sees bytes of another payload.
#[tokio::test(flavor = "multi_thread")]
async fn registered_memory_is_published_again_and_again() {
    let world = World::new().await;
    let consumer = world.another("decode").await;
    let producer = &world.connector;
    let bundle = latent();
    for arena in [true, false] {
        let bundle = Bundle {
            arena,
            ..bundle.clone()
        };
        let memory = bundle.memory(producer.host().arena()).remove(0);
        let registered = producer.register(memory).expect("host memory");
        let before = producer.stats().host.registrations;
        let mut handles = Vec::new();
        for _ in 0..20 {
            let spec = PublishSpec::new("request", bundle.manifest(), CONSUMED);
            let publication = producer.publish(spec, vec![registered.memory()]).expect("room");
            assert!(!registered.is_unused());
            let handle = publication.handle().clone();
            let mut reader = consumer
                .consume(handle.clone(), ConsumeOptions::within(PATIENCE))
                .expect("a consumer");
            bundle.check(&reader.fetch_all().await.expect("alive").tensors, None);
            drop(reader);
            publication.unread().await;
            handles.push(handle);
        }
        assert_eq!(producer.stats().host.registrations, before, "something was registered");
        let mut capabilities: Vec<_> = handles.iter().map(|handle| handle.regions[0].generation).collect();
        capabilities.dedup();
        assert!(
            handles.windows(2).all(|pair| pair[0].regions[0] != pair[1].regions[0]),
            "two payloads have the same right"
        );
        let begin = Instant::now();
        while !registered.is_unused() {
            assert!(begin.elapsed() < PATIENCE, "it is still in use");
            tokio::task::yield_now().await;
        }
        drop(registered);
        all_gone(producer).await;
    }
    all_gone(&consumer).await;
}

/// A consumer that ran out of time, or was dropped while its copies were under way, neither holds nor writes what a later
/// request uses: not the producer's memory, which is filled anew, nor its own destination, which is used again.
#[tokio::test(flavor = "multi_thread")]
async fn late_data_never_reaches_a_later_request() {
    let world = World::new().await;
    let consumer = world.another("decode").await;
    let shape = [8, 1 << 17];
    let len = 4 << 20;
    let mut target = Arc::new(Target::allocate(len).expect("memory"));
    let bytes = Bundle::one(&shape).bytes(0, len);
    let (words, memory) = shared(&bytes);
    let registered = world.connector.register(memory).expect("host memory");
    for round in 0..crate::rounds(200) {
        let bundle = Bundle::one(&shape).cut(0, 8).seeded(round);
        fill(&words, &bundle.bytes(0, len));
        let spec = PublishSpec::new("request", bundle.manifest(), Lease::Pinned);
        let publication = world.connector.publish(spec, vec![registered.memory()]).expect("room");
        let options = |deadline| ConsumeOptions {
            destinations: Some(vec![Arc::clone(&target)]),
            ..ConsumeOptions::within(deadline)
        };
        let late = Duration::from_micros(round % 40 * 50);
        if round % 4 != 3 {
            // Out of time somewhere on the way, or given up.
            let mut first = consumer
                .consume(publication.handle().clone(), options(late))
                .expect("a consumer");
            let fetched = tokio::time::timeout(late * 2, first.fetch_all()).await;
            if let Ok(Ok(fetched)) = &fetched {
                bundle.check(&fetched.tensors, None);
            }
        }
        // As a connector's user does: not before nobody writes into it.
        let begin = Instant::now();
        loop {
            match Arc::get_mut(&mut target).map(Target::reset) {
                Some(Ok(())) => break,
                _ => assert!(begin.elapsed() < PATIENCE, "late copies go on for ever"),
            }
            tokio::task::yield_now().await;
        }
        let mut again = consumer
            .consume(
                publication.handle().clone(),
                ConsumeOptions {
                    destinations: Some(vec![Arc::clone(&target)]),
                    ..ConsumeOptions::within(PATIENCE)
                },
            )
            .expect("a consumer");
        bundle.check(&again.fetch_all().await.expect("alive").tensors, None);
        drop(again);
        world.connector.release(publication.handle().payload);
        publication.unread().await;
    }
    drop(registered);
    all_gone(&world.connector).await;
    all_gone(&consumer).await;
}

/// Everything of many requests at once goes to who asked for it.
#[tokio::test(flavor = "multi_thread")]
async fn overlapping_requests_get_their_own_bytes() {
    let world = World::new().await;
    let mut second = world.second().await;
    let checked = Arc::new(AtomicU32::new(0));
    let rounds = crate::rounds(1000);
    let mut running = tokio::task::JoinSet::new();
    for seed in 0..rounds {
        let chunks = 1 + (seed % 7) as u32;
        let bundle = Bundle::one(&[7, 1 + seed * 97 % 5000, 3]).cut(0, chunks).seeded(seed);
        let bundle = if seed % 3 == 0 { bundle.borrowed() } else { bundle };
        let handle = second.publish(&bundle, CONSUMED).await;
        let (connector, checked) = (Arc::clone(&world.connector), Arc::clone(&checked));
        running.spawn(async move {
            read(&connector, &bundle, handle, seed % 2 == 0).await;
            checked.fetch_add(1, Ordering::Relaxed);
        });
        while running.len() >= 16 {
            running.join_next().await.expect("some run").expect("its own bytes");
        }
    }
    while let Some(ended) = running.join_next().await {
        ended.expect("its own bytes");
    }
    assert_eq!(u64::from(checked.load(Ordering::Relaxed)), rounds);
    second.all_gone().await;
    all_gone(&world.connector).await;
}

async fn read(connector: &Arc<Connector>, bundle: &Bundle, handle: stagewire_core::Handle, private: bool) {
    let options = ConsumeOptions {
        private,
        ..ConsumeOptions::within(PATIENCE)
    };
    let mut consumer = connector.consume(handle, options).expect("a consumer");
    while let Some(chunk) = consumer.next().await.expect("alive") {
        bundle.check(&chunk.tensors, Some(chunk.index));
    }
}

/// Publish, abort, consume, kill, run out of time, in every order: nothing is left of it.
#[tokio::test(flavor = "multi_thread")]
async fn cycles_leave_nothing() {
    let world = World::new().await;
    let mut producer = world.second().await;
    let mut reader = world.second().await;
    let bundle = |round: u64| {
        let bundle = Bundle::one(&[4, 500]).cut(0, 4).seeded(round);
        if round.is_multiple_of(2) {
            bundle
        } else {
            bundle.borrowed()
        }
    };
    for round in 0..crate::rounds(10_000) {
        let dice = round.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40;
        let bundle = bundle(round);
        let handle = producer.open(&bundle, CONSUMED).await;
        let payload = handle.payload;
        let ready = dice % 5;
        for chunk in 0..ready.min(4) {
            producer.ready(&handle, chunk as u32).await;
        }
        let deadline = Duration::from_micros(dice % 3000);
        let options = ConsumeOptions {
            private: dice % 3 == 0,
            ..ConsumeOptions::within(deadline)
        };
        match dice % 7 {
            // Another process takes some chunks, and dies.
            0 if dice % 11 == 0 => {
                let chunks = (ready.min(3)) as u32;
                let handle = handle.to_bytes();
                reader.done(Ask::Consume { handle, chunks }).await;
                std::mem::replace(&mut reader, world.second().await).kill().await;
                producer.done(Ask::Release { payload }).await;
            }
            // The producer dies.
            1 if dice % 13 == 0 => {
                let mut consumer = world.connector.consume(handle, options).expect("a consumer");
                let reading = tokio::spawn(async move { consumer.fetch_all().await.map(drop) });
                std::mem::replace(&mut producer, world.second().await).kill().await;
                tokio::time::timeout(PATIENCE, reading)
                    .await
                    .expect("no consumer is stuck")
                    .expect("no panic")
                    .ok();
            }
            // The producer gives up, or forgets it.
            2 | 3 => {
                let mut consumer = world.connector.consume(handle, options).expect("a consumer");
                let _ = consumer.next().await;
                producer.done(Ask::Abandon { payload }).await;
                producer.done(Ask::Release { payload }).await;
                let _ = consumer.next().await;
            }
            // The consumer runs out of time or gives up, and another one reads what there is.
            _ => {
                let mut consumer = world.connector.consume(handle.clone(), options).expect("a consumer");
                let _ = tokio::time::timeout(deadline / 2, consumer.fetch_all()).await;
                drop(consumer);
                for chunk in ready..4 {
                    producer.ready(&handle, chunk as u32).await;
                }
                let options = ConsumeOptions::within(PATIENCE);
                let mut next = world.connector.consume(handle, options).expect("a consumer");
                match next.fetch_all().await {
                    Ok(fetched) => bundle.check(&fetched.tensors, None),
                    // The first one had it all.
                    Err(ConsumeError::Gone { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        }
    }
    producer.all_gone().await;
    reader.all_gone().await;
    all_gone(&world.connector).await;
}
