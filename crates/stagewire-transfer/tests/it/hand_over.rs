//! How long a hand-over takes, beside a copy of the same bytes within one process. Measures, so it runs only when asked
//! for: `cargo test -p stagewire-transfer --release -- --ignored --nocapture hand_over`.

use std::hint::black_box;
use std::time::{Duration, Instant};

use stagewire_core::Record;
use stagewire_transfer::{ConnectOptions, Target, TransferOptions};

use crate::child::Child;
use crate::support::{self, cma_works, run_dir, start, transport};

/// The latent of five seconds of Wan video at 720p.
const LEN: usize = 14_300_000;
const ROUNDS: usize = 51;

/// Beyond one copy, a hand-over may take this long: pin, confirm, and the ways between threads.
const OVERHEAD: Duration = Duration::from_millis(1);

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

#[expect(clippy::print_stdout, reason = "a measurement is there to be read")]
async fn hand_over(name: &str, len: usize) {
    let (_parent, dir) = run_dir();
    if name == "cma" && !cma_works(&dir).await {
        return;
    }
    let reader = start(&dir).await;
    let (_child, (peer, region)) = Child::producer(&dir, name, len).await;
    let remote = transport(&reader, name)
        .connect(&peer, ConnectOptions::default())
        .await
        .expect("connected");
    let (source, mut copied) = (support::bulk(len), vec![0; len]);
    let mut target = Target::allocate(len as u64).expect("memory");
    let (mut pulls, mut copies) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let begun = Instant::now();
        black_box(&mut copied).copy_from_slice(black_box(&source));
        copies.push(begun.elapsed());
        target.reset().expect("idle");
        let begun = Instant::now();
        let pinned = remote.pin(&region, TransferOptions::default()).await.expect("pinned");
        let whole = [Record::contiguous(0, 0, len as u64)];
        pinned
            .pull(&whole, &target, TransferOptions::default())
            .await
            .expect("pulled");
        drop(pinned);
        pulls.push(begun.elapsed());
    }
    assert!(target.as_slice().expect("pulled") == source, "other bytes");
    let (pull, copy) = (median(pulls), median(copies));
    println!("{name} {len} bytes: {pull:?}, memcpy {copy:?}");
    if len == LEN {
        assert!(pull <= copy + OVERHEAD, "{name}: {pull:?} for a copy of {copy:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures"]
async fn shm_hand_over() {
    for len in [4096, 1 << 20, 2 << 20, 4 << 20, 8 << 20, LEN, 64 << 20] {
        hand_over("shm", len).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures"]
async fn cma_hand_over() {
    for len in [4096, 1 << 20, 2 << 20, 4 << 20, 8 << 20, LEN, 64 << 20] {
        hand_over("cma", len).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures"]
#[expect(clippy::print_stdout, reason = "a measurement is there to be read")]
async fn map_hand_over() {
    let (_parent, dir) = run_dir();
    let reader = start(&dir).await;
    let (_child, (peer, region)) = Child::producer(&dir, "shm", LEN).await;
    let remote = reader
        .shm()
        .connect(&peer, ConnectOptions::default())
        .await
        .expect("connected");
    let mut times = Vec::new();
    for _ in 0..501 {
        let begun = Instant::now();
        let pinned = remote.pin(&region, TransferOptions::default()).await.expect("pinned");
        black_box(pinned.map().await.expect("mapped")[LEN - 1]);
        times.push(begun.elapsed());
    }
    println!("map of {LEN} bytes, with its pin: {:?}", median(times));
}
