//! Chunks that come while others are still computed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use stagewire_connector::{ConsumeError, ConsumeOptions, OnChunk, Owner, PublishSpec, Stop};
use stagewire_core::{Classify, ErrorClass, Failure};
use tokio::time::Instant;

use crate::bundle::{Bundle, CONSUMED};
use crate::second::Ask;
use crate::{PATIENCE, World, all_gone};

fn latent() -> Bundle {
    Bundle::one(&[2, 4, 8, 3]).cut(2, 8)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_that_comes_first_waits_for_each_chunk() {
    let world = World::new().await;
    let mut second = world.second().await;
    for bundle in [latent(), latent().borrowed()] {
        let handle = second.open(&bundle, Owner::Orchestrator).await;
        let mut consumer = world
            .connector
            .consume(handle.clone(), ConsumeOptions::within(PATIENCE))
            .expect("a consumer");
        for index in 0..8 {
            let early = tokio::time::timeout(Duration::from_millis(20), consumer.next()).await;
            assert!(early.is_err(), "chunk {index} came before it was ready");
            second.ready(&handle, index).await;
            let chunk = consumer.next().await.expect("alive").expect("ready");
            assert_eq!(chunk.index, index);
            bundle.check(&chunk.tensors, Some(index));
        }
        assert!(consumer.next().await.expect("alive").is_none());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn chunks_that_become_ready_in_any_order_come_in_order() {
    let world = World::new().await;
    let mut second = world.second().await;
    let bundle = latent();
    let handle = second.open(&bundle, Owner::Orchestrator).await;
    let mut consumer = world
        .connector
        .consume(handle.clone(), ConsumeOptions::within(PATIENCE))
        .expect("a consumer");
    for chunk in [7, 3, 1, 2] {
        second.ready(&handle, chunk).await;
    }
    let early = tokio::time::timeout(Duration::from_millis(50), consumer.next()).await;
    assert!(early.is_err(), "chunk 0 is missing");
    second.ready(&handle, 0).await;
    for index in 0..4 {
        let chunk = consumer.next().await.expect("alive").expect("ready");
        assert_eq!(chunk.index, index);
        bundle.check(&chunk.tensors, Some(index));
    }
    let early = tokio::time::timeout(Duration::from_millis(50), consumer.next()).await;
    assert!(early.is_err(), "chunk 4 is missing");
    for chunk in [6, 5, 4] {
        second.ready(&handle, chunk).await;
    }
    for index in 4..8 {
        assert_eq!(consumer.next().await.expect("alive").expect("ready").index, index);
    }
}

/// In time that grows with their number and not with its square: that would be minutes here.
#[tokio::test(flavor = "multi_thread")]
async fn very_many_chunks_in_the_worst_order_are_each_told_and_copied_once() {
    const CHUNKS: u32 = 20_000;
    let world = World::new().await;
    let producer = world.another("denoise").await;
    let bundle = Bundle::one(&[u64::from(CHUNKS), 3]).cut(0, CHUNKS);
    let told = Arc::new(AtomicU32::new(0));
    for (private, digests) in [(false, false), (true, false), (false, true)] {
        let mut spec = PublishSpec::new("request", bundle.manifest(), CONSUMED);
        spec.digests = digests;
        let memory = bundle.memory(producer.host().arena());
        let publication = producer.open(spec, memory).expect("room");
        told.store(0, Ordering::Relaxed);
        let options = ConsumeOptions {
            private,
            on_chunk: Some(OnChunk::new({
                let told = Arc::clone(&told);
                move |_, _| {
                    told.fetch_add(1, Ordering::Relaxed);
                }
            })),
            ..ConsumeOptions::within(PATIENCE)
        };
        let handle = publication.handle().clone();
        let mut consumer = world.connector.consume(handle, options).expect("a consumer");
        let begin = Instant::now();
        let bytes = bundle.clone();
        let reading = tokio::spawn(async move {
            while let Some(chunk) = consumer.next().await.expect("alive") {
                bytes.check(&chunk.tensors, Some(chunk.index));
            }
        });
        // Odd ones backwards, then the others: until the very last one no chunk can be yielded, and half of the time no two
        // that are complete touch.
        let (odd, even): (Vec<u32>, Vec<u32>) = (0..CHUNKS).rev().partition(|index| index % 2 == 1);
        for (nth, index) in odd.into_iter().chain(even).enumerate() {
            publication.ready(index).expect("it is open");
            if nth % 16 == 0 {
                tokio::task::yield_now().await;
            }
        }
        tokio::time::timeout(PATIENCE, reading)
            .await
            .expect("in time")
            .expect("its bytes");
        assert_eq!(told.load(Ordering::Relaxed), CHUNKS);
        assert!(begin.elapsed() < PATIENCE / 2, "{:?}", begin.elapsed());
    }
    all_gone(&producer).await;
    all_gone(&world.connector).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failure_reaches_the_consumer_within_a_second_with_its_reason() {
    let world = World::new().await;
    let mut second = world.second().await;
    for owner in [Owner::Orchestrator, CONSUMED] {
        let handle = second.open(&latent(), owner).await;
        second.ready(&handle, 0).await;
        second.ready(&handle, 1).await;
        let mut consumer = world
            .connector
            .consume(handle.clone(), ConsumeOptions::within(PATIENCE))
            .expect("a consumer");
        consumer.next().await.expect("alive").expect("ready");
        let failure = Failure::new(ErrorClass::Exhausted, "gpu.memory", "step 3 needs more memory").with("step", 3);
        let begin = Instant::now();
        second
            .done(Ask::Fail {
                payload: handle.payload,
                failure,
            })
            .await;
        // Chunk 1 was ready; the failure comes first all the same, once it is known here.
        let error = loop {
            match consumer.next().await {
                Ok(chunk) => assert!(
                    chunk.is_some_and(|chunk| chunk.index == 1),
                    "more chunks than were ready"
                ),
                Err(error) => break error,
            }
        };
        assert!(
            begin.elapsed() < Duration::from_secs(1),
            "it took {:?}",
            begin.elapsed()
        );
        assert!(matches!(error, ConsumeError::Failed { .. }), "{error}");
        let seen = error.to_failure();
        assert_eq!(
            (seen.class, seen.reason.as_str()),
            (ErrorClass::Exhausted, "gpu.memory")
        );
        assert_eq!(
            (seen.details["step"].as_str(), seen.details["stage"].as_str()),
            ("3", "denoise")
        );
        assert_eq!(seen.details["request"], "request");
        for word in ["step 3 needs more memory", "request", "denoise", "of 8"] {
            assert!(seen.message.contains(word), "{word:?} is not in {:?}", seen.message);
        }
        assert!(
            matches!(consumer.next().await, Err(ConsumeError::Failed { .. })),
            "the error went away"
        );
        // Who comes later learns the same.
        let mut late = world
            .connector
            .consume(handle.clone(), ConsumeOptions::within(PATIENCE))
            .expect("a consumer");
        let error = late.next().await.expect_err("it failed");
        assert_eq!(error.to_failure().reason, "gpu.memory");
        second
            .done(Ask::Release {
                payload: handle.payload,
            })
            .await;
    }
    second.all_gone().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_publication_fails_what_is_missing() {
    let world = World::new().await;
    let mut second = world.second().await;
    let handle = second.open(&latent(), CONSUMED).await;
    let mut consumer = world
        .connector
        .consume(handle.clone(), ConsumeOptions::within(PATIENCE))
        .expect("a consumer");
    second.ready(&handle, 0).await;
    consumer.next().await.expect("alive").expect("ready");
    second
        .done(Ask::Abandon {
            payload: handle.payload,
        })
        .await;
    let error = consumer.next().await.expect_err("nobody can show the rest");
    assert_eq!(error.to_failure().reason, "payload.abandoned");
    // A complete one outlives its publication.
    let handle = second.publish(&latent(), CONSUMED).await;
    second
        .done(Ask::Abandon {
            payload: handle.payload,
        })
        .await;
    let mut consumer = world
        .connector
        .consume(handle, ConsumeOptions::within(PATIENCE))
        .expect("a consumer");
    consumer.fetch_all().await.expect("it is complete");
    drop(consumer);
    second.all_gone().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_producer_is_a_deadline_and_the_wait_can_go_on() {
    let world = World::new().await;
    let mut second = world.second().await;
    let handle = second.open(&latent(), Owner::Orchestrator).await;
    let options = ConsumeOptions::within(Duration::from_millis(60));
    let mut consumer = world.connector.consume(handle.clone(), options).expect("a consumer");
    let error = consumer.next().await.expect_err("nothing is ready");
    assert!(matches!(error, ConsumeError::Deadline { .. }), "{error}");
    assert_eq!(error.class(), ErrorClass::Deadline);
    second.ready(&handle, 0).await;
    assert_eq!(consumer.next().await.expect("alive").expect("ready").index, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_may_be_as_long_as_durations_go() {
    let world = World::new().await;
    let mut second = world.second().await;
    let handle = second.open(&latent(), Owner::Orchestrator).await;
    let options = ConsumeOptions::within(Duration::MAX);
    let mut consumer = world.connector.consume(handle.clone(), options).expect("a consumer");
    second.ready(&handle, 0).await;
    assert_eq!(consumer.next().await.expect("alive").expect("ready").index, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_ends_when_it_is_told_to() {
    let world = World::new().await;
    let mut second = world.second().await;
    let handle = second.open(&latent(), Owner::Orchestrator).await;
    let stop = Stop::new();
    let options = ConsumeOptions {
        stop: Some(stop.clone()),
        ..ConsumeOptions::default()
    };
    let mut consumer = world.connector.consume(handle, options).expect("a consumer");
    let waiting = tokio::spawn(async move { consumer.next().await.map(drop) });
    stop.stop(Failure::new(
        ErrorClass::Cancelled,
        "job.cancelled",
        "nobody wants it any more",
    ));
    let error = tokio::time::timeout(PATIENCE, waiting)
        .await
        .expect("it ends")
        .expect("no panic");
    let failure = error.expect_err("it was stopped").to_failure();
    assert_eq!(
        (failure.class, failure.reason.as_str()),
        (ErrorClass::Cancelled, "job.cancelled")
    );
    all_gone(&world.connector).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn dropped_calls_lose_no_chunk() {
    let world = World::new().await;
    let mut second = world.second().await;
    for bundle in [
        Bundle::one(&[64, 4096]).cut(0, 64),
        Bundle::one(&[64, 4096]).cut(0, 64).borrowed(),
    ] {
        let handle = second.publish(&bundle, Owner::Orchestrator).await;
        let options = ConsumeOptions {
            private: true,
            ..ConsumeOptions::within(PATIENCE)
        };
        let mut consumer = world.connector.consume(handle, options).expect("a consumer");
        let mut expected = 0;
        let mut patience = Duration::ZERO;
        loop {
            // Dropped ever later: at the connection, at the pins, at each pull.
            match tokio::time::timeout(patience, consumer.next()).await {
                Err(_) => patience += Duration::from_micros(10),
                Ok(Ok(Some(chunk))) => {
                    assert_eq!(chunk.index, expected);
                    bundle.check(&chunk.tensors, Some(chunk.index));
                    expected += 1;
                    patience = Duration::ZERO;
                }
                Ok(Ok(None)) => break,
                Ok(Err(error)) => panic!("{error}"),
            }
        }
        assert_eq!(expected, 64);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_producer_is_told_what_it_does_wrong() {
    let world = World::new().await;
    let bundle = latent();
    let arena = world.connector.host().arena();
    let spec = PublishSpec::new("request 7", bundle.manifest(), Owner::Orchestrator);
    let error = world
        .connector
        .publish(spec.clone(), Vec::new())
        .expect_err("no memory");
    assert!(
        error.to_string().contains("request 7") && error.class() == ErrorClass::Invalid,
        "{error}"
    );
    let other = Bundle::one(&[2, 4, 8, 4]).memory(arena);
    let error = world.connector.publish(spec.clone(), other).expect_err("other memory");
    assert!(
        error.to_string().contains("1.0 KiB") && error.to_string().contains("768 B"),
        "{error}"
    );

    let publication = world.connector.open(spec, bundle.memory(arena)).expect("published");
    let error = publication.ready(8).expect_err("there are 8");
    assert_eq!(error.reason(), "payload.chunks");
    world.connector.release(publication.handle().payload);
    let error = publication.ready(0).expect_err("it was released");
    assert_eq!((error.class(), error.reason()), (ErrorClass::Conflict, "publish.ended"));
    publication.released().await;
    drop(publication);
    all_gone(&world.connector).await;
}
