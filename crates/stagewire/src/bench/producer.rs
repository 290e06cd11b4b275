//! The other process of `quick` and `connector`: publishes what it is told to.

mod serve;

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, ensure};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use stagewire_connector::ChunkView;
use stagewire_core::{Handle, Manifest, SchemaError};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use super::manifests::{flat, latent};
use super::paint::paint;
pub(super) use serve::serve;

/// Where the producer's tensor lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Memory {
    /// In the shared arena.
    Arena,
    /// In memory of the producer's own, as a tensor of torch is.
    Borrowed,
}

impl Memory {
    /// The transport that serves it where nothing is copied before.
    pub(super) const fn transport(self) -> &'static str {
        match self {
            Self::Arena => "shm",
            Self::Borrowed => "cma",
        }
    }
}

/// What is published.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Shape {
    /// A video latent of 14.3 MB, cut along time.
    Latent,
    /// Plain bytes.
    Flat { nbytes: u64 },
}

impl Shape {
    fn manifest(self, chunks: u32) -> Result<Manifest, SchemaError> {
        match self {
            Self::Latent => latent(chunks),
            Self::Flat { nbytes } => flat(nbytes, chunks),
        }
    }

    /// Its bytes as the producer paints them, in round 0.
    pub(super) fn painted(self) -> anyhow::Result<Painted> {
        let nbytes = self.manifest(1)?.nbytes().0;
        let bytes = vec![0; usize::try_from(nbytes)?];
        let mut painted = Painted { bytes };
        painted.paint(0);
        Ok(painted)
    }
}

/// What to do next; one line of JSON.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Order {
    /// Register painted memory once, in place of what was held before.
    Hold {
        memory: Memory,
        shape: Shape,
    },
    /// Publish what is held.
    Publish {
        chunks: u32,
    },
    /// Publish a latent in memory of its own, which is registered by that.
    Fresh {
        memory: Memory,
        chunks: u32,
        round: u64,
    },
    Stats,
}

/// Numbers of the producer.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Stats {
    pub(super) registrations: u64,
    pub(super) staged: u64,
}

/// The bytes that the producer publishes.
#[derive(Debug)]
pub(super) struct Painted {
    bytes: Vec<u8>,
}

impl Painted {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(super) fn nbytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    pub(super) fn paint(&mut self, round: u64) {
        paint(&mut self.bytes, round);
    }

    /// Every byte of a chunk.
    pub(super) fn check(&self, view: &ChunkView) -> anyhow::Result<()> {
        let run = view.run();
        for (index, row) in (0..).zip(view.rows()) {
            let start = usize::try_from(run.offset + index * run.pitch)?;
            ensure!(
                self.bytes.get(start..start + row.len()) == Some(row),
                "the bytes at {start} are not those that were sent"
            );
        }
        Ok(())
    }
}

/// Time on the clock that all processes of a host share.
pub(super) fn now() -> Duration {
    let time = clock_gettime(ClockId::Monotonic);
    let (seconds, nanos) = (u64::try_from(time.tv_sec), u32::try_from(time.tv_nsec));
    Duration::new(seconds.unwrap_or(0), nanos.unwrap_or(0))
}

/// The producing process, seen from the consumer.
#[derive(Debug)]
pub(super) struct Producer {
    child: Child,
    orders: ChildStdin,
    answers: ChildStdout,
}

impl Producer {
    pub(super) fn spawn(run_dir: &Path) -> anyhow::Result<Self> {
        let mut child = Command::new("/proc/self/exe")
            .args(["bench-producer", "--bench", "connector", "--dir"])
            .arg(run_dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("cannot start the producing process")?;
        let (orders, answers) = (child.stdin.take(), child.stdout.take());
        Ok(Self {
            orders: orders.context("no pipe")?,
            answers: answers.context("no pipe")?,
            child,
        })
    }

    async fn ask(&mut self, order: Order) -> anyhow::Result<Vec<u8>> {
        let mut line = serde_json::to_vec(&order)?;
        line.push(b'\n');
        self.orders.write_all(&line).await.context("the producer is gone")?;
        let len = self.answers.read_u32().await.context("the producer has ended")?;
        let mut answer = vec![0; len as usize];
        self.answers.read_exact(&mut answer).await?;
        Ok(answer)
    }

    /// Has memory painted and registered, in place of what was held before.
    pub(super) async fn hold(&mut self, memory: Memory, shape: Shape) -> anyhow::Result<Painted> {
        self.ask(Order::Hold { memory, shape }).await?;
        shape.painted()
    }

    /// When it called `publish` with what it holds, and what came of it.
    pub(super) async fn publish(&mut self, chunks: u32) -> anyhow::Result<(Duration, Handle)> {
        published(&self.ask(Order::Publish { chunks }).await?)
    }

    /// As [`Producer::publish`], of a latent that is painted for this round in memory of its own.
    pub(super) async fn publish_fresh(
        &mut self,
        memory: Memory,
        chunks: u32,
        round: u64,
    ) -> anyhow::Result<(Duration, Handle)> {
        published(&self.ask(Order::Fresh { memory, chunks, round }).await?)
    }

    pub(super) async fn stats(&mut self) -> anyhow::Result<Stats> {
        Ok(serde_json::from_slice(&self.ask(Order::Stats).await?)?)
    }

    pub(super) async fn end(mut self) -> anyhow::Result<()> {
        drop(self.orders);
        let status = self.child.wait().await?;
        ensure!(status.success(), "the producer ended with {status}");
        Ok(())
    }
}

fn published(answer: &[u8]) -> anyhow::Result<(Duration, Handle)> {
    let (begin, handle) = answer.split_first_chunk().context("a short answer")?;
    let begin = Duration::from_nanos(u64::from_be_bytes(*begin));
    Ok((begin, Handle::from_bytes(handle)?))
}
