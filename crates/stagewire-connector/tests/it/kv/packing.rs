//! Rows over a transport that moves runs of bytes only go through scratch of the side whose pages are strided; without it
//! they go one by one.

use stagewire_connector::Carrier;
use stagewire_connector::kv::{Heartbeat, Sender};
use stagewire_core::ByteCount;

use super::in_time;
use super::sides::{self, HALVES};
use crate::kv_memory::Memory as Oracle;
use crate::transports::is_here;
use crate::{PATIENCE, World, all_gone};

const ARENA: ByteCount = ByteCount(64 << 20);
const NONE: ByteCount = ByteCount(0);

/// Pulls of one room from one writer at a time: of two parts, four each. Each of them may need scratch.
const AT_A_TIME: u64 = 2 * 4;
/// So many rooms one after the other, each of which pulls much more often than once.
const ROOMS: u64 = 2 * AT_A_TIME;

/// Moves rooms, every byte against the oracle. Returns the bytes of one, and those of them that went through scratch.
async fn moved(carrier: Carrier, geometries: &crate::world::World, [from, to]: [ByteCount; 2]) -> (u64, u64) {
    let world = World::with(|options| (options.transports, options.arena_limit) = (vec![carrier], to)).await;
    let prefill = world
        .another_with("prefill", |options| {
            (options.transports, options.arena_limit) = (vec![carrier], from);
        })
        .await;
    let oracle = Oracle::new(geometries);
    let senders = sides::senders(&prefill, geometries, &oracle, false, Heartbeat::default());
    let handles: Vec<_> = senders.iter().map(Sender::handle).collect();
    let decode = sides::receivers(&world.connector, geometries, &oracle, Heartbeat::default());
    let registered = || prefill.host().stats().registrations;
    let (before, mut moved) = (registered(), Vec::new());
    for number in 1..=ROOMS {
        let sent: Vec<_> = senders
            .iter()
            .map(|sender| sender.room(number, geometries.seq_len, PATIENCE).expect("a room"))
            .collect();
        for room in &sent {
            sides::announce(room, geometries).expect("right");
        }
        let (mut nbytes, mut packed) = (0, 0);
        for rank in &decode {
            let room = rank.receiver.room(sides::wants(number, geometries, &handles));
            let room = room.expect("a room");
            let received = in_time(room.finished()).await.expect("it comes");
            in_time(room.released()).await;
            nbytes += received.nbytes;
            packed += received.packed;
        }
        for room in &sent {
            in_time(room.finished()).await.expect("it went");
        }
        sides::check(&decode, &oracle).expect("the right bytes");
        sides::reset(&decode, &oracle);
        moved.push((nbytes, packed));
    }
    moved.dedup();
    assert_eq!(moved.len(), 1, "the rooms are the same: {moved:?}");
    let (made, most) = (registered() - before, (senders.len() * decode.len()) as u64 * AT_A_TIME);
    assert!(
        made <= most,
        "scratch that is free was not used again: {made} registrations"
    );
    drop((senders, decode));
    all_gone(&prefill).await;
    all_gone(&world.connector).await;
    moved[0]
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_go_through_scratch_of_the_strided_side_or_one_by_one() {
    for carrier in [Carrier::Mooncake, Carrier::Nixl] {
        if is_here(None, carrier) {
            rows_go_through_scratch_over(carrier).await;
        }
    }
}

async fn rows_go_through_scratch_over(carrier: Carrier) {
    let mut geometries = sides::world(HALVES);
    for decode_is_wider in [true, false] {
        for arenas in [[ARENA, ARENA], [ARENA, NONE], [NONE, ARENA], [NONE, NONE]] {
            let (nbytes, packed) = moved(carrier, &geometries, arenas).await;
            let packs = if decode_is_wider { arenas[1] } else { arenas[0] } == ARENA;
            assert!(nbytes > 0);
            let wanted = if packs { nbytes } else { 0 };
            assert_eq!(
                packed, wanted,
                "of {nbytes}, over {carrier}; wider at decode: {decode_is_wider}; {arenas:?}"
            );
        }
        std::mem::swap(&mut geometries.prefill, &mut geometries.decode);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transport_that_moves_rows_needs_no_scratch() {
    let (nbytes, packed) = moved(Carrier::Tcp, &sides::world(HALVES), [ARENA, ARENA]).await;
    assert!(nbytes > 0);
    assert_eq!(packed, 0);
}
