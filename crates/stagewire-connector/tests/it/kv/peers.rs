//! Peers that die, stop, give up or do not fit.

use std::time::Duration;

use rustix::process::Signal;
use stagewire_connector::Carrier;
use stagewire_connector::kv::{Heartbeat, Phase, ReceiverRoom, Sender, SenderHandle, SenderRoom};
use stagewire_core::{ErrorClass, Failure};
use tokio::time::Instant;

use super::second::{Ask, Second};
use super::sides::{self, DecodeRank, HALVES};
use super::{in_time, until};
use crate::kv_memory::Memory as Oracle;
use crate::{PATIENCE, World, all_gone};

/// Silence is found out after 0.9 s, and a second more is what a busy machine may take.
const BEAT: Heartbeat = Heartbeat {
    interval: Duration::from_millis(300),
    misses: 2,
};
const ROOM: u64 = 7;

fn with(carrier: Carrier) -> impl FnOnce(&mut stagewire_connector::ConnectorOptions) {
    move |options| options.transports = vec![carrier]
}

/// Decode in this process, prefill in the second one, with the first of two chunks announced and pulled.
async fn half_way(world: &World, carrier: Carrier) -> (Second, Vec<DecodeRank>, Vec<ReceiverRoom>) {
    let mut prefill = Second::start(&world.run_dir(), carrier).await;
    let geometries = sides::world(HALVES);
    let oracle = Oracle::new(&geometries);
    let handles = prefill.senders(HALVES, BEAT).await;
    let decode = sides::receivers(&world.connector, &geometries, &oracle, BEAT);
    prefill.done(Ask::Open { room: ROOM }).await;
    prefill.done(Ask::Announce { chunks: 1 }).await;
    let want = |rank: &DecodeRank| {
        rank.receiver
            .room(sides::wants(ROOM, &geometries, &handles))
            .expect("a room")
    };
    let rooms: Vec<_> = decode.iter().map(want).collect();
    until(|| rooms.iter().all(|room| room.nbytes() > 0)).await;
    (prefill, decode, rooms)
}

/// Prefill in this process, decode in the second one, with the first of two chunks announced and pulled.
async fn half_sent(world: &World, carrier: Carrier) -> (Second, Vec<Sender>, Vec<SenderRoom>) {
    let mut decode = Second::start(&world.run_dir(), carrier).await;
    let geometries = sides::world(HALVES);
    let oracle = Oracle::new(&geometries);
    let senders = sides::senders(&world.connector, &geometries, &oracle, carrier == Carrier::Shm, BEAT);
    let rooms: Vec<_> = senders
        .iter()
        .map(|sender| sender.room(ROOM, 16, PATIENCE).expect("a room"))
        .collect();
    for room in &rooms {
        room.send(sides::chunk(&geometries, 0, 8)).expect("the first");
    }
    decode.receivers(HALVES, BEAT).await;
    let handles: Vec<Vec<u8>> = senders.iter().map(|sender| sender.handle().to_bytes()).collect();
    decode.done(Ask::Want { room: ROOM, handles }).await;
    decode.come().await;
    // Bytes from one of them do not say that the other has heard of its reader.
    until(|| rooms.iter().all(|room| room.phase() == Phase::Transferring)).await;
    (decode, senders, rooms)
}

#[tokio::test(flavor = "multi_thread")]
async fn prefill_that_is_killed_fails_its_rooms_within_a_second() {
    for carrier in [Carrier::Shm, Carrier::Tcp] {
        let world = World::with(with(carrier)).await;
        let (prefill, decode, rooms) = half_way(&world, carrier).await;
        prefill.signal(Signal::KILL);
        let begin = Instant::now();
        for room in &rooms {
            let failure = in_time(room.finished()).await.expect_err("prefill is dead");
            assert_eq!(
                (failure.class, failure.reason.as_str()),
                (ErrorClass::Unavailable, "kv.peer_lost"),
                "{failure}"
            );
            in_time(room.released()).await;
        }
        assert!(
            begin.elapsed() < Duration::from_secs(1),
            "it took {:?}",
            begin.elapsed()
        );
        drop((prefill, rooms, decode));
        all_gone(&world.connector).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn prefill_that_stops_fails_its_rooms_after_the_heartbeats_limit() {
    let world = World::with(with(Carrier::Tcp)).await;
    let (prefill, _decode, rooms) = half_way(&world, Carrier::Tcp).await;
    prefill.signal(Signal::STOP);
    let begin = Instant::now();
    for room in &rooms {
        let failure = in_time(room.finished()).await.expect_err("prefill is silent");
        assert_eq!(failure.reason, "kv.silent", "{failure}");
        in_time(room.released()).await;
    }
    let most = BEAT.limit() + Duration::from_secs(1);
    assert!(begin.elapsed() < most, "it took {:?}", begin.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn decode_that_is_killed_frees_the_pages_of_prefill_within_a_second() {
    for carrier in [Carrier::Shm, Carrier::Tcp] {
        let world = World::with(with(carrier)).await;
        let (decode, senders, rooms) = half_sent(&world, carrier).await;
        assert_eq!(senders[0].live_rooms(), 1);
        decode.signal(Signal::KILL);
        let begin = Instant::now();
        for room in &rooms {
            let failure = in_time(room.finished()).await.expect_err("decode is dead");
            assert_eq!(failure.reason, "kv.peer_lost", "{failure}");
            in_time(room.released()).await;
        }
        assert!(
            begin.elapsed() < Duration::from_secs(1),
            "it took {:?}",
            begin.elapsed()
        );
        until(|| {
            senders
                .iter()
                .all(|sender| (sender.live_rooms(), sender.receivers()) == (0, 0))
        })
        .await;
        drop((decode, rooms, senders));
        all_gone(&world.connector).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn decode_that_stops_frees_the_pages_of_prefill_and_is_told_when_it_goes_on() {
    let world = World::with(with(Carrier::Tcp)).await;
    let (mut decode, _senders, rooms) = half_sent(&world, Carrier::Tcp).await;
    decode.signal(Signal::STOP);
    let begin = Instant::now();
    for room in &rooms {
        let failure = in_time(room.finished()).await.expect_err("decode is silent");
        assert_eq!(failure.reason, "kv.silent", "{failure}");
        in_time(room.released()).await;
    }
    let most = BEAT.limit() + Duration::from_secs(1);
    assert!(begin.elapsed() < most, "it took {:?}", begin.elapsed());
    decode.signal(Signal::CONT);
    let failure = decode.failed(Ask::Received).await;
    assert_eq!(failure.reason, "kv.silent", "{failure}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_abort_reaches_the_other_side_with_its_reason() {
    let reason = || Failure::new(ErrorClass::Invalid, "request.too_long", "the prompt is too long").with("tokens", 9);
    let world = World::with(with(Carrier::Tcp)).await;
    let (mut prefill, decode, rooms) = half_way(&world, Carrier::Tcp).await;
    prefill.done(Ask::Abort { failure: reason() }).await;
    for room in &rooms {
        let failure = in_time(room.finished()).await.expect_err("prefill gave up");
        assert_eq!(failure, reason());
        in_time(room.released()).await;
    }
    let failure = prefill.failed(Ask::Sent).await;
    assert_eq!(failure, reason());
    drop((prefill, decode, rooms));

    let (mut decode, _senders, rooms) = half_sent(&world, Carrier::Tcp).await;
    decode.done(Ask::Abort { failure: reason() }).await;
    for room in &rooms {
        let failure = in_time(room.finished()).await.expect_err("decode gave up");
        assert_eq!(failure, reason());
        in_time(room.released()).await;
    }
    let failure = decode.failed(Ask::Received).await;
    assert_eq!(failure, reason());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_does_not_fit_is_refused_and_others_are_served() {
    let world = World::with(with(Carrier::Tcp)).await;
    let (mut prefill, decode, rooms) = half_way(&world, Carrier::Tcp).await;
    let geometries = sides::world(HALVES);
    let handles = prefill.senders(HALVES, BEAT).await;
    let mut other = geometries.clone();
    other.decode.page_size = 8;
    let oracle = Oracle::new(&other);
    let stranger = sides::receivers(&world.connector, &other, &oracle, BEAT);
    let refused = stranger[0].receiver.room(sides::wants(9, &other, &handles));
    let refused = refused.expect_err("pages of another size");
    assert_eq!(stagewire_core::Classify::reason(&refused), "kv.page_size");
    // And by prefill itself, whatever a handle says of its engine.
    let forged = forged(&handles, &other);
    let room = stranger[0]
        .receiver
        .room(sides::wants(9, &other, &forged))
        .expect("as the handle has it");
    let failure = in_time(room.finished()).await.expect_err("prefill knows better");
    assert_eq!(
        (failure.class, failure.reason.as_str()),
        (ErrorClass::Unsupported, "kv.page_size"),
        "{failure}"
    );
    // The senders that were there before have gone with the new ones.
    for room in &rooms {
        let failure = in_time(room.finished()).await.expect_err("its senders are gone");
        assert_eq!(failure.reason, "kv.closed", "{failure}");
        in_time(room.released()).await;
    }
    prefill.done(Ask::Open { room: 8 }).await;
    prefill.done(Ask::Announce { chunks: 2 }).await;
    let room = decode[0]
        .receiver
        .room(sides::wants(8, &geometries, &handles))
        .expect("a room");
    in_time(room.finished()).await.expect("it fits");
    sides::check(&decode, &Oracle::new(&geometries)).expect("the right bytes");
    prefill.done(Ask::Sent).await;
}

/// The handles, as if prefill had pages of another size.
fn forged(handles: &[SenderHandle], world: &crate::world::World) -> Vec<SenderHandle> {
    let honest = sides::engine(&sides::world(HALVES).prefill).to_bytes();
    let mut lie = world.prefill.clone();
    lie.page_size = 8;
    let lie = sides::engine(&lie).to_bytes();
    assert_eq!(honest.len(), lie.len(), "the bytes differ in the page size alone");
    let forge = |handle: &SenderHandle| {
        let mut bytes = handle.to_bytes();
        let at = bytes
            .windows(honest.len())
            .position(|part| part == honest)
            .expect("it is in there");
        bytes[at..at + lie.len()].copy_from_slice(&lie);
        SenderHandle::from_bytes(&bytes).expect("a handle")
    };
    handles.iter().map(forge).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_wrong_with_one_room_fails_that_one() {
    let world = World::with(with(Carrier::Tcp)).await;
    let prefill = world.another_with("prefill", with(Carrier::Tcp)).await;
    let geometries = sides::world(HALVES);
    let oracle = Oracle::new(&geometries);
    let senders = sides::senders(&prefill, &geometries, &oracle, false, Heartbeat::default());
    let handles: Vec<_> = senders.iter().map(Sender::handle).collect();
    let decode = sides::receivers(&world.connector, &geometries, &oracle, Heartbeat::default());
    let receiver = &decode[0].receiver;
    let base = sides::wants(0, &geometries, &handles);
    let mut wrong = vec![
        ("kv.not_resident", base.clone().pages("full", [1, 2, 0, 7])),
        ("kv.past_pool", base.clone().pages("full", [1, 2, 3, 9])),
        ("kv.table_length", base.clone().pages("full", [1, 2, 3])),
        ("kv.written_twice", base.clone().pages("full", [1, 2, 3, 3])),
        ("kv.prefix", base.clone().prefix("full", 3)),
        ("kv.deadline", base.clone().within(Duration::from_millis(100))),
    ];
    let mut short = base.clone();
    short.seq_len = 15;
    wrong.push(("kv.seq_len", short));
    for (number, (reason, mut spec)) in (1..).zip(wrong) {
        spec.room = number.into();
        let sent: Vec<_> = senders
            .iter()
            .map(|sender| sender.room(number, 16, PATIENCE).expect("a room"))
            .collect();
        for room in sent.iter().filter(|_| reason != "kv.deadline") {
            sides::announce(room, &geometries).expect("right");
        }
        let room = receiver.room(spec).unwrap_or_else(|error| panic!("{reason}: {error}"));
        let failure = in_time(room.finished()).await.expect_err(reason);
        assert_eq!(failure.reason, reason, "{failure}");
        in_time(room.released()).await;
        for room in &sent {
            let failure = in_time(room.finished()).await.expect_err("decode has failed");
            assert_eq!(failure.reason, reason, "{failure}");
            in_time(room.released()).await;
        }
    }
    // Nothing was written, and the same page tables are taken when they are right.
    let sent: Vec<_> = senders
        .iter()
        .map(|sender| sender.room(0, 16, PATIENCE).expect("a room"))
        .collect();
    for room in &sent {
        sides::announce(room, &geometries).expect("right");
    }
    in_time(receiver.room(base).expect("free").finished())
        .await
        .expect("it comes");
    sides::check(&decode, &oracle).expect("the right bytes");
}
