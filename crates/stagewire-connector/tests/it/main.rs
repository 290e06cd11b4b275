//! Connectors in two processes. The second process is this test binary again: see `process`.

mod ahead;
mod bundle;
mod chunks;
mod death;
mod fake;
mod hosts;
mod kv;
#[path = "../../../stagewire-kv/tests/it/memory.rs"]
#[expect(dead_code, reason = "parts of it are for planners alone")]
mod kv_memory;
mod leases;
mod memory;
mod modes;
mod moved;
mod open;
mod owners;
mod plans;
mod process;
mod protocol;
mod second;
mod soak;
mod stopped;
mod store;
mod transfer;
mod transports;
mod worker;
#[path = "../../../stagewire-kv/tests/it/world.rs"]
#[expect(dead_code, reason = "parts of it are for planners alone")]
mod world;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use stagewire_connector::{Carrier, Connector, ConnectorOptions, ConnectorStats};
use stagewire_core::{ByteCount, StageName};
use tempfile::TempDir;

/// Longest time that a test waits for something that must happen.
const PATIENCE: Duration = Duration::from_secs(20);

/// A run directory, and this process's connector in it.
struct World {
    connector: Arc<Connector>,
    dir: TempDir,
}

impl World {
    async fn new() -> Self {
        Self::with(|_| ()).await
    }

    async fn with(change: impl FnOnce(&mut ConnectorOptions)) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let mut options = options(&dir, "decode");
        change(&mut options);
        let connector = Connector::start(options).await.expect("a connector");
        Self { connector, dir }
    }

    fn run_dir(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    /// Another connector of this process in the same run directory.
    async fn another(&self, role: &str) -> Arc<Connector> {
        self.another_with(role, |_| ()).await
    }

    async fn another_with(&self, role: &str, change: impl FnOnce(&mut ConnectorOptions)) -> Arc<Connector> {
        let mut options = options(&self.dir, role);
        change(&mut options);
        Connector::start(options).await.expect("a connector")
    }

    /// Another process in the same run directory.
    async fn second(&self) -> second::Second {
        second::Second::start(&self.run_dir(), &Carrier::DEFAULT).await
    }
}

fn options(dir: &TempDir, role: &str) -> ConnectorOptions {
    ConnectorOptions {
        arena_limit: ByteCount(64 << 20),
        ..ConnectorOptions::new(dir.path().join("run"), StageName::new(role).expect("a name"))
    }
}

/// How often a soak repeats: a twentieth of what `make soak` does, at least 10 times.
fn rounds(full: u64) -> u64 {
    if std::env::var_os("STAGEWIRE_SOAK").is_some() {
        full
    } else {
        (full / 20).max(10)
    }
}

/// What is left over, by name, where nothing should be.
fn leftovers(stats: &ConnectorStats) -> Vec<(&'static str, u64)> {
    let counts = [
        ("payloads", stats.live_payloads),
        ("bytes", stats.live_bytes),
        ("consumers", stats.consumers),
        ("regions", stats.host.regions),
        ("pins", stats.host.pins_held),
        ("arena bytes", stats.host.allocated_bytes),
    ];
    counts.into_iter().filter(|(_, count)| *count > 0).collect()
}

/// Waits until nothing is left in this process. Pins end with a message, so that it takes a moment.
async fn all_gone(connector: &Connector) {
    let gone = async {
        while !leftovers(&connector.stats()).is_empty() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    if tokio::time::timeout(PATIENCE, gone).await.is_err() {
        panic!("left over: {:?}", leftovers(&connector.stats()));
    }
}
