//! A store in a process of its own, which can be killed.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use stagewire_core::{ByteCount, Peer, RegionRef};
use stagewire_store::{HostStore, KeeperCommand, KeeperOptions, NewObject, Store, run_keeper};
use stagewire_transfer::Host;

use super::{LIMIT, MIB, Random, check, id, open};

/// Names the directory to the child.
const DIR: &str = "STAGEWIRE_TEST_STORE";

/// The keeper itself, not a test.
#[test]
#[ignore = "run as a child process by the tests that kill stores"]
fn keep() {
    if let Some(options) = KeeperOptions::from_env() {
        run_keeper(&options).expect("it keeps");
    }
}

pub(super) fn keeper() -> KeeperCommand {
    let program = std::env::current_exe().expect("this test");
    KeeperCommand::new(program, ["recover::child::keep", "--exact", "--ignored", "--nocapture"])
}

/// Bytes that tell where they come from.
pub(super) fn pattern(seed: u64, len: u64) -> Vec<u8> {
    let word = |n: u64| (seed << 32 ^ n).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes();
    let mut bytes: Vec<u8> = (0..len.div_ceil(8)).flat_map(word).collect();
    bytes.truncate(len as usize);
    bytes
}

/// The store itself, not a test: does what its parent says, line by line.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "run as a child process by the tests that kill stores"]
#[expect(clippy::print_stdout, reason = "the parent reads it")]
async fn serve() {
    let Some(dir) = std::env::var_os(DIR) else { return };
    let (host, store, _) = open(Path::new(&dir), LIMIT).await.expect("it opens");
    let mut drafts = Vec::new();
    println!("\nready");
    for line in std::io::stdin().lines() {
        let line = line.expect("the parent");
        let words: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| words[at].parse::<u64>().expect("a number");
        let answer = match words[0] {
            "seal" | "draft" => {
                let (n, len, seed) = (number(1), number(2), number(3));
                let mut object = NewObject::new(id(n.into()), [ByteCount(len), ByteCount(0)]);
                object.label = format!("label of {n}").into_bytes();
                object.wait = Duration::from_secs(10);
                object.expires = (number(4) > 0).then(|| Duration::from_millis(number(4)));
                let mut draft = store.create(object).await.expect("room");
                draft.bytes_mut(0).expect("there").copy_from_slice(&pattern(seed, len));
                if words[0] == "seal" {
                    draft.seal().await.map(|_| "done".to_owned()).expect("sealed")
                } else {
                    drafts.push(draft);
                    "done".to_owned()
                }
            }
            "delete" => {
                store.delete(id(number(1).into()), None).await.expect("it is there");
                "done".to_owned()
            }
            "get" => {
                let object = store.get(id(number(1).into())).await.expect("it is there");
                assert!(object.part(0) == Some(&*pattern(number(3), number(2))), "other bytes");
                "done".to_owned()
            }
            "region" => region(&store, &host, number(1)).await,
            other => panic!("{other}"),
        };
        println!("{answer}");
    }
}

/// How a reader reaches part 0 of an object, in hexadecimal digits.
async fn region(store: &HostStore, host: &Arc<Host>, n: u64) -> String {
    let object = store.get(id(n.into())).await.expect("it is there");
    let region = object.regions()[0].clone().expect("it has bytes");
    let peer = Peer {
        incarnation: host.incarnation(),
        process: host.process(),
        socket: String::new(),
        transports: vec![host.shm().address()],
    };
    let bytes = postcard::to_stdvec(&(peer, region)).expect("encodable");
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Killed when dropped.
pub(super) struct Child {
    process: std::process::Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
    dir: PathBuf,
}

impl Child {
    pub(super) fn start(dir: &Path) -> Self {
        let mut process = Command::new(std::env::current_exe().expect("this test"))
            .args(["recover::child::serve", "--exact", "--ignored", "--nocapture"])
            .env(DIR, dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // A group of its own: the keeper must not die with it.
            .process_group(0)
            .spawn()
            .expect("it starts");
        let (commands, answers) = (process.stdin.take(), process.stdout.take());
        let mut child = Self {
            process,
            commands: commands.expect("piped"),
            answers: BufReader::new(answers.expect("piped")),
            dir: dir.to_owned(),
        };
        while child.answer().expect("it starts") != "ready" {}
        child
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

    fn ask(&mut self, command: &str) -> String {
        self.try_ask(command).expect("it answers")
    }

    pub(super) fn seal(&mut self, n: u128, len: u64, seed: u64) {
        self.seal_for(n, len, seed, Duration::ZERO);
    }

    pub(super) fn seal_for(&mut self, n: u128, len: u64, seed: u64, expires: Duration) {
        assert_eq!(
            self.ask(&format!("seal {n} {len} {seed} {}", expires.as_millis())),
            "done"
        );
    }

    pub(super) fn draft(&mut self, n: u128, len: u64) {
        assert_eq!(self.ask(&format!("draft {n} {len} 1 0")), "done");
    }

    pub(super) fn delete(&mut self, n: u128) {
        assert_eq!(self.ask(&format!("delete {n}")), "done");
    }

    pub(super) fn region(&mut self, n: u128) -> (Peer, RegionRef) {
        let digits = self.ask(&format!("region {n}"));
        let byte = |at: usize| u8::from_str_radix(&digits[at..at + 2], 16).expect("digits");
        let bytes: Vec<u8> = (0..digits.len()).step_by(2).map(byte).collect();
        postcard::from_bytes(&bytes).expect("decodable")
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.process)
    }

    /// The keeper of its memory: the process that this one started, by whatever it has as parent now.
    pub(super) fn keeper(&self) -> Pid {
        keeper_of(&self.dir).expect("it has a keeper")
    }

    /// The keeper that comes after `first`, once it has the memory.
    pub(super) fn another_keeper(&self, first: Pid) -> Pid {
        let begin = Instant::now();
        loop {
            match keeper_of(&self.dir) {
                Some(other) if other != first && has(other, "memfd:stagewire-arena") => return other,
                _ => assert!(begin.elapsed() < Duration::from_secs(20), "nobody keeps the memory"),
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Keeps it from doing anything.
    pub(super) fn stop(&self) {
        kill_process(self.pid(), Signal::STOP).expect("it runs");
    }

    /// `kill -9` of the process and everything in its group.
    pub(super) fn kill_group(mut self) {
        self.end();
    }

    fn end(&mut self) {
        kill_process_group(self.pid(), Signal::KILL).expect("it runs");
        self.process.wait().expect("it ends");
    }

    /// Seals and deletes until it is killed, at some moment after some answers: on a busy machine, time alone may be too
    /// short for any. Writes down what was acknowledged; returns what was not.
    pub(super) fn work_until_killed(
        mut self,
        random: &mut Random,
        there: &mut BTreeMap<u128, (u64, u64)>,
        round: u32,
    ) -> Doubt {
        let (pid, after) = (self.pid(), Duration::from_micros(random.below(40_000)));
        let kill = move || {
            std::thread::sleep(after);
            kill_process_group(pid, Signal::KILL).expect("nobody has waited for it");
        };
        let (mut unharmed, mut killer) = (random.below(12), None);
        let mut seed = u64::from(round) << 20;
        let doubt = loop {
            match unharmed.checked_sub(1) {
                Some(left) => unharmed = left,
                None => _ = killer.get_or_insert_with(|| std::thread::spawn(kill)),
            }
            seed += 1;
            let n = u128::from(random.below(24));
            let len = [random.below(5000), random.below(2 * MIB)][random.below(2) as usize];
            if let Some((len, seed)) = there.get(&n).copied() {
                if random.below(3) == 0 {
                    match self.try_ask(&format!("get {n} {len} {seed}")) {
                        Some(answer) => assert_eq!(answer, "done", "object {n}"),
                        None => break Doubt::Nothing,
                    }
                    continue;
                }
                if self.try_ask(&format!("delete {n}")).is_none() {
                    break Doubt::Delete(n, len, seed);
                }
                there.remove(&n);
            } else {
                if self.try_ask(&format!("seal {n} {len} {seed} 0")).is_none() {
                    break Doubt::Seal(n, len, seed);
                }
                there.insert(n, (len, seed));
            }
        };
        if let Some(killer) = killer {
            killer.join().expect("it kills");
        }
        let status = self.process.wait().expect("it ends");
        assert_eq!(
            status.signal(),
            Some(Signal::KILL.as_raw()),
            "it ended before: {doubt:?}"
        );
        doubt
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if matches!(self.process.try_wait(), Ok(None)) {
            self.end();
        }
    }
}

/// The process that has the keeper's lock in `dir` open.
pub(super) fn keeper_of(dir: &Path) -> Option<Pid> {
    let lock = dir.join("data/keeper.lock").canonicalize().ok()?;
    let processes = std::fs::read_dir("/proc").expect("Linux");
    let pids = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    let mut pids = pids.filter_map(Pid::from_raw);
    pids.find(|pid| has(*pid, lock.to_str().expect("UTF-8")))
}

/// Whether a process has a file open whose name has this in it.
fn has(pid: Pid, name: &str) -> bool {
    let files = std::fs::read_dir(format!("/proc/{}/fd", pid.as_raw_nonzero()));
    let mut links = files
        .into_iter()
        .flatten()
        .filter_map(|file| std::fs::read_link(file.ok()?.path()).ok());
    links.any(|link| link.to_string_lossy().contains(name))
}

/// What was asked and not answered: it happened, or it did not.
#[derive(Debug, Clone, Copy)]
pub(super) enum Doubt {
    Seal(u128, u64, u64),
    Delete(u128, u64, u64),
    /// It was only read.
    Nothing,
}

impl Doubt {
    pub(super) fn key(self) -> Option<u128> {
        match self {
            Self::Seal(n, ..) | Self::Delete(n, ..) => Some(n),
            Self::Nothing => None,
        }
    }

    /// Writes down what happened. Whatever is there is there in full.
    pub(super) async fn settle(self, store: &HostStore, there: &mut BTreeMap<u128, (u64, u64)>) {
        let (Self::Seal(n, len, seed) | Self::Delete(n, len, seed)) = self else {
            return;
        };
        if store.get(id(n)).await.is_ok() {
            check(store, n, len, seed).await;
            there.insert(n, (len, seed));
        } else {
            there.remove(&n);
        }
    }
}
