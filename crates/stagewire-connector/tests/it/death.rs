//! Processes that die, and what the others notice.

use std::time::Duration;

use stagewire_connector::{ConsumeError, ConsumeOptions, Owner};
use stagewire_core::{Classify, ErrorClass};
use tokio::time::Instant;

use crate::bundle::{Bundle, CONSUMED};
use crate::second::Ask;
use crate::{PATIENCE, World, all_gone};

fn latent() -> Bundle {
    Bundle::one(&[8, 1000]).cut(0, 8)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_producer_killed_in_the_middle_is_a_typed_error_within_a_second() {
    let world = World::new().await;
    for bundle in [latent(), latent().borrowed()] {
        let mut second = world.second().await;
        let handle = second.open(&bundle, Owner::Orchestrator).await;
        for chunk in 0..3 {
            second.ready(&handle, chunk).await;
        }
        let mut consumer = world
            .connector
            .consume(handle.clone(), ConsumeOptions::default())
            .expect("a consumer");
        let mut seen = Vec::new();
        for _ in 0..3 {
            seen.push(consumer.next().await.expect("alive").expect("ready"));
        }
        let waiting = tokio::spawn(async move { (consumer.next().await.map(drop), consumer) });
        second.kill().await;
        let begin = Instant::now();
        let (result, mut consumer) = tokio::time::timeout(PATIENCE, waiting)
            .await
            .expect("it ends")
            .expect("no panic");
        assert!(
            begin.elapsed() < Duration::from_secs(1),
            "it took {:?}",
            begin.elapsed()
        );
        let error = result.expect_err("the producer is dead");
        assert!(matches!(error, ConsumeError::PeerLost { .. }), "{error}");
        assert_eq!((error.class(), error.reason()), (ErrorClass::Unavailable, "peer.lost"));
        assert_eq!(error.lost(), Some(handle.payload));
        let place = error.place().expect("it says where");
        assert_eq!(
            (place.chunk, place.chunks, place.pid),
            (3, 8, handle.holder.process.pid)
        );
        // The error stays, and what was seen stays readable.
        assert!(matches!(consumer.next().await, Err(ConsumeError::PeerLost { .. })));
        for chunk in &seen {
            bundle.check(&chunk.tensors, Some(chunk.index));
        }
        drop((seen, consumer));
        // Who comes later is told the same, without having to wait.
        let mut late = world
            .connector
            .consume(handle.clone(), ConsumeOptions::default())
            .expect("a consumer");
        let error = late.next().await.expect_err("the producer is dead");
        assert!(matches!(error, ConsumeError::PeerLost { .. }), "{error}");
    }
    all_gone(&world.connector).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_mapped_and_ready_outlives_its_producer() {
    let world = World::new().await;
    let mut second = world.second().await;
    let bundle = latent();
    let handle = second.publish(&bundle, Owner::Orchestrator).await;
    let mut consumer = world
        .connector
        .consume(handle, ConsumeOptions::within(PATIENCE))
        .expect("a consumer");
    let first = consumer.next().await.expect("alive").expect("ready");
    bundle.check(&first.tensors, Some(0));
    second.kill().await;
    for index in 1..8 {
        let chunk = consumer
            .next()
            .await
            .expect("its bytes are mapped here")
            .expect("ready");
        bundle.check(&chunk.tensors, Some(index));
    }
    assert!(consumer.next().await.expect("nobody is left to tell").is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_consumer_leaves_no_pin_and_its_successor_begins_at_the_first_chunk() {
    let world = World::new().await;
    let bundle = latent();
    for (bundle, owner) in [(bundle.clone(), CONSUMED), (bundle.borrowed(), CONSUMED)] {
        let mut second = world.second().await;
        let spec = stagewire_connector::PublishSpec::new("request", bundle.manifest(), owner);
        let memory = bundle.memory(world.connector.host().arena());
        let publication = world.connector.publish(spec, memory).expect("published");
        let handle = publication.handle().clone();
        second
            .done(Ask::Consume {
                handle: handle.to_bytes(),
                chunks: 5,
            })
            .await;
        let mut successor = world
            .connector
            .consume(handle.clone(), ConsumeOptions::within(PATIENCE))
            .expect("a consumer");
        let error = successor.next().await.expect_err("the first consumer is at it");
        assert!(matches!(error, ConsumeError::Claimed { .. }), "{error}");
        assert_eq!(
            (error.class(), error.reason()),
            (ErrorClass::Conflict, "payload.claimed")
        );

        second.kill().await;
        let begin = Instant::now();
        let first = loop {
            match successor.next().await {
                Ok(chunk) => break chunk.expect("a chunk"),
                Err(ConsumeError::Claimed { .. }) => {
                    assert!(begin.elapsed() < PATIENCE, "still claimed by a dead process");
                }
                Err(error) => panic!("{error}"),
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        };
        assert_eq!(first.index, 0);
        drop(first);
        bundle.check(&successor.fetch_all().await.expect("its own").tensors, None);
        publication.released().await;
        drop((successor, publication));
        all_gone(&world.connector).await;
    }
}
