//! Who may consume under which lease, and what ends it.

use std::sync::Arc;
use std::time::Duration;

use stagewire_connector::{
    ConsumeError, ConsumeOptions, Consumer, Owner, Publication, PublishError, PublishSpec, StoreService,
};
use stagewire_core::{ByteCount, Classify, ErrorClass, Handle, Lease};
use stagewire_store::{HostStore, TokenGate};
use tokio::time::Instant;

use crate::bundle::Bundle;
use crate::second::Ask;
use crate::{PATIENCE, World, all_gone};

fn latent() -> Bundle {
    Bundle::one(&[8, 1000]).cut(0, 8)
}

impl World {
    fn publish(&self, lease: Lease) -> Result<Publication, PublishError> {
        let spec = PublishSpec::new("request", latent().manifest(), lease);
        let memory = latent().memory(self.connector.host().arena());
        self.connector.publish(spec, memory)
    }

    fn consumer(&self, handle: &Handle) -> Consumer {
        let options = ConsumeOptions::within(PATIENCE);
        self.connector.consume(handle.clone(), options).expect("a consumer")
    }

    async fn fetch(&self, handle: &Handle) -> Result<(), ConsumeError> {
        let mut consumer = self.consumer(handle);
        latent().check(&consumer.fetch_all().await?.tensors, None);
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn delete_on_consume_counts_who_consumed_and_who_was_refused() {
    let world = World::new().await;
    let publication = world.publish(Lease::DeleteOnConsume).expect("room");
    let handle = publication.handle().clone();
    let mut first = world.consumer(&handle);
    first.next().await.expect("alive").expect("ready");
    let error = world.fetch(&handle).await.expect_err("the first is at it");
    assert!(matches!(error, ConsumeError::Claimed { .. }), "{error}");
    first.fetch_all().await.expect("its own");
    publication.released().await;
    let error = world.fetch(&handle).await.expect_err("it is consumed");
    assert!(
        error.to_string().contains("it was consumed, and deleted by that"),
        "{error}"
    );
    let stats = world.connector.stats();
    assert_eq!(
        (stats.consumed, stats.released, stats.expired, stats.claims_refused),
        (1, 0, 0, 1)
    );
    drop(first);
    all_gone(&world.connector).await;
}

/// Whoever learns of the end by a pin that is refused, or by a state that has no more chunks, is told why.
#[tokio::test(flavor = "multi_thread")]
async fn who_is_reading_when_a_payload_ends_learns_how_it_ended() {
    let world = World::new().await;
    for expires in [true, false] {
        let ttl = if expires { Duration::from_millis(200) } else { PATIENCE };
        let spec = PublishSpec::new("request", latent().manifest(), Lease::Ttl(ttl));
        let memory = latent().memory(world.connector.host().arena());
        let publication = world.connector.open(spec, memory).expect("room");
        publication.ready(0).expect("it is open");
        let handle = publication.handle().clone();
        let mut consumer = world.consumer(&handle);
        consumer.next().await.expect("alive").expect("ready");
        let (next, ()) = tokio::join!(consumer.next(), async {
            if !expires {
                world.connector.release(handle.payload);
            }
        });
        let error = next.expect_err("it has ended");
        assert!(matches!(error, ConsumeError::Gone { .. }), "{error}");
        assert_eq!(error.to_string().contains("its lease is over"), expires, "{error}");
    }
    all_gone(&world.connector).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_time_to_live_is_not_extended_by_reads() {
    let world = World::new().await;
    let ttl = Duration::from_millis(300);
    let begin = Instant::now();
    let publication = world.publish(Lease::Ttl(ttl)).expect("room");
    let handle = publication.handle().clone();
    let mut reads = 0;
    let error = loop {
        match world.fetch(&handle).await {
            Ok(()) => reads += 1,
            Err(error) => break error,
        }
        assert!(begin.elapsed() < PATIENCE, "it lives on");
    };
    let lived = begin.elapsed();
    assert!(reads >= 2, "{reads} reads within {ttl:?}: several consumers may come");
    assert!(lived >= ttl && lived < ttl + Duration::from_secs(1), "{lived:?}");
    assert!(matches!(error, ConsumeError::Gone { .. }), "{error}");
    publication.released().await;
    let error = world.fetch(&handle).await.expect_err("it is over");
    assert!(error.to_string().contains("its lease is over"), "{error}");
    let stats = world.connector.stats();
    assert_eq!((stats.consumed, stats.released, stats.expired), (0, 0, 1));
    all_gone(&world.connector).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_read_as_its_time_ends_stays_readable() {
    let world = World::new().await;
    let mut second = world.second().await;
    for bundle in [latent(), latent().borrowed()] {
        let mut ttl = Duration::from_millis(50);
        let (handle, mut consumer, first) = loop {
            let ask = Ask::Publish {
                bundle: bundle.clone(),
                owner: Owner::Lease(Lease::Ttl(ttl)),
                open: false,
                deadline: None,
            };
            let handle = second.handle(ask).await;
            let mut consumer = world.consumer(&handle);
            match consumer.next().await {
                Ok(first) => break (handle, consumer, first.expect("ready")),
                // A slow machine: its time was over before the first chunk.
                Err(error) => assert!(
                    matches!(error, ConsumeError::Gone { .. }) && ttl < PATIENCE,
                    "{ttl:?}: {error}"
                ),
            }
            ttl *= 2;
        };
        while world.fetch(&handle).await.is_ok() {}
        bundle.check(&first.tensors, Some(0));
        for index in 1..8 {
            let chunk = consumer.next().await.expect("it is pinned").expect("ready");
            bundle.check(&chunk.tensors, Some(index));
        }
    }
    second.all_gone().await;
    all_gone(&world.connector).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pinned_ends_when_it_is_released() {
    let world = World::new().await;
    let publication = world.publish(Lease::Pinned).expect("room");
    let handle = publication.handle().clone();
    // Its publication may go, its consumers may come as often as they want.
    drop(publication);
    for _ in 0..3 {
        world.fetch(&handle).await.expect("it is pinned");
    }
    assert_eq!(world.connector.live(), [handle.payload]);
    world.connector.release(handle.payload);
    let error = world.fetch(&handle).await.expect_err("it is released");
    assert!(error.to_string().contains("released"), "{error}");
    let stats = world.connector.stats();
    assert_eq!((stats.consumed, stats.released, stats.expired), (0, 1, 0));
    all_gone(&world.connector).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_payload_that_failed_is_kept_by_no_lease() {
    let world = World::new().await;
    for lease in [Lease::DeleteOnConsume, Lease::Ttl(PATIENCE), Lease::Pinned] {
        let spec = PublishSpec::new("request", latent().manifest(), lease);
        let memory = latent().memory(world.connector.host().arena());
        let publication = world.connector.open(spec, memory).expect("room");
        let handle = publication.handle().clone();
        drop(publication);
        let error = world.fetch(&handle).await.expect_err("it was abandoned");
        assert!(matches!(error, ConsumeError::Failed { .. }), "{lease}: {error}");
        assert!(world.connector.live().is_empty(), "{lease}");
    }
    assert_eq!(world.connector.stats().failed, 3);
    all_gone(&world.connector).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn leases_that_no_process_can_keep_are_refused() {
    let world = World::new().await;
    for (lease, what) in [
        (Lease::Cached, "stores only"),
        (Lease::Ttl(Duration::ZERO), "more time"),
    ] {
        let error = world.publish(lease).expect_err("it cannot be kept");
        assert_eq!((error.class(), error.reason()), (ErrorClass::Invalid, "payload.lease"));
        let message = error.to_string();
        assert!(
            message.contains(what) && message.contains("request") && message.contains(&lease.to_string()),
            "{message}"
        );
    }
    all_gone(&world.connector).await;
}

/// What a store takes over has no more time than it had left.
#[tokio::test]
async fn moving_to_a_store_extends_no_time_to_live() {
    let world = World::new().await;
    let keeper = world.another("store").await;
    let store = HostStore::new(keeper.host(), ByteCount(1 << 20), Arc::new(TokenGate::open()));
    let _service = StoreService::serve(&keeper, store);
    let ttl = Duration::from_secs(600);
    let publication = world.publish(Lease::Ttl(ttl)).expect("room");
    let later = async |by: Duration| {
        tokio::time::pause();
        tokio::time::advance(by).await;
        tokio::time::resume();
    };
    later(ttl - Duration::from_secs(60)).await;
    let stored = world.connector.store(publication.handle(), None, PATIENCE).await;
    let stored = stored.expect("there is room");
    world.fetch(&stored).await.expect("it has a minute left");
    later(Duration::from_secs(60)).await;
    publication.released().await;
    let begin = std::time::Instant::now();
    while world.fetch(&stored).await.is_ok() {
        assert!(begin.elapsed() < PATIENCE, "it lives on");
        tokio::task::yield_now().await;
    }
    assert_eq!(keeper.stats().expired, 1);
    all_gone(&keeper).await;
}
