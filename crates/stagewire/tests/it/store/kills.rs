//! Producers, consumers and the store are killed at random moments, again and again.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process_group};

use super::role::Role;
use super::{Daemon, start_with};
use crate::world::{World, names};

/// How often somebody is killed, in CI and in full.
const ROUNDS: (u64, u64) = (25, 500);
/// Payloads of each kind at a time.
const MANY: usize = 12;
/// Payloads that are gone, and are looked for after each round.
const GONE: usize = 40;

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
    options: Vec<String>,
    store: Option<Daemon>,
    producer: Role,
    consumer: Role,
    random: u64,
    pinned: Vec<Known>,
    once: Vec<Known>,
    gone: Vec<Known>,
    /// What a killed consumer was doing with them, or whether a killed store has heard it, is not known.
    doubtful: Vec<Known>,
    counts: Counts,
}

/// What was done, and what of it was cut short.
#[derive(Debug, Default)]
struct Counts {
    puts: u64,
    /// A producer was killed before it had its handle.
    puts_unanswered: u64,
    reads: u64,
    deletes: u64,
    doubts: u64,
    /// Files of the store before that its index did not name: it was killed while it wrote or removed them.
    orphans: Arc<AtomicU64>,
    /// Payloads that were in files when the store was killed.
    in_files: Arc<AtomicU64>,
}

impl Scene {
    fn new(capacity: &str, spills: bool) -> Self {
        let world = Arc::new(World::new());
        let mut options = vec!["--capacity".to_owned(), capacity.to_owned()];
        if spills {
            let spill = [
                "--spill",
                world.path("spill").to_str().unwrap(),
                "--spill-quota",
                "64MiB",
            ]
            .map(str::to_owned);
            options.extend(spill);
        }
        let (store, _) = start_with(&world, &options);
        let (producer, consumer) = (Role::start(&world.run_dir()), Role::start(&world.run_dir()));
        Self {
            random: options.len() as u64,
            world,
            options,
            store: Some(store),
            producer,
            consumer,
            pinned: Vec::new(),
            once: Vec::new(),
            gone: Vec::new(),
            doubtful: Vec::new(),
            counts: Counts::default(),
        }
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) % bound
    }

    /// One of them, taken out.
    fn pick(&mut self, which: impl Fn(&mut Self) -> &mut Vec<Known>) -> Known {
        let len = which(self).len() as u64;
        let at = self.below(len) as usize;
        which(self).swap_remove(at)
    }

    /// One thing that a producer or a consumer does. Only what was not answered is in doubt.
    fn act(&mut self, seed: u64) {
        let len = 1 + self.below(400_000);
        match self.below(8) {
            // More is put than deleted, until there is enough.
            0 | 1 if self.pinned.len() < MANY => {
                if let Some(known) = self.put(len, seed, "pinned") {
                    self.pinned.push(known);
                }
            }
            2 | 3 if self.once.len() < MANY => {
                if let Some(known) = self.put(len, seed, "delete_on_consume") {
                    self.once.push(known);
                }
            }
            4 if !self.once.is_empty() => {
                let known = self.pick(|scene| &mut scene.once);
                match self.consumer.try_get(&known.handle, known.len, known.seed).as_deref() {
                    Some("same") => self.delete(known),
                    Some("unheard") | None => self.doubt(known),
                    other => panic!("{other:?} of {known:?}"),
                }
            }
            5 if !self.pinned.is_empty() => {
                let known = self.pick(|scene| &mut scene.pinned);
                match self.consumer.try_release(&known.handle).as_deref() {
                    Some("done") => self.delete(known),
                    None => self.doubt(known),
                    other => panic!("{other:?} of {known:?}"),
                }
            }
            _ if !self.pinned.is_empty() => {
                let known = self.pick(|scene| &mut scene.pinned);
                let got = self.consumer.try_get(&known.handle, known.len, known.seed);
                let read = got.as_deref().is_none_or(|got| got == "same" || got == "unheard");
                assert!(read, "{got:?} of {known:?}");
                self.counts.reads += 1;
                self.pinned.push(known);
            }
            _ => {}
        }
    }

    fn put(&mut self, len: u64, seed: u64, lease: &str) -> Option<Known> {
        let Some((handle, before)) = self.producer.try_put(len, seed, lease) else {
            self.counts.puts_unanswered += 1;
            return None;
        };
        self.counts.puts += 1;
        self.counts.puts_unanswered += before;
        Some(Known { handle, len, seed })
    }

    fn delete(&mut self, known: Known) {
        self.counts.deletes += 1;
        self.gone.push(known);
        let old = self.gone.len().saturating_sub(GONE);
        self.gone.drain(..old);
    }

    fn doubt(&mut self, known: Known) {
        self.counts.doubts += 1;
        self.doubtful.push(known);
    }

    fn look(&mut self, known: &Known) -> String {
        self.consumer.look(&known.handle, known.len, known.seed)
    }

    /// Everything that was acknowledged is there, with its bytes, and what was deleted is not. What was in doubt is one of
    /// the two, and stays so.
    fn check(&mut self) {
        for known in std::mem::take(&mut self.doubtful) {
            match &*self.look(&known) {
                // Released or consumed by now, whatever it was.
                "there" => assert_eq!(self.consumer.release(&known.handle), "done", "{known:?}"),
                "gone" => {}
                other => panic!("{other} of {known:?}"),
            }
            self.delete(known);
        }
        for known in [self.pinned.clone(), self.once.clone()].concat() {
            assert_eq!(self.look(&known), "there", "{known:?}");
        }
        for known in self.gone.clone() {
            assert_eq!(self.look(&known), "gone", "{known:?}");
        }
    }

    fn round(&mut self, round: u64) {
        // The store more often than each of the others: it has most to lose.
        let (victim, after) = (self.below(4), Duration::from_micros(self.below(60_000)));
        let pid = match victim {
            0 => self.producer.pid(),
            1 => self.consumer.pid(),
            _ => self.store.as_ref().unwrap().pid(),
        };
        let store = (victim > 1).then(|| self.store.take().unwrap());
        let (orphans, in_files) = (Arc::clone(&self.counts.orphans), Arc::clone(&self.counts.in_files));
        let (world, options) = (Arc::clone(&self.world), self.options.clone());
        let begin = Instant::now();
        std::thread::scope(|scope| {
            let killer = scope.spawn(move || {
                std::thread::sleep(after.saturating_sub(begin.elapsed()));
                // One that has ended by itself shows when it is waited for.
                let _ = kill_process_group(pid, Signal::KILL);
                // Only a store is waited for by others: they look for it until it is back.
                let store = store?;
                store.kill();
                let left = files(&world);
                let (next, ready) = start_with(&world, &options);
                assert_eq!(ready["lost"], 0, "{ready}");
                let named = ready["files"].as_u64().unwrap();
                orphans.fetch_add(left - named, Ordering::Relaxed);
                in_files.fetch_add(named, Ordering::Relaxed);
                Some(next)
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
            0 => {
                self.producer.killed();
                self.producer = again();
            }
            1 => {
                self.consumer.killed();
                self.consumer = again();
            }
            _ => {}
        }
        assert!(
            self.producer.is_alive() && self.consumer.is_alive(),
            "somebody ended by itself"
        );
        self.check();
    }

    /// Ends everything: what is left is what it should be, and nothing else.
    fn end(mut self) -> Counts {
        self.store.take().unwrap().kill();
        let (store, ready) = start_with(&self.world, &self.options);
        let known = (self.pinned.len() + self.once.len()) as u64;
        let found = ready["payloads"].as_u64().unwrap();
        // What a killed producer had put, and had no answer to, may be there.
        let most = known + self.counts.puts_unanswered;
        assert!(
            (known..=most).contains(&found),
            "{found} payloads, {known} to {most} expected"
        );
        for known in std::mem::take(&mut self.pinned) {
            assert_eq!(self.consumer.release(&known.handle), "done", "{known:?}");
        }
        for known in std::mem::take(&mut self.once) {
            assert_eq!(
                self.consumer.get(&known.handle, known.len, known.seed),
                "same",
                "{known:?}"
            );
        }
        store.stop();
        assert_eq!(files(&self.world), 0);
        self.counts
    }
}

/// Files with payloads.
fn files(world: &World) -> u64 {
    let dir = world.path("spill");
    if !dir.exists() {
        return 0;
    }
    names(&dir).iter().filter(|name| name.ends_with(".spill")).count() as u64
}

#[expect(clippy::print_stderr, reason = "what a soak did is there to be read")]
fn kill_again_and_again(capacity: &str, spills: bool) -> Counts {
    let full = std::env::var_os("STAGEWIRE_SOAK").is_some();
    let rounds = if full { ROUNDS.1 } else { ROUNDS.0 };
    let begin = Instant::now();
    let mut scene = Scene::new(capacity, spills);
    for round in 0..rounds {
        scene.round(round);
    }
    let counts = scene.end();
    eprintln!("{rounds} rounds in {:.1?}: {counts:?}", begin.elapsed());
    let idle = [counts.puts, counts.reads, counts.deletes].contains(&0);
    assert!(!idle, "nothing was done: {counts:?}");
    counts
}

#[test]
fn nothing_is_lost_whoever_is_killed() {
    let counts = kill_again_and_again(super::CAPACITY, false);
    assert_eq!(counts.in_files.load(Ordering::Relaxed), 0);
}

/// The memory is a fraction of what is kept: objects move to files and back all the time.
#[test]
fn nothing_is_lost_while_payloads_move_to_files_and_back() {
    let counts = kill_again_and_again("1MiB", true);
    assert!(counts.in_files.load(Ordering::Relaxed) > 0, "{counts:?}");
}
