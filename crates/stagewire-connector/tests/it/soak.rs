//! Many payloads, ended in every way: nothing may add up.

use std::time::Duration;

use stagewire_connector::{ConsumeError, ConsumeOptions, Owner};
use stagewire_core::{ErrorClass, Failure};

use crate::bundle::{Bundle, CONSUMED};
use crate::second::Ask;
use crate::{PATIENCE, World, all_gone};

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_payloads_leave_nothing() {
    let world = World::new().await;
    let mut second = world.second().await;
    for round in 0..1000_u64 {
        let bundle = Bundle::one(&[4, 100]).cut(0, 4).seeded(round);
        let bundle = if round % 2 == 0 { bundle } else { bundle.borrowed() };
        let owner = if round % 3 == 0 { Owner::Orchestrator } else { CONSUMED };
        let handle = second.open(&bundle, owner).await;
        let mut consumer = world
            .connector
            .consume(handle.clone(), ConsumeOptions::within(PATIENCE))
            .expect("a consumer");
        let ready = round % 5;
        for chunk in 0..ready.min(4) {
            second.ready(&handle, chunk as u32).await;
            let chunk = consumer.next().await.expect("alive").expect("ready");
            bundle.check(&chunk.tensors, Some(chunk.index));
        }
        match round % 4 {
            // Everything is consumed.
            0 | 1 if ready == 4 => assert!(consumer.next().await.expect("alive").is_none()),
            // The producer fails.
            0 => {
                let failure = Failure::new(ErrorClass::Internal, "test.failure", "on purpose");
                second
                    .done(Ask::Fail {
                        payload: handle.payload,
                        failure,
                    })
                    .await;
                if ready < 4 {
                    assert!(matches!(consumer.next().await, Err(ConsumeError::Failed { .. })));
                }
            }
            // The consumer goes away, in the middle of waiting.
            1 | 2 => {
                let _ = tokio::time::timeout(Duration::from_micros(round % 700), consumer.next()).await;
            }
            // It is released under the consumer.
            _ => {}
        }
        if owner == Owner::Orchestrator || round % 4 != 0 {
            second
                .done(Ask::Release {
                    payload: handle.payload,
                })
                .await;
        }
    }
    second.all_gone().await;
    all_gone(&world.connector).await;
    assert_eq!(
        world.connector.stats().links,
        1,
        "more than one connection to one process"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn payloads_of_many_requests_at_once_keep_apart() {
    let world = World::new().await;
    let mut second = world.second().await;
    let mut tasks = Vec::new();
    for seed in 0..64_u64 {
        let bundle = Bundle::one(&[8, 1 + seed * 37])
            .cut(0, 1 + (seed % 8) as u32)
            .seeded(seed);
        let bundle = if seed % 2 == 0 { bundle } else { bundle.borrowed() };
        let handle = second.publish(&bundle, CONSUMED).await;
        let options = ConsumeOptions {
            private: seed % 3 == 0,
            ..ConsumeOptions::within(PATIENCE)
        };
        let mut consumer = world.connector.consume(handle, options).expect("a consumer");
        tasks.push(tokio::spawn(async move {
            while let Some(chunk) = consumer.next().await.expect("alive") {
                bundle.check(&chunk.tensors, Some(chunk.index));
            }
        }));
    }
    for task in tasks {
        task.await.expect("no panic");
    }
    second.all_gone().await;
    all_gone(&world.connector).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn producers_killed_at_random_points_never_give_wrong_bytes() {
    let world = World::new().await;
    for round in 0..10_u64 {
        let mut second = world.second().await;
        let bundle = Bundle::one(&[64, 4096]).cut(0, 64).seeded(round);
        let bundle = if round % 2 == 0 { bundle } else { bundle.borrowed() };
        let handle = second.publish(&bundle, Owner::Orchestrator).await;
        let options = ConsumeOptions {
            private: true,
            ..ConsumeOptions::within(PATIENCE)
        };
        let mut consumer = world.connector.consume(handle, options).expect("a consumer");
        let first = consumer.next().await.expect("alive").expect("a chunk");
        bundle.check(&first.tensors, Some(0));
        let reader = tokio::spawn(async move {
            loop {
                match consumer.next().await {
                    Ok(Some(chunk)) => bundle.check(&chunk.tensors, Some(chunk.index)),
                    Ok(None) => return true,
                    Err(ConsumeError::PeerLost { .. }) => return false,
                    Err(error) => panic!("{error}"),
                }
            }
        });
        tokio::time::sleep(Duration::from_micros(round * 300)).await;
        second.kill().await;
        tokio::time::timeout(PATIENCE, reader)
            .await
            .expect("it ends")
            .expect("no wrong byte");
    }
    all_gone(&world.connector).await;
}
