use std::collections::BTreeMap;
use std::io::{BufRead, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use stagewire_core::{ByteCount, Incarnation, Peer, RegionRef};
use stagewire_transfer::{
    self as transfer, Borrowed, Host, HostOptions, Mooncake, MooncakeOptions, Network, Nixl, NixlOptions, Region,
    RegisterOptions, Transport,
};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use uuid::Uuid;

use super::network::network_options;
use super::raw;
use crate::bench::paint::paint;
use crate::exit::{Exit, Fault};

/// Where the owner's bytes lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(in crate::bench) enum Memory {
    /// In the shared arena.
    Arena,
    /// In memory of the owner's own, as a tensor of torch is.
    Borrowed,
}

/// One line of JSON.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Order {
    /// Hold so many painted bytes instead of what was held before, registered with these transports.
    Hold {
        memory: Memory,
        span: u64,
        with: Vec<String>,
    },
    /// Load NIXL from this file.
    Nixl {
        library: PathBuf,
    },
    /// Serve Mooncake's protocol.
    Mooncake,
    Release,
}

/// What the owner holds, and how it is read.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(in crate::bench) struct Held {
    pub(super) peer: Peer,
    regions: BTreeMap<String, Registered>,
    /// Where the bytes are in the owner's memory.
    pub(super) address: u64,
    /// Where the bare stream is.
    pub(super) raw: SocketAddr,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Registered {
    Region(RegionRef),
    Refused(String),
}

impl Held {
    /// The region of a transport, or why there is none.
    pub(super) fn region(&self, transport: &str) -> Result<&RegionRef, String> {
        match self.regions.get(transport) {
            Some(Registered::Region(region)) => Ok(region),
            Some(Registered::Refused(why)) => Err(why.clone()),
            None => Err(format!("it was not registered with {transport}")),
        }
    }
}

/// The owning process, seen from the reader.
#[derive(Debug)]
pub(in crate::bench) struct Owner {
    child: Child,
    orders: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Owner {
    pub(in crate::bench) fn spawn(dir: &Path) -> anyhow::Result<Self> {
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

    pub(in crate::bench) async fn hold(&mut self, memory: Memory, span: u64, with: &[&str]) -> anyhow::Result<Held> {
        let with = with.iter().map(|&name| name.to_owned()).collect();
        let answer = self.order(&Order::Hold { memory, span, with }).await?;
        Ok(serde_json::from_str(&answer)?)
    }

    /// The inner error is why it does not work there.
    pub(in crate::bench) async fn nixl(&mut self, library: PathBuf) -> anyhow::Result<Result<(), String>> {
        let answer = self.order(&Order::Nixl { library }).await?;
        Ok(serde_json::from_str(&answer)?)
    }

    pub(in crate::bench) async fn mooncake(&mut self) -> anyhow::Result<()> {
        self.order(&Order::Mooncake).await.map(drop)
    }

    pub(in crate::bench) async fn release(&mut self) -> anyhow::Result<()> {
        self.order(&Order::Release).await.map(drop)
    }

    async fn order(&mut self, order: &Order) -> anyhow::Result<String> {
        let mut line = serde_json::to_vec(order)?;
        line.push(b'\n');
        self.orders.write_all(&line).await.context("the owner is gone")?;
        let answer = self.answers.next_line().await?;
        answer.context("the owner has ended")
    }

    pub(in crate::bench) fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    pub(in crate::bench) async fn end(mut self) -> anyhow::Result<()> {
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
                paint(&mut extent, 0);
                Ok(Self::Arena(extent.freeze()))
            }
            Memory::Borrowed => {
                let mut bytes = vec![0; usize::try_from(span)?];
                paint(&mut bytes, 0);
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

    fn memory(&self) -> transfer::Memory {
        match self {
            Self::Arena(extent) => extent.clone().into(),
            Self::Borrowed(bytes) => Borrowed::from(bytes.clone()).into(),
        }
    }
}

/// The owning process itself.
struct Serving {
    host: Arc<Host>,
    network: Arc<Network>,
    nixl: Option<Arc<Nixl>>,
    mooncake: Option<Arc<Mooncake>>,
    raw: raw::Server,
    regions: Vec<Region>,
}

/// Serves what each line of stdin orders, until stdin ends.
pub(crate) async fn serve(dir: PathBuf) -> Result<Exit, Fault> {
    let host = Host::start(HostOptions {
        dir,
        incarnation: Incarnation(Uuid::new_v4()),
        arena_limit: ByteCount(4 << 30),
    });
    let host = host.await?;
    let mut serving = Serving {
        network: Network::start(host.clone(), network_options(false)).await?,
        host,
        nixl: None,
        mooncake: None,
        raw: raw::Server::start()?,
        regions: Vec::new(),
    };
    // Blocks this thread alone: the host runs on the others.
    let mut stdout = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let answer = match serde_json::from_str(&line?)? {
            Order::Release => {
                serving.release();
                "{}".to_owned()
            }
            Order::Hold { memory, span, with } => serde_json::to_string(&serving.hold(memory, span, &with)?)?,
            Order::Mooncake => {
                let mooncake = Mooncake::start(serving.network.clone(), MooncakeOptions::default()).await?;
                serving.mooncake = Some(mooncake);
                "{}".to_owned()
            }
            Order::Nixl { library } => serde_json::to_string(&serving.start_nixl(library).await)?,
        };
        writeln!(stdout, "{answer}")?;
        stdout.flush()?;
    }
    serving.release();
    if let Some(mooncake) = &serving.mooncake {
        mooncake.shutdown().await;
    }
    serving.network.shutdown().await;
    serving.host.shutdown().await;
    Ok(Exit::Done)
}

impl Serving {
    fn release(&mut self) {
        self.regions.clear();
        self.raw.offer(None);
        self.host.arena().trim();
    }

    async fn start_nixl(&mut self, library: PathBuf) -> Result<(), String> {
        let options = NixlOptions {
            library: Some(library),
            ..NixlOptions::default()
        };
        let nixl = Nixl::start(&self.network, options).await;
        self.nixl = Some(nixl.map_err(|error| error.to_string())?);
        Ok(())
    }

    fn transports(&self) -> Vec<Arc<dyn Transport>> {
        let mut transports = vec![self.host.shm(), self.network.tcp()];
        transports.extend(self.host.cma().ok());
        transports.extend(self.nixl.clone().map(|nixl| nixl as Arc<dyn Transport>));
        transports.extend(self.mooncake.clone().map(|mooncake| mooncake as Arc<dyn Transport>));
        transports
    }

    fn hold(&mut self, memory: Memory, span: u64, with: &[String]) -> anyhow::Result<Held> {
        self.release();
        let transports = self.transports();
        let peer = Peer {
            incarnation: self.host.incarnation(),
            process: self.host.process(),
            socket: String::new(),
            transports: transports.iter().map(|transport| transport.address()).collect(),
        };
        let bytes = Bytes::painted(&self.host, memory, span)?;
        let mut registered = BTreeMap::new();
        for name in with {
            let transport = transports.iter().find(|transport| transport.name() == name);
            let region = match transport {
                Some(transport) => transport
                    .register(bytes.memory(), RegisterOptions::default())
                    .map_err(|error| error.to_string()),
                None => Err(format!("the owner has no {name}")),
            };
            let answer = match region {
                Ok(region) => {
                    let reference = region.reference();
                    self.regions.push(region);
                    Registered::Region(reference)
                }
                Err(why) => Registered::Refused(why),
            };
            registered.insert(name.clone(), answer);
        }
        let address = bytes.as_slice().as_ptr().addr() as u64;
        self.raw.offer(Some(bytes));
        Ok(Held {
            peer,
            regions: registered,
            address,
            raw: self.raw.address(),
        })
    }
}
