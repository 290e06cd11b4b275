//! A producer or consumer in a process of its own: does what its parent says, line by line.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use stagewire_connector::{Connector, ConnectorOptions, ConsumeError, ConsumeOptions, PublishSpec};
use stagewire_core::{
    Classify, DType, Entry, EntryValue, ErrorClass, Handle, Lease, Manifest, PayloadKind, StageName, TensorSpec,
};

/// Names the run directory to the child.
const RUN_DIR: &str = "STAGEWIRE_TEST_ROLE";
/// How long it tries, while a store is started again.
const PATIENCE: Duration = Duration::from_secs(30);

/// The process itself, not a test.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "run as a child process by the tests that kill it"]
#[expect(clippy::print_stdout, reason = "the parent reads it")]
async fn play() {
    let Some(run_dir) = std::env::var_os(RUN_DIR) else {
        return;
    };
    let options = ConnectorOptions::new(run_dir, StageName::new("role").unwrap());
    let connector = Connector::start(options).await.unwrap();
    println!("\nready");
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let answer = match words[0] {
            "put" => {
                put(
                    &connector,
                    number(words[1]),
                    number(words[2]),
                    words[3].parse().unwrap(),
                )
                .await
            }
            "get" => get(&connector, &decode(words[1]), number(words[2]), number(words[3])).await,
            "look" => look(&connector, &decode(words[1]), number(words[2]), number(words[3])).await,
            "release" => release(&connector, &decode(words[1])).await,
            "attack" => attack(&connector, decode(words[1]), words[2]).await,
            other => panic!("{other}"),
        };
        println!("{answer}");
    }
}

fn number(word: &str) -> u64 {
    word.parse().unwrap()
}

fn decode(digits: &str) -> Handle {
    let byte = |at: usize| u8::from_str_radix(&digits[at..at + 2], 16).unwrap();
    let bytes: Vec<u8> = (0..digits.len()).step_by(2).map(byte).collect();
    Handle::from_bytes(&bytes).unwrap()
}

/// Bytes that tell where they come from.
fn pattern(seed: u64, len: u64) -> Vec<u8> {
    let word = |n: u64| ((seed << 32) ^ n).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes();
    let mut bytes: Vec<u8> = (0..len.div_ceil(8)).flat_map(word).collect();
    bytes.truncate(len as usize);
    bytes
}

/// Publishes, and has the store take it; publishes anew where that dies before it has answered. Gives the handle, in
/// hexadecimal digits, and how many were published before: a store that is back may have them.
async fn put(connector: &Arc<Connector>, len: u64, seed: u64, lease: Lease) -> String {
    let entry = Entry {
        name: "bytes".to_owned(),
        value: EntryValue::Tensor(TensorSpec::new(DType::U8, [len]).unwrap()),
    };
    let manifest = Manifest::new(PayloadKind::Latent, vec![entry]).unwrap();
    let begin = Instant::now();
    for before in 0.. {
        let mut memory = connector.host().arena().allocate(len).unwrap();
        memory.copy_from_slice(&pattern(seed, len));
        let spec = PublishSpec::new(format!("request {seed}"), manifest.clone(), lease);
        let publication = connector.publish(spec, vec![memory.freeze().into()]).unwrap();
        match connector.store(publication.handle(), None, PATIENCE).await {
            Ok(handle) => {
                let digits: String = handle.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
                return format!("{digits} {before}");
            }
            Err(error) => {
                assert!(is_passing(error.class()) && begin.elapsed() < PATIENCE, "{error:?}");
                connector.release(publication.handle().payload);
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    }
    unreachable!("it ends by patience")
}

/// Consumes and compares: `same`, `unheard` where nobody knows whether the store has heard that, `other` or `gone`. Asks
/// again where the store dies meanwhile.
async fn get(connector: &Arc<Connector>, handle: &Handle, len: u64, seed: u64) -> String {
    let got = again(async || {
        let mut consumer = connector.consume(handle.clone(), ConsumeOptions::within(PATIENCE))?;
        let fetched = consumer.fetch_all().await?;
        Ok((fetched.tensors[0].to_vec(), consumer.is_acknowledged()))
    });
    match got.await {
        Some((bytes, _)) if bytes != pattern(seed, len) => "other",
        Some((_, true)) => "same",
        Some((_, false)) => "unheard",
        None => "gone",
    }
    .to_owned()
}

/// Whether the store has the payload, which is not consumed by that: `there`, `other` or `gone`.
async fn look(connector: &Arc<Connector>, handle: &Handle, len: u64, seed: u64) -> String {
    let seen = again(async || {
        let mut consumer = connector.consume(handle.clone(), ConsumeOptions::within(PATIENCE))?;
        let chunk = consumer.next().await?.expect("it has one chunk");
        Ok(chunk.tensors[0].to_vec())
    });
    match seen.await {
        Some(bytes) if bytes == pattern(seed, len) => "there",
        Some(_) => "other",
        None => "gone",
    }
    .to_owned()
}

/// What came of reading a payload, tried again until a store answers; `None` where one says that there is no such payload.
async fn again<T>(read: impl AsyncFn() -> Result<T, ConsumeError>) -> Option<T> {
    let begin = Instant::now();
    loop {
        match read().await {
            Ok(read) => return Some(read),
            Err(ConsumeError::Gone { .. }) => return None,
            // A reader that was killed has its claim until that is noticed.
            Err(error) => {
                let claimed = error.class() == ErrorClass::Conflict;
                assert!(claimed || is_passing(error.class()), "{error:?}");
                assert!(begin.elapsed() < PATIENCE, "{error:?}");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    }
}

/// Whether an error may come of a store that was killed, and end once the next one is there.
const fn is_passing(class: ErrorClass) -> bool {
    matches!(class, ErrorClass::Unavailable | ErrorClass::Deadline)
}

/// Ends a payload, once there is a store to hear that.
async fn release(connector: &Arc<Connector>, handle: &Handle) -> String {
    let begin = Instant::now();
    loop {
        match connector.release_handle(handle).await {
            Ok(()) => return "done".to_owned(),
            Err(error) if is_passing(error.class()) => {
                assert!(begin.elapsed() < PATIENCE, "{error:?}");
            }
            Err(error) => return error.to_string(),
        }
    }
}

/// Tries to change and to cut the memory that a payload is read from, here and at the store: `refused`, or what worked.
async fn attack(connector: &Arc<Connector>, handle: Handle, store: &str) -> String {
    use std::os::unix::fs::FileExt;
    let mut consumer = connector.consume(handle, ConsumeOptions::within(PATIENCE)).unwrap();
    let chunk = consumer.next().await.unwrap().unwrap();
    let before = chunk.tensors[0].to_vec();
    let mut tried = 0;
    for process in ["self", store] {
        for file in std::fs::read_dir(format!("/proc/{process}/fd")).unwrap() {
            let path = file.unwrap().path();
            let name = std::fs::read_link(&path).unwrap_or_default();
            if !name.to_string_lossy().contains("memfd:stagewire-arena") {
                continue;
            }
            // As one's own file it can be opened again, for writing as well.
            let Ok(file) = std::fs::OpenOptions::new().read(true).write(true).open(&path) else {
                continue;
            };
            tried += 1;
            if file.write_all_at(b"x", 0).is_ok() {
                return format!("wrote to {}", path.display());
            }
            if file.set_len(0).is_ok() || file.set_len(1 << 40).is_ok() {
                return format!("cut {}", path.display());
            }
        }
    }
    if tried < 2 {
        return format!("only {tried} files were found");
    }
    let same = chunk.tensors[0].to_vec() == before;
    if same { "refused" } else { "changed" }.to_owned()
}

/// Killed when dropped.
pub(super) struct Role {
    process: std::process::Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Role {
    pub(super) fn start(run_dir: &Path) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["store::role::play", "--exact", "--ignored", "--nocapture"])
            .env(RUN_DIR, run_dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .unwrap();
        let (commands, answers) = (process.stdin.take().unwrap(), process.stdout.take().unwrap());
        let mut role = Self {
            process,
            commands,
            answers: BufReader::new(answers),
        };
        while role.answer().unwrap() != "ready" {}
        role
    }

    pub(super) fn pid(&self) -> Pid {
        Pid::from_child(&self.process)
    }

    pub(super) fn is_alive(&mut self) -> bool {
        self.process.try_wait().unwrap().is_none()
    }

    /// Waits for the end of one that was killed, and for nothing else.
    pub(super) fn killed(&mut self) {
        let status = self.process.wait().unwrap();
        assert_eq!(
            status.signal(),
            Some(Signal::KILL.as_raw()),
            "it ended by itself: {status}"
        );
    }

    pub(super) fn kill(self) {
        drop(self);
    }

    /// `None` once it is dead.
    fn answer(&mut self) -> Option<String> {
        let mut line = String::new();
        match self.answers.read_line(&mut line) {
            Ok(0) | Err(_) => None,
            // An answer that was cut is none.
            Ok(_) => line.strip_suffix('\n').map(str::to_owned),
        }
    }

    fn try_ask(&mut self, command: &str) -> Option<String> {
        writeln!(self.commands, "{command}").ok()?;
        self.answer()
    }

    pub(super) fn ask(&mut self, command: &str) -> String {
        self.try_ask(command).unwrap()
    }

    /// Its handle, in hexadecimal digits, and how many other payloads may be in the store because of this.
    pub(super) fn try_put(&mut self, len: u64, seed: u64, lease: &str) -> Option<(String, u64)> {
        let answer = self.try_ask(&format!("put {len} {seed} {lease}"))?;
        let (handle, before) = answer.split_once(' ').unwrap();
        Some((handle.to_owned(), number(before)))
    }

    pub(super) fn put(&mut self, len: u64, seed: u64, lease: &str) -> String {
        self.try_put(len, seed, lease).unwrap().0
    }

    pub(super) fn try_get(&mut self, handle: &str, len: u64, seed: u64) -> Option<String> {
        self.try_ask(&format!("get {handle} {len} {seed}"))
    }

    pub(super) fn get(&mut self, handle: &str, len: u64, seed: u64) -> String {
        self.try_get(handle, len, seed).unwrap()
    }

    pub(super) fn look(&mut self, handle: &str, len: u64, seed: u64) -> String {
        self.ask(&format!("look {handle} {len} {seed}"))
    }

    pub(super) fn try_release(&mut self, handle: &str) -> Option<String> {
        self.try_ask(&format!("release {handle}"))
    }

    pub(super) fn release(&mut self, handle: &str) -> String {
        self.try_release(handle).unwrap()
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        if matches!(self.process.try_wait(), Ok(None)) {
            let _ = kill_process_group(self.pid(), Signal::KILL);
        }
        let _ = self.process.wait();
    }
}
