//! A way between two nodes that damages, cuts or withholds what passes.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use stagewire_core::{Classify, ErrorClass, Record};
use stagewire_transfer::{
    Borrowed, Memory, NetworkOptions, Pinned, Region, RegisterOptions, Target, TransferError, TransferOptions, Writable,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::late;
use crate::support::{self, Node, run_dir};

/// What happens to bytes from the owner on their way: it may change them, and says whether they pass.
type Tamper = Arc<dyn Fn(&mut [u8]) -> bool + Send + Sync>;

/// An owner that others reach only through a proxy: it listens at 127.0.0.1 and tells others 127.0.0.2.
async fn behind_proxy(dir: &Path, tamper: Tamper) -> (Node, JoinSet<()>) {
    let other = Ipv4Addr::new(127, 0, 0, 2);
    let options = NetworkOptions {
        advertise: Some(IpAddr::V4(other)),
        ..NetworkOptions::default()
    };
    let node = Node::start_with(dir, options).await;
    let real = node.network().local_addr();
    let listener = TcpListener::bind(SocketAddr::new(other.into(), real.port())).await;
    let listener = listener.expect("nobody else listens at that address");
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut passing = JoinSet::new();
        while let Ok((from, _)) = listener.accept().await {
            let (of_reader, to_reader) = from.into_split();
            let (of_owner, to_owner) = TcpStream::connect(real).await.expect("it listens").into_split();
            passing.spawn(pass(of_reader, to_owner, Arc::new(|_: &mut [u8]| true)));
            passing.spawn(pass(of_owner, to_reader, tamper.clone()));
        }
    });
    (node, tasks)
}

async fn pass(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, tamper: Tamper) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(len @ 1..) = from.read(&mut buffer).await {
        let passing = &mut buffer[..len];
        if tamper(passing) && to.write_all(passing).await.is_err() {
            return;
        }
    }
}

/// Memory of the owner, pinned by the reader.
async fn pinned(owner: &Node, reader: &Node, memory: Memory) -> (Region, Box<dyn Pinned>) {
    let registered = owner.transport("tcp").register(memory, RegisterOptions::default());
    let region = registered.expect("registered");
    let pinned = late::pinned(reader, &(owner.peer(), region.reference())).await;
    (region, pinned)
}

const LEN: usize = 1 << 20;
const WHOLE: Record = Record::contiguous(0, 0, LEN as u64);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_changed_byte_is_corrupt_and_nothing_counts_as_written() {
    let (_parent, dir) = run_dir();
    // Full buffers are payload; greetings and answers are short.
    let (owner, _proxy) = behind_proxy(
        &dir,
        Arc::new(|bytes| {
            if bytes.len() > 30_000 {
                bytes[20_000] ^= 1;
            }
            true
        }),
    )
    .await;
    let reader = Node::start(&dir).await;
    let (_region, pinned) = pinned(&owner, &reader, Borrowed::from(support::bulk(LEN)).into()).await;
    let target = Target::allocate(LEN as u64).expect("memory");
    let error = pinned
        .pull(&[WHOLE], &target, TransferOptions::default())
        .await
        .expect_err("a bit is wrong");
    let found = (error.class(), error.reason());
    assert_eq!(found, (ErrorClass::Corrupt, "transfer.digest"), "{error}");
    assert!(
        target.is_idle() && target.slice(0..1).is_err(),
        "corrupt bytes count as written"
    );
    // A short one passes unchanged: the connection is still good.
    let short = Record::contiguous(0, 0, 1000);
    pinned
        .pull(&[short], &target, TransferOptions::default())
        .await
        .expect("pulled");
}

/// In one request, and in the second of those that a large batch needs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_record_that_arrived_changed_is_named() {
    const PART: u64 = 4096;
    for (records, damaged) in [(10, 5), (PART + 1000, PART + 3)] {
        let (width, passed) = (LEN as u64 / records, AtomicUsize::new(0));
        // Frames are of 256 KiB, and begin anew with each request.
        let frame = 256 << 10;
        let begin = damaged / PART * PART * width;
        let begin = begin + (damaged * width - begin) / frame * frame;
        let at = (damaged * width) as usize;
        let (_parent, dir) = run_dir();
        let tamper = move |bytes: &mut [u8]| {
            // What is short is no payload. Heads between the frames are some bytes more, in a record of many.
            if bytes.len() > 1000 {
                let before = passed.fetch_add(bytes.len(), Ordering::Relaxed);
                if (before..before + bytes.len()).contains(&at) {
                    bytes[at - before] ^= 1;
                }
            }
            true
        };
        let (owner, _proxy) = behind_proxy(&dir, Arc::new(tamper)).await;
        let reader = Node::start(&dir).await;
        let (_region, pinned) = pinned(&owner, &reader, Borrowed::from(support::bulk(LEN)).into()).await;
        // In reverse, so that no two are one.
        let record = |number| Record::contiguous(number * width, (records - 1 - number) * width, width);
        let batch: Vec<Record> = (0..records).map(record).collect();
        let target = Target::allocate(LEN as u64).expect("memory");
        let pulled = pinned.pull(&batch, &target, TransferOptions::default()).await;
        let error = pulled.expect_err("a bit is wrong");
        let first = (begin / width) as usize;
        assert_eq!(error.record(), Some(first), "{error}");
        assert_eq!(error.details()["record"], first.to_string());
        assert!(target.is_idle() && target.slice(0..1).is_err(), "it counts as written");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_push_whose_end_nobody_tells_is_in_doubt() {
    let (_parent, dir) = run_dir();
    // The last word of the owner, which is a frame of 32 bytes that begins with 6.
    let (owner, _proxy) = behind_proxy(&dir, Arc::new(|bytes| bytes.len() != 32 || bytes[0] != 6)).await;
    let reader = Node::start(&dir).await;
    let mut memory = Writable::allocate(LEN as u64).expect("memory");
    let (region, pinned) = pinned(&owner, &reader, memory.clone().into()).await;
    let source = support::bulk(LEN);
    let src = Memory::from(Borrowed::from(source.clone()));
    let options = TransferOptions {
        deadline: Some(Duration::from_millis(500)),
    };
    let error = pinned
        .push(&[WHOLE], &src, options)
        .await
        .expect_err("nobody tells the end");
    let found = (error.class(), error.reason());
    assert_eq!(found, (ErrorClass::Unavailable, "transfer.in_doubt"), "{error}");
    assert!(matches!(error, TransferError::InDoubt { bytes, .. } if bytes == LEN as u64));
    drop((pinned, region));
    let released = async {
        while memory.bytes().is_none() {
            tokio::task::yield_now().await;
        }
    };
    timeout(Duration::from_secs(10), released)
        .await
        .expect("nobody holds it any more");
    assert!(
        memory.bytes().expect("just seen") == source,
        "it was written, as it happens, whole"
    );
}
