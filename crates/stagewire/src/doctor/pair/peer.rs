use std::io::{BufRead, Read};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use serde::{Deserialize, Serialize};
use stagewire_core::{ByteCount, Incarnation, Peer, Record, RegionRef};
use stagewire_transfer::{
    Borrowed, ConnectOptions, Host, HostOptions, Memory, Region, RegisterOptions, Target, TransferOptions, Transport,
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
    let ended = if args.reads { read(&host).await } else { offer(&host) };
    host.shutdown().await;
    ended?;
    Ok(Exit::Done)
}

/// The bytes that go over, never the same in neighbouring pages.
fn pattern() -> Vec<u8> {
    (0..LEN).map(|at| (at % 251) as u8).collect()
}

/// Offers by every transport that starts, until stdin ends.
fn offer(host: &Arc<Host>) -> anyhow::Result<()> {
    let shm = host.shm();
    let mut transports = vec![shm.address()];
    let mut kept: Vec<Region> = Vec::new();
    let mut regions = Vec::new();
    let mut offered = |transport: &str, registered: anyhow::Result<Region>| {
        let region = registered.map(|region| {
            let reference = region.reference();
            kept.push(region);
            reference
        });
        regions.push(Offered {
            transport: transport.to_owned(),
            region: region.map_err(|error| format!("{error:#}")),
        });
    };
    offered("shm", from_arena(host));
    match host.cma() {
        Ok(cma) => {
            transports.push(cma.address());
            let memory = Borrowed::from(pattern()).into();
            offered("cma", registered(&*cma, memory));
        }
        Err(error) => offered("cma", Err(anyhow::anyhow!("{}", error.why()))),
    }
    let peer = Peer {
        incarnation: host.incarnation(),
        process: host.process(),
        socket: String::new(),
        transports,
    };
    say(&Offer { peer, regions })?;
    // Blocks this thread alone: the host is served by the others.
    std::io::stdin().lock().read_to_end(&mut Vec::new())?;
    Ok(())
}

fn from_arena(host: &Arc<Host>) -> anyhow::Result<Region> {
    let mut extent = host.arena().allocate(LEN)?;
    extent.copy_from_slice(&pattern());
    registered(&*host.shm(), extent.freeze().into())
}

fn registered(transport: &dyn Transport, memory: Memory) -> anyhow::Result<Region> {
    Ok(transport.register(memory, RegisterOptions::default())?)
}

fn say(value: &impl Serialize) -> anyhow::Result<()> {
    use std::io::Write;
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(&line)?;
    Ok(stdout.flush()?)
}

/// Reads what is offered, and says what came of it.
async fn read(host: &Arc<Host>) -> anyhow::Result<()> {
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line)?;
    let offer: Offer = serde_json::from_str(&line).context("the offer cannot be read")?;
    let mut outcomes = Vec::new();
    for Offered { transport, region } in offer.regions {
        let tried = match region {
            Ok(region) => take(host, &offer.peer, &region).await,
            Err(why) => Err(anyhow::anyhow!("{why}")),
        };
        outcomes.push(Outcome {
            transport,
            error: tried.err().map(|error| format!("{error:#}")),
        });
    }
    say(&outcomes)
}

/// Gets the region, mapped by shm and copied by the others, and compares it.
async fn take(host: &Arc<Host>, peer: &Peer, region: &RegionRef) -> anyhow::Result<()> {
    let maps = region.transport == "shm";
    let transport = if maps { host.shm() } else { host.cma()? };
    let options = TransferOptions {
        deadline: Some(PATIENCE),
    };
    let remote = transport.connect(peer, ConnectOptions { deadline: PATIENCE }).await?;
    let pinned = remote.pin(region, options.clone()).await?;
    if maps {
        return compare(&pinned.map().await?);
    }
    let target = Target::allocate(LEN)?;
    let whole = Record {
        src_offset: 0,
        dst_offset: 0,
        width: LEN,
        rows: 1,
        src_pitch: LEN,
        dst_pitch: LEN,
    };
    pinned.pull(&[whole], &target, options).await?;
    compare(target.as_slice()?)
}

fn compare(bytes: &[u8]) -> anyhow::Result<()> {
    let expected = pattern();
    if bytes == expected {
        return Ok(());
    }
    let at = bytes.iter().zip(&expected).position(|(found, sent)| found != sent);
    bail!("other bytes arrived than were sent, first at {at:?} of {LEN}");
}
