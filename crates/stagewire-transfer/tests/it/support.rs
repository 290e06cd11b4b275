use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use stagewire_core::{ByteCount, Incarnation, Peer};
use stagewire_transfer::{Borrowed, Host, HostOptions, Memory, Network, NetworkOptions, Transport};
use uuid::Uuid;

/// Bound of arenas in tests.
pub(crate) const ARENA: ByteCount = ByteCount(256 << 20);

/// A run directory that does not exist yet, inside one that goes with the first value.
pub(crate) fn run_dir() -> (tempfile::TempDir, PathBuf) {
    let parent = tempfile::tempdir().expect("a directory");
    let dir = parent.path().join("peers");
    (parent, dir)
}

pub(crate) async fn start(dir: &Path) -> Arc<Host> {
    start_as(dir, Incarnation(Uuid::new_v4())).await
}

async fn start_as(dir: &Path, incarnation: Incarnation) -> Arc<Host> {
    let options = HostOptions {
        dir: dir.to_owned(),
        incarnation,
        arena_limit: ARENA,
    };
    Host::start(options).await.expect("the host starts")
}

/// How a host is reached over all its transports.
pub(crate) fn peer(host: &Arc<Host>) -> Peer {
    let mut transports = vec![host.shm().address()];
    transports.extend(host.cma().ok().map(|cma| cma.address()));
    Peer {
        incarnation: host.incarnation(),
        process: host.process(),
        socket: String::new(),
        transports,
    }
}

/// `shm` or `cma`.
pub(crate) fn transport(host: &Arc<Host>, name: &str) -> Arc<dyn Transport> {
    match name {
        "shm" => host.shm(),
        "cma" => host.cma().expect("checked by cma_works"),
        other => panic!("no transport {other}"),
    }
}

/// A host, and how other hosts reach it.
#[derive(Clone)]
pub(crate) struct Node {
    host: Arc<Host>,
    network: Arc<Network>,
}

impl Deref for Node {
    type Target = Arc<Host>;

    fn deref(&self) -> &Arc<Host> {
        &self.host
    }
}

impl Node {
    pub(crate) async fn start(dir: &Path) -> Self {
        Self::start_with(dir, NetworkOptions::default()).await
    }

    pub(crate) async fn start_with(dir: &Path, options: NetworkOptions) -> Self {
        Self::start_as(dir, Incarnation(Uuid::new_v4()), options).await
    }

    pub(crate) async fn start_as(dir: &Path, incarnation: Incarnation, options: NetworkOptions) -> Self {
        let host = start_as(dir, incarnation).await;
        let network = Network::start(host.clone(), options).await.expect("it listens");
        Self { host, network }
    }

    pub(crate) fn network(&self) -> &Arc<Network> {
        &self.network
    }

    /// How it is reached over all its transports.
    pub(crate) fn peer(&self) -> Peer {
        let mut peer = peer(&self.host);
        peer.transports.push(self.network.tcp().address());
        peer
    }

    /// `tcp`, or one of [`transport`].
    pub(crate) fn transport(&self, name: &str) -> Arc<dyn Transport> {
        match name {
            "tcp" => self.network.tcp(),
            other => transport(&self.host, other),
        }
    }
}

/// Memory with these bytes that the transport can register.
pub(crate) fn memory(host: &Host, name: &str, bytes: &[u8]) -> Memory {
    if name != "shm" {
        return Borrowed::from(bytes.to_vec()).into();
    }
    let mut extent = host.arena().allocate(bytes.len() as u64).expect("the arena has room");
    extent.copy_from_slice(bytes);
    extent.freeze().into()
}

/// Whether this machine allows cma; says so where not.
#[expect(clippy::print_stderr, reason = "a skip must be visible")]
pub(crate) async fn cma_works(dir: &Path) -> bool {
    match start(dir).await.cma() {
        Ok(_) => true,
        Err(error) => {
            eprintln!("skipped: {error}");
            false
        }
    }
}

/// Says visibly that the wheels of the peers are missing, which fails the test where they are required.
#[expect(clippy::print_stderr, reason = "a skip must be visible")]
pub(crate) fn without_peers(why: &str) {
    let required = std::env::var_os("STAGEWIRE_REQUIRE_PEERS").is_some_and(|required| required == "1");
    assert!(
        !required,
        "STAGEWIRE_REQUIRE_PEERS is set, and {why}; `make peers` installs it"
    );
    eprintln!("skipped: {why}; `make peers` installs it");
}

/// Bytes that differ from offset to offset; quick to make also without optimisation.
pub(crate) fn bulk(len: usize) -> Vec<u8> {
    let mut state = 1_u32;
    let step = move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    let block: Vec<u8> = std::iter::repeat_with(step).take(65_521).collect();
    let mut bytes = Vec::with_capacity(len + block.len());
    while bytes.len() < len {
        let number = bytes.len() / block.len();
        bytes.extend_from_slice(&block);
        let at = bytes.len() - block.len();
        bytes[at..at + size_of::<usize>()].copy_from_slice(&number.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// For tests that cannot be asynchronous themselves; two workers, as the others have.
pub(crate) fn runtime() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(2).enable_all().build().expect("a runtime")
}

/// Has a process stop, and waits until all of its threads stand still.
pub(crate) async fn stop(pid: Pid) {
    kill_process(pid, Signal::STOP).expect("it runs");
    let tasks = format!("/proc/{pid}/task");
    until("the process stands still", || {
        let mut tasks = std::fs::read_dir(&tasks).expect("it runs");
        tasks.all(|task| {
            let stat = task.map(|task| std::fs::read_to_string(task.path().join("stat")).unwrap_or_default());
            stat.is_ok_and(|stat| stat.contains(") T "))
        })
    })
    .await;
}

/// Has a process that stopped go on.
pub(crate) fn go_on(pid: Pid) {
    kill_process(pid, Signal::CONT).expect("it runs");
}

/// A number that other bytes have not.
pub(crate) fn fingerprint(bytes: &[u8]) -> u64 {
    use std::hash::{DefaultHasher, Hasher};
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}

/// Waits until the condition holds.
pub(crate) async fn until(what: &str, condition: impl Fn() -> bool) {
    let reached = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let limit = Duration::from_secs(10);
    assert!(
        tokio::time::timeout(limit, reached).await.is_ok(),
        "not within {limit:?}: {what}"
    );
}

/// How often a race is run: `few` times, or `full` times where `make soak` asks for it.
pub(crate) fn rounds(few: usize, full: usize) -> usize {
    if std::env::var_os("STAGEWIRE_SOAK").is_some() {
        full
    } else {
        few
    }
}
