//! Peers that die, stop or come back, with real processes.

use std::time::{Duration, Instant};

use stagewire_core::{Classify, Incarnation, Record};
use stagewire_transfer::{Borrowed, ConnectOptions, Memory, Target, TransferOptions, Transport};
use uuid::Uuid;
use xxhash_rust::xxh3::xxh3_64;

use super::child::{Options, bytes, registrations_become};
use super::processes::{pin, pull};
use super::{End, is_here};
use crate::child::to_hex;
use crate::support;

const MIB: usize = 1 << 20;

const TCP: Options = Options {
    writable: false,
    tls: Some("tcp"),
    library: None,
    incarnation: None,
};

const WRITABLE_TCP: Options = Options { writable: true, ..TCP };

fn whole(len: usize) -> [Record; 1] {
    [Record::contiguous(0, 0, len as u64)]
}

fn within(milliseconds: u64) -> TransferOptions {
    TransferOptions {
        deadline: Some(Duration::from_millis(milliseconds)),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_owner_ends_its_transfers_within_a_second() {
    if !is_here() {
        return;
    }
    let (_parent, dir) = support::run_dir();
    let end = End::start(&dir).await;
    let len = 128 * MIB;
    for options in [Options::default(), TCP] {
        let (mut owner, offer) = options.owner(&dir, len).await;
        let pinned = pin(&end, &offer).await;
        let mut target = Target::allocate(len as u64).expect("memory");
        let pulls = async {
            loop {
                if let Err(error) = pinned.pull(&whole(len), &target, TransferOptions::default()).await {
                    return (error, Instant::now());
                }
                target.reset().expect("the pull is over");
            }
        };
        let kill = async {
            support::until("bytes are in flight", || end.nixl.stats().in_flight_bytes > 0).await;
            owner.kill();
            Instant::now()
        };
        let ((error, ended), killed) = tokio::join!(pulls, kill);
        assert_eq!(error.reason(), "peer.lost", "{error}");
        let after = ended.duration_since(killed);
        assert!(after < Duration::from_secs(1), "{after:?} after the kill");
        support::until("nothing writes into the target", || target.is_idle()).await;
        assert!(target.as_slice().is_err(), "half a pull shows");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_owner_is_noticed_by_the_deadline_and_late_bytes_harm_nobody() {
    if !is_here() {
        return;
    }
    let (_parent, dir) = support::run_dir();
    let end = End::start(&dir).await;
    let len = 64 * MIB;
    let (owner, offer) = TCP.owner(&dir, len).await;
    let pinned = pin(&end, &offer).await;
    // So that connecting is no part of what follows.
    pull(&*pinned, &whole(MIB), MIB).await;
    owner.stop().await;
    let mut target = Target::allocate(len as u64).expect("memory");
    let begun = Instant::now();
    let pulled = pinned.pull(&whole(len), &target, within(500)).await;
    let (error, took) = (pulled.expect_err("the owner stands still"), begun.elapsed());
    assert_eq!(error.reason(), "transfer.deadline", "{error}");
    assert!(took < Duration::from_millis(1500), "{took:?}");
    assert!(!target.is_idle(), "given up while NIXL may still write into it");
    assert_eq!(target.reset().expect_err("busy").reason(), "target.busy");
    owner.go_on();
    support::until("NIXL is done with the target", || target.is_idle()).await;
    assert!(target.slice(0..1).is_err(), "late bytes show");
    target.reset().expect("idle");
    let pulled = pinned.pull(&whole(len), &target, TransferOptions::default()).await;
    pulled.expect("pulled");
    assert!(target.as_slice().expect("pulled") == support::bulk(len));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_owner_on_this_host_is_read_all_the_same_or_the_deadline_ends_it() {
    if !is_here() {
        return;
    }
    let (_parent, dir) = support::run_dir();
    let end = End::start(&dir).await;
    let len = 8 * MIB;
    let (owner, offer) = Options::default().owner(&dir, len).await;
    let pinned = pin(&end, &offer).await;
    pull(&*pinned, &whole(MIB), MIB).await;
    owner.stop().await;
    let target = Target::allocate(len as u64).expect("memory");
    // Cross-memory attach needs nobody over there; where UCX goes another way, nothing arrives.
    match pinned.pull(&whole(len), &target, within(5000)).await {
        Ok(()) => assert!(target.as_slice().expect("pulled") == support::bulk(len)),
        Err(error) => assert_eq!(error.reason(), "transfer.deadline", "{error}"),
    }
    let remote = end
        .nixl
        .connect(&offer.0, ConnectOptions::default())
        .await
        .expect("connected");
    let error = remote
        .pin(&offer.1, within(300))
        .await
        .expect_err("a pin needs the owner");
    assert_eq!(error.reason(), "transfer.deadline", "{error}");
    owner.go_on();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_push_that_ran_out_of_time_is_in_doubt_and_lands_in_quarantined_memory() {
    if !is_here() {
        return;
    }
    let (_parent, dir) = support::run_dir();
    let end = End::start(&dir).await;
    let len = 32 * MIB;
    let (mut owner, offer) = WRITABLE_TCP.owner(&dir, len).await;
    let pinned = pin(&end, &offer).await;
    let source = support::bulk(len);
    let digest = xxh3_64(&source);
    let memory = Memory::from(Borrowed::from(source));
    pinned
        .push(&whole(100), &memory, TransferOptions::default())
        .await
        .expect("pushed");
    owner.stop().await;
    let error = pinned
        .push(&whole(len), &memory, within(300))
        .await
        .expect_err("the owner stands still");
    assert_eq!(error.reason(), "transfer.in_doubt", "{error}");
    drop(pinned);
    owner.go_on();
    owner.ask::<()>("release").await;
    let limit = Instant::now() + Duration::from_secs(20);
    // As long as the write may land, nobody sees the bytes, and nobody can use the memory for something else.
    while let Some(reason) = owner.ask::<Option<String>>("register-again").await {
        // Still pinned by the write, then still known to the writer.
        assert!(
            ["register.overlap", "register.quarantined"].contains(&&*reason),
            "{reason}"
        );
        let shown: Option<u64> = owner.ask("bytes").await;
        assert!(
            shown.is_none_or(|shown| shown == digest),
            "shown before the write landed"
        );
        assert!(Instant::now() < limit, "never given back");
    }
    assert_eq!(
        bytes(&mut owner).await,
        digest,
        "the write landed before the memory was given back"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_that_comes_back_under_the_same_name_is_reached_again() {
    if !is_here() {
        return;
    }
    let (_parent, dir) = support::run_dir();
    let end = End::start(&dir).await;
    let options = Options {
        incarnation: Some(Incarnation(Uuid::new_v4())),
        ..Options::default()
    };
    for _ in 0..3 {
        let (mut owner, offer) = options.owner(&dir, MIB).await;
        let pinned = pin(&end, &offer).await;
        let target = pull(&*pinned, &whole(MIB), MIB).await;
        assert!(target.as_slice().expect("pulled") == support::bulk(MIB));
        owner.kill();
        owner.gone().await;
        let pulled = pinned
            .pull(
                &whole(MIB),
                &Target::allocate(MIB as u64).expect("memory"),
                within(5000),
            )
            .await;
        assert_eq!(pulled.expect_err("it is gone").reason(), "peer.lost");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_stays_until_its_readers_have_forgotten_it_or_died() {
    if !is_here() {
        return;
    }
    let (_parent, dir) = support::run_dir();
    let end = End::start(&dir).await;
    let (mut owner, offer) = Options::default().owner(&dir, MIB).await;
    let mut other = Options::default().reader(&dir);
    other.ask::<()>(&format!("pull {}", to_hex(&offer))).await;
    let pinned = pin(&end, &offer).await;
    pull(&*pinned, &whole(MIB), MIB).await;
    drop(pinned);
    owner.ask::<()>("release").await;
    assert_eq!(
        owner.ask::<u64>("registrations").await,
        1,
        "given back while a reader has it pinned"
    );
    other.kill();
    registrations_become(&mut owner, 0).await;
    support::until("the reader that lives has forgotten it", || {
        end.nixl.known_registrations() == 0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_that_a_dead_reader_could_write_stays_a_while() {
    if !is_here() {
        return;
    }
    let (_parent, dir) = support::run_dir();
    let (mut owner, offer) = WRITABLE_TCP.owner(&dir, MIB).await;
    let mut reader = TCP.reader(&dir);
    reader.ask::<()>(&format!("pull {}", to_hex(&offer))).await;
    owner.ask::<()>("release").await;
    reader.kill();
    let (killed, limit) = (Instant::now(), Duration::from_secs(30));
    while owner.ask::<u64>("registrations").await > 0 {
        assert!(killed.elapsed() < limit, "never given back");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let after = killed.elapsed();
    assert!(after > Duration::from_secs(9), "given back after {after:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transfer_that_hangs_costs_little() {
    if !is_here() {
        return;
    }
    let cost = cost_of_hanging().await;
    assert!(cost <= Duration::from_millis(20), "{cost:?} for three seconds");
}

/// CPU of the thread that moves bytes, while a transfer hangs for three seconds.
async fn cost_of_hanging() -> Duration {
    let (_parent, dir) = support::run_dir();
    let (owner, offer) = TCP.owner(&dir, 8 * MIB).await;
    let mut reader = TCP.reader(&dir);
    reader.ask::<()>(&format!("block {}", to_hex(&offer))).await;
    owner.stop().await;
    reader.ask::<()>("now").await;
    let (pulled, cost): (Result<(), String>, Duration) = reader.receive().await;
    assert_eq!(pulled, Err("transfer.deadline".to_owned()));
    owner.go_on();
    cost
}

/// Not over TCP: there UCX 1.23 ends the owner's process where it cannot answer a read ("Fatal: unexpected error").
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_on_this_host_that_is_killed_in_the_middle_leaves_its_owner_unharmed() {
    if !is_here() {
        return;
    }
    let (_parent, dir) = support::run_dir();
    let len = 64 * MIB;
    let (mut owner, offer) = Options::default().owner(&dir, len).await;
    for _ in 0..3 {
        let mut reader = Options::default().reader(&dir);
        reader.ask::<()>(&format!("block {}", to_hex(&offer))).await;
        reader.ask::<()>("now").await;
        reader.kill();
        reader.gone().await;
    }
    let end = End::start(&dir).await;
    let pinned = pin(&end, &offer).await;
    let target = pull(&*pinned, &whole(len), len).await;
    assert!(target.as_slice().expect("pulled") == support::bulk(len));
    drop(pinned);
    owner.ask::<()>("release").await;
    registrations_become(&mut owner, 0).await;
}
