//! What the other processes do.

use std::collections::HashMap;
use std::io::{self, BufRead};
use std::thread;
use std::time::Duration;

use stagewire_core::{Classify, Record};
use stagewire_transfer::{ConnectOptions, Pinned, Region, RegisterOptions, Remote, Target, TransferOptions};

use super::{End, pin, seeded, side};
use crate::child::{ARGUMENT, Child, DIR, Offer, TRANSPORT, argument, cpu_time, from_hex, say, to_hex};

pub(crate) const OWNER: &str = "side-owner";
pub(crate) const READER: &str = "side-reader";

/// When an owner releases a region that it registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Release {
    /// Before anybody hears of it.
    AtOnce,
    /// So long after it has told its reference.
    After(Duration),
    /// When it is asked to.
    WhenAsked,
}

/// A process that owns regions.
pub(super) struct Owner(pub(super) Child);

impl Owner {
    pub(super) fn start(end: &End) -> Self {
        Self(Child::spawn(OWNER, &end.dir, end.name, ""))
    }

    /// Has it register [`seeded`] bytes.
    pub(super) async fn register(&mut self, seed: usize, len: usize, release: Release) -> Offer {
        let release = match release {
            Release::AtOnce => "at-once".to_owned(),
            Release::After(time) => time.as_micros().to_string(),
            Release::WhenAsked => "when-asked".to_owned(),
        };
        self.0.ask(&format!("register {seed} {len} {release}")).await
    }

    pub(super) async fn release(&mut self, region: u64) {
        self.0.ask::<()>(&format!("release {region}")).await;
    }

    /// Waits until it owns no memory of a region any more.
    pub(super) async fn owns_nothing(&mut self) {
        let limit = tokio::time::Instant::now() + Duration::from_secs(20);
        loop {
            let regions: u64 = self.0.ask("regions").await;
            if regions == 0 {
                return;
            }
            assert!(
                tokio::time::Instant::now() < limit,
                "it still has the memory of {regions} regions"
            );
        }
    }
}

pub(crate) async fn own() {
    let side = side(&argument(TRANSPORT), argument(DIR).as_ref()).await;
    let serve = move || {
        let mut kept: HashMap<u64, Region> = HashMap::new();
        for line in io::stdin().lock().lines() {
            let line = line.expect("text");
            let words: Vec<&str> = line.split(' ').collect();
            let number = |at: usize| words[at].parse::<usize>().expect("a number");
            match words[0] {
                "register" => {
                    let memory = (side.memory)(&seeded(number(1), number(2)));
                    let region = side.transport.register(memory, RegisterOptions::default());
                    let region = region.expect("registered");
                    let offer = (side.peer.clone(), region.reference());
                    match words[3] {
                        "at-once" => drop(region),
                        "when-asked" => drop(kept.insert(offer.1.region, region)),
                        _ => {
                            let time = Duration::from_micros(number(3) as u64);
                            thread::spawn(move || {
                                thread::sleep(time);
                                drop(region);
                            });
                        }
                    }
                    say(&offer);
                }
                "release" => {
                    kept.remove(&(number(1) as u64)).expect("registered");
                    say(&());
                }
                "regions" => say(&(side.regions)()),
                other => panic!("no command {other}"),
            }
        }
    };
    tokio::task::spawn_blocking(serve).await.expect("no panic");
}

/// A process that has a region of another one pinned.
pub(super) struct Reader(pub(super) Child);

impl Reader {
    pub(super) async fn start(end: &End, offer: &Offer) -> Self {
        let mut child = Child::spawn(READER, &end.dir, end.name, &to_hex(offer));
        child.receive::<()>().await;
        Self(child)
    }

    /// Has it read everything, which must be [`seeded`] bytes.
    pub(super) async fn reads(&mut self, seed: usize) {
        let exact: bool = self.0.ask(&format!("read {seed}")).await;
        assert!(exact, "other bytes");
    }

    /// Has it read on and on, until it dies.
    pub(super) async fn reads_on(&mut self) {
        self.0.ask::<()>("read-on").await;
    }

    /// Reason of the error with which it cannot pin another region.
    pub(super) async fn refused(&mut self, offer: &Offer) -> Option<String> {
        self.0.ask(&format!("pin {}", to_hex(offer))).await
    }

    /// Has it wait three seconds for an owner that stands still; tells the reason of the error, and the CPU that it took.
    pub(super) async fn waits(&mut self) -> (Option<String>, Duration) {
        self.0.ask("wait").await
    }
}

pub(crate) async fn read() {
    let side = side(&argument(TRANSPORT), argument(DIR).as_ref()).await;
    let (peer, region): Offer = from_hex(&argument(ARGUMENT));
    let remote = side.transport.connect(&peer, ConnectOptions::default()).await;
    let remote = remote.expect("connected");
    let pinned = pin(&*remote, &region).await;
    let (said, mut lines) = tokio::sync::mpsc::unbounded_channel();
    thread::spawn(move || {
        for line in io::stdin().lock().lines() {
            if said.send(line.expect("text")).is_err() {
                return;
            }
        }
    });
    say(&());
    while let Some(line) = lines.recv().await {
        match line.split_once(' ').unwrap_or((&line, "")) {
            ("read", seed) => {
                let expected = seeded(seed.parse().expect("a number"), pinned.len() as usize);
                let mut target = Target::allocate(pinned.len()).expect("memory");
                pull(&*pinned, &mut target, None).await.expect("pulled");
                say(&(target.as_slice().expect("pulled") == expected));
            }
            ("read-on", _) => {
                let mut target = Target::allocate(pinned.len()).expect("memory");
                pull(&*pinned, &mut target, None).await.expect("pulled");
                say(&());
                loop {
                    pull(&*pinned, &mut target, None).await.expect("pulled");
                }
            }
            ("pin", offer) => {
                let (_, region): Offer = from_hex(offer);
                let pinned = remote.pin(&region, TransferOptions::default()).await;
                say(&pinned.err().map(|error| error.reason().to_owned()));
            }
            ("wait", _) => say(&wait(&*remote, &*pinned, &region).await),
            other => panic!("no command {other:?}"),
        }
    }
}

/// Everything, anew.
async fn pull(
    pinned: &dyn Pinned,
    target: &mut Target,
    deadline: Option<Duration>,
) -> Result<(), stagewire_transfer::TransferError> {
    target.reset().expect("idle");
    let whole = [Record::contiguous(0, 0, pinned.len())];
    pinned.pull(&whole, target, TransferOptions { deadline }).await
}

/// For the bytes, or where those come without the owner, for another pin.
async fn wait(
    remote: &dyn Remote,
    pinned: &dyn Pinned,
    region: &stagewire_core::RegionRef,
) -> (Option<String>, Duration) {
    let mut target = Target::allocate(pinned.len()).expect("memory");
    let deadline = Some(Duration::from_secs(3));
    let before = cpu_time();
    let mut waited = pull(pinned, &mut target, deadline).await;
    let mut took = cpu_time() - before;
    if waited.is_ok() {
        let before = cpu_time();
        waited = remote.pin(region, TransferOptions { deadline }).await.map(drop);
        took = cpu_time() - before;
    }
    (waited.err().map(|error| error.reason().to_owned()), took)
}
