//! Many rooms: at a time, and one after the other.

use std::time::Duration;

use futures::future::join_all;
use rustix::process::Signal;
use stagewire_connector::Carrier;
use stagewire_connector::kv::{
    CacheMemory, ChunkSpec, Heartbeat, Phase, Receiver, ReceiverOptions, RoomSpec, Sender, SenderOptions,
};
use stagewire_core::{DType, ErrorClass, Failure};
use stagewire_kv::{Component, Geometry};

use super::pages::Pages;
use super::second::{Ask, Second};
use super::sides::{self, HALVES};
use super::{in_time, until};
use crate::kv_memory::Memory as Oracle;
use crate::{PATIENCE, World, all_gone, rounds};

const PAGE: u64 = 64;
const ROOMS: u64 = 128;

/// 128 rooms of two prefill ranks and one decode rank, two full layers and two with a window: 8192 tokens and 32 MiB each
/// with `make soak`, 128 tokens otherwise, which takes a second.
async fn all_at_a_time(carrier: Carrier) {
    let tokens = if std::env::var_os("STAGEWIRE_SOAK").is_some() {
        8192
    } else {
        128
    };
    let logical = tokens / PAGE;
    let world = World::with(|options| options.transports = vec![carrier]).await;
    let prefill = world
        .another_with("prefill", |options| options.transports = vec![carrier])
        .await;
    let full = Component::mha("full", 2, 8, [64, 64], DType::BF16);
    let swa = Component {
        window: Some(127),
        ..Component::mha("swa", 2, 8, [64, 64], DType::BF16)
    };
    let geometry = |tp| Geometry::new(tp, u32::try_from(PAGE).expect("small"), vec![full.clone(), swa.clone()]);
    let (from, to) = (sides::engine(&geometry(2)), sides::engine(&geometry(1)));
    // Every room reads the same pages of prefill, and has pages of its own at decode.
    let source = |buffer: usize, rank: usize, bytes: u64| {
        let byte = |at: u64| (at / 128 * 7 + at * 3) as u8 ^ (buffer as u8) << 2 ^ (rank as u8) << 7;
        (0..bytes).map(byte).collect::<Vec<u8>>()
    };
    let mut senders = Vec::new();
    let mut sources = Vec::new();
    for rank in 0..2 {
        let buffers = from.buffers(rank).expect("it splits");
        let bytes = buffers
            .iter()
            .enumerate()
            .map(|(index, buffer)| source(index, rank as usize, buffer.page_bytes * (logical + 1)));
        let bytes: Vec<Vec<u8>> = bytes.collect();
        let memory: Vec<_> = bytes.iter().map(|bytes| Pages::new(bytes).memory()).collect();
        let cache = CacheMemory::one_each(memory);
        let sender = Sender::new(&prefill, from.clone(), rank, cache, SenderOptions::default());
        senders.push(sender.expect("a sender"));
        sources.push(bytes);
    }
    let handles: Vec<_> = senders.iter().map(Sender::handle).collect();
    let buffers = to.buffers(0).expect("it splits");
    let pages: Vec<Pages> = buffers
        .iter()
        .map(|buffer| {
            Pages::new(&vec![
                0;
                usize::try_from(buffer.page_bytes * (logical * ROOMS + 1))
                    .expect("fits")
            ])
        })
        .collect();
    let targets: Vec<_> = pages.iter().map(Pages::target).collect();
    let cache = CacheMemory::one_each(targets);
    let receiver = Receiver::new(&world.connector, to, 0, cache, ReceiverOptions::default()).expect("a receiver");

    // Without optimisation, 4 GiB take minutes.
    let limit = Duration::from_secs(600);
    let mut sent = Vec::new();
    let mut rooms = Vec::new();
    let table = |first: u64| (first..first + logical).map(|page| page as i64).collect::<Vec<i64>>();
    for number in 0..ROOMS {
        let own = table(1 + number * logical);
        let spec = RoomSpec::new(number, handles.clone(), tokens).within(limit);
        let spec = spec.pages("full", own.clone()).pages("swa", own);
        rooms.push(receiver.room(spec).expect("free"));
        for sender in &senders {
            let room = sender.room(number, tokens, limit).expect("a room");
            let window = swa.pages(u32::try_from(PAGE).expect("small"), tokens);
            let window = table(1)[usize::try_from(window.start).expect("small")..].to_vec();
            let chunk = ChunkSpec::new(0..tokens)
                .pages("full", table(1))
                .pages("swa", window)
                .last();
            room.send(chunk).expect("all of it");
            sent.push(room);
        }
    }
    assert_eq!(receiver.live_rooms(), ROOMS as usize);
    for ended in join_all(rooms.iter().map(|room| room.finished())).await {
        ended.expect("it comes");
    }
    for ended in join_all(sent.iter().map(|room| room.finished())).await {
        ended.expect("it went");
    }
    // Of each room the last page: its tokens are half of one rank's heads, half of the other's.
    for number in 0..ROOMS {
        for (index, (buffer, pages)) in buffers.iter().zip(&pages).enumerate() {
            let (page, half) = (buffer.page_bytes as usize, (buffer.page_bytes / 2) as usize);
            let found = pages.part(page * (logical * (number + 1)) as usize, page);
            let row = half / PAGE as usize;
            for (rank, bytes) in sources.iter().enumerate() {
                let wanted = &bytes[index][half * logical as usize..];
                for token in 0..PAGE as usize {
                    let at = token * 2 * row + rank * row;
                    assert_eq!(
                        found[at..at + row],
                        wanted[token * row..(token + 1) * row],
                        "room {number}"
                    );
                }
            }
        }
    }
    drop((rooms, sent, receiver, senders));
    all_gone(&prefill).await;
    all_gone(&world.connector).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_rooms_at_a_time_over_tcp() {
    all_at_a_time(Carrier::Tcp).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_rooms_at_a_time_over_mooncake() {
    all_at_a_time(Carrier::Mooncake).await;
}

/// Rooms that succeed, and rooms that either side ends in the middle.
#[tokio::test(flavor = "multi_thread")]
async fn rooms_leave_nothing_behind() {
    let world = World::with(|options| options.transports = vec![Carrier::Tcp]).await;
    let mut prefill = Second::start(&world.run_dir(), Carrier::Tcp).await;
    let geometries = sides::world(HALVES);
    let oracle = Oracle::new(&geometries);
    let handles = prefill.senders(HALVES, Heartbeat::default()).await;
    let decode = sides::receivers(&world.connector, &geometries, &oracle, Heartbeat::default());
    let reason = || Failure::new(ErrorClass::Cancelled, "job.cancelled", "the client has gone");
    let mut pins = None;
    for cycle in 0..rounds(1000) {
        // The same pages each time.
        prefill.done(Ask::Open { room: cycle }).await;
        let room = decode[0]
            .receiver
            .room(sides::wants(cycle, &geometries, &handles))
            .expect("its pages are free");
        prefill.done(Ask::Announce { chunks: 1 }).await;
        let ended = match cycle % 3 {
            0 => {
                prefill.done(Ask::Announce { chunks: 1 }).await;
                let ended = room.finished().await;
                prefill.done(Ask::Sent).await;
                ended.map(drop)
            }
            1 => {
                room.abort(reason());
                let ended = room.finished().await;
                assert_eq!(prefill.failed(Ask::Sent).await, reason());
                ended.map(drop)
            }
            _ => {
                prefill.done(Ask::Abort { failure: reason() }).await;
                assert_eq!(prefill.failed(Ask::Sent).await, reason());
                room.finished().await.map(drop)
            }
        };
        assert_eq!(ended, if cycle % 3 == 0 { Ok(()) } else { Err(reason()) });
        in_time(room.released()).await;
        drop(room);
        assert_eq!(decode[0].receiver.live_rooms(), 0);
        let now = world.connector.stats().host.pins_held;
        assert!(*pins.get_or_insert(now) >= now, "pins add up: {now}");
    }
    drop((decode, prefill));
    all_gone(&world.connector).await;
}

/// The receiver stays, and one process of prefill after the other dies in the middle of a room.
#[tokio::test(flavor = "multi_thread")]
async fn prefill_that_dies_again_and_again_leaves_nothing_behind() {
    for carrier in [Carrier::Shm, Carrier::Tcp] {
        let world = World::with(|options| options.transports = vec![carrier]).await;
        let geometries = sides::world(HALVES);
        let oracle = Oracle::new(&geometries);
        let decode = sides::receivers(&world.connector, &geometries, &oracle, Heartbeat::default());
        for _ in 0..rounds(500) {
            let mut prefill = Second::start(&world.run_dir(), carrier).await;
            let handles = prefill.senders(HALVES, Heartbeat::default()).await;
            let room = decode[0]
                .receiver
                .room(sides::wants(1, &geometries, &handles))
                .expect("its pages are free");
            prefill.done(Ask::Open { room: 1 }).await;
            prefill.done(Ask::Announce { chunks: 1 }).await;
            until(|| room.nbytes() > 0).await;
            prefill.signal(Signal::KILL);
            let failure = in_time(room.finished()).await;
            assert_eq!(failure.expect_err("prefill is dead").reason, "kv.peer_lost");
            in_time(room.released()).await;
        }
        assert_eq!(decode[0].receiver.live_rooms(), 0);
        drop(decode);
        all_gone(&world.connector).await;
        assert_eq!(world.connector.stats().links, 0, "connections to the dead");
    }
}

/// The senders stay, and one process of decode after the other dies in the middle of a room.
#[tokio::test(flavor = "multi_thread")]
async fn decode_that_dies_again_and_again_leaves_nothing_behind() {
    for carrier in [Carrier::Shm, Carrier::Tcp] {
        let world = World::with(|options| options.transports = vec![carrier]).await;
        let geometries = sides::world(HALVES);
        let oracle = Oracle::new(&geometries);
        let in_arena = carrier == Carrier::Shm;
        let senders = sides::senders(&world.connector, &geometries, &oracle, in_arena, Heartbeat::default());
        let handles: Vec<Vec<u8>> = senders.iter().map(|sender| sender.handle().to_bytes()).collect();
        for cycle in 0..rounds(500) {
            let mut decode = Second::start(&world.run_dir(), carrier).await;
            decode.receivers(HALVES, Heartbeat::default()).await;
            let rooms: Vec<_> = senders
                .iter()
                .map(|sender| sender.room(cycle, 16, PATIENCE).expect("a room"))
                .collect();
            for room in &rooms {
                room.send(sides::chunk(&geometries, 0, 8)).expect("the first");
            }
            let handles = handles.clone();
            decode.done(Ask::Want { room: cycle, handles }).await;
            // Bytes from one of them do not say that the other has heard of its reader.
            until(|| rooms.iter().all(|room| room.phase() == Phase::Transferring)).await;
            decode.come().await;
            decode.signal(Signal::KILL);
            for room in &rooms {
                let failure = in_time(room.finished()).await;
                assert_eq!(failure.expect_err("decode is dead").reason, "kv.peer_lost");
                in_time(room.released()).await;
            }
        }
        let live = |sender: &Sender| (sender.live_rooms(), sender.receivers());
        until(|| senders.iter().all(|sender| live(sender) == (0, 0))).await;
        drop(senders);
        all_gone(&world.connector).await;
        assert_eq!(world.connector.stats().links, 0, "connections to the dead");
    }
}
