//! The other process of whole rooms: one rank of prefill.

use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use stagewire_connector::kv::{CacheMemory, CachePlace, ChunkSpec, Sender, SenderHandle, SenderOptions, SenderRoom};
use stagewire_connector::{Carrier, Connector, ConnectorOptions};
use stagewire_core::{ByteCount, StageName};
use stagewire_transfer::{Borrowed, Memory};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use super::moves::{BUFFERS, DEADLINE, TOKENS, tables};
use super::pair;
use crate::bench::paint::paint;
use crate::bench::producer::now;
use crate::bench::transfer::network::network_options;
use crate::exit::{Exit, Fault};

/// One line of JSON.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Order {
    /// Be rank 0 of prefill at the first of these sizes, with painted buffers of so many bytes.
    Hold { transport: String, tp: [u32; 2], span: u64 },
    /// Open a room.
    Open { room: u64 },
    /// Announce all of it, with pages in no order or in one run. Answers when that was.
    Announce { scattered: bool },
    /// End it, and wait until its pages are free.
    End,
}

/// Where a buffer is, one after the other in one piece of memory.
pub(super) fn places(span: u64) -> Vec<CachePlace> {
    let nbytes = span / BUFFERS;
    let place = |at| CachePlace {
        memory: 0,
        offset: at * nbytes,
        nbytes,
    };
    (0..BUFFERS).map(place).collect()
}

/// A connector with one transport.
pub(super) async fn connector(dir: &Path, role: &str, transport: &str) -> anyhow::Result<Arc<Connector>> {
    let options = ConnectorOptions {
        arena_limit: ByteCount(4 << 30),
        transports: vec![transport.parse::<Carrier>()?],
        network: network_options(false),
        ..ConnectorOptions::new(dir, StageName::new(role)?)
    };
    Ok(Connector::start(options).await?)
}

/// The process, as decode has it.
#[derive(Debug)]
pub(super) struct Prefill {
    child: Child,
    orders: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Prefill {
    /// `nixl` is the file of NIXL's library.
    pub(super) fn spawn(dir: &Path, nixl: Option<&Path>) -> anyhow::Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        command.args(["bench-producer", "--bench", "kv", "--dir"]).arg(dir);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        if let Some(nixl) = nixl {
            command.env("NIXL_CAPI_LIB", nixl);
        }
        let mut child = command.spawn().context("cannot start the process of prefill")?;
        let (orders, answers) = (child.stdin.take(), child.stdout.take());
        Ok(Self {
            orders: orders.context("no pipe")?,
            answers: BufReader::new(answers.context("no pipe")?).lines(),
            child,
        })
    }

    async fn tell(&mut self, order: &Order) -> anyhow::Result<()> {
        let mut line = serde_json::to_vec(order)?;
        line.push(b'\n');
        self.orders.write_all(&line).await.context("prefill is gone")
    }

    async fn hear<T: DeserializeOwned>(&mut self) -> anyhow::Result<T> {
        let answer = self.answers.next_line().await?;
        Ok(serde_json::from_str(&answer.context("prefill has ended")?)?)
    }

    pub(super) async fn hold(&mut self, transport: &str, tp: [u32; 2], span: u64) -> anyhow::Result<SenderHandle> {
        let transport = transport.to_owned();
        self.tell(&Order::Hold { transport, tp, span }).await?;
        Ok(SenderHandle::from_bytes(&self.hear::<Vec<u8>>().await?)?)
    }

    pub(super) async fn open(&mut self, room: u64) -> anyhow::Result<()> {
        self.tell(&Order::Open { room }).await?;
        self.hear().await
    }

    /// Does not wait for the answer.
    pub(super) async fn announce(&mut self, scattered: bool) -> anyhow::Result<()> {
        self.tell(&Order::Announce { scattered }).await
    }

    /// When it was announced.
    pub(super) async fn announced(&mut self) -> anyhow::Result<Duration> {
        self.hear().await
    }

    pub(super) async fn end_room(&mut self) -> anyhow::Result<()> {
        self.tell(&Order::End).await?;
        self.hear().await
    }

    pub(super) async fn end(mut self) -> anyhow::Result<()> {
        drop(self.orders);
        let status = self.child.wait().await?;
        ensure!(status.success(), "prefill ended with {status}");
        Ok(())
    }
}

/// The process itself.
struct Serving {
    dir: PathBuf,
    rank: Option<(Arc<Connector>, Sender)>,
    room: Option<SenderRoom>,
}

/// Does what each line of stdin orders, until stdin ends.
pub(in crate::bench) async fn serve(dir: PathBuf) -> Result<Exit, Fault> {
    let mut serving = Serving {
        dir,
        rank: None,
        room: None,
    };
    // Blocks this thread alone: the connector runs on the others.
    let mut stdout = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let answer = match serde_json::from_str(&line?)? {
            Order::Hold { transport, tp, span } => serde_json::to_string(&serving.hold(&transport, tp, span).await?)?,
            Order::Open { room } => serde_json::to_string(&serving.open(room)?)?,
            Order::Announce { scattered } => serde_json::to_string(&serving.announce(scattered)?)?,
            Order::End => serde_json::to_string(&serving.end_room().await?)?,
        };
        writeln!(stdout, "{answer}")?;
        stdout.flush()?;
    }
    serving.end().await;
    Ok(Exit::Done)
}

impl Serving {
    async fn end(&mut self) {
        self.room = None;
        if let Some((connector, sender)) = self.rank.take() {
            drop(sender);
            connector.close().await;
        }
    }

    async fn hold(&mut self, transport: &str, tp: [u32; 2], span: u64) -> anyhow::Result<Vec<u8>> {
        self.end().await;
        let connector = connector(&self.dir, "prefill", transport).await?;
        let memory: Memory = if transport == "shm" {
            let mut extent = connector.host().arena().allocate(span)?;
            paint(&mut extent, 0);
            extent.freeze().into()
        } else {
            let mut bytes = vec![0; usize::try_from(span)?];
            paint(&mut bytes, 0);
            Borrowed::from(bytes).into()
        };
        let cache = CacheMemory::new([memory], places(span));
        let engine = pair(tp)?.prefill().clone();
        let sender = Sender::new(&connector, engine, 0, cache, SenderOptions::default())?;
        let handle = sender.handle().to_bytes();
        self.rank = Some((connector, sender));
        Ok(handle)
    }

    fn open(&mut self, room: u64) -> anyhow::Result<()> {
        let (_, sender) = self.rank.as_ref().context("nothing is held")?;
        self.room = Some(sender.room(room, TOKENS, DEADLINE)?);
        Ok(())
    }

    fn announce(&self, scattered: bool) -> anyhow::Result<Duration> {
        let (Some((_, sender)), Some(room)) = (&self.rank, &self.room) else {
            bail!("no room is open");
        };
        let geometry = sender.engine().geometry();
        let pages = tables(scattered).src;
        let mut chunk = ChunkSpec::new(0..TOKENS).last();
        for component in &geometry.components {
            let logical = component.pages(geometry.page_size, TOKENS);
            let (lo, hi) = (usize::try_from(logical.start)?, usize::try_from(logical.end)?);
            chunk = chunk.pages(&component.name, &pages[lo..hi]);
        }
        let begin = now();
        room.send(chunk)?;
        Ok(begin)
    }

    async fn end_room(&mut self) -> anyhow::Result<()> {
        let room = self.room.take().context("no room is open")?;
        // Other ranks of decode never come.
        let abandoned =
            stagewire_core::Failure::new(stagewire_core::ErrorClass::Cancelled, "kv.aborted", "the round is over");
        room.abort(abandoned);
        room.released().await;
        Ok(())
    }
}
