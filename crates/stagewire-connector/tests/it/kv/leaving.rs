//! Senders, receivers and connectors that end.

use std::time::Duration;

use stagewire_connector::kv::{
    CacheMemory, Heartbeat, KvError, Phase, Receiver, ReceiverOptions, RoomSpec, Sender, SenderOptions,
};
use stagewire_core::Classify;
use stagewire_transfer::{Borrowed, Memory, Target};

use super::odd::{self, Pair};
use super::{in_time, sides, until};
use crate::{PATIENCE, all_gone};

/// Nobody finds silence before a test is over.
const SLOW: Heartbeat = Heartbeat {
    interval: Duration::from_secs(60),
    misses: 2,
};

#[tokio::test(flavor = "multi_thread")]
async fn a_receiver_that_is_dropped_says_so_at_once() {
    let Pair {
        sender,
        receiver,
        world,
        prefill,
    } = odd::pair(SLOW).await;
    let sent = sender.room(1, 4, PATIENCE * 9).expect("a room");
    let spec = RoomSpec::new(1, [sender.handle()], 4).pages("full", [1, 2]);
    let room = receiver.room(spec).expect("a room");
    until(|| sent.phase() != Phase::Bootstrapping).await;
    drop(receiver);
    for failure in [
        in_time(room.finished()).await.expect_err("its receiver has ended"),
        in_time(sent.finished()).await.expect_err("its reader has ended"),
    ] {
        assert_eq!(failure.reason, "kv.closed", "{failure}");
    }
    in_time(sent.released()).await;
    until(|| sender.receivers() == 0).await;
    drop((room, sent, sender));
    for connector in [&prefill, &world.connector] {
        in_time(all_gone(connector)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn receivers_that_come_and_go_are_not_remembered() {
    let Pair { sender, world, .. } = &odd::pair(SLOW).await;
    for round in 0..20 {
        let receiver = odd::receiver(world, SLOW);
        let sent = sender.room(round, 4, PATIENCE).expect("a room");
        sent.send(odd::whole()).expect("as it should be");
        let spec = RoomSpec::new(round, [sender.handle()], 4).pages("full", [1, 2]);
        let room = receiver.room(spec).expect("a room");
        in_time(room.finished()).await.expect("it comes");
        in_time(sent.finished()).await.expect("it went");
    }
    until(|| sender.receivers() == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sender_that_is_dropped_hears_its_readers_let_go() {
    let Pair {
        sender,
        receiver,
        world,
        prefill,
    } = odd::pair(SLOW).await;
    let sent = sender.room(1, 4, PATIENCE * 9).expect("a room");
    sent.send(odd::whole()).expect("as it should be");
    let first = RoomSpec::new(1, [sender.handle()], 4).pages("full", [1, 2]);
    let room = receiver.room(first.clone()).expect("a room");
    in_time(room.finished()).await.expect("it comes");
    in_time(room.released()).await;
    in_time(sent.finished()).await.expect("it went");
    drop((room, sent));

    let sent = sender.room(2, 4, PATIENCE * 9).expect("a room");
    let read = RoomSpec {
        room: 2.into(),
        ..first.clone()
    };
    let read = receiver.room(read).expect("a room");
    let waits = RoomSpec {
        room: 3.into(),
        ..first.clone()
    }
    .pages("full", [3, 4]);
    let waits = receiver.room(waits).expect("a room");
    until(|| sent.phase() == Phase::Waiting).await;
    let handle = sender.handle();
    drop(sender);
    for failure in [
        in_time(sent.finished()).await.expect_err("its sender has ended"),
        in_time(read.finished()).await.expect_err("its sender has ended"),
        // Sooner than its question would be kept for.
        tokio::time::timeout(PATIENCE / 4, waits.finished())
            .await
            .expect("at once")
            .expect_err("nobody opens it any more"),
    ] {
        assert_eq!(failure.reason, "kv.closed", "{failure}");
    }
    in_time(sent.released()).await;
    let late = RoomSpec::new(4, [handle], 4).pages("full", [5, 6]);
    let late = receiver.room(late).expect("a room");
    let failure = in_time(late.finished()).await.expect_err("nobody is there");
    assert_eq!(failure.reason, "kv.closed", "{failure}");
    drop((read, waits, late, sent, receiver));
    for connector in [&prefill, &world.connector] {
        in_time(all_gone(connector)).await;
    }
}

fn is_closed<T>(refused: Result<T, KvError>) -> bool {
    refused.is_err_and(|error| error.reason() == "kv.closed")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connector_that_is_closed_ends_its_senders_and_receivers() {
    for decode_closes in [false, true] {
        let Pair {
            sender,
            receiver,
            world,
            prefill,
        } = &odd::pair(SLOW).await;
        let sent = sender.room(1, 4, PATIENCE * 9).expect("a room");
        let spec = RoomSpec::new(1, [sender.handle()], 4).pages("full", [1, 2]);
        let room = receiver.room(spec.clone().within(PATIENCE * 9)).expect("a room");
        until(|| sent.phase() != Phase::Bootstrapping).await;
        let engine = || sides::engine(&odd::geometry());
        if decode_closes {
            in_time(world.connector.close()).await;
            let failure = in_time(room.finished()).await.expect_err("its connector is closed");
            assert_eq!(failure.reason, "kv.closed", "{failure}");
            assert!(is_closed(receiver.room(spec)));
            let targets = [(); 2].map(|()| Target::allocate(8 * 8).expect("memory"));
            let (cache, options) = (CacheMemory::one_each(targets), ReceiverOptions::default());
            assert!(is_closed(Receiver::new(&world.connector, engine(), 0, cache, options)));
        } else {
            in_time(prefill.close()).await;
            let failure = in_time(sent.finished()).await.expect_err("its connector is closed");
            assert_eq!(failure.reason, "kv.closed", "{failure}");
            assert!(is_closed(sender.room(2, 4, PATIENCE)));
            let memory = [1, 2].map(|byte| Memory::from(Borrowed::from(vec![byte; 8 * 8])));
            let (cache, options) = (CacheMemory::one_each(memory), SenderOptions::default());
            assert!(is_closed(Sender::new(prefill, engine(), 0, cache, options)));
        }
        in_time(room.finished()).await.expect_err("the other side has ended");
        in_time(sent.finished()).await.expect_err("the other side has ended");
        in_time(room.released()).await;
        in_time(sent.released()).await;
    }
}
