//! Processes with a Mooncake port of ours: this very test binary, started again to run [`entry`] alone.

use std::env;
use std::io::{self, Read, Write};
use std::process::Stdio;
use std::time::Duration;

use rustix::process::Pid;
use stagewire_core::{Peer, RegionRef};
use stagewire_transfer::{Borrowed, Memory, RegisterOptions, Transport, Writable};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;
use tokio::time::timeout;

use crate::mooncake::Ours;
use crate::support;

const ROLE: &str = "STAGEWIRE_TEST_MOONCAKE";

/// A child process. Dropped, it is killed.
pub(crate) struct Owner {
    process: tokio::process::Child,
    pid: Pid,
    pub(crate) peer: Peer,
    pub(crate) readable: RegionRef,
    pub(crate) writable: RegionRef,
}

impl Owner {
    /// A process with a region of [`support::bulk`] and a writable one, each of so many bytes.
    pub(crate) async fn start(len: usize) -> Self {
        let mut process = Command::new(env::current_exe().expect("this binary"))
            .args(["--exact", "mooncake_child::entry", "--nocapture"])
            .env(ROLE, len.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("the child starts");
        let pid = process.id().expect("it runs").try_into().expect("pids are positive");
        let mut lines = BufReader::new(process.stdout.take().expect("piped")).lines();
        let offered = async {
            while let Some(line) = lines.next_line().await.expect("its output") {
                if let Some((_, json)) = line.split_once("@@") {
                    return serde_json::from_str(json).expect("an offer");
                }
            }
            panic!("the child ended without a word");
        };
        let (peer, readable, writable) = timeout(Duration::from_secs(20), offered).await.expect("it answers");
        Self {
            process,
            pid: Pid::from_raw(pid).expect("pids are positive"),
            peer,
            readable,
            writable,
        }
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
}

/// Not a test: what a child does. Does nothing where no parent asked for it.
#[test]
fn entry() {
    let Ok(len) = env::var(ROLE) else {
        return;
    };
    let len: usize = len.parse().expect("a length");
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(2).enable_all().build().expect("a runtime");
    let ours = runtime.block_on(Ours::start());
    let register = |memory: Memory| {
        let region = ours.mooncake.register(memory, RegisterOptions::default());
        region.expect("registered")
    };
    let readable = register(Borrowed::from(support::bulk(len)).into());
    let writable = register(Writable::allocate(len as u64).expect("memory").into());
    let offer = (ours.peer(), readable.reference(), writable.reference());
    let offer = serde_json::to_string(&offer).expect("it encodes");
    let mut stdout = io::stdout();
    writeln!(stdout, "\n@@{offer}")
        .and_then(|()| stdout.flush())
        .expect("the parent reads");
    io::stdin().read_to_end(&mut Vec::new()).expect("the parent lives");
}
