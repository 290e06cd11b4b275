//! Which way payloads go, and what becomes of them on the way.

mod claims;

use std::sync::Arc;
use std::time::Duration;

use stagewire_connector::{
    Connector, ConsumeError, ConsumeOptions, Mode, ModeCount, ModeReason, Publication, PublishError, PublishSpec,
    PutError,
};
use stagewire_core::{ByteCount, Classify, ErrorClass, Handle, Lease, Peer, TransferMode};
use tokio::time::Instant;

use crate::bundle::Bundle;
use crate::second::{Answer, Ask, Second};
use crate::{PATIENCE, World, all_gone};

/// 32 KB, in 8 pages of a store.
fn latent() -> Bundle {
    Bundle::one(&[8, 1000]).cut(0, 8)
}

async fn store(world: &World, limit: u64) -> Second {
    let mut store = world.second().await;
    let ask = Ask::ServeStore {
        limit: ByteCount(limit),
        closed: false,
    };
    assert!(matches!(store.ask(ask).await, Answer::Peer(_)));
    store
}

struct Publish {
    mode: Mode,
    lease: Lease,
    consumer: Option<Peer>,
    within: Duration,
}

impl Publish {
    fn new(mode: Mode) -> Self {
        Self {
            mode,
            lease: Lease::DeleteOnConsume,
            consumer: None,
            within: PATIENCE,
        }
    }

    fn by(self, connector: &Connector, bundle: &Bundle) -> Result<Publication, PublishError> {
        let spec = PublishSpec {
            mode: self.mode,
            consumer: self.consumer,
            store_within: self.within,
            ..PublishSpec::new("request 7", bundle.manifest(), self.lease)
        };
        connector.publish(spec, bundle.memory(connector.host().arena()))
    }
}

async fn fetch(connector: &Arc<Connector>, bundle: &Bundle, handle: &Handle) -> Result<TransferMode, ConsumeError> {
    let options = ConsumeOptions::within(PATIENCE);
    let mut consumer = connector.consume(handle.clone(), options)?;
    let fetched = consumer.fetch_all().await?;
    bundle.check(&fetched.tensors, None);
    Ok(fetched.handovers[0].mode)
}

fn count(connector: &Connector, mode: TransferMode, reason: ModeReason) -> u64 {
    let counts = connector.stats().modes;
    let same = |count: &&ModeCount| (count.mode, count.reason) == (mode, reason);
    counts.iter().find(same).map_or(0, |count| count.count)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stored_payload_needs_its_producer_no_more() {
    let world = World::new().await;
    let mut store = store(&world, 1 << 20).await;
    for bundle in [latent(), latent().borrowed()] {
        let producer = world.another("denoise").await;
        let publication = Publish::new(Mode::Store)
            .by(&producer, &bundle)
            .expect("there is a store");
        let handle = publication.handle().clone();
        assert_eq!(
            (handle.mode, publication.mode(), publication.mode_reason()),
            (TransferMode::Store, TransferMode::Store, ModeReason::Requested)
        );
        let stored = publication.settled().await.expect("there is room");
        assert_eq!(stored.holder, store.peer().await);
        assert!(matches!(publication.outcome(), Some(Ok(found)) if found == stored));
        assert!(!publication.cancel(), "it is settled");
        publication.released().await;
        all_gone(&producer).await;
        drop(publication);
        producer.close().await;
        drop(producer);
        // The handle that was there at once, and the one that leads straight there.
        let first = if bundle.arena { handle } else { stored };
        let mode = fetch(&world.connector, &bundle, &first)
            .await
            .expect("the store has it");
        assert_eq!(mode, TransferMode::Store);
    }
    store.all_gone().await;
    all_gone(&world.connector).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn auto_goes_by_who_is_alive() {
    let world = World::new().await;
    let producer = &world.connector;
    let auto = |consumer: Option<Peer>| Publish {
        consumer,
        ..Publish::new(Mode::Auto)
    };
    let without = auto(None).by(producer, &latent()).expect("it stays");
    assert_eq!(without.mode_reason(), ModeReason::NoStore);
    assert_eq!(without.settled().await.expect("it stays").mode, TransferMode::P2p);
    producer.release(without.handle().payload);

    let mut store = store(&world, 1 << 20).await;
    let unknown = auto(None).by(producer, &latent()).expect("there is a store");
    assert_eq!(
        (unknown.handle().mode, unknown.mode_reason()),
        (TransferMode::Store, ModeReason::ConsumerUnknown)
    );
    let stored = unknown.settled().await.expect("there is room");
    fetch(producer, &latent(), &stored).await.expect("it is there");

    let mut consumer = world.second().await;
    let peer = consumer.peer().await;
    let alive = auto(Some(peer.clone())).by(producer, &latent()).expect("it stays");
    assert_eq!(
        (alive.handle().mode, alive.mode_reason()),
        (TransferMode::P2p, ModeReason::ConsumerAlive)
    );
    alive.settled().await.expect("there is room in case");
    let consume = Ask::Consume {
        handle: alive.handle().to_bytes(),
        chunks: 9,
    };
    consumer.done(consume).await;
    alive.released().await;

    consumer.kill().await;
    let lost = auto(Some(peer)).by(producer, &latent()).expect("there is a store");
    assert_eq!(
        (lost.handle().mode, lost.mode_reason()),
        (TransferMode::Store, ModeReason::ConsumerLost)
    );
    fetch(producer, &latent(), lost.handle()).await.expect("wherever it is");
    for reason in [ModeReason::NoStore, ModeReason::ConsumerAlive] {
        assert_eq!(count(producer, TransferMode::P2p, reason), 1, "{reason:?}");
    }
    for reason in [ModeReason::ConsumerUnknown, ModeReason::ConsumerLost] {
        assert_eq!(count(producer, TransferMode::Store, reason), 1, "{reason:?}");
    }
    store.all_gone().await;
    all_gone(producer).await;
}

/// What is handed over directly has room in the store; when its consumer dies, it goes there, whatever came in between.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_consumer_sends_its_payload_to_the_store() {
    let world = World::new().await;
    let producer = &world.connector;
    let mut store = store(&world, 8 << 12).await;
    for chunks in [0, 3] {
        let mut consumer = world.second().await;
        let direct = Publish {
            consumer: Some(consumer.peer().await),
            ..Publish::new(Mode::Auto)
        };
        let direct = direct.by(producer, &latent()).expect("its consumer lives");
        direct.settled().await.expect("there is room in case");
        assert_eq!(direct.handle().mode, TransferMode::P2p);
        // Nobody else gets that room.
        let other = Publish {
            within: Duration::from_millis(30),
            ..Publish::new(Mode::Store)
        };
        let other = other.by(producer, &latent()).expect("there is a store");
        let error = other.settled().await.expect_err("all room is kept");
        assert_eq!(
            (error.class(), error.reason()),
            (ErrorClass::Exhausted, "store.refused")
        );

        let consume = Ask::Consume {
            handle: direct.handle().to_bytes(),
            chunks,
        };
        consumer.done(consume).await;
        consumer.kill().await;
        direct.released().await;
        let begin = Instant::now();
        while direct.mode() == TransferMode::P2p {
            assert!(
                begin.elapsed() < PATIENCE,
                "it has gone to the store, and says that it is here"
            );
            tokio::task::yield_now().await;
        }
        assert_eq!(direct.mode_reason(), ModeReason::ConsumerLost);
        let there = direct.handle().clone();
        assert_eq!((there.mode, there.holder), (TransferMode::Store, store.peer().await));
        assert_eq!(count(producer, TransferMode::P2p, ModeReason::ConsumerAlive), 0);
        let mode = fetch(producer, &latent(), direct.handle())
            .await
            .expect("the store has it");
        assert_eq!(mode, TransferMode::Store);
        store.all_gone().await;
        all_gone(producer).await;
    }
    assert_eq!(count(producer, TransferMode::Store, ModeReason::ConsumerLost), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_does_not_fit_says_so_and_leaves_nothing() {
    let world = World::new().await;
    let producer = &world.connector;
    let mut store = store(&world, 8 << 12).await;
    let large = Bundle::one(&[9, 1024]);
    let publication = Publish::new(Mode::Store)
        .by(producer, &large)
        .expect("there is a store");
    let error = publication.settled().await.expect_err("larger than the store");
    assert!(matches!(&*error, PutError::Refused { .. }), "{error}");
    assert_eq!(error.class(), ErrorClass::Invalid);
    let late = fetch(producer, &large, publication.handle())
        .await
        .expect_err("it has ended");
    assert!(matches!(&late, ConsumeError::Failed { .. }), "{late}");
    assert!(late.to_string().contains("larger than the whole store"), "{late}");
    all_gone(producer).await;
    store.all_gone().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_waits_holds_nobody_up_and_can_be_given_up() {
    let world = World::new().await;
    let producer = &world.connector;
    let mut store = store(&world, 9 << 12).await;
    let first = Publish::new(Mode::Store)
        .by(producer, &latent())
        .expect("there is a store");
    let first = first.settled().await.expect("there is room");
    let waiting = Publish::new(Mode::Store)
        .by(producer, &latent().seeded(2))
        .expect("there is a store");
    let small = Bundle::one(&[10]);
    let begin = Instant::now();
    let mate = Publish::new(Mode::Store)
        .by(producer, &small)
        .expect("there is a store");
    let mate = mate.settled().await.expect("there is a page left");
    assert!(waiting.outcome().is_none() && begin.elapsed() < PATIENCE / 2);

    let begin = Instant::now();
    assert!(waiting.cancel());
    let error = waiting.settled().await.expect_err("given up");
    assert_eq!(
        (error.class(), error.reason()),
        (ErrorClass::Cancelled, "publish.cancelled")
    );
    waiting.released().await;
    assert!(!waiting.cancel(), "twice");
    all_gone(producer).await;
    assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());

    // Its place in the queue for room is free as well.
    let next = Publish::new(Mode::Store)
        .by(producer, &latent().seeded(3))
        .expect("there is a store");
    fetch(producer, &latent(), &first).await.expect("it is there");
    let next = next.settled().await.expect("there is room again");
    fetch(producer, &latent().seeded(3), &next).await.expect("it is there");
    fetch(producer, &small, &mate).await.expect("it is there");
    store.all_gone().await;
    all_gone(producer).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn modes_and_leases_that_do_not_go_together_are_refused() {
    let world = World::new().await;
    let producer = &world.connector;
    let error = Publish::new(Mode::Store).by(producer, &latent()).expect_err("no store");
    assert_eq!((error.class(), error.reason()), (ErrorClass::Unsupported, "store.none"));
    assert!(error.to_string().contains("request 7"), "{error}");
    let cached = |mode| Publish {
        lease: Lease::Cached,
        ..Publish::new(mode)
    };
    let error = cached(Mode::Auto).by(producer, &latent()).expect_err("no store");
    assert_eq!(error.reason(), "store.none");
    let mut store = store(&world, 1 << 20).await;
    let error = cached(Mode::P2p).by(producer, &latent()).expect_err("only in a store");
    assert_eq!((error.class(), error.reason()), (ErrorClass::Invalid, "payload.lease"));
    let publication = cached(Mode::Auto).by(producer, &latent()).expect("there is a store");
    assert_eq!(publication.mode_reason(), ModeReason::Lease);
    let stored = publication.settled().await.expect("there is room");
    for _ in 0..2 {
        fetch(producer, &latent(), &stored)
            .await
            .expect("any number may read it");
    }
    producer.release_handle(&stored).await.expect("it is there");
    store.all_gone().await;
    all_gone(producer).await;
}

/// A store that is asked while it is gone gets the payload once it is back.
#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_comes_back_gets_what_waits_for_it() {
    let world = World::new().await;
    let producer = &world.connector;
    store(&world, 1 << 20).await.kill().await;
    let publication = Publish::new(Mode::Store)
        .by(producer, &latent())
        .expect("there was a store");
    let early = tokio::time::timeout(Duration::from_millis(100), publication.settled()).await;
    assert!(early.is_err(), "{early:?}");
    let mut store = store(&world, 1 << 20).await;
    let stored = publication.settled().await.expect("it is back");
    fetch(producer, &latent(), &stored).await.expect("it is there");
    store.all_gone().await;
    all_gone(producer).await;
}

/// Chunks of a payload for the store are consumed from the producer while it is open, and it moves once it is complete.
#[tokio::test(flavor = "multi_thread")]
async fn a_streamed_payload_goes_to_the_store_once_it_is_complete() {
    let world = World::new().await;
    let producer = &world.connector;
    let mut store = store(&world, 1 << 20).await;
    let spec = PublishSpec {
        mode: Mode::Store,
        ..PublishSpec::new("request", latent().manifest(), Lease::Pinned)
    };
    let memory = latent().memory(producer.host().arena());
    let publication = producer.open(spec, memory).expect("there is a store");
    let options = ConsumeOptions::within(PATIENCE);
    let mut consumer = producer
        .consume(publication.handle().clone(), options)
        .expect("a consumer");
    for index in 0..4 {
        publication.ready(index).expect("it is open");
        let chunk = consumer.next().await.expect("alive").expect("ready");
        assert_eq!(chunk.handover.mode, TransferMode::P2p, "its producer still has it");
    }
    assert!(publication.outcome().is_none());
    for index in 4..8 {
        publication.ready(index).expect("it is open");
    }
    let stored = publication.settled().await.expect("there is room");
    // Its memory here is released; what was begun goes on, and who comes now reads from the store.
    let mut seen = 4;
    while let Some(chunk) = consumer.next().await.expect("pinned, or in the store") {
        latent().check(&chunk.tensors, Some(seen));
        seen += 1;
    }
    assert_eq!(seen, 8);
    assert_eq!(
        fetch(producer, &latent(), publication.handle())
            .await
            .expect("the store has it"),
        TransferMode::Store
    );
    producer.release_handle(&stored).await.expect("it is there");
    drop(consumer);
    store.all_gone().await;
    all_gone(producer).await;
}

/// Of who gives a payload up and the store that takes it, one wins, and both say the same.
#[tokio::test(flavor = "multi_thread")]
async fn giving_up_and_taking_cannot_both_happen() {
    let world = World::new().await;
    let producer = &world.connector;
    let mut store = store(&world, 1 << 20).await;
    let (mut won, mut lost) = (0, 0);
    let mut pause = Duration::ZERO;
    for round in 0..crate::rounds(2000) {
        let bundle = latent().seeded(round);
        let publish = Publish {
            lease: Lease::Pinned,
            ..Publish::new(Mode::Store)
        };
        let publication = publish.by(producer, &bundle).expect("there is a store");
        let begin = std::time::Instant::now();
        while begin.elapsed() < pause {
            tokio::task::yield_now().await;
        }
        if publication.cancel() {
            won += 1;
            // Near the moment at which either may win.
            pause += Duration::from_micros(17);
            let error = publication.settled().await.expect_err("given up");
            assert!(matches!(&*error, PutError::Cancelled { .. }), "{error}");
            let late = fetch(producer, &bundle, publication.handle()).await;
            assert!(matches!(late, Err(ConsumeError::Gone { .. })), "{late:?}");
        } else {
            lost += 1;
            pause = pause.saturating_sub(Duration::from_micros(19));
            let stored = publication.settled().await.expect("the store has it");
            assert_eq!(publication.handle(), &stored);
            fetch(producer, &bundle, &stored).await.expect("it is there");
            producer.release_handle(&stored).await.expect("it is there");
        }
    }
    assert!(won > 0 && lost > 0, "{won} given up, {lost} stored: it was never close");
    store.all_gone().await;
    all_gone(producer).await;
}

/// A connector that was started anew is another consumer, though its process lives on.
#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_is_alive_as_long_as_its_connector_is() {
    let world = World::new().await;
    let producer = &world.connector;
    let mut store = store(&world, 1 << 20).await;
    let consumer = world.another("decode").await;
    let peer = consumer.peer().clone();
    let auto = |consumer: Peer| Publish {
        consumer: Some(consumer),
        ..Publish::new(Mode::Auto)
    };
    let direct = auto(peer.clone()).by(producer, &latent()).expect("its consumer lives");
    assert_eq!(direct.mode_reason(), ModeReason::ConsumerAlive);
    direct.settled().await.expect("there is room in case");
    consumer.close().await;
    let _anew = world.another("decode").await;
    let begin = Instant::now();
    while direct.mode() == TransferMode::P2p {
        assert!(begin.elapsed() < PATIENCE, "it waits for a consumer that is gone");
        tokio::task::yield_now().await;
    }
    // One that was gone before, and one whose pid, and moment of birth, somebody else has by now.
    let other_life = Peer {
        incarnation: stagewire_core::Incarnation(uuid::Uuid::from_u128(7)),
        ..peer.clone()
    };
    for gone in [peer, other_life] {
        let stored = auto(gone).by(producer, &latent()).expect("there is a store");
        assert_eq!(stored.mode_reason(), ModeReason::ConsumerLost);
        fetch(producer, &latent(), stored.handle())
            .await
            .expect("wherever it is");
    }
    fetch(producer, &latent(), direct.handle())
        .await
        .expect("the store has it");
    store.all_gone().await;
    all_gone(producer).await;
}

/// A store without room fails no payload that can be read where it is; and one whose consumer dies meanwhile goes to the
/// store once that has room.
#[tokio::test(flavor = "multi_thread")]
async fn a_payload_needs_no_room_in_the_store_to_be_read_here() {
    let world = World::new().await;
    let producer = &world.connector;
    let mut store = store(&world, 8 << 12).await;
    let full = Publish::new(Mode::Store)
        .by(producer, &latent())
        .expect("there is a store");
    let full = full.settled().await.expect("there is room");
    let mut consumer = world.second().await;
    let direct = async |within: Duration, consumer: &mut Second| {
        let direct = Publish {
            consumer: Some(consumer.peer().await),
            within,
            ..Publish::new(Mode::Auto)
        };
        direct.by(producer, &latent()).expect("its consumer lives")
    };
    let refused = direct(Duration::from_millis(20), &mut consumer).await;
    let here = refused.settled().await.expect("it can be read all the same");
    assert_eq!((here.mode, producer.stats().unreserved), (TransferMode::P2p, 1));
    let handle = here.to_bytes();
    consumer.done(Ask::Consume { handle, chunks: 9 }).await;
    refused.released().await;

    let waiting = direct(PATIENCE, &mut consumer).await;
    assert!(waiting.outcome().is_none(), "there is no room");
    let begin = Instant::now();
    consumer.kill().await;
    waiting.settled().await.expect("it can be read all the same");
    assert!(begin.elapsed() < PATIENCE / 2, "it waits for room in vain");
    assert_eq!(producer.live(), [waiting.handle().payload]);
    producer.release_handle(&full).await.expect("it is there");
    waiting.released().await;
    let mode = fetch(producer, &latent(), waiting.handle()).await;
    assert_eq!(mode.expect("the store has it"), TransferMode::Store);
    assert_eq!(producer.stats().unreserved, 1, "nobody refused the second");
    store.all_gone().await;
    all_gone(producer).await;
}
