//! Who ends a payload, and when its memory goes.

use std::time::Duration;

use stagewire_connector::{ConsumeError, ConsumeOptions, Owner, PublishSpec};
use stagewire_core::{Classify, ErrorClass, Handle};

use crate::bundle::{Bundle, CONSUMED};
use crate::second::{Answer, Ask};
use crate::{PATIENCE, World, all_gone};

fn latent() -> Bundle {
    Bundle::one(&[8, 1000]).cut(0, 8)
}

async fn first_error(world: &World, handle: &Handle) -> ConsumeError {
    let mut consumer = world
        .connector
        .consume(handle.clone(), ConsumeOptions::within(PATIENCE))
        .expect("a consumer");
    consumer.next().await.expect_err("it is gone")
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_the_iteration_deletes_what_the_consumer_owns() {
    let world = World::new().await;
    let mut second = world.second().await;
    for bundle in [latent(), latent().borrowed()] {
        let handle = second.publish(&bundle, CONSUMED).await;
        let mut consumer = world
            .connector
            .consume(handle.clone(), ConsumeOptions::within(PATIENCE))
            .expect("a consumer");
        let mut chunks = Vec::new();
        while let Some(chunk) = consumer.next().await.expect("alive") {
            chunks.push(chunk);
        }
        let error = first_error(&world, &handle).await;
        assert!(matches!(error, ConsumeError::Gone { .. }), "{error}");
        assert_eq!(
            (error.class(), error.reason(), error.lost()),
            (ErrorClass::NotFound, "payload.gone", Some(handle.payload))
        );
        for chunk in &chunks {
            bundle.check(&chunk.tensors, Some(chunk.index));
        }
    }
    second.all_gone().await;
    all_gone(&world.connector).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_acknowledgement_ends_it_early() {
    let world = World::new().await;
    let mut second = world.second().await;
    for chunks in [0, 1] {
        let handle = second.publish(&latent(), CONSUMED).await;
        let mut consumer = world
            .connector
            .consume(handle.clone(), ConsumeOptions::within(PATIENCE))
            .expect("a consumer");
        for _ in 0..chunks {
            consumer.next().await.expect("alive").expect("ready");
        }
        consumer.ack().await.expect("alive");
        assert!(consumer.next().await.expect("done").is_none());
        assert!(matches!(first_error(&world, &handle).await, ConsumeError::Gone { .. }));
    }
    second.all_gone().await;
    // Who is not let in cannot end it for who is.
    let handle = second.publish(&latent(), CONSUMED).await;
    let consume = || {
        world
            .connector
            .consume(handle.clone(), ConsumeOptions::within(PATIENCE))
            .expect("a consumer")
    };
    let (mut first, mut other) = (consume(), consume());
    first.next().await.expect("alive").expect("ready");
    let refused = other.ack().await;
    assert!(matches!(refused, Err(ConsumeError::Claimed { .. })), "{refused:?}");
    latent().check(&first.fetch_all().await.expect("it is still there").tensors, None);
    other.ack().await.expect_err("it is gone");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_consumer_lets_go_and_the_next_one_gets_everything() {
    let world = World::new().await;
    let mut second = world.second().await;
    let bundle = latent().borrowed();
    let handle = second.publish(&bundle, CONSUMED).await;
    for chunks in 0..4 {
        let mut consumer = world
            .connector
            .consume(handle.clone(), ConsumeOptions::within(PATIENCE))
            .expect("a consumer");
        for index in 0..chunks {
            assert_eq!(consumer.next().await.expect("alive").expect("ready").index, index);
        }
    }
    let mut last = world
        .connector
        .consume(handle, ConsumeOptions::within(PATIENCE))
        .expect("a consumer");
    bundle.check(&last.fetch_all().await.expect("nobody else is at it").tensors, None);
    drop(last);
    second.all_gone().await;
    all_gone(&world.connector).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_orchestrators_payload_stays_until_it_is_released() {
    let world = World::new().await;
    let mut second = world.second().await;
    let bundle = latent();
    let handle = second.publish(&bundle, Owner::Orchestrator).await;
    let mut consumers = Vec::new();
    for _ in 0..3 {
        let mut consumer = world
            .connector
            .consume(handle.clone(), ConsumeOptions::within(PATIENCE))
            .expect("a consumer");
        bundle.check(&consumer.fetch_all().await.expect("several may read").tensors, None);
        consumers.push(consumer);
    }
    assert!(matches!(second.ask(Ask::Stats).await, Answer::Leftovers(left) if !left.is_empty()));
    second
        .done(Ask::Release {
            payload: handle.payload,
        })
        .await;
    assert!(matches!(first_error(&world, &handle).await, ConsumeError::Gone { .. }));
    // What is released twice, or was never there, is no error.
    second
        .done(Ask::Release {
            payload: handle.payload,
        })
        .await;
    second.all_gone().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_that_is_released_while_pinned_goes_when_the_view_does() {
    let world = World::new().await;
    let mut second = world.second().await;
    let bundle = latent();
    let handle = second.publish(&bundle, Owner::Orchestrator).await;
    let mut consumer = world
        .connector
        .consume(handle.clone(), ConsumeOptions::within(PATIENCE))
        .expect("a consumer");
    let chunk = consumer.next().await.expect("alive").expect("ready");
    drop(consumer);
    second
        .done(Ask::Release {
            payload: handle.payload,
        })
        .await;
    // Another payload of the same size must not land in the same memory.
    let other = second.publish(&latent().seeded(2), Owner::Orchestrator).await;
    let Answer::Leftovers(left) = second.ask(Ask::Stats).await else {
        panic!("no numbers")
    };
    let count = |wanted: &str| {
        left.iter()
            .find(|(name, _)| name == wanted)
            .map_or(0, |(_, count)| *count)
    };
    assert_eq!((count("payloads"), count("regions"), count("pins")), (1, 2, 1));
    bundle.check(&chunk.tensors, Some(0));
    drop(chunk);
    second.done(Ask::Release { payload: other.payload }).await;
    second.all_gone().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_in_the_middle_is_seen_by_who_waits() {
    let world = World::new().await;
    let mut second = world.second().await;
    let handle = second.open(&latent(), Owner::Orchestrator).await;
    second.ready(&handle, 0).await;
    let mut consumer = world
        .connector
        .consume(handle.clone(), ConsumeOptions::within(PATIENCE))
        .expect("a consumer");
    consumer.next().await.expect("alive").expect("ready");
    second
        .done(Ask::Release {
            payload: handle.payload,
        })
        .await;
    let error = consumer.next().await.expect_err("it was released");
    assert!(matches!(error, ConsumeError::Gone { .. }), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_nobody_consumes_expires_and_is_counted() {
    let world = World::new().await;
    let bundle = latent();
    let mut spec = PublishSpec::new("request", bundle.manifest(), CONSUMED);
    assert_eq!(spec.deadline, Some(PublishSpec::UNCONSUMED));
    spec.deadline = Some(Duration::from_millis(30));
    let publication = world
        .connector
        .publish(spec, bundle.memory(world.connector.host().arena()))
        .expect("published");
    tokio::time::timeout(PATIENCE, publication.released())
        .await
        .expect("it expires");
    let handle = publication.handle().clone();
    drop(publication);
    assert_eq!(
        (world.connector.stats().expired, world.connector.stats().released),
        (1, 0)
    );
    let error = first_error(&world, &handle).await;
    assert!(error.to_string().contains("nobody consumed it in time"), "{error}");
    all_gone(&world.connector).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn closing_ends_everything_and_can_be_repeated() {
    let world = World::new().await;
    let mut second = world.second().await;
    let handle = second.open(&latent(), Owner::Orchestrator).await;
    let mut consumer = world
        .connector
        .consume(handle, ConsumeOptions::default())
        .expect("a consumer");
    let bundle = latent();
    let spec = PublishSpec::new("request", bundle.manifest(), CONSUMED);
    let arena = world.connector.host().arena().clone();
    let publication = world
        .connector
        .publish(spec.clone(), bundle.memory(&arena))
        .expect("published");
    let waiting = tokio::spawn(async move { consumer.next().await.map(drop) });
    let socket = world.connector.peer().socket.clone();
    assert!(std::path::Path::new(&socket).exists());

    world.connector.close().await;
    world.connector.close().await;
    publication.released().await;
    let ended = tokio::time::timeout(PATIENCE, waiting)
        .await
        .expect("it ends")
        .expect("no panic");
    assert!(matches!(ended, Err(ConsumeError::Closed { .. })), "{ended:?}");
    let error = world
        .connector
        .publish(spec, bundle.memory(&arena))
        .expect_err("closed");
    assert_eq!(error.reason(), "connector.closed");
    let left = std::fs::read_dir(world.run_dir().join("peers")).expect("a directory");
    let left: Vec<_> = left.map(|entry| entry.expect("an entry").path()).collect();
    let own = &world.connector.peer().incarnation.0.simple().to_string()[..16];
    assert!(
        left.iter().all(|path| !path.to_string_lossy().contains(own)),
        "sockets are left: {left:?}"
    );
}
