//! What moving a cache by the records of its plan costs, beside moving the same bytes in one piece.
//!
//! The source rank is another process. Its buffers follow one another in one region, and so do those of the destination.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use futures::stream::{self, StreamExt, TryStreamExt};
use stagewire_core::{ByteCount, Incarnation, Record};
use stagewire_transfer::probe::{Probe, Room, Rows, Way};
use stagewire_transfer::{Host, HostOptions, Network, Pinned, TransferOptions, Transport};
use uuid::Uuid;

use super::{Bench, Tables, pair};
use crate::bench::contest::Contest;
use crate::bench::paint::paint;
use crate::bench::report::{Case, Goal, Target, Unit};
use crate::bench::transfer::apart::Apart;
use crate::bench::transfer::local::pin;
use crate::bench::transfer::network::network_options;
use crate::bench::transfer::owner::{Memory, Owner};
use crate::exit::Fault;

/// Tokens of the prompt: 20 MiB for one rank of decode at TP 4.
pub(super) const TOKENS: u64 = 2048;
const PAGE: u64 = 64;
const HEAD: u64 = 128;
/// Buffers of K and V of all layers, full and window.
pub(super) const BUFFERS: u64 = 72;

/// Pulls of one descriptor each that are under way at a time.
const IN_FLIGHT: usize = 32;

/// Longest time of one operation.
pub(super) const DEADLINE: Duration = Duration::from_secs(60);

const SLICES: Target = Target {
    text: ">= 0.6",
    goal: Goal::RatioAtLeast(0.6),
};
const EACH: Target = Target {
    text: ">= 5",
    goal: Goal::RatioAtLeast(5.0),
};
const MEMCPY: Target = Target {
    text: ">= 0.5",
    goal: Goal::RatioAtLeast(0.5),
};
const PLAIN: Target = Target {
    text: ">= 0.95",
    goal: Goal::RatioAtLeast(0.95),
};

/// One way to get the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Entrant {
    /// The records of the plan.
    Records,
    /// As many bytes, without a gap.
    Contiguous,
    /// A pull for each descriptor.
    Each,
    Memcpy,
}

/// What moves from one rank to another.
pub(super) struct Move {
    pub(super) records: Vec<Record>,
    descriptors: Vec<Record>,
    pub(super) nbytes: u64,
    /// Bytes of the buffers of each side.
    pub(super) spans: [u64; 2],
}

impl Move {
    /// The first pair of ranks of gpt-oss-120b between these sizes; pages in no order, or in one run.
    pub(super) fn of(tp: [u32; 2], scattered: bool) -> anyhow::Result<Self> {
        let pages = i64::try_from(TOKENS / PAGE)?;
        let tables = tables(scattered);
        let plan = super::plan_of(&pair(tp)?, &tables, 0, TOKENS)?;
        // Page 0 is nobody's; scattered tables go up to twice as many.
        let span = |tp: u32, last: i64| -> anyhow::Result<u64> {
            Ok(u64::try_from(last + 1)? * PAGE * u64::from(8 / tp) * HEAD)
        };
        let sides = [span(tp[0], tables.src[tables.src.len() - 1])?, span(tp[1], pages)?];
        let buffer = |component: u32, kv: u32, layer: u32| u64::from((component * 2 + kv) * 18 + layer);
        let records = plan.records()?.into_iter().map(|planned| Record {
            src_offset: planned.record.src_offset + sides[0] * buffer(planned.component, planned.kv, planned.src_layer),
            dst_offset: planned.record.dst_offset + sides[1] * buffer(planned.component, planned.kv, planned.dst_layer),
            ..planned.record
        });
        let records: Vec<Record> = records.collect();
        let rows = records.iter().flat_map(|record| {
            let offsets = record.row_offsets();
            offsets.map(|(src, dst)| Record::contiguous(src, dst, record.width))
        });
        Ok(Self {
            nbytes: plan.nbytes(),
            descriptors: rows.collect(),
            spans: sides.map(|side| side * BUFFERS),
            records,
        })
    }

    /// Every byte of what arrived.
    pub(super) fn check(&self, records: &[Record], own: &mut Room, destination: &mut Room) -> anyhow::Result<()> {
        let (own, found) = (own.bytes().context("in use")?, destination.bytes().context("in use")?);
        let rows = records
            .iter()
            .flat_map(|record| record.row_offsets().map(move |offsets| (record.width, offsets)));
        for (width, (src, dst)) in rows {
            let (src, dst, width) = (src as usize, dst as usize, width as usize);
            ensure!(
                own[src..src + width] == found[dst..dst + width],
                "the bytes at {dst} are others"
            );
        }
        Ok(())
    }
}

/// Pages in no order at the source, or in one run.
pub(super) fn tables(scattered: bool) -> Tables {
    let pages = 1..=(TOKENS / PAGE).cast_signed();
    let at_source = |page| if scattered { 2 * page } else { page };
    Tables {
        name: "",
        src: pages.clone().map(at_source).collect(),
        dst: pages.collect(),
    }
}

/// Everything that a round needs.
struct Round<'a> {
    moved: &'a Move,
    pinned: Box<dyn Pinned>,
    probe: Probe,
    own: Room,
    destination: Room,
}

/// Both processes.
pub(super) struct Ends {
    host: Arc<Host>,
    pub(super) network: Arc<Network>,
    pub(super) owner: Owner,
}

impl Ends {
    pub(super) async fn start() -> anyhow::Result<(Self, tempfile::TempDir)> {
        let dir = tempfile::Builder::new().prefix("stagewire-bench-").tempdir()?;
        let peers = dir.path().join("peers");
        let host = Host::start(HostOptions {
            dir: peers.clone(),
            incarnation: Incarnation(Uuid::new_v4()),
            arena_limit: ByteCount(0),
        });
        let host = host.await?;
        let network = Network::start(host.clone(), network_options(false)).await?;
        let owner = Owner::spawn(&peers)?;
        Ok((Self { host, network, owner }, dir))
    }

    pub(super) fn transport(&self, name: &str) -> anyhow::Result<Arc<dyn Transport>> {
        Ok(match name {
            "shm" => self.host.shm(),
            "cma" => self.host.cma()?,
            _ => self.network.tcp(),
        })
    }

    pub(super) async fn end(self) -> anyhow::Result<()> {
        self.network.shutdown().await;
        self.owner.end().await?;
        self.host.shutdown().await;
        Ok(())
    }
}

impl Bench<'_> {
    /// Rows of all transports.
    pub(super) async fn moves(&mut self) -> Result<(), Fault> {
        let names = |transport| {
            [
                format!("{transport}, TP 1 to 4, slices of 256 bytes"),
                format!("{transport}, TP 4 to 4, pages"),
            ]
        };
        let all = ["shm", "cma", "tcp"].map(|transport| (transport, names(transport)));
        let asked: Vec<_> = all
            .into_iter()
            .map(|(transport, names)| (transport, names.map(|name| (self.wants(&name), name))))
            .filter(|(_, names)| names.iter().any(|(wanted, _)| *wanted))
            .collect();
        if asked.is_empty() {
            return Ok(());
        }
        let (mut ends, dir) = Ends::start().await?;
        for (transport, [(sliced, slices), (paged, pages)]) in asked {
            if let Err(error) = ends.transport(transport) {
                for (_, name) in [(sliced, slices), (paged, pages)].into_iter().filter(|row| row.0) {
                    self.report.skip(name, "throughput", error.to_string());
                }
                continue;
            }
            if sliced {
                self.slices(&mut ends, transport, &slices).await.context(slices)?;
            }
            if paged {
                self.pages(&mut ends, transport, &pages).await.context(pages)?;
            }
        }
        ends.end().await?;
        drop(dir);
        Ok(())
    }

    /// Heads cut out of each token.
    async fn slices(&mut self, ends: &mut Ends, transport: &str, name: &str) -> anyhow::Result<()> {
        let moved = Move::of([1, 4], true)?;
        let mut entrants = vec![Entrant::Records, Entrant::Contiguous, Entrant::Memcpy];
        entrants.extend((transport == "tcp").then_some(Entrant::Each));
        let contest = self.contest(ends, transport, &moved, &entrants).await?;
        let tcp = transport == "tcp";
        self.row(
            name,
            &moved,
            &contest,
            (Entrant::Contiguous, "contiguous"),
            tcp.then_some(SLICES),
        );
        if tcp {
            let each = format!("a pull for each of {}", moved.descriptors.len());
            self.row(name, &moved, &contest, (Entrant::Each, &each), Some(EACH));
        }
        let shm = (transport == "shm").then_some(MEMCPY);
        self.row(name, &moved, &contest, (Entrant::Memcpy, "memcpy"), shm);
        Ok(())
    }

    /// Whole pages, one run of them.
    async fn pages(&mut self, ends: &mut Ends, transport: &str, name: &str) -> anyhow::Result<()> {
        let moved = Move::of([4, 4], false)?;
        let entrants = [Entrant::Records, Entrant::Contiguous, Entrant::Memcpy];
        let contest = self.contest(ends, transport, &moved, &entrants).await?;
        self.row(name, &moved, &contest, (Entrant::Contiguous, "plain copy"), Some(PLAIN));
        self.row(name, &moved, &contest, (Entrant::Memcpy, "memcpy"), None);
        Ok(())
    }

    fn row(
        &mut self,
        name: &str,
        moved: &Move,
        contest: &Contest<Entrant>,
        (reference, reference_name): (Entrant, &str),
        target: Option<Target>,
    ) {
        let row = Case {
            name: name.to_owned(),
            metric: "throughput",
            unit: Unit::GigabytesPerSecond { bytes: moved.nbytes },
            reference: reference_name.to_owned(),
            target,
        };
        self.report.add(row, &contest.pairs(Entrant::Records, reference));
    }

    async fn contest(
        &self,
        ends: &mut Ends,
        transport: &str,
        moved: &Move,
        entrants: &[Entrant],
    ) -> anyhow::Result<Contest<Entrant>> {
        let memory = if transport == "shm" {
            Memory::Arena
        } else {
            Memory::Borrowed
        };
        let held = ends.owner.hold(memory, moved.spans[0], &[transport]).await?;
        let room = |len: u64| Room::new(usize::try_from(len)?).context("there is not enough memory");
        let mut round = Round {
            moved,
            pinned: pin(ends.transport(transport)?, &held).await?,
            probe: Probe::start().context("cannot start a thread")?,
            own: room(moved.spans[0])?,
            destination: room(moved.spans[1])?,
        };
        paint(round.own.bytes().context("in use")?, 0);
        let apart = Apart::new(ends.owner.pid().context("the owner has ended")?)?;
        // What copies with two threads may have two cores.
        let apart = if transport == "tcp" { apart } else { None };
        for entrant in entrants {
            round.destination.bytes().context("in use")?.fill(0);
            round.once(*entrant).await.with_context(|| format!("{entrant:?}"))?;
            round.check(*entrant).with_context(|| format!("{entrant:?}"))?;
        }
        let contest = Contest::run(entrants, self.options.pairs, async |entrant| round.once(entrant).await).await;
        drop((round, apart));
        ends.owner.release().await?;
        contest
    }
}

impl Round<'_> {
    async fn once(&mut self, entrant: Entrant) -> anyhow::Result<Duration> {
        if entrant == Entrant::Memcpy {
            let destination = self.destination.bytes().context("in use")?;
            let (own, rows) = (
                self.own.bytes().context("in use")?,
                Rows::whole(usize::try_from(self.moved.nbytes)?),
            );
            let begin = Instant::now();
            self.probe
                .copy(Way::Plain, black_box(own), black_box(destination), rows);
            return Ok(begin.elapsed());
        }
        let target = self.destination.target().context("in use")?;
        let options = TransferOptions {
            deadline: Some(DEADLINE),
        };
        let whole = [Record::contiguous(0, 0, self.moved.nbytes)];
        let begin = Instant::now();
        match entrant {
            Entrant::Records => self.pinned.pull(&self.moved.records, &target, options).await?,
            Entrant::Contiguous => self.pinned.pull(&whole, &target, options).await?,
            Entrant::Each | Entrant::Memcpy => {
                let (pinned, target) = (&*self.pinned, &target);
                stream::iter(&self.moved.descriptors)
                    .map(|one| pinned.pull(std::slice::from_ref(one), target, options.clone()))
                    .buffer_unordered(IN_FLIGHT)
                    .try_collect::<()>()
                    .await?;
            }
        }
        Ok(begin.elapsed())
    }

    fn check(&mut self, entrant: Entrant) -> anyhow::Result<()> {
        let whole = [Record::contiguous(0, 0, self.moved.nbytes)];
        let records: &[Record] = match entrant {
            Entrant::Records | Entrant::Each => &self.moved.records,
            Entrant::Contiguous | Entrant::Memcpy => &whole,
        };
        self.moved.check(records, &mut self.own, &mut self.destination)
    }
}
