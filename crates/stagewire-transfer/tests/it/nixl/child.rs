//! What other processes do with NIXL.

use std::io::{self, BufRead};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use stagewire_core::{Classify, Incarnation, Record};
use stagewire_transfer::{
    Borrowed, ConnectOptions, Memory, Region, RegisterOptions, Target, TransferOptions, Transport, Writable,
};
use uuid::Uuid;

use super::End;
use crate::child::{Child, DIR, INCARNATION, Offer, argument, from_hex, say};
use crate::support;

/// An owner of [`support::bulk`].
pub(crate) const READABLE: &str = "nixl-readable";
/// An owner of zeros that others may write.
pub(crate) const WRITABLE: &str = "nixl-writable";
pub(crate) const READER: &str = "nixl-reader";

/// What a child is started with.
#[derive(Debug, Clone, Default)]
pub(crate) struct Options {
    /// An owner's region is [`WRITABLE`] instead of [`READABLE`].
    pub(crate) writable: bool,
    /// The transports that UCX may use; all where none are named.
    pub(crate) tls: Option<&'static str>,
    /// The library, where it is not that of the other tests.
    pub(crate) library: Option<PathBuf>,
    /// Which life of a process it is; a new one where none is named.
    pub(crate) incarnation: Option<Incarnation>,
}

impl Options {
    fn spawn(&self, role: &str, dir: &Path) -> Child {
        let incarnation = self.incarnation.unwrap_or_else(|| Incarnation(Uuid::new_v4()));
        let library = self.library.as_ref().map(|library| library.display().to_string());
        let extra = [
            (INCARNATION, Some(incarnation.0.to_string())),
            (super::LIBRARY, library),
            ("UCX_TLS", self.tls.map(str::to_owned)),
        ];
        let extra = extra.into_iter().filter_map(|(name, value)| Some((name, value?)));
        Child::spawn_with(role, dir, "nixl", "", extra)
    }

    /// An owner of one region of so many bytes.
    pub(crate) async fn owner(&self, dir: &Path, len: usize) -> (Child, Offer) {
        let mut owner = self.spawn(if self.writable { WRITABLE } else { READABLE }, dir);
        let offer = owner.ask(&format!("register {len}")).await;
        (owner, offer)
    }

    /// A process that reads from others.
    pub(crate) fn reader(&self, dir: &Path) -> Child {
        self.spawn(READER, dir)
    }
}

/// The digest of an owner's writable memory, once nobody else may write it.
pub(crate) async fn bytes(owner: &mut Child) -> u64 {
    let limit = Instant::now() + Duration::from_secs(20);
    loop {
        if let Some(digest) = owner.ask("bytes").await {
            return digest;
        }
        assert!(Instant::now() < limit, "its memory is not given back");
    }
}

/// Waits until an owner has so many registrations.
pub(crate) async fn registrations_become(owner: &mut Child, expected: u64) {
    let limit = Instant::now() + Duration::from_secs(20);
    loop {
        let found: u64 = owner.ask("registrations").await;
        if found == expected {
            return;
        }
        assert!(Instant::now() < limit, "{found} registrations, expected {expected}");
    }
}

/// This process's end, as its parent wants it.
async fn start() -> End {
    let incarnation = argument(INCARNATION).parse().expect("a UUID");
    End::start_as(argument(DIR).as_ref(), Incarnation(incarnation)).await
}

pub(crate) async fn own(writable: bool) {
    let end = start().await;
    let serve = move || {
        let mut region: Option<Region> = None;
        let mut memory: Option<Writable> = None;
        for line in io::stdin().lock().lines() {
            let line = line.expect("text");
            match line.split_once(' ').unwrap_or((&line, "")) {
                ("register", len) => {
                    let len: usize = len.parse().expect("a length");
                    let registered: Memory = if writable {
                        let fresh = Writable::allocate(len as u64).expect("memory");
                        memory = Some(fresh.clone());
                        fresh.into()
                    } else {
                        Borrowed::from(support::bulk(len)).into()
                    };
                    let made = end
                        .nixl
                        .register(registered, RegisterOptions::default())
                        .expect("registered");
                    say(&(end.peer(), made.reference()));
                    region = Some(made);
                }
                // Why the same memory cannot be registered again, if so.
                ("register-again", _) => {
                    let again = memory.clone().expect("writable").into();
                    let again = end.nixl.register(again, RegisterOptions::default());
                    say(&again.err().map(|error| error.reason().to_owned()));
                }
                ("release", _) => {
                    region = None;
                    say(&());
                }
                ("registrations", _) => say(&end.nixl.registrations()),
                // Their digest, once nobody else may write them.
                ("bytes", _) => {
                    let bytes = memory.as_mut().and_then(Writable::bytes);
                    say(&bytes.map(xxhash_rust::xxh3::xxh3_64));
                }
                other => panic!("no command {other:?}"),
            }
        }
        drop(region);
    };
    tokio::task::spawn_blocking(serve).await.expect("no panic");
}

pub(crate) async fn read() {
    let end = start().await;
    let (said, mut lines) = tokio::sync::mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for line in io::stdin().lock().lines() {
            if said.send(line.expect("text")).is_err() {
                return;
            }
        }
    });
    let mut held = Vec::new();
    while let Some(line) = lines.recv().await {
        let Some((command, offer)) = line.split_once(' ') else {
            panic!("no command {line}");
        };
        let (peer, region): Offer = from_hex(offer);
        let remote = end
            .nixl
            .connect(&peer, ConnectOptions::default())
            .await
            .expect("connected");
        let pinned = remote.pin(&region, TransferOptions::default()).await.expect("pinned");
        let target = Target::allocate(region.len).expect("memory");
        let whole = [Record::contiguous(0, 0, region.len)];
        match command {
            // Pulls once, and holds the pin.
            "pull" => {
                let pulled = pinned.pull(&whole, &target, TransferOptions::default()).await;
                pulled.expect("pulled");
                held.push(pinned);
                say(&());
            }
            // Waits three seconds for a pull that does not end, and says what that cost the thread of `nixl`.
            "block" => {
                // Connecting is no part of it.
                let first = Target::allocate(1).expect("memory");
                let pulled = pinned
                    .pull(&[Record::contiguous(0, 0, 1)], &first, TransferOptions::default())
                    .await;
                pulled.expect("pulled");
                say(&());
                // The parent has stopped the owner.
                lines.recv().await.expect("the parent goes on");
                let before = worker_time();
                let deadline = Some(Duration::from_secs(3));
                let pull = pinned.pull(&whole, &target, TransferOptions { deadline });
                let begun = async {
                    let stats = || end.nixl.stats();
                    support::until("bytes are in flight", || {
                        stats().in_flight_bytes > 0 || stats().pulls > 1
                    })
                    .await;
                    say(&());
                };
                let (pulled, ()) = tokio::join!(pull, begun);
                let cost = worker_time() - before;
                say(&(pulled.map_err(|error| error.reason().to_owned()), cost));
            }
            other => panic!("no command {other}"),
        }
    }
}

/// Time on a processor of the thread that moves bytes.
fn worker_time() -> Duration {
    let tasks = std::fs::read_dir("/proc/self/task").expect("threads");
    let worker = tasks.flatten().find(|task| {
        let name = std::fs::read_to_string(task.path().join("comm"));
        name.is_ok_and(|name| name.trim() == "stagewire-nixl")
    });
    let path = worker.expect("it runs").path().join("schedstat");
    let times = std::fs::read_to_string(path).expect("a schedstat");
    let nanoseconds = times.split(' ').next().expect("a number").parse().expect("a number");
    Duration::from_nanos(nanoseconds)
}
