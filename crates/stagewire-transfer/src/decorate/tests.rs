//! Over a transport without sockets and with the clock paused: time passes only where somebody waits for it.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::join;
use stagewire_core::{Classify, Record};
use tokio::time::{Instant, advance};

use super::loopback::{Loopback, PEER, peer};
use super::{Fault, FaultPlan, Mishap, Operation, Outcome, Recorder, Throttle, ThrottleOptions};
use crate::{
    Borrowed, ConnectOptions, Memory, Pinned, Region, RegisterOptions, Remote, Target, TransferError, TransferOptions,
    Transport, Writable,
};

const SECOND: Duration = Duration::from_secs(1);
const LATENCY: Duration = Duration::from_millis(50);

fn source() -> Vec<u8> {
    (0..1000).map(|byte| (byte % 251) as u8).collect()
}

/// 100 rows of 5 bytes.
const ROWS: Record = Record {
    src_offset: 0,
    dst_offset: 0,
    width: 5,
    rows: 100,
    src_pitch: 10,
    dst_pitch: 5,
};

fn within(deadline: Duration) -> TransferOptions {
    TransferOptions {
        deadline: Some(deadline),
    }
}

/// A region of [`source`], pinned over a transport.
async fn pinned(transport: &dyn Transport) -> (Region, Box<dyn Pinned>) {
    let memory = Borrowed::from(source()).into();
    let region = transport
        .register(memory, RegisterOptions::default())
        .expect("registered");
    let remote = connect(transport).await;
    let pinned = remote.pin(&region.reference(), TransferOptions::default()).await;
    (region, pinned.expect("pinned"))
}

async fn connect(transport: &dyn Transport) -> Arc<dyn Remote> {
    let connected = transport.connect(&peer(), ConnectOptions::default()).await;
    connected.expect("connected")
}

async fn pull(pinned: &dyn Pinned, options: TransferOptions) -> Result<Target, TransferError> {
    let target = Target::allocate(500).expect("memory");
    pinned.pull(&[ROWS], &target, options).await?;
    Ok(target)
}

fn rows_of_source() -> Vec<u8> {
    source().chunks(10).flat_map(|row| row[..5].to_vec()).collect()
}

fn throttle(inner: Arc<dyn Transport>) -> Throttle {
    let options = ThrottleOptions {
        bytes_per_second: NonZeroU64::new(500),
        latency: LATENCY,
    };
    Throttle::new(inner, options)
}

fn fault(operation: Operation, mishap: Mishap) -> (Loopback, Fault) {
    let loopback = Loopback::new();
    let fault = Fault::new(Arc::new(loopback.clone()), FaultPlan::new().at(operation, 1, mishap));
    (loopback, fault)
}

#[tokio::test(start_paused = true)]
async fn a_throttled_transfer_takes_as_long_as_its_bytes() {
    let throttle = throttle(Arc::new(Loopback::new()));
    let began = Instant::now();
    let (_region, pinned) = pinned(&throttle).await;
    assert_eq!(began.elapsed(), 2 * LATENCY, "connect and pin");
    drop(pinned.map().await.expect("mapped"));
    assert_eq!(began.elapsed(), 3 * LATENCY, "mapping moves no bytes");

    let began = Instant::now();
    let options = TransferOptions::default();
    let first = async {
        let target = pull(&*pinned, options.clone()).await.expect("pulled");
        assert_eq!(target.as_slice().expect("pulled"), rows_of_source());
        began.elapsed()
    };
    let second = async {
        pull(&*pinned, options.clone()).await.expect("pulled");
        began.elapsed()
    };
    assert_eq!(join(first, second).await, (LATENCY + SECOND, LATENCY + 2 * SECOND));
}

/// The clock of tests, too, wakes at whole milliseconds.
#[tokio::test(start_paused = true)]
async fn late_timers_do_not_slow_a_row_of_throttled_transfers() {
    let options = ThrottleOptions {
        bytes_per_second: NonZeroU64::new(200_000),
        latency: Duration::ZERO,
    };
    let throttle = Throttle::new(Arc::new(Loopback::new()), options);
    let (_region, pinned) = pinned(&throttle).await;
    let millisecond = Duration::from_millis(1);
    // 500 bytes take 2.5 ms; an idle line saves nothing up for a row.
    for _ in 0..2 {
        advance(SECOND).await;
        let begin = Instant::now();
        for _ in 0..21 {
            pull(&*pinned, within(SECOND)).await.expect("in time");
        }
        let took = begin.elapsed();
        assert!((52 * millisecond..=54 * millisecond).contains(&took), "{took:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_throttled_transfer_ends_with_its_deadline_or_its_peer() {
    let loopback = Loopback::new();
    let throttle = throttle(Arc::new(loopback.clone()));
    let (_region, pinned) = pinned(&throttle).await;

    let (began, deadline) = (Instant::now(), SECOND / 2);
    let error = pull(&*pinned, within(deadline)).await.expect_err("too slow");
    assert!(matches!(error, TransferError::Deadline { peer: PEER, what: "the pull", after, .. } if after == deadline));
    assert_eq!(began.elapsed(), deadline);

    let began = Instant::now();
    pull(&*pinned, within(2 * SECOND)).await.expect("the line is free");
    assert_eq!(began.elapsed(), LATENCY + SECOND, "the late one occupied the line");

    let target = Target::allocate(500).expect("memory");
    let beyond = [Record::contiguous(0, 0, 501)];
    let refused = pinned.pull(&beyond, &target, within(SECOND)).now_or_never();
    assert_eq!(
        refused.expect("at once").expect_err("outside").reason(),
        "transfer.bounds"
    );

    let lost = async {
        tokio::time::sleep(SECOND / 4).await;
        loopback.lose();
    };
    let unbounded = TransferOptions { deadline: None };
    let began = Instant::now();
    let (pulled, ()) = join(pull(&*pinned, unbounded), lost).await;
    assert!(matches!(pulled, Err(TransferError::PeerLost { how, .. }) if how == "it was lost"));
    assert_eq!(began.elapsed(), SECOND / 4);
}

#[tokio::test(start_paused = true)]
async fn a_dropped_operation_ends_with_its_deadline_or_its_peer() {
    for operation in [Operation::Pin, Operation::Pull, Operation::Push] {
        let (_, fault) = fault(operation, Mishap::Drop);
        let began = Instant::now();
        let error = run(&fault, operation, within(SECOND))
            .await
            .expect_err("no answer comes");
        assert_eq!(
            (began.elapsed(), error.reason()),
            (SECOND, "transfer.deadline"),
            "{operation}"
        );
        assert_eq!(fault.mishaps(), 1);
        run(&fault, operation, within(SECOND))
            .await
            .expect("only the first is lost");
    }
    let (loopback, fault) = fault(Operation::Map, Mishap::Drop);
    let mapping = run(&fault, Operation::Map, within(SECOND));
    let lost = async {
        advance(100 * SECOND).await;
        loopback.lose();
    };
    let (mapped, ()) = join(mapping, lost).await;
    assert_eq!(mapped.expect_err("the peer is gone").reason(), "peer.lost");
}

/// Runs one operation, and what it needs before, with new memory.
async fn run(transport: &dyn Transport, operation: Operation, options: TransferOptions) -> Result<(), TransferError> {
    let memory = Writable::allocate(1000).expect("memory");
    let region = transport
        .register(memory.into(), RegisterOptions::default())
        .expect("registered");
    let remote = connect(transport).await;
    let (pin_options, own) = match operation {
        Operation::Pin => (options.clone(), TransferOptions::default()),
        _ => (TransferOptions::default(), options),
    };
    let pinned = remote.pin(&region.reference(), pin_options).await?;
    match operation {
        Operation::Pull => pull(&*pinned, own).await.map(drop),
        Operation::Push => pinned.push(&[ROWS], &Borrowed::from(source()).into(), own).await,
        Operation::Map => pinned.map().await.map(drop),
        _ => Ok(()),
    }
}

#[tokio::test(start_paused = true)]
async fn a_delay_counts_towards_the_deadline() {
    for operation in [Operation::Pin, Operation::Pull, Operation::Push] {
        let (_, late) = fault(operation, Mishap::Delay(2 * SECOND));
        let error = run(&late, operation, within(SECOND)).await.expect_err("late");
        assert!(
            matches!(error, TransferError::Deadline { after: SECOND, .. }),
            "{error}"
        );
        let (_, in_time) = fault(operation, Mishap::Delay(SECOND));
        let began = Instant::now();
        run(&in_time, operation, within(2 * SECOND)).await.expect("in time");
        assert_eq!(began.elapsed(), SECOND, "{operation}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_was_cut_does_not_count_as_written() {
    for after in [0, 1, 7, 499, 500] {
        let (_, fault) = fault(Operation::Pull, Mishap::Cut { after });
        let (_region, pinned) = pinned(&fault).await;
        let target = Target::allocate(500).expect("memory");
        let options = TransferOptions::default();
        let error = pinned.pull(&[ROWS], &target, options.clone()).await.expect_err("cut");
        assert_eq!(error.reason(), "transfer.io");
        assert!(target.is_idle(), "the claim was not given up");
        assert!(target.slice(0..1).is_err(), "a byte of a cut pull shows");
        pinned
            .pull(&[ROWS], &target, options)
            .await
            .expect("all of it can be pulled again");
        assert_eq!(target.as_slice().expect("pulled"), rows_of_source());
    }
}

#[tokio::test(start_paused = true)]
async fn one_bit_arrives_changed_and_nobody_says_so() {
    let (_, fault) = fault(Operation::Pull, Mishap::Corrupt { byte: 500 + 7 });
    let (_region, pinned) = pinned(&fault).await;
    let target = pull(&*pinned, TransferOptions::default())
        .await
        .expect("it says that all is well");
    assert!(target.is_idle());
    let mut changed = rows_of_source();
    changed[7] ^= 1;
    assert_eq!(target.as_slice().expect("pulled"), changed);
    let target = pull(&*pinned, TransferOptions::default()).await.expect("pulled");
    assert_eq!(target.as_slice().expect("pulled"), rows_of_source());
}

#[tokio::test(start_paused = true)]
async fn a_refused_pull_stays_refused_whatever_goes_wrong() {
    let beyond = [Record::contiguous(0, 0, 501)];
    let twice = [Record::contiguous(0, 0, 10), Record::contiguous(20, 9, 10)];
    for mishap in [Mishap::Corrupt { byte: 0 }, Mishap::Cut { after: 3 }, Mishap::Duplicate] {
        for (records, reason) in [(&beyond[..], "transfer.bounds"), (&twice[..], "transfer.overlap")] {
            let (_, fault) = fault(Operation::Pull, mishap.clone());
            let (_region, pinned) = pinned(&fault).await;
            let target = Target::allocate(500).expect("memory");
            let refused = pinned.pull(records, &target, TransferOptions::default()).await;
            assert_eq!(refused.expect_err("refused").reason(), reason, "{mishap:?}");
            assert!(target.is_idle() && target.slice(0..1).is_err());
        }
    }
}

/// What a push with a mishap leaves in the region.
async fn pushed(mishap: Mishap) -> (Result<(), TransferError>, Vec<u8>) {
    let (_, fault) = fault(Operation::Push, mishap);
    let mut memory = Writable::allocate(500).expect("memory");
    let region = fault
        .register(memory.clone().into(), RegisterOptions::default())
        .expect("registered");
    let remote = connect(&fault).await;
    let pinned = remote
        .pin(&region.reference(), TransferOptions::default())
        .await
        .expect("pinned");
    let from: Memory = Borrowed::from(source()).into();
    let pushed = pinned.push(&[ROWS], &from, TransferOptions::default()).await;
    drop((pinned, region));
    (pushed, memory.bytes().expect("nobody else holds it").to_vec())
}

#[tokio::test(start_paused = true)]
async fn a_push_goes_wrong_in_the_same_ways() {
    let (result, found) = pushed(Mishap::Duplicate).await;
    assert_eq!((result.is_ok(), found), (true, rows_of_source()));

    let (result, found) = pushed(Mishap::Cut { after: 7 }).await;
    assert_eq!(result.expect_err("cut").reason(), "transfer.in_doubt");
    assert_eq!((&found[..7], &found[7..]), (&rows_of_source()[..7], &[0; 493][..]));

    let (result, found) = pushed(Mishap::Corrupt { byte: 7 }).await;
    result.expect("it says that all is well");
    let mut changed = rows_of_source();
    changed[7] ^= 1;
    assert_eq!(found, changed);
}

#[tokio::test(start_paused = true)]
async fn mappings_and_pins_go_wrong_in_their_own_ways() {
    let (_, altered) = fault(Operation::Map, Mishap::Corrupt { byte: 1003 });
    let (region, pin) = pinned(&altered).await;
    let mapping = pin.map().await.expect("mapped");
    assert_eq!(mapping[3], source()[3] ^ 1);
    drop(pin);
    assert!(!region.is_idle(), "the altered copy keeps the pin");
    drop(mapping);
    assert!(region.is_idle());

    let (_, cut) = fault(Operation::Map, Mishap::Cut { after: 0 });
    let (_region, pin) = pinned(&cut).await;
    assert_eq!(pin.map().await.expect_err("cut").reason(), "transfer.io");

    for (mishap, reason) in [
        (Mishap::Corrupt { byte: 40 }, "transfer.region_unknown"),
        (Mishap::Cut { after: 0 }, "transfer.io"),
        (
            Mishap::fail(|| TransferError::Released { peer: PEER, region: 1 }),
            "transfer.region_released",
        ),
    ] {
        let (loopback, fault) = fault(Operation::Pin, mishap.clone());
        let memory = Borrowed::from(source()).into();
        let region = loopback
            .register(memory, RegisterOptions::default())
            .expect("registered");
        let remote = connect(&fault).await;
        let refused = remote.pin(&region.reference(), TransferOptions::default()).await;
        assert_eq!(refused.expect_err("it goes wrong").reason(), reason, "{mishap:?}");
        assert!(region.is_idle(), "{mishap:?} left a pin behind");
    }
}

#[tokio::test(start_paused = true)]
async fn the_recorder_tells_what_was_asked_and_what_came_of_it() {
    let plan = FaultPlan::new().at(Operation::Pull, 2, Mishap::Drop);
    let slow = Arc::new(throttle(Arc::new(Loopback::new())));
    let recorder = Recorder::new(Arc::new(Fault::new(slow, plan)));
    let (region, pinned) = pinned(&recorder).await;
    pull(&*pinned, TransferOptions::default()).await.expect("pulled");
    pull(&*pinned, within(SECOND)).await.expect_err("lost");
    assert!(pull(&*pinned, within(SECOND)).now_or_never().is_none(), "throttled");

    let number = region.reference().region;
    let entries = recorder.entries();
    let told: Vec<_> = entries
        .iter()
        .map(|entry| (entry.operation, entry.region, entry.records, entry.bytes, entry.took))
        .collect();
    let expected = [
        (Operation::Register, Some(number), 0, 1000, Duration::ZERO),
        (Operation::Connect, None, 0, 0, LATENCY),
        (Operation::Pin, Some(number), 0, 1000, LATENCY),
        (Operation::Pull, Some(number), 1, 500, LATENCY + SECOND),
        (Operation::Pull, Some(number), 1, 500, SECOND),
        (Operation::Pull, Some(number), 1, 500, Duration::ZERO),
    ];
    assert_eq!(told, expected);
    let outcomes: Vec<_> = entries.iter().map(|entry| &entry.outcome).collect();
    assert_eq!(outcomes[..4], [&Outcome::Done; 4]);
    assert!(matches!(
        outcomes[4],
        Outcome::Failed {
            reason: "transfer.deadline",
            ..
        }
    ));
    assert_eq!(outcomes[5], &Outcome::Dropped);
    assert_eq!(entries[3].began, 2 * LATENCY);
    assert_eq!(
        (recorder.count(Operation::Pull), recorder.bytes(Operation::Pull)),
        (1, 500)
    );
    assert_eq!(recorder.matching(|entry| entry.peer == Some(PEER)).len(), 5);
    recorder.clear();
    assert!(recorder.entries().is_empty());
}
