//! Rooms between two connectors.

use std::time::Duration;

use stagewire_connector::Carrier;
use stagewire_connector::kv::{
    CacheMemory, ChunkSpec, Phase, Receiver, ReceiverOptions, RoomSpec, Sender, SenderOptions,
};
use stagewire_core::{Classify, DType};
use stagewire_kv::{Component, Geometry};

use super::pages::Pages;
use super::sides;
use crate::kv_memory::Memory as Oracle;
use crate::world::World as Geometries;
use crate::{PATIENCE, World, all_gone};

async fn random_rooms(carrier: Carrier, seeds: std::ops::Range<u64>) {
    let world = World::with(|options| options.transports = vec![carrier]).await;
    let prefill = world
        .another_with("prefill", |options| options.transports = vec![carrier])
        .await;
    for seed in seeds {
        let geometries = Geometries::roll(seed);
        let oracle = Oracle::new(&geometries);
        let senders = sides::senders(&prefill, &geometries, &oracle, carrier == Carrier::Shm);
        let handles: Vec<_> = senders.iter().map(|sender| sender.handle()).collect();
        let decode = sides::receivers(&world.connector, &geometries, &oracle);
        let open = |sender: &stagewire_connector::kv::Sender| sender.room(seed, geometries.seq_len, PATIENCE);
        let sent: Vec<_> = senders.iter().map(|sender| open(sender).expect("a room")).collect();
        for room in &sent {
            sides::announce(room, &geometries).expect("as it should be");
        }
        let mut rooms = Vec::new();
        for rank in &decode {
            rooms.push(
                rank.receiver
                    .room(sides::wants(seed, &geometries, &handles))
                    .expect("a room"),
            );
        }
        for room in &rooms {
            let received = room
                .finished()
                .await
                .unwrap_or_else(|failure| panic!("seed {seed}: {failure}"));
            assert_eq!(received.aux, Some(geometries.seq_len.to_le_bytes().to_vec()));
            tokio::time::timeout(PATIENCE, room.released()).await.expect("released");
        }
        for room in &sent {
            let finished = tokio::time::timeout(PATIENCE, room.finished()).await;
            finished
                .unwrap_or_else(|_| panic!("seed {seed}: {:?}", room.phase()))
                .expect("successful");
            tokio::time::timeout(PATIENCE, room.released()).await.expect("released");
            assert_eq!(room.phase(), Phase::Success);
        }
        sides::check(&decode, &oracle).unwrap_or_else(|problem| panic!("seed {seed}: {problem}\n{geometries:?}"));
    }
    for connector in [&prefill, &world.connector] {
        tokio::time::timeout(Duration::from_secs(20), all_gone(connector))
            .await
            .expect("nothing is left");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn random_rooms_over_shm() {
    random_rooms(Carrier::Shm, 0..20).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn random_rooms_over_tcp() {
    random_rooms(Carrier::Tcp, 100..120).await;
}

/// Two ranks of prefill with half of the heads each, one of decode; one layer, pages of 2 tokens with 4 bytes.
fn halves() -> (Geometry, Geometry) {
    let component = Component::mha("full", 1, 2, [2, 2], DType::U8);
    let geometry = |tp| Geometry::new(tp, 2, vec![component.clone()]);
    (geometry(2), geometry(1))
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_of_a_room_that_is_over_are_used_again() {
    let world = World::new().await;
    let prefill = world.another("prefill").await;
    let (from, to) = halves();
    let source: Vec<[Pages; 2]> = (0..2).map(|_| [(); 2].map(|()| Pages::new(&[0; 8 * 4]))).collect();
    let mut senders = Vec::new();
    for (rank, pages) in (0..).zip(&source) {
        let cache = CacheMemory::one_each(pages.each_ref().map(Pages::memory));
        let sender = Sender::new(&prefill, sides::engine(&from), rank, cache, SenderOptions::default());
        senders.push(sender.expect("a sender"));
    }
    let handles: Vec<_> = senders.iter().map(Sender::handle).collect();
    let pages = [(); 2].map(|()| Pages::new(&[0; 8 * 8]));
    let cache = CacheMemory::one_each(pages.each_ref().map(Pages::target));
    let receiver = Receiver::new(
        &world.connector,
        sides::engine(&to),
        0,
        cache,
        ReceiverOptions::default(),
    );
    let receiver = receiver.expect("a receiver");
    for round in 1..=20_u8 {
        // The same number and the same pages each time.
        let rooms: Vec<_> = senders
            .iter()
            .map(|sender| sender.room(1, 4, PATIENCE).expect("a room"))
            .collect();
        for (rank, buffers) in (0..).zip(&source) {
            for (kv, buffer) in (0..).zip(buffers) {
                buffer.write(0, &[round ^ (rank << 6) ^ (kv << 5); 8 * 4]);
            }
        }
        let spec = RoomSpec::new(1, handles.clone(), 4).pages("full", [3, 2]);
        let room = receiver.room(spec.clone()).expect("free");
        let busy = receiver.room(spec).expect_err("its pages are the other's");
        assert_eq!(busy.reason(), "kv.page_in_use");
        for sent in &rooms {
            sent.send(ChunkSpec::new(0..2).pages("full", [4])).expect("first");
            sent.send(ChunkSpec::new(2..4).pages("full", [1]).last()).expect("last");
            let again = sent.send(ChunkSpec::new(4..4)).expect_err("it was the last");
            assert_eq!(again.reason(), "kv.room_ended");
        }
        room.finished().await.expect("it comes");
        room.released().await;
        for sent in &rooms {
            sent.finished().await.expect("it went");
            sent.released().await;
        }
        for (kv, buffer) in (0..).zip(&pages) {
            let token = [0, 1].map(|rank: u8| [round ^ (rank << 6) ^ (kv << 5); 2]).concat();
            let wanted = [vec![0; 2 * 8], token.repeat(4), vec![0; 4 * 8]].concat();
            assert_eq!(buffer.read(), wanted, "round {round}");
        }
    }
}
