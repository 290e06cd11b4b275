//! Payloads in a store of their own process.

use std::time::{Duration, Instant};

use stagewire_connector::{ConsumeError, ConsumeOptions, Owner, PublishSpec, PutError};
use stagewire_core::{
    Attempt, ByteCount, Classify, DType, EntryValue, Epoch, ErrorClass, Handle, JobId, Lease, Token, TransferMode,
};
use uuid::Uuid;

use crate::bundle::{Bundle, CONSUMED, spec};
use crate::second::{Ask, Second};
use crate::{PATIENCE, World, all_gone};

/// This process consumes, a second one produces, a third one keeps the store.
struct Three {
    world: World,
    producer: Second,
    store: Second,
}

impl Three {
    async fn new(limit: ByteCount, closed: bool) -> Self {
        let world = World::new().await;
        let (mut producer, mut store) = (world.second().await, world.second().await);
        store.ask(Ask::ServeStore { limit, closed }).await;
        let peer = store.peer().await;
        producer.done(Ask::UseStore { peer }).await;
        Self { world, producer, store }
    }

    async fn put(&mut self, handle: &Handle, token: Option<Token>) -> Handle {
        self.producer.handle(put(handle, token, PATIENCE)).await
    }

    async fn fetch(&self, bundle: &Bundle, handle: &Handle) {
        let mut consumer = self
            .world
            .connector
            .consume(handle.clone(), ConsumeOptions::within(PATIENCE))
            .expect("a consumer");
        let fetched = consumer.fetch_all().await.expect("the store has it");
        bundle.check(&fetched.tensors, None);
        assert!(
            fetched
                .handovers
                .iter()
                .all(|handover| handover.mode == TransferMode::Store)
        );
    }
}

fn put(handle: &Handle, token: Option<Token>, wait: Duration) -> Ask {
    Ask::Store {
        payload: handle.payload,
        token,
        wait,
    }
}

fn token(attempt: u32) -> Token {
    Token {
        epoch: Epoch(1),
        job: JobId(Uuid::from_u128(1)),
        attempt: Attempt(attempt),
    }
}

fn mixed() -> Bundle {
    Bundle::many(vec![
        EntryValue::Tensor(spec(DType::BF16, &[2, 8, 500])),
        EntryValue::None,
        EntryValue::List(vec![spec(DType::I64, &[3, 9]), spec(DType::U8, &[1, 8, 0])]),
    ])
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stored_payload_outlives_its_producer() {
    for bundle in [
        mixed(),
        mixed().borrowed(),
        mixed().cut(1, 8),
        mixed().cut(1, 3).borrowed(),
    ] {
        let mut three = Three::new(ByteCount(1 << 20), false).await;
        let handle = three.producer.publish(&bundle, CONSUMED).await;
        let stored = three.put(&handle, None).await;
        assert_eq!(
            (stored.payload, stored.mode, &stored.manifest),
            (handle.payload, TransferMode::Store, &handle.manifest)
        );
        assert_eq!(
            stored.capability, handle.capability,
            "the first handle would not find it"
        );
        three.producer.all_gone().await;
        three.producer.kill().await;
        let mut consumer = three
            .world
            .connector
            .consume(stored.clone(), ConsumeOptions::within(PATIENCE))
            .expect("a consumer");
        bundle.check(&consumer.fetch_all().await.expect("the store has it").tensors, None);
        drop(consumer);
        // Its consumer owned it, in the store as well.
        three.store.all_gone().await;
        let mut late = three
            .world
            .connector
            .consume(stored, ConsumeOptions::within(PATIENCE))
            .expect("a consumer");
        assert!(matches!(late.next().await, Err(ConsumeError::Gone { .. })));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_orchestrators_payload_stays_in_the_store_until_it_is_released_there() {
    let mut three = Three::new(ByteCount(1 << 20), false).await;
    let bundle = mixed().cut(1, 4);
    let handle = three.producer.publish(&bundle, Owner::Orchestrator).await;
    let stored = three.put(&handle, None).await;
    three.producer.all_gone().await;
    for _ in 0..2 {
        three.fetch(&bundle, &stored).await;
    }
    three
        .store
        .done(Ask::Release {
            payload: stored.payload,
        })
        .await;
    three.store.all_gone().await;
    all_gone(&three.world.connector).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn chunks_that_are_still_computed_are_waited_for() {
    let mut three = Three::new(ByteCount(1 << 20), false).await;
    let bundle = Bundle::one(&[4, 100]).cut(0, 4);
    let handle = three.producer.open(&bundle, Owner::Orchestrator).await;
    // The producer cannot be asked while it waits for the store: it fails by itself.
    let failure = three
        .producer
        .refused(put(&handle, None, Duration::from_millis(100)))
        .await;
    assert_eq!(
        (failure.class, failure.reason.as_str()),
        (ErrorClass::Deadline, "consume.deadline")
    );
    for chunk in 0..4 {
        three.producer.ready(&handle, chunk).await;
    }
    let stored = three.put(&handle, None).await;
    three.fetch(&bundle, &stored).await;
    three
        .store
        .done(Ask::Release {
            payload: stored.payload,
        })
        .await;
    three.store.all_gone().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_store_refuses_and_the_payload_stays_with_its_producer() {
    let mut three = Three::new(ByteCount(5 * 4096), false).await;
    let bundle = Bundle::one(&[3000]);
    let first = three.producer.publish(&bundle, Owner::Orchestrator).await;
    let stored = three.put(&first, None).await;
    let other = bundle.clone().seeded(2);
    let second = three.producer.publish(&other, Owner::Orchestrator).await;
    let failure = three
        .producer
        .refused(put(&second, None, Duration::from_millis(20)))
        .await;
    assert_eq!(
        (failure.class, failure.reason.as_str()),
        (ErrorClass::Exhausted, "credit.store_bytes")
    );
    assert_eq!(
        (
            failure.details["used_bytes"].as_str(),
            failure.details["limit_bytes"].as_str()
        ),
        ("12288", "20480")
    );
    assert!(
        failure.message.contains(&first.payload.to_string()),
        "{}",
        failure.message
    );
    // It can still be had from its producer, and goes in once there is room.
    let mut consumer = three
        .world
        .connector
        .consume(second.clone(), ConsumeOptions::within(PATIENCE))
        .expect("a consumer");
    other.check(&consumer.fetch_all().await.expect("alive").tensors, None);
    three
        .store
        .done(Ask::Release {
            payload: stored.payload,
        })
        .await;
    let stored = three.put(&second, None).await;
    three.fetch(&other, &stored).await;

    let large = three.producer.publish(&Bundle::one(&[5121]), Owner::Orchestrator).await;
    let failure = three.producer.refused(put(&large, None, PATIENCE)).await;
    assert_eq!(failure.reason, "store.too_large");
}

#[tokio::test(flavor = "multi_thread")]
async fn only_granted_attempts_put_and_their_leavings_can_be_discarded() {
    let mut three = Three::new(ByteCount(1 << 20), true).await;
    let bundle = mixed();
    let handle = three.producer.publish(&bundle, Owner::Orchestrator).await;
    for (token, class) in [
        (None, ErrorClass::Unauthenticated),
        (Some(token(1)), ErrorClass::Fenced),
    ] {
        assert_eq!(three.producer.refused(put(&handle, token, PATIENCE)).await.class, class);
    }
    three.store.done(Ask::Grant { token: token(2) }).await;
    let stored = three.put(&handle, Some(token(2))).await;
    three.fetch(&bundle, &stored).await;
    three.store.done(Ask::Discard { token: token(2) }).await;
    three.store.all_gone().await;
    let other = three.producer.publish(&bundle, Owner::Orchestrator).await;
    assert_eq!(
        three
            .producer
            .refused(put(&other, Some(token(2)), PATIENCE))
            .await
            .class,
        ErrorClass::Fenced
    );
}

/// Who may read a payload of an orchestrator may not end it, wherever it is.
#[tokio::test(flavor = "multi_thread")]
async fn a_reader_does_not_end_an_orchestrators_payload() {
    let mut three = Three::new(ByteCount(1 << 20), true).await;
    let bundle = mixed();
    let handle = three.producer.publish(&bundle, Owner::Orchestrator).await;
    three.store.done(Ask::Grant { token: token(2) }).await;
    let stored = three.producer.publish(&bundle, Owner::Orchestrator).await;
    let stored = three.put(&stored, Some(token(2))).await;
    for (handle, class) in [(&handle, ErrorClass::Denied), (&stored, ErrorClass::Unauthenticated)] {
        let error = three.world.connector.release_handle(handle).await;
        let error = error.expect_err("it has the right to read");
        assert_eq!((error.class(), error.reason()), (class, "release.refused"));
        assert!(error.to_string().contains(&handle.payload.to_string()), "{error}");
    }
    three.fetch(&bundle, &stored).await;
    three.put(&handle, Some(token(2))).await;
    three.store.done(Ask::Discard { token: token(2) }).await;
    // Nobody but who has the handle ends what has a lease.
    three.store.done(Ask::Grant { token: token(3) }).await;
    let pinned = three.producer.publish(&bundle, Owner::Lease(Lease::Pinned)).await;
    let pinned = three.put(&pinned, Some(token(3))).await;
    three
        .world
        .connector
        .release_handle(&pinned)
        .await
        .expect("it is pinned until then");
    three.store.all_gone().await;
    three.producer.all_gone().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_dies_is_noticed_by_both_sides() {
    let mut three = Three::new(ByteCount(1 << 20), false).await;
    let bundle = Bundle::one(&[4, 100]).cut(0, 4).borrowed();
    let first = three.producer.publish(&bundle, Owner::Orchestrator).await;
    let stored = three.put(&first, None).await;
    let second = three.producer.publish(&bundle, Owner::Orchestrator).await;
    three.store.kill().await;
    let mut consumer = three
        .world
        .connector
        .consume(stored, ConsumeOptions::within(PATIENCE))
        .expect("a consumer");
    assert!(matches!(consumer.next().await, Err(ConsumeError::PeerLost { .. })));
    let failure = three.producer.refused(put(&second, None, PATIENCE)).await;
    assert_eq!(failure.class, ErrorClass::Unavailable);
    let mut consumer = three
        .world
        .connector
        .consume(second, ConsumeOptions::within(PATIENCE))
        .expect("a consumer");
    bundle.check(
        &consumer.fetch_all().await.expect("its producer still has it").tensors,
        None,
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_producer_that_dies_half_way_leaves_nothing_in_the_store() {
    for round in 0..8 {
        let mut three = Three::new(ByteCount(8 << 20), false).await;
        let handle = three
            .producer
            .open(&Bundle::one(&[4, 1 << 16]).cut(0, 4), Owner::Orchestrator)
            .await;
        // The last chunk never comes.
        for chunk in 0..3 {
            three.producer.ready(&handle, chunk).await;
        }
        three.producer.tell(&put(&handle, None, PATIENCE)).await;
        tokio::time::sleep(Duration::from_millis(round)).await;
        three.producer.kill().await;
        three.store.all_gone().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_can_put_into_its_own_store() {
    let world = World::new().await;
    let mut second = world.second().await;
    second
        .ask(Ask::ServeStore {
            limit: ByteCount(1 << 20),
            closed: false,
        })
        .await;
    let peer = second.peer().await;
    second.done(Ask::UseStore { peer }).await;
    for owner in [Owner::Orchestrator, CONSUMED] {
        let bundle = mixed().cut(1, 2).borrowed();
        let handle = second.publish(&bundle, owner).await;
        let stored = second.handle(put(&handle, None, PATIENCE)).await;
        let mut consumer = world
            .connector
            .consume(stored.clone(), ConsumeOptions::within(PATIENCE))
            .expect("a consumer");
        bundle.check(&consumer.fetch_all().await.expect("it is there").tensors, None);
        drop(consumer);
        second
            .done(Ask::Release {
                payload: stored.payload,
            })
            .await;
        second.all_gone().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_keeps_no_store_says_so() {
    let world = World::new().await;
    let mut second = world.second().await;
    let handle = second.publish(&mixed(), Owner::Orchestrator).await;
    assert_eq!(second.refused(put(&handle, None, PATIENCE)).await.reason, "store.none");
    second
        .done(Ask::UseStore {
            peer: world.connector.peer().clone(),
        })
        .await;
    let failure = second.refused(put(&handle, None, PATIENCE)).await;
    assert!(failure.message.contains("keeps none"), "{}", failure.message);
}

#[tokio::test]
async fn puts_end_in_time_though_the_store_does_not_answer() {
    let world = World::new().await;
    let silent = World::new().await;
    let peer = silent.connector.peer().clone();
    silent.connector.close().await;
    let _listener = tokio::net::UnixListener::bind(&peer.socket).expect("the closed connector left its name free");
    world.connector.set_store(Some(peer));
    let bundle = Bundle::one(&[4]);
    let spec = PublishSpec::new("r".to_owned(), bundle.manifest(), Owner::Orchestrator);
    let memory = bundle.memory(world.connector.host().arena());
    let publication = world.connector.publish(spec, memory).expect("room");

    // One after the other, they would wait for the same connection.
    let put = || world.connector.store(publication.handle(), None, Duration::ZERO);
    let begin = Instant::now();
    let (first, second, third) = tokio::join!(put(), put(), put());
    let took = begin.elapsed();
    for error in [first, second, third].map(|put| put.expect_err("nobody answers")) {
        assert!(
            matches!(error, PutError::Deadline { .. } | PutError::Link { .. }),
            "{error}"
        );
    }
    assert!(took < Duration::from_secs(8), "{took:?}");
}
