//! A payload whose later chunks are still being written.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use stagewire_connector::{Owner, PublishSpec};
use stagewire_core::{ByteCount, Incarnation, Record};
use stagewire_transfer::{
    Borrowed, ConnectOptions, Host, HostOptions, Network, NetworkOptions, Pinned, Target, TransferOptions,
};
use uuid::Uuid;

use crate::World;
use crate::bundle::Bundle;

const LEN: usize = 2 << 20;

async fn pull(pinned: &dyn Pinned) -> Target {
    let target = Target::allocate(LEN as u64).expect("memory");
    let whole = [Record::contiguous(0, 0, LEN as u64)];
    let pulled = pinned.pull(&whole, &target, TransferOptions::default()).await;
    pulled.expect("nothing was damaged on its way");
    target
}

/// Whoever reads, by mistake, what was not announced yet gets it as it is, and no word of damage.
#[expect(unsafe_code, reason = "a producer that still writes what it has published")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_that_are_still_written_are_not_taken_for_damaged() {
    let world = World::new().await;
    let bytes: Arc<Vec<AtomicU8>> = Arc::new(std::iter::repeat_with(AtomicU8::default).take(LEN).collect());
    let first = NonNull::from(bytes.as_slice()).cast();
    // SAFETY: the Vec keeps the bytes, which anybody may read at any time.
    let memory = unsafe { Borrowed::new(first, LEN, bytes.clone()) };
    let bundle = Bundle::one(&[2, LEN as u64 / 8]).cut(0, 2);
    let spec = PublishSpec::new("r", bundle.manifest(), Owner::Orchestrator);
    let publication = world.connector.open(spec, vec![memory.into()]).expect("published");
    let handle = publication.handle();

    let dir = tempfile::tempdir().expect("a directory");
    let options = HostOptions {
        dir: dir.path().join("peers"),
        incarnation: Incarnation(Uuid::new_v4()),
        arena_limit: ByteCount(1 << 20),
    };
    let host = Host::start(options).await.expect("a host");
    let network = Network::start(host, NetworkOptions::default())
        .await
        .expect("it listens");
    let remote = network.tcp().connect(&handle.holder, ConnectOptions::default()).await;
    let pinned = remote
        .expect("connected")
        .pin(&handle.regions[0], TransferOptions::default())
        .await;
    let pinned = pinned.expect("pinned");

    let stop = Arc::new(AtomicBool::new(false));
    let (written, stopped) = (bytes.clone(), stop.clone());
    let writer = std::thread::spawn(move || {
        for round in (0..=u8::MAX).cycle() {
            if stopped.load(Ordering::Relaxed) {
                return;
            }
            written
                .iter()
                .step_by(64)
                .for_each(|byte| byte.store(round, Ordering::Relaxed));
        }
    });
    for _ in 0..20 {
        pull(&*pinned).await;
    }
    stop.store(true, Ordering::Relaxed);
    writer.join().expect("no panic");
    (0..2).for_each(|chunk| publication.ready(chunk).expect("it has two"));
    let target = pull(&*pinned).await;
    let expected: Vec<u8> = bytes.iter().map(|byte| byte.load(Ordering::Relaxed)).collect();
    assert!(target.as_slice().expect("pulled") == expected, "other bytes");
}
