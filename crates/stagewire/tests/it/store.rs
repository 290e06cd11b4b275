//! `stagewire store` with producers and consumers in processes of their own, any of which is killed at any moment.

mod kills;
mod role;

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use std::os::unix::process::CommandExt;

use crate::world::{World, names};
use role::Role;

const CAPACITY: &str = "64MiB";

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
    start_with(world, &["--capacity", CAPACITY].map(str::to_owned))
}

fn start_with(world: &World, options: &[String]) -> (Daemon, serde_json::Value) {
    let data = world.path("data");
    let mut child = world
        .command(["store", "--json", "--quiet", "--data-dir"])
        .arg(data)
        .args(options)
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
    assert_eq!(late.look(&gone, 5_000, 3), "gone", "what was deleted stays deleted");
    assert_eq!(late.get(&once, 5_000, 2), "same");
    assert_eq!(consumer.look(&once, 5_000, 2), "gone", "it was consumed");
    store.kill();
    let (store, ready) = start(&world);
    assert_eq!(ready["payloads"], 2);
    assert_eq!(late.look(&once, 5_000, 2), "gone");
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
    // In the same run directory, and in another one with the same data.
    let (elsewhere, other) = (world.path("elsewhere"), world.path("other"));
    let pid = store.0.id();
    for (run, data, expected) in [
        (
            None,
            &other,
            format!("another store (process {pid}) serves the run directory DIR/run"),
        ),
        (
            Some(&elsewhere),
            &data,
            format!("another store (process {pid}) uses the data directory DIR/data"),
        ),
    ] {
        let mut arguments = vec!["store", "--capacity", CAPACITY, "--data-dir", data.to_str().unwrap()];
        arguments.extend(
            run.map(|run| ["--run-dir", run.to_str().unwrap()])
                .into_iter()
                .flatten(),
        );
        let done = world.run(arguments);
        assert_eq!(done.code, 1);
        assert!(done.stderr.contains(&expected), "{}", done.stderr);
    }
    let done = world.run(["store", "--capacity", "lots"]);
    assert_eq!(done.code, 2, "{}", done.stderr);
    let done = world.run(["keeper"]);
    assert_eq!(done.code, 2, "{}", done.stderr);
    store.stop();
}
