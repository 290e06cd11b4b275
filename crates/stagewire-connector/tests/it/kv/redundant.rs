//! Ranks of prefill that no rank of decode needs.

use stagewire_connector::kv::{
    CacheMemory, ChunkSpec, Phase, Receiver, ReceiverOptions, RoomSpec, Sender, SenderOptions,
};
use stagewire_core::{DType, ErrorClass, Failure};
use stagewire_kv::{Component, Geometry};

use super::pages::Pages;
use super::{in_time, sides, until};
use crate::{PATIENCE, World};

/// One head, so that the second of two ranks of prefill is a replica of the first.
fn geometry(tp: u32) -> Geometry {
    Geometry::new(tp, 2, vec![Component::mha("full", 1, 1, [2, 2], DType::U8)])
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rank_that_nobody_needs_hears_so_at_once_however_the_room_ends() {
    let world = World::new().await;
    let prefill = world.another("prefill").await;
    let senders: Vec<Sender> = (0..2)
        .map(|rank| {
            let pages = [(); 2].map(|()| Pages::new(&[1; 8 * 4]));
            let cache = CacheMemory::one_each(pages.each_ref().map(Pages::memory));
            let options = SenderOptions::default();
            Sender::new(&prefill, sides::engine(&geometry(2)), rank, cache, options).expect("a sender")
        })
        .collect();
    let pages = [(); 2].map(|()| Pages::new(&[0; 8 * 4]));
    let cache = CacheMemory::one_each(pages.each_ref().map(Pages::target));
    let options = ReceiverOptions::default();
    let receiver = Receiver::new(&world.connector, sides::engine(&geometry(1)), 0, cache, options);
    let receiver = receiver.expect("a receiver");
    assert_eq!(receiver.writers(&senders[0].handle()).expect("they fit"), [0]);
    let handles: Vec<_> = senders.iter().map(Sender::handle).collect();
    let spec = |room: u64| RoomSpec::new(room, handles.clone(), 4).pages("full", [1, 2]);
    let open = |rank: usize, room: u64| senders[rank].room(room, 4, PATIENCE * 9).expect("a room");

    // Before anything is announced, and whatever comes of the room.
    let (needed, other) = (open(0, 1), open(1, 1));
    let room = receiver.room(spec(1)).expect("a room");
    in_time(other.finished()).await.expect("nobody needs it");
    assert!(other.is_released(), "its pages are free");
    until(|| needed.phase() == Phase::Waiting).await;
    let whole = || ChunkSpec::new(0..4).pages("full", [3, 4]).last();
    for sent in [&needed, &other] {
        sent.send(whole()).expect("as if nothing was");
    }
    in_time(room.finished()).await.expect("it comes");
    in_time(needed.finished()).await.expect("it went");
    in_time(room.released()).await;

    // Also where decode has failed before the room was opened there.
    let needed = open(0, 2);
    let room = receiver.room(spec(2)).expect("its pages are free");
    until(|| needed.phase() == Phase::Waiting).await;
    room.abort(Failure::new(
        ErrorClass::Cancelled,
        "job.cancelled",
        "the client has gone",
    ));
    let failure = in_time(needed.finished()).await.expect_err("decode gave up");
    assert_eq!(failure.reason, "job.cancelled");
    in_time(room.released()).await;
    let other = open(1, 2);
    in_time(other.finished()).await.expect("nobody needs it");
}
