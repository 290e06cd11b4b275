//! Other processes with NIXL: this very test binary, started again to run [`entry`] alone.

use std::env;
use std::io::{self, BufRead, Write};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;
use serde::de::DeserializeOwned;
use stagewire_core::{Classify, Incarnation, Peer, Record, RegionRef};
use stagewire_transfer::{
    Borrowed, ConnectOptions, Memory, Region, RegisterOptions, Target, TransferOptions, Transport, Writable,
};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{ChildStdin, ChildStdout, Command};
use tokio::time::timeout;
use uuid::Uuid;

use super::End;
use crate::child::{from_hex, to_hex};
use crate::support;

const ROLE: &str = "STAGEWIRE_NIXL_ROLE";
const DIR: &str = "STAGEWIRE_NIXL_DIR";
const INCARNATION: &str = "STAGEWIRE_NIXL_INCARNATION";

/// Marks a line of a child that is meant for its parent.
const MARK: &str = "@@";

/// How an owner is reached, and what it has registered.
pub(crate) type Offer = (Peer, RegionRef);

/// Another process. Dropped, it is killed.
pub(crate) struct Child {
    process: tokio::process::Child,
    stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
    pid: Pid,
}

/// What a child is started with.
#[derive(Debug, Clone, Default)]
pub(crate) struct Options {
    /// Its region is all zeros and writable, instead of [`support::bulk`].
    pub(crate) writable: bool,
    /// The transports that UCX may use; all where none are named.
    pub(crate) tls: Option<&'static str>,
    /// The library, where it is not that of the other tests.
    pub(crate) library: Option<PathBuf>,
    /// Which life of a process it is; a new one where none is named.
    pub(crate) incarnation: Option<Incarnation>,
}

impl Child {
    /// An owner of one region of so many bytes.
    pub(crate) async fn owner(dir: &Path, len: usize, options: &Options) -> (Self, Offer) {
        let role = if options.writable { "writable" } else { "readable" };
        let mut owner = Self::spawn(role, dir, options);
        let offer = owner.ask(&format!("register {len}")).await;
        (owner, offer)
    }

    /// A process that reads from others.
    pub(crate) fn reader(dir: &Path, options: &Options) -> Self {
        Self::spawn("reader", dir, options)
    }

    fn spawn(role: &str, dir: &Path, options: &Options) -> Self {
        let incarnation = options.incarnation.unwrap_or_else(|| Incarnation(Uuid::new_v4()));
        let mut process = Command::new(env::current_exe().expect("this binary"));
        process
            .args(["--exact", "nixl::child::entry", "--nocapture"])
            .env(ROLE, role)
            .env(DIR, dir)
            .env(INCARNATION, incarnation.0.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true);
        if let Some(library) = &options.library {
            process.env(super::LIBRARY, library);
        }
        if let Some(tls) = options.tls {
            process.env("UCX_TLS", tls);
        }
        let mut process = process.spawn().expect("the child starts");
        let pid = process.id().expect("it runs").try_into().expect("pids are positive");
        Self {
            pid: Pid::from_raw(pid).expect("pids are positive"),
            stdin: process.stdin.take().expect("piped"),
            lines: BufReader::new(process.stdout.take().expect("piped")).lines(),
            process,
        }
    }

    /// Has it do something, and gives its answer.
    pub(crate) async fn ask<T: DeserializeOwned>(&mut self, command: &str) -> T {
        self.tell(command).await;
        self.answer().await
    }

    /// Has the pull of a reader begin that was told to block, and waits until its bytes are in flight.
    pub(crate) async fn begin(&mut self, command: &str) {
        self.tell(command).await;
        self.answer::<()>().await;
    }

    async fn tell(&mut self, command: &str) {
        let line = format!("{command}\n");
        self.stdin.write_all(line.as_bytes()).await.expect("it listens");
    }

    pub(crate) async fn answer<T: DeserializeOwned>(&mut self) -> T {
        let marked = async {
            while let Some(line) = self.lines.next_line().await.expect("its output") {
                if let Some((_, text)) = line.split_once(MARK) {
                    return from_hex(text);
                }
            }
            panic!("the child ended without a word");
        };
        timeout(Duration::from_secs(60), marked)
            .await
            .expect("the child answers")
    }

    /// SIGKILL.
    pub(crate) fn kill(&mut self) {
        self.process.start_kill().expect("it runs");
    }

    /// SIGSTOP, and waits until it stands still.
    pub(crate) async fn stop(&self) {
        kill_process(self.pid, Signal::STOP).expect("it runs");
        let stat = format!("/proc/{}/stat", self.pid);
        support::until("the child stands still", || {
            std::fs::read_to_string(&stat).is_ok_and(|stat| stat.contains(") T "))
        })
        .await;
    }

    pub(crate) fn go_on(&self) {
        kill_process(self.pid, Signal::CONT).expect("it runs");
    }

    /// Waits until it is gone.
    pub(crate) async fn gone(&mut self) {
        self.process.wait().await.expect("a child of this process");
    }

    /// The digest of its writable memory, once nobody else may write it.
    pub(crate) async fn bytes(&mut self) -> u64 {
        let limit = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some(digest) = self.ask("bytes").await {
                return digest;
            }
            assert!(Instant::now() < limit, "its memory is not given back");
        }
    }

    /// Waits until it has so many registrations.
    pub(crate) async fn registrations_become(&mut self, expected: u64) {
        let limit = Instant::now() + Duration::from_secs(20);
        loop {
            let found: u64 = self.ask("registrations").await;
            if found == expected {
                return;
            }
            assert!(Instant::now() < limit, "{found} registrations, expected {expected}");
        }
    }
}

/// Not a test: what a child does. Does nothing where no parent asked for it.
#[test]
fn entry() {
    let Ok(role) = env::var(ROLE) else {
        return;
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    runtime.expect("a runtime").block_on(async {
        let (dir, incarnation) = (env::var_os(DIR), env::var(INCARNATION));
        let incarnation = incarnation.expect("set by the parent").parse().expect("a UUID");
        let dir = dir.expect("set by the parent");
        let end = End::start_as(dir.as_ref(), Incarnation(incarnation)).await;
        match role.as_str() {
            "reader" => read(end).await,
            role => own(end, role == "writable").await,
        }
    });
}

fn say<T: Serialize>(value: &T) {
    let mut stdout = io::stdout();
    writeln!(stdout, "\n{MARK}{}", to_hex(value))
        .and_then(|()| stdout.flush())
        .expect("the parent reads");
}

async fn own(end: End, writable: bool) {
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

async fn read(end: End) {
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
