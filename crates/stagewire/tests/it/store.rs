//! `stagewire store` with producers and consumers in processes of their own, any of which is killed at any moment.

mod role;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use std::os::unix::process::CommandExt;

use crate::world::{World, names};
use role::Role;

const CAPACITY: &str = "64MiB";
/// How often somebody is killed, in CI and in full.
const ROUNDS: (u64, u64) = (25, 500);
/// Payloads of each kind at a time.
const MANY: usize = 12;

/// `stagewire store`. Killed when dropped.
struct Daemon(Child);

impl Daemon {
    fn pid(&self) -> Pid {
        Pid::from_child(&self.0)
    }

    /// `kill -9` of the process and its group.
    fn kill(self) {
        drop(self);
    }

    fn stop(mut self) {
        kill_process(self.pid(), Signal::TERM).unwrap();
        assert!(self.0.wait().unwrap().success());
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None)) {
            let _ = kill_process_group(self.pid(), Signal::KILL);
            let _ = self.0.wait();
        }
    }
}

/// A store, from the moment it serves, and what it said.
fn start(world: &World) -> (Daemon, serde_json::Value) {
    let data = world.path("data");
    let mut command = world.command(["store", "--capacity", CAPACITY, "--json", "--quiet", "--data-dir"]);
    let mut child = command
        .arg(data)
        .stdout(Stdio::piped())
        // A group of its own, as a shell gives it one: the keeper must not die with it.
        .process_group(0)
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap())
        .read_line(&mut line)
        .unwrap();
    let ready = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{line:?}: {error}"));
    (Daemon(child), ready)
}

#[test]
fn handles_outlive_the_store_that_is_killed() {
    let world = World::new();
    let (store, ready) = start(&world);
    assert_eq!(
        (ready["payloads"].as_u64(), ready["pid"].as_u64()),
        (Some(0), Some(store.0.id().into()))
    );
    let (mut producer, mut consumer) = (Role::start(&world.run_dir()), Role::start(&world.run_dir()));
    let kept = producer.put(300_000, 1, "pinned");
    let once = producer.put(5_000, 2, "delete_on_consume");
    let gone = producer.put(5_000, 3, "pinned");
    let timed = producer.put(100, 4, "ttl(1h)");
    // What is put is the store's: its producer may go.
    producer.kill();
    assert_eq!(consumer.get(&kept, 300_000, 1), "same");
    assert_eq!(consumer.release(&gone), "done");
    store.kill();

    let (store, ready) = start(&world);
    assert_eq!(
        (ready["payloads"].as_u64(), ready["lost"].as_u64()),
        (Some(3), Some(0)),
        "{ready}"
    );
    assert_eq!(
        consumer.get(&kept, 300_000, 1),
        "same",
        "a consumer that knew the old store"
    );
    let mut late = Role::start(&world.run_dir());
    assert_eq!(late.get(&kept, 300_000, 1), "same", "a consumer that never met it");
    assert_eq!(late.get(&timed, 100, 4), "same");
    assert_eq!(late.look(&gone), "gone", "what was deleted stays deleted");
    assert_eq!(late.get(&once, 5_000, 2), "same");
    assert_eq!(consumer.look(&once), "gone", "it was consumed");
    store.kill();
    let (store, ready) = start(&world);
    assert_eq!(ready["payloads"], 2);
    assert_eq!(late.look(&once), "gone");
    assert_eq!(late.release(&kept), "done");
    store.stop();
    let left = names(&world.path("data"));
    assert!(!left.contains(&"keeper.sock".to_owned()), "{left:?}");
    let (store, ready) = start(&world);
    assert_eq!((ready["payloads"].as_u64(), ready["lost"].as_u64()), (Some(0), Some(0)));
    store.stop();
}

#[test]
fn a_reader_can_neither_change_nor_cut_a_payload() {
    let world = World::new();
    let (store, _) = start(&world);
    let (mut producer, mut consumer) = (Role::start(&world.run_dir()), Role::start(&world.run_dir()));
    let handle = producer.put(300_000, 1, "pinned");
    assert_eq!(consumer.ask(&format!("attack {handle} {}", store.0.id())), "refused");
    assert_eq!(producer.get(&handle, 300_000, 1), "same");
    // Nor who reads what the store took over from the dead one.
    store.kill();
    let (store, _) = start(&world);
    assert_eq!(consumer.get(&handle, 300_000, 1), "same");
    assert_eq!(consumer.ask(&format!("attack {handle} {}", store.0.id())), "refused");
    assert_eq!(producer.get(&handle, 300_000, 1), "same");
    store.stop();
}

#[test]
fn a_second_store_and_bad_input_are_refused() {
    let world = World::new();
    let (store, _) = start(&world);
    let data = world.path("data");
    let data = data.to_str().unwrap();
    let done = world.run(["store", "--capacity", CAPACITY, "--data-dir", data]);
    assert_eq!(done.code, 1);
    assert!(
        done.stderr.contains("another store uses the data directory DIR/data"),
        "{}",
        done.stderr
    );
    let done = world.run(["store", "--capacity", "lots"]);
    assert_eq!(done.code, 2, "{}", done.stderr);
    let done = world.run(["keeper"]);
    assert_eq!(done.code, 2, "{}", done.stderr);
    store.stop();
}

/// What is known of one payload.
#[derive(Debug, Clone)]
struct Known {
    handle: String,
    len: u64,
    seed: u64,
}

/// Everybody, any of whom may be killed.
struct Scene {
    world: Arc<World>,
    store: Option<Daemon>,
    producer: Role,
    consumer: Role,
    random: u64,
    /// Kills so far. An answer across one of them is in doubt.
    kills: Arc<AtomicU64>,
    pinned: Vec<Known>,
    once: Vec<Known>,
    gone: Vec<Known>,
}

impl Scene {
    fn below(&mut self, bound: u64) -> u64 {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) % bound
    }

    /// One thing that a producer or a consumer does. What was in doubt is settled or forgotten.
    fn act(&mut self, seed: u64) {
        let before = self.kills.load(Ordering::SeqCst);
        let len = 1 + self.below(400_000);
        match self.below(4) {
            0 if self.pinned.len() < MANY => {
                if let Some(handle) = self.producer.try_put(len, seed, "pinned") {
                    self.pinned.push(Known { handle, len, seed });
                }
            }
            1 if self.once.len() < MANY => {
                if let Some(handle) = self.producer.try_put(len, seed, "delete_on_consume") {
                    self.once.push(Known { handle, len, seed });
                }
            }
            2 if !self.once.is_empty() => {
                let at = self.below(self.once.len() as u64) as usize;
                let known = self.once.swap_remove(at);
                match self.consumer.try_get(&known.handle, known.len, known.seed).as_deref() {
                    Some("same") if self.kills.load(Ordering::SeqCst) == before => self.gone.push(known),
                    // A store that dies as it is told may have heard it or not: it is read again, or it is gone.
                    Some("same" | "gone") if self.kills.load(Ordering::SeqCst) > before => {}
                    None => {}
                    other => panic!("{other:?} of {known:?}"),
                }
            }
            _ if !self.pinned.is_empty() => {
                let at = self.below(self.pinned.len() as u64) as usize;
                let known = self.pinned[at].clone();
                if self.below(4) > 0 {
                    let got = self.consumer.try_get(&known.handle, known.len, known.seed);
                    assert!(got.as_deref().is_none_or(|got| got == "same"), "{got:?} of {known:?}");
                } else {
                    self.pinned.swap_remove(at);
                    if self.consumer.try_release(&known.handle).as_deref() == Some("done")
                        && self.kills.load(Ordering::SeqCst) == before
                    {
                        self.gone.push(known);
                    }
                }
            }
            _ => {}
        }
    }

    /// Everything that was acknowledged is there, and nothing else.
    fn check(&mut self) {
        for known in self.pinned.clone() {
            assert_eq!(
                self.consumer.get(&known.handle, known.len, known.seed),
                "same",
                "{known:?}"
            );
        }
        let recent = self.gone.len().saturating_sub(MANY);
        for known in self.gone.split_off(recent) {
            assert_eq!(self.consumer.look(&known.handle), "gone", "{known:?}");
        }
    }

    fn round(&mut self, round: u64) {
        let (victim, after) = (self.below(3), Duration::from_micros(self.below(60_000)));
        let pid = match victim {
            0 => self.producer.pid(),
            1 => self.consumer.pid(),
            _ => self.store.as_ref().unwrap().pid(),
        };
        let kills = Arc::clone(&self.kills);
        let store = (victim == 2).then(|| self.store.take().unwrap());
        let begin = Instant::now();
        std::thread::scope(|scope| {
            let world = Arc::clone(&self.world);
            let killer = scope.spawn(move || {
                std::thread::sleep(after.saturating_sub(begin.elapsed()));
                kills.fetch_add(1, Ordering::SeqCst);
                // One that has ended by itself shows elsewhere.
                let _ = kill_process_group(pid, Signal::KILL);
                // Only a store is waited for by others: they look for it until it is back.
                let next = store.map(|store| {
                    store.kill();
                    let (next, ready) = start(&world);
                    assert_eq!(ready["lost"], 0, "{ready}");
                    next
                });
                kills.fetch_add(1, Ordering::SeqCst);
                next
            });
            let mut n = 0;
            while !killer.is_finished() && self.producer.is_alive() && self.consumer.is_alive() {
                n += 1;
                self.act(round * 1000 + n);
            }
            if let Some(next) = killer.join().unwrap() {
                self.store = Some(next);
            }
        });
        let again = || Role::start(&self.world.run_dir());
        match victim {
            0 => self.producer = again(),
            1 => self.consumer = again(),
            _ => {}
        }
        self.check();
    }
}

#[test]
fn nothing_is_lost_whoever_is_killed() {
    let full = std::env::var_os("STAGEWIRE_SOAK").is_some();
    let rounds = if full { ROUNDS.1 } else { ROUNDS.0 };
    let world = Arc::new(World::new());
    let (store, _) = start(&world);
    let (producer, consumer) = (Role::start(&world.run_dir()), Role::start(&world.run_dir()));
    let mut scene = Scene {
        world,
        store: Some(store),
        producer,
        consumer,
        random: rounds,
        kills: Arc::default(),
        pinned: Vec::new(),
        once: Vec::new(),
        gone: Vec::new(),
    };
    for round in 0..rounds {
        scene.round(round);
    }
    let mut counts = BTreeMap::new();
    for known in std::mem::take(&mut scene.pinned) {
        *counts.entry(scene.consumer.release(&known.handle)).or_insert(0) += 1;
    }
    assert!(counts.keys().all(|answer| answer == "done"), "{counts:?}");
    scene.store.take().unwrap().stop();
}
