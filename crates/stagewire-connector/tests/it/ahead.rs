//! Chunks that are copied before they are asked for.

use std::sync::Arc;

use stagewire_connector::{ConsumeError, ConsumeOptions, Owner};
use stagewire_core::{ErrorClass, Failure};
use stagewire_transfer::{Target, Transport};
use tokio::time::Instant;

use crate::bundle::Bundle;
use crate::second::Ask;
use crate::{PATIENCE, World, all_gone};

/// 8 chunks of 1000 bytes; each row of a chunk is 40 bytes.
fn narrow() -> Bundle {
    Bundle::one(&[25, 8, 10]).cut(1, 8)
}

fn copies() -> ConsumeOptions {
    ConsumeOptions {
        private: true,
        ..ConsumeOptions::within(PATIENCE)
    }
}

/// Waits, without asking the consumer for anything, until so many bytes were copied.
async fn copied(world: &World, bytes: u64) {
    let begin = Instant::now();
    while world.connector.stats().host.copied_bytes < bytes {
        assert!(begin.elapsed() < PATIENCE, "nothing is copied ahead");
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_chunk_comes_while_one_is_in_use() {
    for bundle in [narrow(), narrow().borrowed()] {
        let world = World::new().await;
        let mut second = world.second().await;
        let handle = second.open(&bundle, Owner::Orchestrator).await;
        let mut consumer = world.connector.consume(handle.clone(), copies()).expect("a consumer");
        second.ready(&handle, 0).await;
        let first = consumer.next().await.expect("alive").expect("ready");
        // One that was there, and one that comes only now.
        for index in 1..3 {
            second.ready(&handle, index).await;
            copied(&world, u64::from(index + 1) * 1000).await;
            let chunk = consumer.next().await.expect("alive").expect("ready");
            bundle.check(&chunk.tensors, Some(index));
        }
        bundle.check(&first.tensors, Some(0));
        assert_eq!(world.connector.stats().host.copied_bytes, 3000);
        // A failure ends the wait for more.
        let failure = Failure::new(ErrorClass::Internal, "test.failure", "on purpose");
        let payload = handle.payload;
        second.done(Ask::Fail { payload, failure }).await;
        assert!(matches!(consumer.next().await, Err(ConsumeError::Failed { .. })));
        second.done(Ask::Release { payload }).await;
        drop((consumer, first));
        second.all_gone().await;
        all_gone(&world.connector).await;
    }
}

#[expect(clippy::print_stderr, reason = "a visible skip")]
#[tokio::test(flavor = "multi_thread")]
async fn a_whole_payload_that_is_there_is_one_pull() {
    for (bundle, transport) in [(narrow(), "shm"), (narrow().borrowed(), "cma")] {
        let world = World::new().await;
        let mut second = world.second().await;
        let host = world.connector.host();
        let transport: Arc<dyn Transport> = match transport {
            "shm" => host.shm(),
            _ => match host.cma() {
                Ok(cma) => cma,
                Err(error) => {
                    eprintln!("skipped: copies over cma: {error}");
                    continue;
                }
            },
        };
        let handle = second.publish(&bundle, Owner::Orchestrator).await;
        let before = transport.stats().pulls;
        let mut consumer = world.connector.consume(handle.clone(), copies()).expect("a consumer");
        let fetched = consumer.fetch_all().await.expect("alive");
        bundle.check(&fetched.tensors, None);
        assert_eq!((transport.stats().pulls - before, fetched.handovers.len()), (1, 8));
        // One by one, the first comes alone: it is not to wait for the others.
        let mut consumer = world.connector.consume(handle, copies()).expect("a consumer");
        let before = world.connector.stats().host.copied_bytes;
        consumer.next().await.expect("alive").expect("ready");
        copied(&world, before + 2000).await;
        for index in 1..8 {
            let chunk = consumer.next().await.expect("alive").expect("ready");
            bundle.check(&chunk.tensors, Some(index));
        }
        assert_eq!(
            world.connector.stats().host.copied_bytes,
            before + 8000,
            "a byte was copied twice"
        );
    }
}

/// Also where nothing else gets a turn between them, because each copy is too short to be waited for.
#[tokio::test]
async fn chunks_that_are_asked_for_in_a_row_share_pulls() {
    let world = World::new().await;
    let mut second = world.second().await;
    let bundle = narrow();
    let handle = second.publish(&bundle, Owner::Orchestrator).await;
    let shm = world.connector.host().shm();
    let before = shm.stats().pulls;
    let mut consumer = world.connector.consume(handle, copies()).expect("a consumer");
    for index in 0..8 {
        let chunk = consumer.next().await.expect("alive").expect("ready");
        bundle.check(&chunk.tensors, Some(index));
    }
    let pulls = shm.stats().pulls - before;
    assert!((2..8).contains(&pulls), "8 chunks came by {pulls} pulls");
}

/// What is copied ahead for a consumer that is gone leaves nothing behind.
#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_that_goes_takes_its_copies_with_it() {
    let world = World::new().await;
    let mut second = world.second().await;
    let bundle = Bundle::one(&[8, 1 << 18]).cut(0, 8);
    for bundle in [bundle.clone(), bundle.borrowed()] {
        let handle = second.publish(&bundle, Owner::Orchestrator).await;
        for _ in 0..20 {
            let target = Arc::new(Target::allocate(8 << 20).expect("memory"));
            let options = ConsumeOptions {
                destinations: Some(vec![Arc::clone(&target)]),
                ..ConsumeOptions::within(PATIENCE)
            };
            let mut consumer = world.connector.consume(handle.clone(), options).expect("a consumer");
            let chunk = consumer.next().await.expect("alive").expect("ready");
            drop(consumer);
            let begin = Instant::now();
            while !target.is_idle() {
                assert!(begin.elapsed() < PATIENCE, "it is still written to");
                tokio::task::yield_now().await;
            }
            bundle.check(&chunk.tensors, Some(0));
        }
        second
            .done(Ask::Release {
                payload: handle.payload,
            })
            .await;
        second.all_gone().await;
        all_gone(&world.connector).await;
    }
}
