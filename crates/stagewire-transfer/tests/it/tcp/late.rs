//! What failed, came too late or was cancelled writes nothing any more.

use std::path::Path;
use std::time::{Duration, Instant};

use stagewire_core::{ByteCount, Classify, Record};
use stagewire_transfer::{Borrowed, ConnectOptions, Memory, NetworkOptions, Pinned, Target, TransferOptions};

use crate::child::{Child, Offer};
use crate::support::{self, Node, run_dir, until};

const LEN: usize = 24 << 20;
const WHOLE: Record = Record::contiguous(0, 0, LEN as u64);

/// So slow that a transfer lasts much longer than the tests wait.
const RATE: u64 = 8 << 20;

pub(super) async fn pinned(node: &Node, (peer, region): &Offer) -> Box<dyn Pinned> {
    let remote = node.transport("tcp").connect(peer, ConnectOptions::default()).await;
    let pinned = remote.expect("connected").pin(region, TransferOptions::default()).await;
    pinned.expect("pinned")
}

/// Memory of a target that nobody else uses, looked at while a pull may write it.
struct Peek(std::ptr::NonNull<u8>);

// SAFETY: an address.
#[expect(unsafe_code, reason = "looks at bytes that do not count as written")]
unsafe impl Send for Peek {}
// SAFETY: as above.
#[expect(unsafe_code, reason = "looks at bytes that do not count as written")]
unsafe impl Sync for Peek {}

impl Peek {
    #[expect(unsafe_code, reason = "looks at bytes that do not count as written")]
    fn byte(&self, at: usize) -> u8 {
        // SAFETY: inside the target, which outlives this.
        unsafe { self.0.add(at).read_volatile() }
    }

    fn bytes(&self) -> Vec<u8> {
        (0..LEN).map(|at| self.byte(at)).collect()
    }
}

/// A target whose bytes are all `0xEE`, which is nowhere in a row in what is pulled.
#[expect(unsafe_code, reason = "there is no safe way to fill a target")]
fn marked() -> (Target, Peek) {
    let bytes: &'static mut [u8] = vec![0xEE; LEN].leak();
    let ptr = std::ptr::NonNull::from(&mut *bytes).cast();
    // SAFETY: leaked, and used by nobody else.
    let target = unsafe { Target::new(ptr, LEN, std::sync::Arc::new(())) };
    (target, Peek(ptr))
}

/// The end of a pull that is under way, and what may have been written by then.
async fn ends_for_good(child: &mut Child, dir: &Path, offer: &Offer, target: &Target, peek: &Peek) {
    assert!(target.is_idle(), "something may still write");
    assert!(target.slice(0..1).is_err(), "it counts as written");
    let snapshot = peek.bytes();
    child.go_on();
    // The owner goes on, finds the lane closed, and serves others; then it holds nothing of the pull any more.
    let other = Child::reader(dir, "tcp", offer).await;
    drop(other);
    child.holds_become((1, 1, 0)).await;
    assert!(peek.bytes() == snapshot, "bytes were written after the end");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pull_that_ran_out_of_time_writes_nothing_any_more() {
    let (_parent, dir) = run_dir();
    let node = Node::start(&dir).await;
    let (mut child, offer) = Child::slow_producer(&dir, 0, Some(RATE), LEN).await;
    let pinned = pinned(&node, &offer).await;
    let (target, peek) = marked();
    let expected = support::bulk(LEN);
    let options = TransferOptions {
        deadline: Some(Duration::from_millis(700)),
    };
    let stop = async {
        until("some bytes came", || {
            peek.byte(100_000) == expected[100_000] && peek.byte(100_001) == expected[100_001]
        })
        .await;
        child.stop().await;
    };
    let (pulled, ()) = tokio::join!(pinned.pull(&[WHOLE], &target, options), stop);
    let error = pulled.expect_err("the owner stands still");
    assert_eq!(error.reason(), "transfer.deadline", "{error}");
    assert_eq!(peek.byte(LEN - 1), 0xEE, "it was done before it stopped");
    ends_for_good(&mut child, &dir, &offer, &target, &peek).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_pull_writes_nothing_any_more() {
    let (_parent, dir) = run_dir();
    let node = Node::start(&dir).await;
    let (mut child, offer) = Child::slow_producer(&dir, 0, Some(RATE), LEN).await;
    let pinned = pinned(&node, &offer).await;
    let (target, peek) = marked();
    let expected = support::bulk(LEN);
    tokio::select! {
        done = pinned.pull(&[WHOLE], &target, TransferOptions::default()) => panic!("so soon? {done:?}"),
        () = until("some bytes came", || peek.byte(100_000) == expected[100_000] && peek.byte(100_001) == expected[100_001]) => {}
    }
    ends_for_good(&mut child, &dir, &offer, &target, &peek).await;
}

/// Pushes slowly; gives the pin and the source.
async fn pusher(dir: &Path, offer: &Offer) -> (Node, Box<dyn Pinned>, Vec<u8>, Memory) {
    let mut options = NetworkOptions::default();
    options.tcp.send_rate = Some(ByteCount(RATE));
    let node = Node::start_with(dir, options).await;
    let pinned = pinned(&node, offer).await;
    let source = support::bulk(LEN);
    let memory = Borrowed::from(source.clone()).into();
    (node, pinned, source, memory)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_push_writes_all_or_nothing() {
    let (_parent, dir) = run_dir();
    let zeros = support::fingerprint(&vec![0; LEN]);
    for (stop, millis) in [(true, 500), (false, 500), (false, 60_000)] {
        let (mut child, offer) = Child::sink(&dir, LEN).await;
        let (node, pinned, source, memory) = pusher(&dir, &offer).await;
        let options = TransferOptions {
            deadline: Some(Duration::from_millis(millis)),
        };
        let under_way = async {
            until("the push is under way", || {
                node.transport("tcp").stats().in_flight_bytes > 0
            })
            .await;
            if stop {
                child.stop().await;
            }
        };
        let (pushed, ()) = tokio::join!(pinned.push(&[WHOLE], &memory, options), under_way);
        if stop {
            child.go_on();
        }
        drop(pinned);
        if millis < 1000 {
            let error = pushed.expect_err("there was too little time");
            assert_eq!(error.reason(), "transfer.deadline", "{error}");
            assert_eq!(child.pushed().await, zeros, "part of a push was written");
        } else {
            pushed.expect("pushed");
            assert_eq!(
                child.pushed().await,
                support::fingerprint(&source),
                "other bytes were written"
            );
        }
    }
}

/// SIGKILL of the owner in the middle of a push: known within a second, and not in doubt.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_owner_dies_during_a_push() {
    let (_parent, dir) = run_dir();
    let (mut child, offer) = Child::sink(&dir, LEN).await;
    let (node, pinned, _, memory) = pusher(&dir, &offer).await;
    let kill = async {
        until("the push is under way", || {
            node.transport("tcp").stats().in_flight_bytes > 0
        })
        .await;
        child.kill();
        Instant::now()
    };
    let (pushed, killed) = tokio::join!(pinned.push(&[WHOLE], &memory, TransferOptions::default()), kill);
    let error = pushed.expect_err("it died");
    assert_eq!(error.reason(), "peer.lost", "{error}");
    assert!(
        killed.elapsed() <= Duration::from_secs(1),
        "noticed after {:?}",
        killed.elapsed()
    );
}

/// Everything that needs the owner ends by its deadline while it stands still, and works again when it goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_producer_that_stops_is_noticed_by_the_deadline() {
    let (_parent, dir) = run_dir();
    let node = Node::start(&dir).await;
    let (child, offer) = Child::producer(&dir, "tcp", LEN).await;
    let remote = node.transport("tcp").connect(&offer.0, ConnectOptions::default()).await;
    let remote = remote.expect("connected");
    let pinned = remote.pin(&offer.1, TransferOptions::default()).await.expect("pinned");
    let mut target = Target::allocate(LEN as u64).expect("memory");
    let short = TransferOptions {
        deadline: Some(Duration::from_millis(200)),
    };
    child.stop().await;
    let begun = Instant::now();
    let errors = [
        remote.pin(&offer.1, short.clone()).await.expect_err("it stands still"),
        pinned
            .pull(&[WHOLE], &target, short)
            .await
            .expect_err("it stands still"),
    ];
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    for error in errors {
        assert_eq!(error.reason(), "transfer.deadline", "{error}");
        assert!(error.to_string().contains("200ms"), "{error}");
    }
    assert!(remote.is_alive(), "a stopped process is not dead");
    assert!(target.is_idle() && target.slice(0..1).is_err(), "it counts as written");
    child.go_on();
    target.reset().expect("idle");
    let pulled = pinned.pull(&[WHOLE], &target, TransferOptions::default()).await;
    pulled.expect("it goes on");
    assert!(target.as_slice().expect("pulled") == support::bulk(LEN), "other bytes");
}
