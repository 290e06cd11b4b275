use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, bail};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use stagewire_connector::{Connector, ConnectorOptions, PublishSpec};
use stagewire_core::{Handle, Lease, StageName};
use stagewire_transfer as transfer;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use super::latent::{Latent, manifest, paint};
use crate::exit::{Exit, Fault};

/// Where the producer's tensor lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(in crate::bench) enum Memory {
    /// In the shared arena.
    Arena,
    /// In memory of the producer's own, as a tensor of torch is.
    Borrowed,
}

impl Memory {
    /// The transport that serves it where nothing is copied before.
    pub(in crate::bench) const fn transport(self) -> &'static str {
        match self {
            Self::Arena => "shm",
            Self::Borrowed => "cma",
        }
    }
}

/// What to publish next; one line of JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Order {
    pub(super) memory: Memory,
    pub(super) chunks: u32,
    pub(super) round: u64,
}

/// Time on the clock that all processes of a host share.
pub(in crate::bench) fn now() -> Duration {
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
            .args(["bench-producer", "--bench", "quick", "--dir"])
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

    /// When it called `publish`, and what came of it.
    pub(super) async fn publish(&mut self, order: &Order) -> anyhow::Result<(Duration, Handle)> {
        let mut line = serde_json::to_vec(order)?;
        line.push(b'\n');
        self.orders.write_all(&line).await.context("the producer is gone")?;
        let begin = Duration::from_nanos(self.answers.read_u64().await.context("the producer has ended")?);
        let len = self.answers.read_u32().await?;
        let mut handle = vec![0; len as usize];
        self.answers.read_exact(&mut handle).await?;
        Ok((begin, Handle::from_bytes(&handle)?))
    }

    pub(super) async fn end(mut self) -> anyhow::Result<()> {
        drop(self.orders);
        let status = self.child.wait().await?;
        if !status.success() {
            bail!("the producer ended with {status}");
        }
        Ok(())
    }
}

/// The producing process itself: publishes what each line of stdin orders, until stdin ends.
pub(crate) async fn produce(dir: PathBuf) -> Result<Exit, Fault> {
    let role = StageName::new("producer").expect("it is a name");
    let connector = Connector::start(ConnectorOptions::new(dir, role)).await?;
    // Blocks this thread alone: the connector runs on the others.
    let mut stdout = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let order: Order = serde_json::from_str(&line?)?;
        let memory = painted(&connector, &order)?;
        let spec = PublishSpec::new(
            format!("round {}", order.round),
            manifest(order.chunks)?,
            Lease::DeleteOnConsume,
        );
        let begin = now();
        let publication = connector.publish(spec, vec![memory])?;
        let handle = publication.handle().to_bytes();
        let mut answer = Vec::with_capacity(handle.len() + 12);
        answer.extend_from_slice(&u64::try_from(begin.as_nanos())?.to_be_bytes());
        answer.extend_from_slice(&u32::try_from(handle.len())?.to_be_bytes());
        answer.extend_from_slice(&handle);
        stdout.write_all(&answer)?;
        stdout.flush()?;
    }
    connector.close().await;
    Ok(Exit::Done)
}

fn painted(connector: &Connector, order: &Order) -> anyhow::Result<transfer::Memory> {
    let mut latent = Latent::new();
    match order.memory {
        Memory::Arena => {
            let mut extent = connector.host().arena().allocate(latent.bytes().len() as u64)?;
            paint(&mut extent, order.round);
            Ok(extent.freeze().into())
        }
        Memory::Borrowed => {
            latent.paint(order.round);
            Ok(transfer::Borrowed::from(latent.into_bytes()).into())
        }
    }
}
