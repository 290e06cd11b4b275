//! The other process: publishes what it has registered.

use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use serde::{Deserialize, Serialize};
use stagewire_connector::{ChunkView, Connector, ConnectorOptions, PublishSpec, Registered};
use stagewire_core::{
    Chunking, DType, Entry, EntryValue, Handle, Lease, Manifest, PayloadKind, SchemaError, StageName, TensorSpec,
};
use stagewire_transfer as transfer;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use crate::bench::quick::latent::{self, paint};
use crate::bench::quick::producer::{Memory, now};
use crate::exit::{Exit, Fault};

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
        let Self::Flat { nbytes } = self else {
            return latent::manifest(chunks);
        };
        let entry = Entry {
            name: "bytes".to_owned(),
            value: EntryValue::Tensor(TensorSpec::new(DType::U8, [nbytes])?),
        };
        let manifest = Manifest::new(PayloadKind::Latent, vec![entry])?;
        match chunks {
            1 => Ok(manifest),
            chunks => manifest.with_chunking(Chunking::new(0, chunks)?),
        }
    }

    fn nbytes(self) -> Result<u64, SchemaError> {
        Ok(self.manifest(1)?.nbytes().0)
    }
}

/// What to do next; one line of JSON.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Order {
    Hold { memory: Memory, shape: Shape },
    Publish { chunks: u32 },
    Stats,
}

impl Order {
    pub(super) const fn hold(memory: Memory, shape: Shape) -> Self {
        Self::Hold { memory, shape }
    }
}

/// Numbers of the producer.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Stats {
    pub(super) registrations: u64,
    pub(super) staged: u64,
}

/// What the producer holds.
#[derive(Debug)]
pub(super) struct Held {
    bytes: Vec<u8>,
}

impl Held {
    pub(super) fn bytes(&self) -> Vec<u8> {
        self.bytes.clone()
    }

    pub(super) fn nbytes(&self) -> u64 {
        self.bytes.len() as u64
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

    /// Has memory filled and registered, in place of what was held before.
    pub(super) async fn hold(&mut self, order: Order) -> anyhow::Result<Held> {
        self.ask(order).await?;
        let Order::Hold { shape, .. } = order else {
            bail!("nothing to hold")
        };
        let mut bytes = vec![0; usize::try_from(shape.nbytes()?)?];
        paint(&mut bytes, 0);
        Ok(Held { bytes })
    }

    /// When it called `publish`, and what came of it.
    pub(super) async fn publish(&mut self, chunks: u32) -> anyhow::Result<(Duration, Handle)> {
        let answer = self.ask(Order::Publish { chunks }).await?;
        let (begin, handle) = answer.split_first_chunk().context("a short answer")?;
        Ok((
            Duration::from_nanos(u64::from_be_bytes(*begin)),
            Handle::from_bytes(handle)?,
        ))
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

/// The producing process itself: does what each line of stdin orders, until stdin ends.
pub(crate) async fn produce(dir: PathBuf) -> Result<Exit, Fault> {
    let role = StageName::new("producer").expect("it is a name");
    let connector = Connector::start(ConnectorOptions::new(dir, role)).await?;
    let mut held: Option<(Shape, Registered)> = None;
    // Blocks this thread alone: the connector runs on the others.
    let mut stdout = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let answer = match serde_json::from_str(&line?)? {
            Order::Hold { memory, shape } => {
                // What was held goes first, to make room.
                drop(held.take());
                held = Some((shape, register(&connector, memory, shape)?));
                Vec::new()
            }
            Order::Publish { chunks } => {
                let (shape, registered) = held.as_ref().context("nothing is held")?;
                let manifest = shape.manifest(chunks).map_err(anyhow::Error::from)?;
                let spec = PublishSpec::new("bench", manifest, Lease::DeleteOnConsume);
                let begin = now();
                let publication = connector.publish(spec, vec![registered.memory()])?;
                let mut answer = u64::try_from(begin.as_nanos())?.to_be_bytes().to_vec();
                answer.extend(publication.handle().to_bytes());
                answer
            }
            Order::Stats => {
                let stats = connector.stats();
                serde_json::to_vec(&Stats {
                    registrations: stats.host.registrations,
                    staged: stats.staged_bytes,
                })?
            }
        };
        let mut frame = u32::try_from(answer.len())?.to_be_bytes().to_vec();
        frame.extend(answer);
        stdout.write_all(&frame)?;
        stdout.flush()?;
    }
    connector.close().await;
    Ok(Exit::Done)
}

fn register(connector: &Arc<Connector>, memory: Memory, shape: Shape) -> anyhow::Result<Registered> {
    let nbytes = shape.nbytes()?;
    let memory: transfer::Memory = match memory {
        Memory::Arena => {
            let mut extent = connector.host().arena().allocate(nbytes)?;
            paint(&mut extent, 0);
            extent.freeze().into()
        }
        Memory::Borrowed => {
            let mut bytes = vec![0; usize::try_from(nbytes)?];
            paint(&mut bytes, 0);
            transfer::Borrowed::from(bytes).into()
        }
    };
    Ok(connector.register(memory)?)
}
