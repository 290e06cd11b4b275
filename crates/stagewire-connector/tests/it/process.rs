//! This test binary again, as another process: one of its ignored tests, which answers over its pipes.

use std::ffi::{OsStr, OsString};
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

/// Tells answers from what the test harness prints.
const MARK: &str = "@@";

/// The other process. Dropped, it is killed.
pub(crate) struct Process {
    child: Child,
    stdin: ChildStdin,
    stdout: Lines<BufReader<ChildStdout>>,
}

impl Process {
    /// Runs a test in it, by a command that runs others, such as `unshare --pid`, or by none.
    pub(crate) fn start(by: &[&str], test: &str, env: &[(&str, OsString)]) -> Self {
        let this = std::env::current_exe().expect("this binary");
        let mut words = by.iter().map(OsStr::new).chain([this.as_os_str()]);
        let mut child = Command::new(words.next().expect("this binary at least"))
            .args(words)
            .args(["--exact", test, "--nocapture", "--ignored"])
            .envs(env.iter().cloned())
            .envs(crate::transports::nixl_library().map(|path| ("NIXL_CAPI_LIB", path)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("it runs again");
        let stdin = child.stdin.take().expect("piped");
        let stdout = BufReader::new(child.stdout.take().expect("piped")).lines();
        Self { child, stdin, stdout }
    }

    /// Asks without waiting for the answer.
    pub(crate) async fn tell(&mut self, ask: &impl Serialize) {
        let line = format!("{}\n", encode(ask));
        self.stdin.write_all(line.as_bytes()).await.expect("it listens");
    }

    pub(crate) async fn ask<T: for<'a> Deserialize<'a>>(&mut self, ask: &impl Serialize, within: Duration) -> T {
        self.tell(ask).await;
        let answer = async {
            loop {
                let line = self.stdout.next_line().await.expect("text").expect("it lives");
                if let Some((_, answer)) = line.split_once(MARK) {
                    return decode(answer);
                }
            }
        };
        tokio::time::timeout(within, answer).await.expect("an answer in time")
    }

    /// Sends a signal; of one that stops it, waits until none of its threads runs any more.
    pub(crate) fn signal(&self, signal: Signal) {
        let pid = self.child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
        let pid = pid.expect("it runs");
        kill_process(pid, signal).expect("ours");
        if signal == Signal::STOP {
            let options = WaitIdOptions::STOPPED | WaitIdOptions::NOWAIT;
            waitid(WaitId::Pid(pid), options).expect("ours");
        }
    }

    /// `kill -9`, and waits until it is dead.
    pub(crate) async fn kill(mut self) {
        self.child.kill().await.expect("it was alive");
    }
}

/// Answers, in the other process, whatever is asked, until nobody can ask any more.
#[expect(clippy::print_stdout, reason = "answers go to the first process")]
pub(crate) async fn serve<A: for<'a> Deserialize<'a>, B: Serialize>(mut answer: impl AsyncFnMut(A) -> B) {
    // Blocks this thread only; the connector runs on the others.
    for line in std::io::stdin().lines().map_while(Result::ok) {
        let answer = answer(decode(&line)).await;
        println!("{MARK}{}", encode(&answer));
    }
}

fn encode<T: Serialize>(message: &T) -> String {
    let bytes = postcard::to_stdvec(message).expect("plain data");
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn decode<T: for<'a> Deserialize<'a>>(text: &str) -> T {
    let byte = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).expect("hexadecimal");
    let bytes: Vec<u8> = (0..text.len()).step_by(2).map(byte).collect();
    postcard::from_bytes(&bytes).expect("the same version")
}
