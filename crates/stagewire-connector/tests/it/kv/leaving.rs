//! Receivers that end.

use std::time::Duration;

use stagewire_connector::kv::{Heartbeat, Phase, RoomSpec};
use tokio::time::Instant;

use super::odd::{self, Pair};
use crate::{PATIENCE, all_gone};

/// Nobody finds silence before a test is over.
const SLOW: Heartbeat = Heartbeat {
    interval: Duration::from_secs(60),
    misses: 2,
};

async fn until(condition: impl Fn() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < PATIENCE, "it does not come about");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

async fn in_time<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, what).await.expect("in time")
}

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
