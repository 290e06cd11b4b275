//! Connectors on two hosts: the second process has a pid namespace of its own, where the numbers of this one mean nothing.

use std::process::Command;
use std::time::Duration;

use stagewire_connector::{Carrier, ConsumeError, ConsumeOptions, LinkError, Mode, Owner, PublishSpec};
use stagewire_core::{ByteCount, Classify, ErrorClass, TransferMode};
use stagewire_transfer::{ConnectError, Secret};
use tokio::time::Instant;

use crate::bundle::{Bundle, CONSUMED};
use crate::second::{Answer, Ask, Second};
use crate::transfer::{TAKES, take_all};
use crate::{PATIENCE, World, all_gone};

const TOKEN: &str = "a deployment's token";

/// How a process gets a pid namespace, by what this user may do.
fn unshare() -> Option<Vec<&'static str>> {
    let own = ["unshare", "--pid", "--mount-proc", "--kill-child"];
    let as_user = [
        "unshare",
        "--user",
        "--map-root-user",
        "--pid",
        "--mount-proc",
        "--kill-child",
    ];
    let works = |words: &&[&str]| {
        let ran = Command::new(words[0]).args(&words[1..]).arg("true").output();
        ran.is_ok_and(|output| output.status.success())
    };
    [&own[..], &as_user[..]].into_iter().find(works).map(<[_]>::to_vec)
}

/// This process and one on another host, with a run directory of its own; `None`, said aloud, where that cannot be.
#[expect(clippy::print_stderr, reason = "a test that is skipped says so")]
async fn two_hosts(token: impl Into<Option<&str>>) -> Option<(World, Second, tempfile::TempDir)> {
    let token = token.into();
    let Some(unshare) = unshare() else {
        eprintln!("skipped: this user may not make a pid namespace");
        return None;
    };
    let world = World::with(|options| options.network.token = token.map(|_| Secret::new(TOKEN))).await;
    let dir = tempfile::tempdir().expect("a directory");
    let second = Second::start_by(&unshare, &dir.path().join("run"), &Carrier::DEFAULT, token).await;
    Some((world, second, dir))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn payloads_go_from_host_to_host_whole_and_in_chunks() {
    let Some((world, mut second, _dir)) = two_hosts(TOKEN).await else {
        return;
    };
    assert!(
        !world.connector.host().is_host_of(&second.peer().await),
        "it is on this host"
    );
    let bundle = Bundle::one(&[1, 16, 21, 12, 10]);
    for bundle in [bundle.clone(), bundle.clone().cut(2, 8), bundle.cut(1, 16)] {
        for bundle in [bundle.clone(), bundle.borrowed()] {
            let handle = second.publish(&bundle, Owner::Orchestrator).await;
            for take in TAKES {
                // Nothing is mapped from another host.
                let bundle = Bundle {
                    arena: false,
                    ..bundle.clone()
                };
                take_all(&world, &bundle, &handle, take).await;
            }
            let options = ConsumeOptions::within(PATIENCE);
            let mut consumer = world.connector.consume(handle.clone(), options).expect("a consumer");
            let fetched = consumer.fetch_all().await.expect("the producer lives");
            assert!(
                fetched.handovers.iter().all(|handover| handover.path == "tcp"),
                "{fetched:?}"
            );
            drop((fetched, consumer));
            let payload = handle.payload;
            second.done(Ask::Release { payload }).await;
        }
    }
    second.all_gone().await;
    all_gone(&world.connector).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chunks_come_as_they_are_shown_and_the_last_reader_ends_the_payload() {
    let Some((world, mut second, _dir)) = two_hosts(TOKEN).await else {
        return;
    };
    let bundle = Bundle::one(&[8, 1000]).cut(0, 8);
    let handle = second.open(&bundle, CONSUMED).await;
    let options = ConsumeOptions::within(PATIENCE);
    let mut consumer = world.connector.consume(handle.clone(), options).expect("a consumer");
    for chunk in 0..8 {
        second.ready(&handle, chunk).await;
        let chunk = consumer.next().await.expect("alive").expect("ready");
        bundle.check(&chunk.tensors, Some(chunk.index));
    }
    assert!(consumer.next().await.expect("alive").is_none());
    let options = ConsumeOptions::within(PATIENCE);
    let mut late = world.connector.consume(handle, options).expect("a consumer");
    let error = late.next().await.expect_err("it was consumed");
    assert_eq!(error.reason(), "payload.gone", "{error}");
    second.all_gone().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_that_dies_on_another_host_is_a_typed_error_within_a_second() {
    let Some((world, mut second, _dir)) = two_hosts(TOKEN).await else {
        return;
    };
    let handle = second
        .open(&Bundle::one(&[8, 1000]).cut(0, 8), Owner::Orchestrator)
        .await;
    for chunk in 0..3 {
        second.ready(&handle, chunk).await;
    }
    let consume = |options| world.connector.consume(handle.clone(), options).expect("a consumer");
    let mut consumer = consume(ConsumeOptions::default());
    for _ in 0..3 {
        consumer.next().await.expect("alive").expect("ready");
    }
    // While it is silent, the deadline judges.
    let mut hasty = consume(ConsumeOptions::within(Duration::from_millis(100)));
    for _ in 0..3 {
        hasty.next().await.expect("alive").expect("ready");
    }
    let error = hasty.next().await.expect_err("no further chunk");
    assert!(matches!(error, ConsumeError::Deadline { .. }), "{error}");

    let waiting = tokio::spawn(async move { consumer.next().await.map(drop) });
    second.kill().await;
    let begin = Instant::now();
    let result = tokio::time::timeout(PATIENCE, waiting).await.expect("it ends");
    let took = begin.elapsed();
    let error = result.expect("no panic").expect_err("the producer is dead");
    assert!(matches!(error, ConsumeError::PeerLost { .. }), "{error}");
    assert!(took < Duration::from_secs(1), "it took {took:?}");
    let error = consume(ConsumeOptions::default())
        .next()
        .await
        .expect_err("the producer is dead");
    assert!(matches!(error, ConsumeError::PeerLost { .. }), "{error}");
    drop(hasty);
    all_gone(&world.connector).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_token_is_refused_and_its_error_says_so() {
    let Some((world, mut second, _dir)) = two_hosts("another token").await else {
        return;
    };
    let handle = second.publish(&Bundle::one(&[10]), Owner::Orchestrator).await;
    let options = ConsumeOptions::within(PATIENCE);
    let mut consumer = world.connector.consume(handle, options).expect("a consumer");
    let error = consumer.next().await.expect_err("refused");
    let ConsumeError::Link {
        source: LinkError::Network { source, .. },
        ..
    } = &error
    else {
        panic!("{error:?}");
    };
    assert!(matches!(source, ConnectError::Token { .. }), "{source}");
    assert_eq!(
        (error.class(), error.reason()),
        (ErrorClass::Unauthenticated, "connect.token")
    );
}

/// Else any user of a host could put into its stores.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_token_no_other_host_is_served() {
    let Some((world, mut second, _dir)) = two_hosts(None).await else {
        return;
    };
    let handle = second.publish(&Bundle::one(&[10]), Owner::Orchestrator).await;
    let consume = || {
        world
            .connector
            .consume(handle.clone(), ConsumeOptions::within(PATIENCE))
    };
    let error = consume().expect("a consumer").next().await.expect_err("refused");
    assert_eq!(error.reason(), "connect.refused", "{error}");
    second.kill().await;
    let error = consume().expect("a consumer").next().await.expect_err("it is dead");
    assert!(
        matches!(&error, ConsumeError::PeerLost { how, .. } if how.contains("set where it binds")),
        "{error:?}"
    );
}

/// A store that runs on another host takes payloads, and gives them back when their producer is gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_on_another_host_keeps_payloads() {
    let Some((world, mut second, _dir)) = two_hosts(TOKEN).await else {
        return;
    };
    let (limit, closed) = (ByteCount(16 << 20), false);
    let Answer::Peer(store) = second.ask(Ask::ServeStore { limit, closed }).await else {
        panic!("no store");
    };
    world.connector.set_store(Some(store));
    let bundle = Bundle::one(&[8, 1000]).cut(0, 8);
    let mut spec = PublishSpec::new("request", bundle.manifest(), CONSUMED);
    spec.mode = Mode::Store;
    let publication = world
        .connector
        .publish(spec, bundle.memory(world.connector.host().arena()));
    let publication = publication.expect("published");
    let settled = tokio::time::timeout(PATIENCE, publication.settled())
        .await
        .expect("in time");
    let handle = settled.expect("the store takes it");
    drop(publication);
    let options = ConsumeOptions::within(PATIENCE);
    let mut consumer = world.connector.consume(handle, options).expect("a consumer");
    let fetched = consumer.fetch_all().await.expect("the store lives");
    bundle.check(&fetched.tensors, None);
    assert!(
        fetched
            .handovers
            .iter()
            .all(|handover| handover.mode == TransferMode::Store)
    );
    drop((fetched, consumer));
    second.all_gone().await;
    all_gone(&world.connector).await;
}

/// A consumer on another host that was named and dies leaves its payload to the store.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_consumer_lost_on_another_host_leaves_its_payload_to_the_store() {
    let Some((world, mut second, _dir)) = two_hosts(TOKEN).await else {
        return;
    };
    let (limit, closed) = (ByteCount(16 << 20), false);
    let mut keeper = world.second().await;
    let Answer::Peer(store) = keeper.ask(Ask::ServeStore { limit, closed }).await else {
        panic!("no store");
    };
    world.connector.set_store(Some(store));
    let bundle = Bundle::one(&[10]);
    let mut spec = PublishSpec::new("request", bundle.manifest(), CONSUMED);
    spec.mode = Mode::Auto;
    spec.consumer = Some(second.peer().await);
    let publication = world
        .connector
        .publish(spec, bundle.memory(world.connector.host().arena()));
    let publication = publication.expect("published");
    assert_eq!(
        publication.mode(),
        TransferMode::P2p,
        "the consumer is known, and alive for all that is known"
    );
    let handle = publication.handle().clone();
    second.kill().await;
    let moved = async {
        while world.connector.live().contains(&handle.payload) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(PATIENCE, moved).await.expect("the store took it");
    let options = ConsumeOptions::within(PATIENCE);
    let mut consumer = world.connector.consume(handle, options).expect("a consumer");
    bundle.check(&consumer.fetch_all().await.expect("the store lives").tensors, None);
}

/// A consumer on another host that this one cannot talk to is not dead.
#[expect(clippy::print_stderr, reason = "a test that is skipped says so")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_consumer_out_of_reach_is_not_lost() {
    let Some(unshare) = unshare() else {
        eprintln!("skipped: this user may not make a pid namespace");
        return;
    };
    let world = World::with(|options| options.network.token = Some(Secret::new(TOKEN))).await;
    let (limit, closed) = (ByteCount(16 << 20), false);
    let mut keeper = world.second().await;
    keeper.ask(Ask::ServeStore { limit, closed }).await;
    let dir = tempfile::tempdir().expect("a directory");
    let run_dir = dir.path().join("run");
    let mut stranger = Second::start_by(&unshare, &run_dir, &Carrier::DEFAULT, Some("another token")).await;
    let bundle = Bundle::one(&[10]);
    let mut spec = PublishSpec::new("request", bundle.manifest(), CONSUMED);
    spec.mode = Mode::Auto;
    spec.consumer = Some(stranger.peer().await);
    let memory = bundle.memory(world.connector.host().arena());
    let publication = world.connector.publish(spec, memory).expect("there is a store");
    publication.settled().await.expect("it stays");
    let moved = tokio::time::timeout(Duration::from_millis(500), publication.released()).await;
    assert!(moved.is_err() && publication.mode() == TransferMode::P2p);
    stranger.kill().await;
    let moved = tokio::time::timeout(PATIENCE, publication.released()).await;
    moved.expect("its consumer is dead");
}
