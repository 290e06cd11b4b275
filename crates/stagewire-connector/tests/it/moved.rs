//! Payloads that are not where their handle says.

use std::time::Duration;

use stagewire_connector::{ConsumeError, ConsumeOptions, Owner, PublishSpec, ReleaseError};
use stagewire_core::{ByteCount, Capability, Classify, ErrorClass, Handle, Lease, TransferMode};
use tokio::time::Instant;

use crate::bundle::{Bundle, CONSUMED};
use crate::second::{Answer, Ask, Second};
use crate::{PATIENCE, World, all_gone};

fn latent() -> Bundle {
    Bundle::one(&[8, 1000]).cut(0, 8)
}

async fn serve_store(second: &mut Second) {
    let ask = Ask::ServeStore {
        limit: ByteCount(1 << 20),
        closed: false,
    };
    assert!(matches!(second.ask(ask).await, Answer::Peer(_)));
}

fn put(handle: &Handle) -> Ask {
    Ask::Store {
        payload: handle.payload,
        token: None,
        wait: PATIENCE,
    }
}

async fn fetch(world: &World, bundle: &Bundle, handle: &Handle) -> Result<TransferMode, ConsumeError> {
    let options = ConsumeOptions::within(PATIENCE);
    let mut consumer = world.connector.consume(handle.clone(), options)?;
    let fetched = consumer.fetch_all().await?;
    bundle.check(&fetched.tensors, None);
    Ok(fetched.handovers[0].mode)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_handle_finds_what_went_to_the_store() {
    for dies in [false, true] {
        let world = World::new().await;
        let mut store = world.second().await;
        serve_store(&mut store).await;
        // Nobody tells anybody where the store is: the run directory does.
        let mut producer = world.second().await;
        for bundle in [latent(), latent().borrowed(), Bundle::one(&[0])] {
            let handle = producer.publish(&bundle, CONSUMED).await;
            producer.handle(put(&handle)).await;
            assert_eq!(handle.mode, TransferMode::P2p);
            if dies {
                let gone = std::mem::replace(&mut producer, world.second().await);
                gone.kill().await;
            }
            let mode = fetch(&world, &bundle, &handle).await.expect("it is in the store");
            assert_eq!(mode, TransferMode::Store);
            let error = fetch(&world, &bundle, &handle).await.expect_err("it is consumed");
            assert!(error.lost().is_some(), "{error}");
        }
        producer.all_gone().await;
        store.all_gone().await;
        all_gone(&world.connector).await;
    }
}

/// The error of a producer's death stays what it was where no store has the payload.
#[tokio::test(flavor = "multi_thread")]
async fn what_no_store_has_is_lost_with_its_producer() {
    let world = World::new().await;
    let mut store = world.second().await;
    serve_store(&mut store).await;
    let mut producer = world.second().await;
    let handle = producer.publish(&latent(), CONSUMED).await;
    producer.kill().await;
    let begin = Instant::now();
    let error = fetch(&world, &latent(), &handle).await.expect_err("it is nowhere");
    assert!(matches!(error, ConsumeError::PeerLost { .. }), "{error}");
    assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
}

/// A store that is killed has its payloads again when it is back: what was not deleted there is not called deleted.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_dead_store_has_is_released_by_the_next_one() {
    let world = World::new().await;
    let mut dead = world.second().await;
    serve_store(&mut dead).await;
    let mut producer = world.second().await;
    let mut handle = producer.publish(&latent(), Owner::Lease(Lease::Pinned)).await;
    handle.holder = dead.peer().await;
    handle.mode = TransferMode::Store;
    dead.kill().await;
    let begin = Instant::now();
    let error = world
        .connector
        .release_handle(&handle)
        .await
        .expect_err("nobody has heard it");
    assert!(matches!(error, ReleaseError::StoreLost { .. }), "{error}");
    assert_eq!((error.class(), error.reason()), (ErrorClass::Unavailable, "store.lost"));
    assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());

    let mut store = world.second().await;
    serve_store(&mut store).await;
    producer.handle(put(&handle)).await;
    world
        .connector
        .release_handle(&handle)
        .await
        .expect("the next one has it");
    store.all_gone().await;
    producer.all_gone().await;
}

/// A handle of a store that is gone finds the store that serves the run directory now, also one that is only starting.
#[tokio::test(flavor = "multi_thread")]
async fn handles_outlive_a_store() {
    let world = World::new().await;
    let gone = world.second().await;
    let mut producer = world.second().await;
    for copies in [false, true] {
        let bundle = latent();
        let mut handle = producer.publish(&bundle, Owner::Lease(Lease::Pinned)).await;
        let mut store = world.second().await;
        let mut dead = world.second().await;
        handle.holder = dead.peer().await;
        handle.mode = TransferMode::Store;
        dead.kill().await;
        let options = ConsumeOptions {
            private: copies,
            ..ConsumeOptions::within(PATIENCE)
        };
        let mut consumer = world.connector.consume(handle.clone(), options).expect("a consumer");
        let reading = tokio::spawn(async move {
            // It may take longer to start than a consumer waits at a time.
            loop {
                match consumer.fetch_all().await {
                    // The new store has it only a moment later.
                    Err(ConsumeError::PeerLost { .. } | ConsumeError::Gone { .. }) => {}
                    result => return result,
                }
            }
        });
        serve_store(&mut store).await;
        producer.handle(put(&handle)).await;
        let fetched = tokio::time::timeout(PATIENCE, reading)
            .await
            .expect("it ends")
            .expect("no panic");
        let fetched = fetched.expect("it is in the new store");
        bundle.check(&fetched.tensors, None);
        drop(fetched);
        // Pinned until somebody releases it, who need not know where it is.
        fetch(&world, &bundle, &handle).await.expect("it is pinned");
        let mut forged = handle.clone();
        forged.capability = Capability::from_random([7; 16]);
        let error = world.connector.release_handle(&forged).await.expect_err("forged");
        assert!(matches!(error, ReleaseError::Denied { .. }), "{error}");
        world.connector.release_handle(&handle).await.expect("it is there");
        world
            .connector
            .release_handle(&handle)
            .await
            .expect("twice is no error");
        store.all_gone().await;
        store.kill().await;
    }
    producer.all_gone().await;
    all_gone(&world.connector).await;
    gone.kill().await;
}

/// A consumer that comes while the store still pulls is not refused: it waits for where the payload ends up.
#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_that_comes_while_it_moves_waits() {
    let world = World::new().await;
    let mut store = world.second().await;
    serve_store(&mut store).await;
    for moves in [true, false] {
        let producer = world.another("denoise").await;
        let spec = PublishSpec::new("request", latent().manifest(), CONSUMED);
        let memory = latent().memory(producer.host().arena());
        let publication = producer.open(spec, memory).expect("room");
        let handle = publication.handle().clone();
        let putting = {
            let (producer, handle) = (producer.clone(), handle.clone());
            tokio::spawn(async move { producer.store(&handle, None, PATIENCE).await })
        };
        // The store has begun once it has made room.
        let begin = Instant::now();
        while matches!(store.ask(Ask::Stats).await, Answer::Leftovers(left) if left.is_empty()) {
            assert!(begin.elapsed() < PATIENCE, "the store does not begin");
        }
        let options = ConsumeOptions::within(PATIENCE);
        let mut consumer = world.connector.consume(handle.clone(), options).expect("a consumer");
        let early = tokio::time::timeout(Duration::from_millis(50), consumer.next()).await;
        assert!(early.is_err(), "{:?}", early.map(|chunk| chunk.map(drop)));
        if moves {
            for index in 0..8 {
                publication.ready(index).expect("it is open");
            }
            putting.await.expect("no panic").expect("there is room");
        } else {
            // It stays here, and goes on.
            putting.abort();
            let _ = putting.await;
            store.all_gone().await;
            for index in 0..8 {
                publication.ready(index).expect("it is open");
            }
        }
        let fetched = consumer.fetch_all().await.expect("wherever it is");
        latent().check(&fetched.tensors, None);
        let expected = if moves { TransferMode::Store } else { TransferMode::P2p };
        assert_eq!(fetched.handovers[0].mode, expected);
        drop((fetched, consumer));
        store.all_gone().await;
        assert_eq!(producer.stats().moved, u64::from(moves));
        producer.close().await;
    }
    all_gone(&world.connector).await;
}
