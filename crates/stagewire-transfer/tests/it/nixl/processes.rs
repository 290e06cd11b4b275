//! Two processes that move bytes.

use std::path::{Path, PathBuf};

use stagewire_core::{Classify, ErrorClass, Record};
use stagewire_transfer::{
    Borrowed, ConnectOptions, Memory, Network, NetworkOptions, Nixl, NixlOptions, Pinned, Target, TransferOptions,
    Transport,
};
use xxhash_rust::xxh3::xxh3_64;

use super::child::{Options, bytes};
use super::{End, is_here, library};
use crate::child::{Child, Offer};
use crate::support;

const MIB: usize = 1 << 20;

/// By all ways that UCX has, and over TCP alone.
const WAYS: [Option<&str>; 2] = [None, Some("tcp")];

pub(super) async fn pin(end: &End, (peer, region): &Offer) -> Box<dyn Pinned> {
    let remote = end
        .nixl
        .connect(peer, ConnectOptions::default())
        .await
        .expect("connected");
    remote.pin(region, TransferOptions::default()).await.expect("pinned")
}

pub(super) async fn pull(pinned: &dyn Pinned, records: &[Record], len: usize) -> Target {
    let target = Target::allocate(len as u64).expect("memory");
    let pulled = pinned.pull(records, &target, TransferOptions::default()).await;
    pulled.expect("pulled");
    target
}

async fn owner(dir: &Path, len: usize, tls: Option<&'static str>, writable: bool) -> (Child, Offer) {
    let options = Options {
        writable,
        tls,
        ..Options::default()
    };
    options.owner(dir, len).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_of_another_process_arrive_exactly() {
    if !is_here() {
        return;
    }
    let (_parent, dir) = support::run_dir();
    let end = End::start(&dir).await;
    let len = 70 * MIB + 13;
    let source = support::bulk(len);
    for tls in WAYS {
        let (_owner, offer) = owner(&dir, len, tls, false).await;
        let pinned = pin(&end, &offer).await;
        let whole = pull(&*pinned, &[Record::contiguous(0, 0, len as u64)], len).await;
        assert!(whole.as_slice().expect("pulled") == source, "over {tls:?}");
        // 128 strided runs, as a chunk of a latent has.
        let runs = Record {
            src_offset: 3,
            dst_offset: 0,
            width: 100_000,
            rows: 128,
            src_pitch: 500_009,
            dst_pitch: 100_000,
        };
        let chunk = pull(&*pinned, &[runs], 12_800_000).await;
        let found = chunk.as_slice().expect("pulled");
        for (row, found) in found.chunks(100_000).enumerate() {
            let at = 3 + row * 500_009;
            assert!(found == &source[at..at + 100_000], "row {row} over {tls:?}");
        }
        // In reverse, so that no two can be merged into one.
        let records: Vec<Record> = (0..5000)
            .map(|index| Record::contiguous(index * 1000, (4999 - index) * 800, 700))
            .collect();
        let batch = pull(&*pinned, &records, 5000 * 800).await;
        for Record {
            src_offset,
            dst_offset,
            width,
            ..
        } in records
        {
            let found = batch.slice(dst_offset..dst_offset + width).expect("pulled");
            let at = src_offset as usize;
            assert!(found == &source[at..at + width as usize], "record at {at} over {tls:?}");
        }
    }
    let stats = end.nixl.stats();
    assert_eq!((stats.pulls, stats.failed, stats.in_flight_bytes), (6, 0, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pushed_bytes_are_there_once_the_push_is_over() {
    if !is_here() {
        return;
    }
    let (_parent, dir) = support::run_dir();
    let end = End::start(&dir).await;
    let len = 40 * MIB + 7;
    let source = support::bulk(len);
    let digest = xxh3_64(&source);
    let memory = Memory::from(Borrowed::from(source));
    for tls in WAYS {
        let (mut child, offer) = owner(&dir, len, tls, true).await;
        let pinned = pin(&end, &offer).await;
        let half = len as u64 / 2;
        let records = [
            Record::contiguous(half, half, len as u64 - half),
            Record::contiguous(0, 0, half),
        ];
        let pushed = pinned.push(&records, &memory, TransferOptions::default()).await;
        pushed.expect("pushed");
        assert_eq!(
            child.ask::<Option<u64>>("bytes").await,
            None,
            "shown while a peer may write"
        );
        child.ask::<()>("release").await;
        drop(pinned);
        assert_eq!(bytes(&mut child).await, digest, "over {tls:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_not_writable_is_not_written() {
    if !is_here() {
        return;
    }
    let (_parent, dir) = support::run_dir();
    let end = End::start(&dir).await;
    let (_child, offer) = owner(&dir, MIB, None, false).await;
    let pinned = pin(&end, &offer).await;
    let memory = Memory::from(Borrowed::from(vec![0; 100]));
    let pushed = pinned
        .push(&[Record::contiguous(0, 0, 100)], &memory, TransferOptions::default())
        .await;
    let error = pushed.expect_err("read-only");
    assert_eq!(
        (error.class(), error.reason()),
        (ErrorClass::Denied, "transfer.read_only")
    );
    let target = pull(&*pinned, &[Record::contiguous(0, 0, MIB as u64)], MIB).await;
    assert!(target.as_slice().expect("pulled") == support::bulk(MIB));
}

/// The wheel again, under the name of another release.
fn renamed(site: &Path, release: &str) -> PathBuf {
    let library = library().expect("checked by is_here");
    let libs = library.parent().expect("a directory");
    for directory in [".nixl_cu12.mesonpy.libs", "nixl_cu12.libs"] {
        let original = libs.with_file_name(directory);
        std::os::unix::fs::symlink(original, site.join(directory)).expect("a link");
    }
    std::fs::create_dir(site.join(format!("nixl_cu12-{release}.dist-info"))).expect("a directory");
    site.join(".nixl_cu12.mesonpy.libs/libnixl_capi.so")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_release_is_refused_and_both_are_named() {
    if !is_here() {
        return;
    }
    let (parent, dir) = support::run_dir();
    let end = End::start(&dir).await;
    let ours = end.nixl.version().release().expect("a wheel").to_owned();
    let options = Options {
        library: Some(renamed(parent.path(), "1.3.2")),
        ..Options::default()
    };
    let (_child, (peer, _)) = options.owner(&dir, MIB).await;
    let connected = end.nixl.connect(&peer, ConnectOptions::default()).await;
    let error = connected.expect_err("between 1.3 and 1.5 transfers never end");
    assert_eq!(
        (error.class(), error.reason()),
        (ErrorClass::Unsupported, "connect.backend_version")
    );
    let text = error.to_string();
    assert!(text.contains("1.3.2") && text.contains(&ours), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_library_everything_else_goes_on() {
    let (_parent, dir) = support::run_dir();
    let network = Network::start(support::start(&dir).await, NetworkOptions::default()).await;
    let network = network.expect("the network starts");
    let start = async |library: PathBuf| {
        let options = NixlOptions {
            library: Some(library),
            ..NixlOptions::default()
        };
        let error = Nixl::start(&network, options).await.expect_err("not NIXL");
        (error.class(), error.reason())
    };
    let missing = start(dir.join("libnixl_capi.so")).await;
    // Once NIXL is loaded, another one is refused before it is looked for.
    let expected = [
        (ErrorClass::Unsupported, "nixl.not_found"),
        (ErrorClass::Conflict, "nixl.mixed"),
    ];
    assert!(expected.contains(&missing), "{missing:?}");
}
