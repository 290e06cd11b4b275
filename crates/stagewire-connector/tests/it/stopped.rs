//! Processes that stand still, as one that is stopped by a signal does: nobody waits for them longer than he said.

use std::sync::Arc;
use std::time::Duration;

use rustix::process::Signal;
use stagewire_connector::{ConsumeError, ConsumeOptions, Owner, PublishSpec, PutError, StoreService};
use stagewire_core::{ByteCount, Classify, ErrorClass, Peer};
use stagewire_store::{HostStore, Store, TokenGate};
use tokio::time::Instant;

use crate::bundle::Bundle;
use crate::second::{Answer, Ask, Second};
use crate::{PATIENCE, World, all_gone};

/// What a machine that is busy may add.
const SLACK: Duration = Duration::from_secs(2);

async fn store(world: &World) -> (Second, Peer) {
    let mut store = world.second().await;
    let (limit, closed) = (ByteCount(1 << 20), false);
    match store.ask(Ask::ServeStore { limit, closed }).await {
        Answer::Peer(peer) => (store, peer),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn reaching_a_store_counts_among_the_time_of_a_put() {
    let world = World::new().await;
    let (store, peer) = store(&world).await;
    world.connector.set_store(Some(peer));
    store.signal(Signal::STOP);
    let bundle = Bundle::one(&[100]);
    let spec = PublishSpec::new("request", bundle.manifest(), Owner::Orchestrator);
    let memory = bundle.memory(world.connector.host().arena());
    let publication = world.connector.publish(spec, memory).expect("room");
    let begin = Instant::now();
    // Side by side: one does not wait for the try of the other first.
    let puts = (0..4).map(|_| {
        world
            .connector
            .store(publication.handle(), None, Duration::from_millis(100))
    });
    for put in futures::future::join_all(puts).await {
        let error = put.expect_err("nobody takes it");
        assert!(matches!(error, PutError::Deadline { .. }), "{error}");
    }
    let waited = begin.elapsed();
    assert!(waited < Duration::from_secs(1) + SLACK, "{waited:?}");
    assert_eq!(world.connector.live(), [publication.handle().payload]);
    store.signal(Signal::CONT);
    let stored = world.connector.store(publication.handle(), None, PATIENCE).await;
    world
        .connector
        .release_handle(&stored.expect("it goes on"))
        .await
        .expect("it is there");
    all_gone(&world.connector).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn consumers_of_a_producer_that_stands_still_end_at_their_deadlines() {
    let world = World::new().await;
    let mut second = world.second().await;
    let bundle = Bundle::one(&[100]);
    let handle = second.publish(&bundle, Owner::Orchestrator).await;
    // One that is connected already, and one that is not.
    for connected in [false, true] {
        second.signal(Signal::STOP);
        let begin = Instant::now();
        // More than its socket and what waits for that have room for.
        let consumed = (0..2000).map(|_| async {
            let options = ConsumeOptions::within(Duration::from_millis(500));
            let mut consumer = world.connector.consume(handle.clone(), options).expect("a consumer");
            let error = consumer.next().await.expect_err("nobody answers");
            (error, consumer)
        });
        let consumed = futures::future::join_all(consumed).await;
        assert!(
            begin.elapsed() < Duration::from_millis(500) + SLACK,
            "{connected}: {:?}",
            begin.elapsed()
        );
        for (error, _) in &consumed {
            assert!(matches!(error, ConsumeError::Deadline { .. }), "{connected}: {error}");
        }
        let begin = Instant::now();
        drop(consumed);
        assert!(begin.elapsed() < SLACK, "{:?}", begin.elapsed());
        second.signal(Signal::CONT);
        let mut consumer = world
            .connector
            .consume(handle.clone(), ConsumeOptions::within(PATIENCE))
            .expect("a consumer");
        bundle.check(&consumer.fetch_all().await.expect("it goes on").tensors, None);
    }
    second
        .done(Ask::Release {
            payload: handle.payload,
        })
        .await;
    second.all_gone().await;
    all_gone(&world.connector).await;
}

/// Its pins cannot be taken from it: it may go on to read at any time.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_store_says_which_reader_stands_still_and_holds_its_memory() {
    const LIMIT: ByteCount = ByteCount(1 << 20);
    let world = World::new().await;
    let keeper = world.another("store").await;
    let kept = HostStore::new(keeper.host(), LIMIT, Arc::new(TokenGate::open()));
    let service = StoreService::serve(&keeper, kept);
    let mut reader = world.second().await;
    let bundle = Bundle::one(&[LIMIT.0 / 4]);
    let put = async |wait| {
        let spec = PublishSpec::new("request", bundle.manifest(), Owner::Orchestrator);
        let memory = bundle.memory(world.connector.host().arena());
        let publication = world.connector.publish(spec, memory).expect("room");
        let stored = world.connector.store(publication.handle(), None, wait).await;
        world.connector.release(publication.handle().payload);
        stored
    };
    let handle = put(PATIENCE).await.expect("room");
    let ask = Ask::Consume {
        handle: handle.to_bytes(),
        chunks: 1,
    };
    reader.done(ask).await;
    assert_eq!(service.store().usage().readers, [], "nothing of it is gone");
    let pid = reader.peer().await.process.pid;
    for stopped in [false, true] {
        if stopped {
            reader.signal(Signal::STOP);
        } else {
            world.connector.release_handle(&handle).await.expect("it is there");
        }
        let error = put(Duration::from_millis(100)).await.expect_err("it is full");
        assert_eq!(error.class(), ErrorClass::Exhausted);
        let who = format!(
            "still read by process {pid}{}",
            if stopped { ", which is stopped" } else { " for" }
        );
        assert!(error.to_string().contains(&who), "{error}");
        let named = &error.to_failure().details["readers"];
        assert!(named.contains(&pid.to_string()) && named.contains("1.0 MiB"), "{named}");
    }
    let [reading] = service.store().usage().readers[..] else {
        panic!("{:?}", service.store().usage());
    };
    assert_eq!(
        (reading.pid, reading.stopped, reading.objects, reading.nbytes),
        (Some(pid), true, 1, LIMIT)
    );
    reader.signal(Signal::CONT);
    reader.done(Ask::DropConsumers).await;
    let handle = put(PATIENCE).await.expect("it has let go");
    assert_eq!(service.store().usage().readers, []);
    world.connector.release_handle(&handle).await.expect("it is there");
    all_gone(&world.connector).await;
}
