use std::io::{BufRead, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use stagewire_core::{ByteCount, Incarnation, Peer, RegionRef};
use stagewire_transfer::{self as transfer, Borrowed, Host, HostOptions, Region, RegisterOptions};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use uuid::Uuid;

use super::paint::paint;
use super::raw;
use crate::exit::{Exit, Fault};

/// Where the owner's bytes lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Memory {
    /// In the shared arena.
    Arena,
    /// In memory of the owner's own, as a tensor of torch is.
    Borrowed,
}

/// One line of JSON.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Order {
    /// Hold so many painted bytes instead of what was held before.
    Hold {
        memory: Memory,
        span: u64,
    },
    Release,
}

/// What the owner holds, and how it is read.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Held {
    pub(super) peer: Peer,
    pub(super) region: Option<RegionRef>,
    /// Why there is no region.
    pub(super) refused: Option<String>,
    /// Where the bytes are in the owner's memory.
    pub(super) address: u64,
    /// Where the bare stream is.
    pub(super) raw: SocketAddr,
}

/// The owning process, seen from the reader.
#[derive(Debug)]
pub(super) struct Owner {
    child: Child,
    orders: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Owner {
    pub(super) fn spawn(dir: &Path) -> anyhow::Result<Self> {
        let mut child = Command::new("/proc/self/exe")
            .args(["bench-producer", "--bench", "transfer", "--dir"])
            .arg(dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("cannot start the owning process")?;
        let (orders, answers) = (child.stdin.take(), child.stdout.take());
        Ok(Self {
            orders: orders.context("no pipe")?,
            answers: BufReader::new(answers.context("no pipe")?).lines(),
            child,
        })
    }

    pub(super) async fn hold(&mut self, memory: Memory, span: u64) -> anyhow::Result<Held> {
        let answer = self.order(&Order::Hold { memory, span }).await?;
        Ok(serde_json::from_str(&answer)?)
    }

    pub(super) async fn release(&mut self) -> anyhow::Result<()> {
        self.order(&Order::Release).await.map(drop)
    }

    async fn order(&mut self, order: &Order) -> anyhow::Result<String> {
        let mut line = serde_json::to_vec(order)?;
        line.push(b'\n');
        self.orders.write_all(&line).await.context("the owner is gone")?;
        let answer = self.answers.next_line().await?;
        answer.context("the owner has ended")
    }

    pub(super) fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    pub(super) async fn end(mut self) -> anyhow::Result<()> {
        drop(self.orders);
        let status = self.child.wait().await?;
        if !status.success() {
            bail!("the owner ended with {status}");
        }
        Ok(())
    }
}

/// Bytes that the owner holds.
#[derive(Clone)]
pub(super) enum Bytes {
    Arena(transfer::Extent),
    Borrowed(Arc<Vec<u8>>),
}

impl Bytes {
    fn painted(host: &Host, memory: Memory, span: u64) -> anyhow::Result<Self> {
        match memory {
            Memory::Arena => {
                let mut extent = host.arena().allocate(span)?;
                paint(&mut extent);
                Ok(Self::Arena(extent.freeze()))
            }
            Memory::Borrowed => {
                let mut bytes = vec![0; usize::try_from(span)?];
                paint(&mut bytes);
                Ok(Self::Borrowed(Arc::new(bytes)))
            }
        }
    }

    pub(super) fn as_slice(&self) -> &[u8] {
        match self {
            Self::Arena(extent) => extent.bytes().expect("nobody writes to it"),
            Self::Borrowed(bytes) => bytes,
        }
    }

    fn register(&self, host: &Arc<Host>) -> anyhow::Result<Region> {
        let options = RegisterOptions::default();
        match self {
            Self::Arena(extent) => Ok(host.shm().register(extent.clone().into(), options)?),
            Self::Borrowed(bytes) => {
                let memory = Borrowed::from(bytes.clone());
                Ok(host.cma()?.register(memory.into(), options)?)
            }
        }
    }
}

/// The owning process itself.
pub(crate) async fn serve(dir: PathBuf) -> Result<Exit, Fault> {
    let host = Host::start(HostOptions {
        dir,
        incarnation: Incarnation(Uuid::new_v4()),
        arena_limit: ByteCount(4 << 30),
    });
    let host = host.await?;
    let mut transports = vec![host.shm().address()];
    transports.extend(host.cma().ok().map(|cma| cma.address()));
    let peer = Peer {
        incarnation: host.incarnation(),
        process: host.process(),
        socket: String::new(),
        transports,
    };
    let raw = raw::Server::start()?;
    let mut region = None;
    // Blocks this thread alone: the host runs on the others.
    let mut stdout = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        drop(region.take());
        raw.offer(None);
        host.arena().trim();
        let answer = match serde_json::from_str(&line?)? {
            Order::Release => "{}".to_owned(),
            Order::Hold { memory, span } => {
                let bytes = Bytes::painted(&host, memory, span)?;
                let registered = bytes.register(&host);
                let held = Held {
                    peer: peer.clone(),
                    region: registered.as_ref().ok().map(Region::reference),
                    refused: registered.as_ref().err().map(|error| format!("{error:#}")),
                    address: bytes.as_slice().as_ptr().addr() as u64,
                    raw: raw.address(),
                };
                region = registered.ok();
                raw.offer(Some(bytes));
                serde_json::to_string(&held)?
            }
        };
        writeln!(stdout, "{answer}")?;
        stdout.flush()?;
    }
    drop(region);
    host.shutdown().await;
    Ok(Exit::Done)
}
