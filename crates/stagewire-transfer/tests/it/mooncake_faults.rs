//! Transfer Engines that die, stop, come back or keep their handshake port busy.

use std::time::{Duration, Instant};

use serde_json::json;
use stagewire_core::{Classify, ErrorClass};
use stagewire_transfer::{
    Borrowed, ConnectOptions, Memory, MooncakeError, MooncakeOptions, Region, Segment, SegmentBuffer, Target,
    TransferOptions, Writable,
};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

use crate::mooncake::{Ours, owned, pull, whole};
use crate::mooncake_peer::{Engine, keyed, wheel_works};
use crate::support::{rounds, until};

const LEN: u64 = 24 << 20;
const ROUNDS: u64 = 10;
const NOTICED_WITHIN: Duration = Duration::from_secs(1);

const SHORT: TransferOptions = TransferOptions {
    deadline: Some(Duration::from_millis(500)),
};

fn is_lost(error: &MooncakeError) {
    let found = (error.class(), error.reason());
    assert_eq!(found, (ErrorClass::Unavailable, "peer.lost"), "{error}");
}

/// Pulls again and again until it fails; what succeeds is exact.
async fn pull_until_error(segment: &Segment, src: SegmentBuffer, expected: &[u8]) -> MooncakeError {
    let mut target = Target::allocate(src.len).expect("memory");
    loop {
        let pulled = segment
            .pull(src, &whole(src.len), &target, TransferOptions::default())
            .await;
        if let Err(error) = pulled {
            assert!(target.slice(0..1).is_err(), "a failed pull counts as written");
            assert!(target.is_idle());
            return error;
        }
        assert!(target.as_slice().expect("pulled") == expected, "other bytes");
        target.reset().expect("idle");
    }
}

async fn push_until_error(segment: &Segment, dst: SegmentBuffer, src: &Memory) -> MooncakeError {
    loop {
        let pushed = segment
            .push(dst, &whole(dst.len), src, TransferOptions::default())
            .await;
        if let Err(error) = pushed {
            return error;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_is_killed_during_pulls_and_pushes() {
    if !wheel_works() {
        return;
    }
    let ours = Ours::start().await;
    let (expected, source) = (
        keyed(LEN as usize, 5),
        Memory::from(Borrowed::from(keyed(LEN as usize, 6))),
    );
    for round in 0..ROUNDS {
        let mut engine = Engine::start().await;
        let (src, _) = engine.allocate(LEN, Some(5)).await;
        let (dst, _) = engine.allocate(LEN, None).await;
        let segment = ours.open(engine.name()).await;
        pull(&segment, src).await.expect("alive");
        let killer = async {
            // At another point of a transfer in each round.
            sleep(Duration::from_micros(1500 * round)).await;
            engine.kill();
            Instant::now()
        };
        let (pulled, pushed, at) = timeout(Duration::from_secs(20), async {
            tokio::join!(
                pull_until_error(&segment, src, &expected),
                push_until_error(&segment, dst, &source),
                killer
            )
        })
        .await
        .expect("ends");
        assert!(at.elapsed() <= NOTICED_WITHIN, "noticed after {:?}", at.elapsed());
        is_lost(&pulled);
        // Whether it fell in the middle of a push or between two.
        let pushed = (pushed.class(), pushed.reason());
        let unavailable = ErrorClass::Unavailable;
        assert!(
            [(unavailable, "transfer.in_doubt"), (unavailable, "peer.lost")].contains(&pushed),
            "{pushed:?}"
        );
        let again = pull(&segment, src).await.expect_err("it is dead");
        is_lost(&again);
        assert!(
            segment.lost().is_some_and(|how| how.contains("does not answer")),
            "{segment:?}"
        );
        let error = ours.mooncake.open(engine.name(), ConnectOptions::default()).await;
        let error = error.expect_err("nobody is there");
        assert_eq!(
            (error.class(), error.reason()),
            (ErrorClass::Unavailable, "mooncake.handshake"),
            "{error}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_stops_and_a_write_lands_late() {
    if !wheel_works() {
        return;
    }
    let (ours, mut engine) = (Ours::start().await, Engine::start().await);
    let (src, _) = engine.allocate(LEN, Some(5)).await;
    let (dst, index) = engine.allocate(100_000, None).await;
    let segment = ours.open(engine.name()).await;
    pull(&segment, src).await.expect("alive");
    // In the middle of a pull.
    let (mut target, records) = (Target::allocate(LEN).expect("memory"), whole(LEN));
    let pulling = async {
        loop {
            let begun = Instant::now();
            if let Err(error) = segment.pull(src, &records, &target, SHORT).await {
                return (error, begun.elapsed());
            }
            target.reset().expect("idle");
        }
    };
    let ((error, took), ()) = tokio::join!(pulling, engine.stop());
    assert_eq!(
        (error.class(), error.reason()),
        (ErrorClass::Deadline, "transfer.deadline"),
        "{error}"
    );
    assert!(
        took < Duration::from_millis(900),
        "the deadline of 500 ms took {took:?}"
    );
    assert!(target.is_idle() && target.slice(0..1).is_err());

    let source = Borrowed::from(keyed(100_000, 8)).into();
    let error = segment
        .push(dst, &whole(100_000), &source, SHORT)
        .await
        .expect_err("it stands still");
    assert_eq!(
        (error.class(), error.reason()),
        (ErrorClass::Unavailable, "transfer.in_doubt"),
        "{error}"
    );
    assert!(error.to_string().contains("may still be written"), "{error}");
    let error = segment
        .probe(ConnectOptions {
            deadline: Duration::from_millis(300),
        })
        .await
        .expect_err("it stands still");
    assert_eq!(
        (error.class(), error.reason()),
        (ErrorClass::Deadline, "mooncake.handshake_deadline"),
        "{error}"
    );

    engine.go_on();
    let mut landed = false;
    let limit = Instant::now() + Duration::from_secs(10);
    while !landed && Instant::now() < limit {
        landed = engine.holds(index, 8, 0, 100_000).await;
    }
    assert!(
        landed,
        "what was in doubt is known to land; if it does not any more, say so in the documentation"
    );
    segment
        .pull(src, &records, &target, TransferOptions::default())
        .await
        .expect("it goes on");
    assert!(target.as_slice().expect("pulled") == keyed(LEN as usize, 5));
}

/// An engine that reads and writes memory of ours.
async fn at_work(ours: &Ours, engine: &mut Engine) -> (Region, Writable) {
    let memory = Writable::allocate(64 << 20).expect("memory");
    let (region, exposed) = ours.expose(memory.clone());
    let SegmentBuffer { address, len } = exposed.buffer();
    let peer = ours.mooncake.name();
    let clock =
        json!({"do": "clock", "peer": peer, "address": address, "size": len, "rounds": 100_000, "writes": true});
    engine.begin(clock).await;
    until("it writes", || !region.is_idle()).await;
    // It ends with the region: a test of its own shows what dropping it does.
    std::mem::forget(exposed);
    (region, memory)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_is_killed_while_it_writes_ours() {
    if !wheel_works() {
        return;
    }
    let ours = Ours::start().await;
    for _ in 0..3 {
        let mut engine = Engine::start().await;
        let (region, mut memory) = at_work(&ours, &mut engine).await;
        engine.kill();
        timeout(NOTICED_WITHIN, region.idle()).await.expect("noticed");
        drop(region);
        owned(&mut memory).await;
    }
    assert_eq!((ours.host.stats().pins_held, ours.host.stats().regions), (0, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_stops_while_it_writes_ours() {
    if !wheel_works() {
        return;
    }
    let (ours, mut engine) = (Ours::start().await, Engine::start().await);
    let (region, mut memory) = at_work(&ours, &mut engine).await;
    engine.stop().await;
    // Between two requests of the engine nothing is held; else the release ends the one under way.
    region.release();
    timeout(NOTICED_WITHIN, region.idle())
        .await
        .expect("the write is ended");
    drop(region);
    let before = owned(&mut memory).await;
    engine.go_on();
    let (_region, exposed) = ours.expose(Borrowed::from(keyed(10, 1)));
    let mut other = Engine::start().await;
    let address = exposed.buffer().address;
    let read = json!({"do": "read", "peer": ours.mooncake.name(), "address": address, "size": 10, "key": 1});
    assert_eq!(other.call(read).await["differs"], -1, "another peer is disturbed");
    assert!(memory.bytes().expect("ours alone") == before, "a late write landed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_sockets_on_an_engines_handshake_port_stop_only_new_peers() {
    if !wheel_works() {
        return;
    }
    let (ours, newcomer, mut engine) = (Ours::start().await, Ours::start().await, Engine::start().await);
    let (src, _) = engine.allocate(1000, Some(5)).await;
    let segment = ours.open(engine.name()).await;
    let idle = [
        TcpStream::connect(engine.name()).await.expect("it listens"),
        TcpStream::connect(engine.name()).await.expect("it listens"),
    ];
    let begun = Instant::now();
    let options = ConnectOptions {
        deadline: Duration::from_millis(700),
    };
    let error = newcomer
        .mooncake
        .open(engine.name(), options.clone())
        .await
        .expect_err("it is busy");
    assert!(
        begun.elapsed() < NOTICED_WITHIN,
        "a deadline of 700 ms took {:?}",
        begun.elapsed()
    );
    assert_eq!(
        (error.class(), error.reason()),
        (ErrorClass::Deadline, "mooncake.handshake_deadline"),
        "{error}"
    );
    assert!(
        error.to_string().contains("each idle one keeps the others waiting"),
        "{error}"
    );
    let begun = Instant::now();
    assert!(pull(&segment, src).await.expect("its data port is free") == keyed(1000, 5));
    let again = ours.mooncake.open(engine.name(), options).await.expect("known");
    assert!(pull(&again, src).await.expect("pulled") == keyed(1000, 5));
    assert!(
        begun.elapsed() < NOTICED_WITHIN,
        "a known peer waited for {:?}",
        begun.elapsed()
    );
    drop(idle);
    newcomer.open(engine.name()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_came_back_under_its_name_is_opened_again() {
    // Between two peers, another program may take the port.
    let mut tries = 3;
    while !a_peer_comes_back().await {
        tries -= 1;
        assert!(tries > 0, "the port was never free again");
    }
    if wheel_works() {
        // An engine has another port after each start.
        let ours = Ours::start().await;
        let mut engine = Engine::start().await;
        let (src, _) = engine.allocate(1000, Some(3)).await;
        let before = ours.open(engine.name()).await;
        engine.kill();
        let mut engine = Engine::start().await;
        is_lost(&pull_until_error(&before, src, &keyed(1000, 3)).await);
        let (src, _) = engine.allocate(1000, Some(4)).await;
        assert!(pull(&*ours.open(engine.name()).await, src).await.expect("pulled") == keyed(1000, 4));
    }
}

/// Whether it got its old port.
async fn a_peer_comes_back() -> bool {
    let (ours, other) = (Ours::start().await, Ours::start().await);
    let (_region, exposed) = other.expose(Borrowed::from(keyed(1000, 5)));
    let name = other.mooncake.name().to_owned();
    let segment = ours.open(&name).await;
    pull(&segment, exposed.buffer()).await.expect("alive");
    other.mooncake.shutdown().await;
    let stale = exposed.buffer();
    let error = pull(&segment, stale).await.expect_err("it is gone");
    is_lost(&error);
    let options = MooncakeOptions {
        bind: name.parse().expect("an address"),
        ..MooncakeOptions::default()
    };
    let Ok(back) = Ours::start_with(options).await else {
        return false;
    };
    assert_eq!(back.mooncake.name(), name);
    // The old value stays lost; the name, opened again, is the new peer, where old addresses mean nothing.
    is_lost(&pull(&segment, stale).await.expect_err("it is gone"));
    let again = ours.open(&name).await;
    let error = pull(&again, stale).await.expect_err("an address of before");
    assert_eq!(error.reason(), "mooncake.rejected", "{error}");
    true
}

/// A twentieth of the count that a soak has.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn releases_never_race_requests() {
    let (ours, other) = (Ours::start().await, Ours::start().await);
    let segment = ours.open(other.mooncake.name()).await;
    for round in (0..50_u8).cycle().take(rounds(50, 1000)) {
        let expected = keyed(1 << 20, round);
        let (region, exposed) = other.expose(Borrowed::from(expected.clone()));
        let src = exposed.buffer();
        let release = async {
            sleep(Duration::from_micros(200 * u64::from(round))).await;
            region.release();
            timeout(NOTICED_WITHIN, region.idle())
                .await
                .expect("the requests are ended");
        };
        let (first, second, ()) = tokio::join!(
            pull_until_error(&segment, src, &expected),
            pull_until_error(&segment, src, &expected),
            release
        );
        for error in [first, second] {
            // Refused, or cut off in the middle.
            assert!(["mooncake.rejected", "peer.lost"].contains(&error.reason()), "{error}");
        }
        assert!(segment.lost().is_none(), "the peer lives: {segment:?}");
    }
    let stats = other.host.stats();
    assert_eq!((stats.pins_held, stats.regions), (0, 0), "{stats:?}");
}
