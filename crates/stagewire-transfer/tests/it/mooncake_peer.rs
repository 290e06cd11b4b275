//! Transfer Engines of the public wheel, each in a process of its own: `tests/peers/mooncake_peer.py`.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::OnceLock;
use std::time::Duration;

use rustix::process::Pid;
use serde_json::{Value, json};
use stagewire_transfer::SegmentBuffer;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{ChildStdin, ChildStdout, Command};
use tokio::time::timeout;

use crate::support;

/// The longest time that a peer may take for one command.
const ANSWER: Duration = Duration::from_secs(60);

/// A process with a Transfer Engine. Dropped, it is killed.
pub(crate) struct Engine {
    process: tokio::process::Child,
    stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
    pid: Pid,
    name: String,
}

/// The interpreter of the environment with the peers' wheels: `make peers` makes it.
fn python() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let peers = env::var_os("STAGEWIRE_PEERS").map_or_else(|| root.join(".peers"), PathBuf::from);
    peers.join("bin/python")
}

/// Whether the wheel can be used here; says so where not.
pub(crate) fn wheel_works() -> bool {
    static WORKS: OnceLock<bool> = OnceLock::new();
    let works = *WORKS.get_or_init(|| {
        let mut import = std::process::Command::new(python());
        import
            .args(["-c", "import numpy, mooncake.engine"])
            .stderr(Stdio::null());
        import.status().is_ok_and(|status| status.success())
    });
    if !works {
        support::without_peers(&format!("{} cannot import mooncake.engine", python().display()));
    }
    works
}

impl Engine {
    pub(crate) async fn start() -> Self {
        let mut process = Command::new(python())
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/peers/mooncake_peer.py"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .expect("the peer starts");
        let pid = process.id().expect("it runs").try_into().expect("pids are positive");
        let mut engine = Self {
            pid: Pid::from_raw(pid).expect("pids are positive"),
            stdin: process.stdin.take().expect("piped"),
            lines: BufReader::new(process.stdout.take().expect("piped")).lines(),
            process,
            name: String::new(),
        };
        engine.name = engine.answer().await["name"].as_str().expect("a name").to_owned();
        engine
    }

    /// `host:port` of its handshake port.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Has it do something, and waits until it is done.
    pub(crate) async fn call(&mut self, command: Value) -> Value {
        self.begin(command).await;
        self.answer().await
    }

    /// Has it do something.
    pub(crate) async fn begin(&mut self, command: Value) {
        self.stdin
            .write_all(format!("{command}\n").as_bytes())
            .await
            .expect("it listens");
    }

    pub(crate) async fn answer(&mut self) -> Value {
        let marked = async {
            while let Some(line) = self.lines.next_line().await.expect("its output") {
                if let Some(text) = line.strip_prefix("@@") {
                    return serde_json::from_str(text).expect("JSON");
                }
            }
            panic!("the peer ended without a word");
        };
        timeout(ANSWER, marked).await.expect("the peer answers")
    }

    /// Has it do something, and gives the engine's return code.
    pub(crate) async fn code(&mut self, command: Value) -> i64 {
        let answer = self.call(command).await;
        answer["code"].as_i64().unwrap_or_else(|| panic!("no code in {answer}"))
    }

    /// Registers memory there: zeros, or [`support::bulk`] combined with a key. Gives its number there, too.
    pub(crate) async fn allocate(&mut self, len: u64, key: Option<u8>) -> (SegmentBuffer, u64) {
        let answer = self.call(json!({"do": "allocate", "size": len, "key": key})).await;
        assert_eq!(answer["code"], 0, "{answer}");
        let number = |name: &str| answer[name].as_u64().unwrap_or_else(|| panic!("no {name} in {answer}"));
        let address = number("address");
        (SegmentBuffer { address, len }, number("index"))
    }

    /// Whether its memory from `at` on is what [`keyed`] gives.
    pub(crate) async fn holds(&mut self, index: u64, key: u8, at: u64, len: u64) -> bool {
        let command = json!({"do": "check", "index": index, "key": key, "at": at, "size": len});
        self.call(command).await["differs"] == -1
    }

    /// SIGKILL.
    pub(crate) fn kill(&mut self) {
        self.process.start_kill().expect("it runs");
    }

    /// Has it stop, and waits until all of its threads stand still.
    pub(crate) async fn stop(&self) {
        support::stop(self.pid).await;
    }

    pub(crate) fn go_on(&self) {
        support::go_on(self.pid);
    }
}

/// The bytes of [`support::bulk`], each combined with a key.
pub(crate) fn keyed(len: usize, key: u8) -> Vec<u8> {
    let mut bytes = support::bulk(len);
    bytes.iter_mut().for_each(|byte| *byte ^= key);
    bytes
}

/// Where the wheels are required, a test without them fails; else it says that it was skipped.
#[test]
fn without_the_wheels_tests_fail_only_where_they_are_required() {
    let run = |required| {
        let mut test = std::process::Command::new(env::current_exe().expect("this binary"));
        test.args(["--exact", "mooncake::an_engine_reads_in_batches", "--nocapture"])
            .env("STAGEWIRE_PEERS", "/nowhere")
            .env("STAGEWIRE_REQUIRE_PEERS", required);
        let ran = test.output().expect("it runs");
        (ran.status.success(), String::from_utf8_lossy(&ran.stderr).into_owned())
    };
    let (passed, printed) = run("");
    assert!(passed && printed.contains("skipped: /nowhere/bin/python"), "{printed}");
    let (passed, printed) = run("1");
    assert!(!passed && printed.contains("/nowhere/bin/python"), "{printed}");
}
