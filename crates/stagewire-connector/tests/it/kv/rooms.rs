//! Rooms between two connectors.

use stagewire_connector::Carrier;
use stagewire_connector::kv::{
    CacheMemory, ChunkSpec, Heartbeat, Receiver, ReceiverOptions, RoomSpec, Sender, SenderOptions,
};
use stagewire_core::{Classify, DType};
use stagewire_kv::{Component, Geometry};

use super::in_time;
use super::pages::Pages;
use super::second::{Ask, Second};
use super::sides::{self, DecodeRank};
use crate::kv_memory::Memory as Oracle;
use crate::transports::is_here;
use crate::{PATIENCE, World, all_gone, rounds};

/// Random worlds between two processes, every byte against the oracle. The second process is prefill.
async fn random_rooms(carrier: Carrier, first: u64) {
    if !is_here(None, carrier) || !is_here(Some(&World::new().await), carrier) {
        return;
    }
    let world = World::with(|options| options.transports = vec![carrier]).await;
    let mut prefill = Second::start(&world.run_dir(), carrier).await;
    for seed in first..first + rounds(200) {
        let geometries = sides::world(seed);
        let oracle = Oracle::new(&geometries);
        let handles = prefill.senders(seed, Heartbeat::default()).await;
        let decode = sides::receivers(&world.connector, &geometries, &oracle, Heartbeat::default());
        prefill.done(Ask::Open { room: seed }).await;
        let want = |rank: &DecodeRank| rank.receiver.room(sides::wants(seed, &geometries, &handles));
        let rooms: Vec<_> = decode.iter().map(|rank| want(rank).expect("a room")).collect();
        prefill.done(Ask::Announce { chunks: usize::MAX / 2 }).await;
        for room in &rooms {
            let received = room
                .finished()
                .await
                .unwrap_or_else(|failure| panic!("seed {seed}: {failure}"));
            assert_eq!(received.aux, Some(geometries.seq_len.to_le_bytes().to_vec()));
            in_time(room.released()).await;
        }
        prefill.done(Ask::Sent).await;
        sides::check(&decode, &oracle).unwrap_or_else(|problem| panic!("seed {seed}: {problem}\n{geometries:?}"));
    }
    drop(prefill);
    all_gone(&world.connector).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn random_rooms_over_shm() {
    random_rooms(Carrier::Shm, 1000).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn random_rooms_over_cma() {
    random_rooms(Carrier::Cma, 2000).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn random_rooms_over_tcp() {
    random_rooms(Carrier::Tcp, 3000).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn random_rooms_over_mooncake() {
    random_rooms(Carrier::Mooncake, 4000).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn random_rooms_over_nixl() {
    random_rooms(Carrier::Nixl, 5000).await;
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
