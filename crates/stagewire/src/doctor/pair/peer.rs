use std::io::{BufRead, Read, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use serde::{Deserialize, Serialize};
use stagewire_core::{ByteCount, Incarnation, Peer, Record, RegionRef};
use stagewire_transfer::{
    Borrowed, ConnectOptions, Host, HostOptions, Memory, Mooncake, MooncakeOptions, Network, NetworkOptions, Nixl,
    NixlLibrary, NixlOptions, Region, RegisterOptions, Target, TransferOptions, Transport,
};
use uuid::Uuid;

use super::{LEN, Outcome};
use crate::exit::{Exit, Fault};

/// For each step of the reading process; the doctor has a deadline of its own.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Debug, Args)]
pub(crate) struct PeerArgs {
    /// Where the data sockets are
    #[arg(long)]
    dir: PathBuf,

    /// What to try
    #[arg(long, value_delimiter = ',')]
    transports: Vec<String>,

    /// Read what the other process offers on stdin, instead of offering
    #[arg(long)]
    reads: bool,
}

/// What the offering process says in one line.
#[derive(Debug, Serialize, Deserialize)]
struct Offer {
    peer: Peer,
    regions: Vec<Offered>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Offered {
    transport: String,
    region: Result<RegionRef, String>,
}

/// One of the two processes of the probe.
pub(crate) async fn peer(args: PeerArgs) -> Result<Exit, Fault> {
    let host = Host::start(HostOptions {
        dir: args.dir.join("peers"),
        incarnation: Incarnation(Uuid::new_v4()),
        arena_limit: ByteCount(64 << 20),
    })
    .await?;
    let mut opened = Vec::new();
    for name in args.transports {
        let way = Opened::open(&host, &name).await.map_err(|error| format!("{error:#}"));
        opened.push((name, way));
    }
    let ended = if args.reads {
        read(&opened).await
    } else {
        offer(&host, &opened)
    };
    host.shutdown().await;
    ended?;
    Ok(Exit::Done)
}

type Opening = (String, Result<Opened, String>);

/// A transport of this process.
struct Opened {
    transport: Arc<dyn Transport>,
    /// What carries it, where that is not part of this program.
    by: Option<String>,
}

impl Opened {
    async fn open(host: &Arc<Host>, name: &str) -> anyhow::Result<Self> {
        let network = || Network::start(host.clone(), NetworkOptions::default());
        let mut by = None;
        let transport: Arc<dyn Transport> = match name {
            "shm" => host.shm(),
            "cma" => host.cma().map_err(|error| anyhow::anyhow!("{}", error.why()))?,
            "tcp" => network().await?.tcp(),
            "mooncake" => Mooncake::start(network().await?, MooncakeOptions::default()).await?,
            "nixl" => {
                let nixl = Nixl::start(&network().await?, NixlOptions::default()).await?;
                let library = NixlLibrary::open(None)?;
                by = Some(format!("NIXL {} of {}", library.version(), library.path().display()));
                nixl
            }
            other => bail!("there is no transport {other}"),
        };
        Ok(Self { transport, by })
    }

    /// Registers the bytes, in the arena where the transport wants them there.
    fn register(&self, host: &Host) -> anyhow::Result<Region> {
        let memory: Memory = if self.transport.name() == "shm" {
            let mut extent = host.arena().allocate(LEN)?;
            extent.copy_from_slice(&pattern());
            extent.freeze().into()
        } else {
            Borrowed::from(pattern()).into()
        };
        Ok(self.transport.register(memory, RegisterOptions::default())?)
    }

    /// Gets the region, mapped where that is possible and else copied, and compares it.
    async fn take(&self, peer: &Peer, region: &RegionRef) -> anyhow::Result<()> {
        let options = TransferOptions {
            deadline: Some(PATIENCE),
        };
        let remote = self
            .transport
            .connect(peer, ConnectOptions { deadline: PATIENCE })
            .await?;
        let pinned = remote.pin(region, options.clone()).await?;
        if self.transport.abilities().map {
            return compare(&pinned.map().await?);
        }
        let target = Target::allocate(LEN)?;
        pinned.pull(&[Record::contiguous(0, 0, LEN)], &target, options).await?;
        compare(target.as_slice()?)
    }
}

/// The bytes that go over, never the same in neighbouring pages.
fn pattern() -> Vec<u8> {
    (0..LEN).map(|at| (at % 251) as u8).collect()
}

/// Offers by every transport that opened, until stdin ends.
fn offer(host: &Arc<Host>, opened: &[Opening]) -> anyhow::Result<()> {
    let mut kept: Vec<Region> = Vec::new();
    let mut regions = Vec::new();
    for (name, opened) in opened {
        let registered = match opened {
            Ok(opened) => opened.register(host).map_err(|error| format!("{error:#}")),
            Err(why) => Err(why.clone()),
        };
        let region = registered.map(|region| {
            let reference = region.reference();
            kept.push(region);
            reference
        });
        let transport = name.clone();
        regions.push(Offered { transport, region });
    }
    let transports = opened.iter().filter_map(|(_, opened)| opened.as_ref().ok());
    let peer = Peer {
        incarnation: host.incarnation(),
        process: host.process(),
        socket: String::new(),
        transports: transports.map(|opened| opened.transport.address()).collect(),
    };
    say(&Offer { peer, regions })?;
    // Blocks this thread alone: the host is served by the others.
    std::io::stdin().lock().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// Reads what is offered, and says what came of it.
async fn read(opened: &[Opening]) -> anyhow::Result<()> {
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line)?;
    let offer: Offer = serde_json::from_str(&line).context("the offer cannot be read")?;
    let mut outcomes = Vec::new();
    for Offered { transport, region } in offer.regions {
        let here = opened.iter().find(|(name, _)| *name == transport);
        let here = here.map(|(_, opened)| opened.as_ref().map_err(String::as_str));
        let tried = match (region, here) {
            (Ok(region), Some(Ok(here))) => here.take(&offer.peer, &region).await,
            (Err(why), _) => Err(anyhow::anyhow!("{why}")),
            (_, Some(Err(why))) => Err(anyhow::anyhow!("{why}")),
            (_, None) => Err(anyhow::anyhow!("only one of the processes tries it")),
        };
        outcomes.push(Outcome {
            transport,
            by: here.and_then(|here| here.ok()?.by.clone()),
            error: tried.err().map(|error| format!("{error:#}")),
        });
    }
    say(&outcomes)
}

fn say(value: &impl Serialize) -> anyhow::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(&line)?;
    Ok(stdout.flush()?)
}

fn compare(bytes: &[u8]) -> anyhow::Result<()> {
    let expected = pattern();
    if bytes == expected {
        return Ok(());
    }
    let at = bytes.iter().zip(&expected).position(|(found, sent)| found != sent);
    bail!("other bytes arrived than were sent, first at {at:?} of {LEN}");
}
