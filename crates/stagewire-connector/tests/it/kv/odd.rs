//! What makes no sense is refused, or fails its room alone: nothing panics, and nothing is held.

use std::sync::Arc;
use std::time::Duration;

use stagewire_connector::Connector;
use stagewire_connector::kv::{
    CacheMemory, ChunkSpec, Heartbeat, Receiver, ReceiverOptions, RoomSpec, Sender, SenderOptions,
};
use stagewire_core::{Classify, DType, ErrorClass};
use stagewire_kv::{Component, Geometry};

use super::pages::Pages;
use super::{in_time, sides};
use crate::{PATIENCE, World};

/// One rank on each side, with eight pages of two tokens, of which nobody is told.
pub(super) struct Pair {
    pub(super) sender: Sender,
    pub(super) receiver: Receiver,
    pub(super) prefill: Arc<Connector>,
    pub(super) world: World,
}

pub(super) fn geometry() -> Geometry {
    Geometry::new(1, 2, vec![Component::mha("full", 1, 2, [2, 2], DType::U8)])
}

pub(super) fn receiver(world: &World, heartbeat: Heartbeat) -> Receiver {
    let pages = [(); 2].map(|()| Pages::new(&[0; 8 * 8]));
    let cache = CacheMemory::one_each(pages.each_ref().map(Pages::target));
    let options = ReceiverOptions {
        heartbeat,
        ..ReceiverOptions::default()
    };
    Receiver::new(&world.connector, sides::engine(&geometry()), 0, cache, options).expect("a receiver")
}

pub(super) async fn pair(heartbeat: Heartbeat) -> Pair {
    let world = World::new().await;
    let prefill = world.another("prefill").await;
    let source = [(); 2].map(|()| Pages::new(&[1; 8 * 8]));
    let cache = CacheMemory::one_each(source.each_ref().map(Pages::memory));
    let options = SenderOptions {
        heartbeat,
        // Who does not let go fails the test.
        cut_off: PATIENCE * 9,
        ..SenderOptions::default()
    };
    let sender = Sender::new(&prefill, sides::engine(&geometry()), 0, cache, options).expect("a sender");
    let receiver = receiver(&world, heartbeat);
    Pair {
        sender,
        receiver,
        prefill,
        world,
    }
}

/// Everything of four tokens.
pub(super) fn whole() -> ChunkSpec {
    ChunkSpec::new(0..4).pages("full", [4, 5]).last()
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_that_decode_does_not_have_fail_their_room_on_both_sides() {
    let Pair { sender, receiver, .. } = &pair(Heartbeat::default()).await;
    for (number, page) in (0..).zip([0, 8, 1 << 40, i64::MAX / 8, i64::MAX, -1, i64::MIN]) {
        let sent = sender.room(number, 4, PATIENCE * 2).expect("a room");
        sent.send(whole()).expect("as it should be");
        let spec = RoomSpec::new(number, [sender.handle()], 4).pages("full", [page, 2]);
        let room = receiver.room(spec).expect("page tables fail the room");
        let failure = room.finished().await.expect_err("there is no such page");
        assert_eq!(failure.class, ErrorClass::Invalid, "page {page}: {failure}");
        in_time(room.released()).await;
        let at_prefill = in_time(sent.finished()).await.expect_err("decode has nothing");
        assert_eq!(at_prefill.reason, failure.reason, "page {page}");
    }
    // The next room has page 2.
    let sent = sender.room(100, 4, PATIENCE).expect("a room");
    sent.send(whole()).expect("as it should be");
    let spec = RoomSpec::new(100, [sender.handle()], 4).pages("full", [1, 2]);
    let room = receiver.room(spec).expect("free");
    room.finished().await.expect("nobody else minds");
}

#[tokio::test(flavor = "multi_thread")]
async fn sequences_that_are_too_long_are_refused() {
    let Pair { sender, receiver, .. } = &pair(Heartbeat::default()).await;
    for seq_len in [1 << 23, 1 << 45, 1 << 62, u64::MAX] {
        let error = sender.room(1, seq_len, PATIENCE).expect_err("too long");
        assert_eq!(error.reason(), "kv.tokens");
        let sent = sender.room(1, 4, PATIENCE).expect("nothing is left of it");
        sent.send(whole()).expect("as it should be");
        let spec = RoomSpec::new(1, [sender.handle()], seq_len).pages("full", [1, 2]);
        let room = receiver.room(spec).expect("lengths fail the room");
        room.finished().await.expect_err("the two sides count different tokens");
        in_time(room.released()).await;
        in_time(sent.finished()).await.expect_err("decode has nothing");
        in_time(sent.released()).await;
    }
    assert_eq!((sender.live_rooms(), receiver.live_rooms()), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn times_without_end_and_without_length_are_as_good_as_others() {
    for interval in [Duration::ZERO, Duration::from_micros(500), Duration::MAX] {
        let heartbeat = Heartbeat {
            interval,
            misses: u32::MAX,
        };
        let Pair { sender, receiver, .. } = &pair(heartbeat).await;
        let sent = sender.room(1, 4, Duration::MAX).expect("a room");
        let spec = RoomSpec::new(1, [sender.handle()], 4).pages("full", [1, 2]);
        let room = receiver.room(spec.within(Duration::MAX)).expect("a room");
        sent.send(whole()).expect("as it should be");
        room.finished().await.expect("it comes");
        sent.finished().await.expect("it went");
    }
}
