//! Other processes: this very test binary, started again to run [`entry`] alone.

use std::env;
use std::io::{self, BufRead, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;
use serde::de::DeserializeOwned;
use stagewire_core::{ByteCount, Classify, Incarnation, Peer, Record, RegionRef};
use stagewire_transfer::{
    ConnectOptions, HostStats, Memory, NetworkOptions, Pinned, RegisterOptions, Target, TransferOptions, Writable,
};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{ChildStdin, ChildStdout, Command};
use tokio::time::timeout;
use uuid::Uuid;

use crate::nixl;
use crate::processes;
use crate::support::{self, Node};

const ROLE: &str = "STAGEWIRE_TEST_ROLE";
pub(crate) const DIR: &str = "STAGEWIRE_TEST_DIR";
pub(crate) const TRANSPORT: &str = "STAGEWIRE_TEST_TRANSPORT";
pub(crate) const ARGUMENT: &str = "STAGEWIRE_TEST_ARGUMENT";
const PORT: &str = "STAGEWIRE_TEST_PORT";
const RATE: &str = "STAGEWIRE_TEST_RATE";

/// Which life of a process a child is.
pub(crate) const INCARNATION: &str = "STAGEWIRE_TEST_INCARNATION";

/// Marks a line of a child that is meant for its parent.
const MARK: &str = "@@";

/// What a producer says when it is ready.
pub(crate) type Offer = (Peer, RegionRef);

/// A child process. Dropped, it is killed.
pub(crate) struct Child {
    process: tokio::process::Child,
    stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
    pid: Pid,
}

impl Child {
    /// A producer of one region with [`support::bulk`] of so many bytes.
    pub(crate) async fn producer(dir: &Path, transport: &str, len: usize) -> (Self, Offer) {
        let mut child = Self::spawn("producer", dir, transport, &len.to_string());
        let offer = child.receive().await;
        (child, offer)
    }

    /// A producer that is this life of its process.
    pub(crate) async fn producer_as(
        dir: &Path,
        incarnation: Incarnation,
        transport: &str,
        len: usize,
    ) -> (Self, Offer) {
        let extra = [(INCARNATION, incarnation.0.to_string())];
        let mut child = Self::spawn_with("producer", dir, transport, &len.to_string(), extra);
        let offer = child.receive().await;
        (child, offer)
    }

    /// A producer that listens at this port (0: any), and sends so many bytes per second over `tcp`.
    pub(crate) async fn slow_producer(dir: &Path, port: u16, rate: Option<u64>, len: usize) -> (Self, Offer) {
        let rate = rate.map_or(String::new(), |rate| rate.to_string());
        let extra = [(PORT, port.to_string()), (RATE, rate)];
        let mut child = Self::spawn_with("producer", dir, "tcp", &len.to_string(), extra);
        let offer = child.receive().await;
        (child, offer)
    }

    /// A process with one region of zeros that may be pushed into over `tcp`.
    pub(crate) async fn sink(dir: &Path, len: usize) -> (Self, Offer) {
        let mut child = Self::spawn("sink", dir, "tcp", &len.to_string());
        let offer = child.receive().await;
        (child, offer)
    }

    /// Has a sink release its region, and tells what is in it once nobody can write there any more, as
    /// [`support::fingerprint`].
    pub(crate) async fn pushed(&mut self) -> u64 {
        self.ask("pushed").await
    }

    /// Has a reader over `tcp` pull everything with this deadline; tells the reason of its error, if any.
    pub(crate) async fn pull_within(&mut self, deadline: Duration) -> Option<String> {
        self.ask(&format!("pull {}", deadline.as_millis())).await
    }

    /// A reader that holds a pin, and a mapping where the transport has them.
    pub(crate) async fn reader(dir: &Path, transport: &str, offer: &Offer) -> Self {
        let mut child = Self::spawn("reader", dir, transport, &to_hex(offer));
        child.receive::<()>().await;
        child
    }

    pub(crate) fn spawn(role: &str, dir: &Path, transport: &str, argument: &str) -> Self {
        Self::spawn_with(role, dir, transport, argument, [])
    }

    pub(crate) fn spawn_with(
        role: &str,
        dir: &Path,
        transport: &str,
        argument: &str,
        extra: impl IntoIterator<Item = (&'static str, String)>,
    ) -> Self {
        let mut process = Command::new(env::current_exe().expect("this binary"))
            .args(["--exact", "child::entry", "--nocapture"])
            .env(ROLE, role)
            .env(DIR, dir)
            .env(TRANSPORT, transport)
            .env(ARGUMENT, argument)
            .envs(extra)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("the child starts");
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
        let line = format!("{command}\n");
        self.stdin.write_all(line.as_bytes()).await.expect("it listens");
        self.receive().await
    }

    /// What it says next.
    pub(crate) async fn receive<T: DeserializeOwned>(&mut self) -> T {
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

    /// Its pins and regions: `(pins_held, regions, allocated_bytes)`.
    pub(crate) async fn holds(&mut self) -> (u64, u64, u64) {
        self.ask("holds").await
    }

    /// Waits until it holds so much.
    pub(crate) async fn holds_become(&mut self, expected: (u64, u64, u64)) {
        let mut found = self.holds().await;
        let limit = tokio::time::Instant::now() + Duration::from_secs(10);
        while found != expected {
            assert!(
                tokio::time::Instant::now() < limit,
                "it holds {found:?}, expected {expected:?}"
            );
            found = self.holds().await;
        }
    }

    /// Has it fork. The fork does nothing but keep open what its parent had.
    pub(crate) async fn fork(&mut self) -> Fork {
        let pid: i32 = self.ask("fork").await;
        Fork(Pid::from_raw(pid).expect("pids are positive"))
    }

    /// Has it execute another program, as the same process.
    pub(crate) async fn execute(&mut self) {
        self.stdin.write_all(b"execute\n").await.expect("it listens");
        let program = format!("/proc/{}/comm", self.pid);
        support::until("another program runs", || {
            std::fs::read_to_string(&program).is_ok_and(|name| name.trim() == "sleep")
        })
        .await;
    }

    /// Has it take the second half of its region away from everybody, which is borrowed memory.
    pub(crate) async fn hide(&mut self) {
        self.ask::<()>("hide").await;
    }

    /// Releases its region.
    pub(crate) async fn release(&mut self) {
        self.ask::<()>("release").await;
    }

    /// SIGKILL.
    pub(crate) fn kill(&mut self) {
        self.process.start_kill().expect("it runs");
    }

    /// Has it stop, and waits until it stands still.
    pub(crate) async fn stop(&self) {
        support::stop(self.pid).await;
    }

    pub(crate) fn go_on(&self) {
        support::go_on(self.pid);
    }

    /// Waits until it is gone.
    pub(crate) async fn gone(&mut self) {
        self.process.wait().await.expect("a child of this process");
    }
}

/// A fork of a child. Dropped, it is killed.
pub(crate) struct Fork(Pid);

impl Drop for Fork {
    fn drop(&mut self) {
        kill_process(self.0, Signal::KILL).expect("nobody else ends it");
    }
}

pub(crate) fn to_hex<T: Serialize>(value: &T) -> String {
    let bytes = postcard::to_stdvec(value).expect("encodes");
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn from_hex<T: DeserializeOwned>(text: &str) -> T {
    let digits = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).expect("hexadecimal");
    let bytes: Vec<u8> = (0..text.len()).step_by(2).map(digits).collect();
    postcard::from_bytes(&bytes).expect("decodes")
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
    let runtime = runtime.expect("a runtime");
    runtime.block_on(async {
        match role.as_str() {
            "producer" => produce().await,
            "reader" => read().await,
            "sink" => sink().await,
            nixl::child::READABLE | nixl::child::WRITABLE => nixl::child::own(role == nixl::child::WRITABLE).await,
            nixl::child::READER => nixl::child::read().await,
            processes::child::OWNER => processes::child::own().await,
            processes::child::READER => processes::child::read().await,
            other => panic!("no role {other}"),
        }
    });
}

pub(crate) fn argument(name: &str) -> String {
    env::var(name).expect("set by the parent")
}

pub(crate) fn say<T: Serialize>(value: &T) {
    let mut stdout = io::stdout();
    writeln!(stdout, "\n{MARK}{}", to_hex(value))
        .and_then(|()| stdout.flush())
        .expect("the parent reads");
}

async fn produce() {
    let (dir, transport) = (argument(DIR), argument(TRANSPORT));
    let mut options = NetworkOptions::default();
    let number = |name| env::var(name).ok()?.parse::<u64>().ok();
    options
        .bind
        .set_port(number(PORT).map_or(0, |port| port.try_into().expect("a port")));
    options.tcp.send_rate = number(RATE).map(ByteCount);
    let incarnation = env::var(INCARNATION).map_or_else(|_| Uuid::new_v4(), |text| text.parse().expect("a UUID"));
    let host = Node::start_as(dir.as_ref(), Incarnation(incarnation), options).await;
    let bytes = support::bulk(argument(ARGUMENT).parse().expect("a length"));
    let memory = support::memory(&host, &transport, &bytes);
    let address = match &memory {
        Memory::Borrowed(borrowed) => borrowed.as_ptr().addr().get(),
        _ => 0,
    };
    let register = host.transport(&transport).register(memory, RegisterOptions::default());
    let mut region = Some(register.expect("registered"));
    let reference = region
        .as_ref()
        .map(stagewire_transfer::Region::reference)
        .expect("just registered");
    say(&(host.peer(), reference));
    tokio::task::spawn_blocking(move || {
        for line in io::stdin().lock().lines() {
            match line.expect("text").as_str() {
                "holds" => {
                    let HostStats {
                        pins_held,
                        regions,
                        allocated_bytes,
                        ..
                    } = host.stats();
                    say(&(pins_held, regions, allocated_bytes));
                }
                "fork" => fork(),
                "execute" => {
                    let error = std::process::Command::new("sleep").arg("60").exec();
                    panic!("sleep does not start: {error}");
                }
                "release" => {
                    region = None;
                    say(&());
                }
                "hide" => {
                    hide(address, bytes.len() / 2);
                    say(&());
                }
                other => panic!("no command {other}"),
            }
        }
        drop(region);
    })
    .await
    .expect("no panic");
}

/// Lets nobody read memory from so many bytes behind this address on, for as long again, to whole pages.
#[expect(unsafe_code, reason = "breaks a promise about memory")]
fn hide(address: usize, half: usize) {
    let page = rustix::param::page_size();
    let begin = std::ptr::with_exposed_provenance_mut((address + half).next_multiple_of(page));
    // SAFETY: pages in the middle of memory that nobody uses in this process any more.
    let hidden = unsafe { libc::mprotect(begin, half / page * page - page, libc::PROT_NONE) };
    assert_eq!(hidden, 0, "{}", io::Error::last_os_error());
}

/// Forks, and tells the parent who the fork is.
#[expect(unsafe_code, reason = "there is no safe fork")]
fn fork() {
    // SAFETY: the fork calls nothing but `alarm` and `pause`, which are allowed between fork and exec.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // SAFETY: has the fork end by itself where nobody else ends it.
        unsafe { libc::alarm(60) };
        loop {
            // SAFETY: waits for a signal and touches no memory.
            unsafe { libc::pause() };
        }
    }
    say(&pid);
}

async fn read() {
    let (dir, transport) = (argument(DIR), argument(TRANSPORT));
    let (peer, region): Offer = from_hex(&argument(ARGUMENT));
    let host = Node::start(dir.as_ref()).await;
    let transport = host.transport(&transport);
    let remote = transport
        .connect(&peer, ConnectOptions::default())
        .await
        .expect("connected");
    let pinned: Box<dyn Pinned> = remote.pin(&region, TransferOptions::default()).await.expect("pinned");
    let mapping = pinned.map().await;
    assert_eq!(mapping.is_ok(), transport.abilities().map);
    let (commands, mut pulls) = tokio::sync::mpsc::unbounded_channel();
    let listening = tokio::task::spawn_blocking(move || {
        for line in io::stdin().lock().lines() {
            match line.expect("text").as_str().split_once(' ') {
                None => fork(),
                Some((_, millis)) => {
                    let deadline = Duration::from_millis(millis.parse().expect("milliseconds"));
                    commands.send(deadline).expect("somebody pulls");
                }
            }
        }
    });
    say(&());
    while let Some(deadline) = pulls.recv().await {
        say(&pull(&*pinned, deadline).await);
    }
    listening.await.expect("no panic");
    drop(mapping);
}

/// Reason of the error.
async fn pull(pinned: &dyn Pinned, deadline: Duration) -> Option<String> {
    let target = Target::allocate(pinned.len()).expect("memory");
    let options = TransferOptions {
        deadline: Some(deadline),
    };
    let whole = [Record::contiguous(0, 0, pinned.len())];
    let pulled = pinned.pull(&whole, &target, options).await;
    pulled.err().map(|error| error.reason().to_owned())
}

/// CPU that this process took so far, in all its threads.
pub(crate) fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

async fn sink() {
    let dir = argument(DIR);
    let host = Node::start(dir.as_ref()).await;
    let len = argument(ARGUMENT).parse().expect("a length");
    let mut memory = Writable::allocate(len).expect("memory");
    let registered = host
        .transport("tcp")
        .register(memory.clone().into(), RegisterOptions::default());
    let mut region = Some(registered.expect("registered"));
    let reference = region.as_ref().expect("just registered").reference();
    say(&(host.peer(), reference));
    tokio::task::spawn_blocking(move || {
        for line in io::stdin().lock().lines() {
            assert_eq!(line.expect("text"), "pushed");
            region = None;
            let limit = std::time::Instant::now() + Duration::from_secs(10);
            while memory.bytes().is_none() {
                assert!(std::time::Instant::now() < limit, "somebody still holds the memory");
                std::thread::yield_now();
            }
            say(&support::fingerprint(memory.bytes().expect("just seen")));
        }
        drop((region, host));
    })
    .await
    .expect("no panic");
}
