//! Rows of the transports of one host.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use stagewire_core::Record;
use stagewire_transfer::probe::{self, Way};
use stagewire_transfer::{ConnectOptions, Pinned, TransferOptions, Transport};

use super::owner::Held;
use super::raw;
use super::shape::{Shape, size_name};
use super::{Bench, DEADLINE, MIB, Rooms};
use crate::bench::contest::Contest;
use crate::bench::report::{Case, Goal, Target, Unit};

const BARE: Target = Target {
    text: ">= 0.95",
    goal: Goal::RatioAtLeast(0.95),
};

const TWO_THREADS: Target = Target {
    text: ">= 1.4",
    goal: Goal::RatioAtLeast(1.4),
};

const HAND_OVER: Target = Target {
    text: "<= 5 us",
    goal: Goal::AtMost(5.0),
};

const NO_COPY: Target = Target {
    text: "0",
    goal: Goal::AtMost(0.0),
};

/// One way to get the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Entrant {
    Pull,
    Map,
    Memcpy,
    Bare(Way),
    Process,
    Tcp,
}

/// Everything that a round of one case needs.
struct Round<'a> {
    bench: &'a Bench<'a>,
    held: &'a Held,
    pinned: &'a dyn Pinned,
    rooms: &'a mut Rooms,
    tcp: &'a mut raw::Client,
    size: u64,
    shape: Shape,
}

impl Bench<'_> {
    pub(super) async fn shm(
        &mut self,
        size: u64,
        shapes: &[Shape],
        held: &Held,
        rooms: &mut Rooms,
    ) -> anyhow::Result<()> {
        let pinned = pin(self.host.shm(), held).await?;
        let mut tcp = raw::Client::connect(held.raw)?;
        for shape in shapes {
            let case = format!("shm copy, {}, {}", size_name(size), shape.name());
            if !self.wants(&case) {
                continue;
            }
            let mut round = Round::of(self, held, &*pinned, rooms, &mut tcp, size, *shape);
            let mut entrants = vec![Entrant::Pull, Entrant::Memcpy, Entrant::Tcp];
            entrants.extend(Way::ALL.map(Entrant::Bare));
            let contest = round.contest(&entrants).await?;
            let best = contest.best(Way::ALL.map(Entrant::Bare));
            let Some(Entrant::Bare(way)) = best else {
                unreachable!("all of them were timed");
            };
            let against_memcpy = (size >= 64 * MIB).then_some(TWO_THREADS);
            self.rows(
                &case,
                size,
                &contest,
                &[
                    (Entrant::Bare(way), format!("bare {}", way.name()), Some(BARE)),
                    (Entrant::Memcpy, "memcpy".to_owned(), against_memcpy),
                    (Entrant::Tcp, "raw TCP".to_owned(), None),
                ],
            );
        }
        self.map(size, held, &*pinned, rooms, &mut tcp).await
    }

    /// What it costs to show pinned memory, at any size.
    async fn map(
        &mut self,
        size: u64,
        held: &Held,
        pinned: &dyn Pinned,
        rooms: &mut Rooms,
        tcp: &mut raw::Client,
    ) -> anyhow::Result<()> {
        let case = format!("shm map, {}", size_name(size));
        if !self.wants(&case) {
            return Ok(());
        }
        let before = self.host.stats().copied_bytes;
        let mut round = Round::of(self, held, pinned, rooms, tcp, size, Shape::Whole);
        let contest = round.contest(&[Entrant::Map, Entrant::Memcpy, Entrant::Tcp]).await?;
        let copied = self.host.stats().copied_bytes - before;
        for (entrant, reference, target) in [
            (Entrant::Memcpy, "memcpy", Some(HAND_OVER)),
            (Entrant::Tcp, "raw TCP", None),
        ] {
            let row = Case {
                name: case.clone(),
                metric: "handover",
                unit: Unit::Microseconds,
                reference: reference.to_owned(),
                target,
            };
            self.report.add(row, &contest.pairs(Entrant::Map, entrant));
        }
        #[expect(clippy::cast_precision_loss, reason = "0, or far from it")]
        let copied = copied as f64;
        self.report
            .count(format!("{case}, bytes copied"), "copied", copied, "B", NO_COPY);
        Ok(())
    }

    pub(super) async fn cma(
        &mut self,
        size: u64,
        shapes: &[Shape],
        held: &Held,
        rooms: &mut Rooms,
    ) -> anyhow::Result<()> {
        let case = |shape: &Shape| format!("cma copy, {}, {}", size_name(size), shape.name());
        let unavailable = match self.host.cma() {
            Ok(_) => held.region("cma").err(),
            Err(error) => Some(error.to_string()),
        };
        if let Some(why) = unavailable {
            for case in shapes
                .iter()
                .map(case)
                .filter(|case| self.wants(case))
                .collect::<Vec<_>>()
            {
                self.report.skip(case, "throughput", why.clone());
            }
            return Ok(());
        }
        let pinned = pin(self.host.cma()?, held).await?;
        let mut tcp = raw::Client::connect(held.raw)?;
        for shape in shapes {
            let case = case(shape);
            if !self.wants(&case) {
                continue;
            }
            let mut round = Round::of(self, held, &*pinned, rooms, &mut tcp, size, *shape);
            let entrants = [Entrant::Pull, Entrant::Memcpy, Entrant::Process, Entrant::Tcp];
            let contest = round.contest(&entrants).await?;
            let threads = probe::cma_threads(size);
            let bare = format!(
                "bare process_vm_readv, {threads} {}",
                if threads == 1 { "thread" } else { "threads" }
            );
            self.rows(
                &case,
                size,
                &contest,
                &[
                    (Entrant::Process, bare, (size >= MIB).then_some(BARE)),
                    (Entrant::Memcpy, "memcpy".to_owned(), None),
                    (Entrant::Tcp, "raw TCP".to_owned(), None),
                ],
            );
        }
        Ok(())
    }

    fn rows(
        &mut self,
        case: &str,
        size: u64,
        contest: &Contest<Entrant>,
        references: &[(Entrant, String, Option<Target>)],
    ) {
        for (entrant, reference, target) in references {
            let row = Case {
                name: case.to_owned(),
                metric: "throughput",
                unit: Unit::GigabytesPerSecond { bytes: size },
                reference: reference.clone(),
                target: *target,
            };
            self.report.add(row, &contest.pairs(Entrant::Pull, *entrant));
        }
    }
}

/// Pins what the owner holds.
pub(in crate::bench) async fn pin(transport: Arc<dyn Transport>, held: &Held) -> anyhow::Result<Box<dyn Pinned>> {
    let remote = transport.connect(&held.peer, ConnectOptions::default()).await?;
    let region = held.region(transport.name()).map_err(anyhow::Error::msg)?;
    Ok(remote.pin(region, TransferOptions::default()).await?)
}

impl<'a> Round<'a> {
    fn of(
        bench: &'a Bench<'_>,
        held: &'a Held,
        pinned: &'a dyn Pinned,
        rooms: &'a mut Rooms,
        tcp: &'a mut raw::Client,
        size: u64,
        shape: Shape,
    ) -> Self {
        Self {
            bench,
            held,
            pinned,
            rooms,
            tcp,
            size,
            shape,
        }
    }

    /// Checks that every way gives the same bytes, then times them.
    async fn contest(&mut self, entrants: &[Entrant]) -> anyhow::Result<Contest<Entrant>> {
        for entrant in entrants {
            self.rooms.destination.bytes().context("in use")?.fill(0);
            self.once(*entrant).await?;
            self.check(*entrant).with_context(|| format!("{entrant:?}"))?;
        }
        let pairs = self.bench.options.pairs;
        Contest::run(entrants, pairs, async |entrant| self.once(entrant).await).await
    }

    async fn once(&mut self, entrant: Entrant) -> anyhow::Result<Duration> {
        let (probe, rows) = (&self.bench.probe, self.shape.rows(self.size));
        if entrant == Entrant::Pull {
            return self.pull().await;
        }
        if entrant == Entrant::Map {
            let begin = Instant::now();
            let mapping = self.pinned.map().await?;
            black_box(mapping.as_ptr());
            return Ok(begin.elapsed());
        }
        let destination = self.rooms.destination.bytes().context("in use")?;
        let destination = &mut destination[..self.size as usize];
        match entrant {
            Entrant::Pull | Entrant::Map => unreachable!("done above"),
            Entrant::Tcp => Ok(self.tcp.read(destination)?),
            Entrant::Memcpy => {
                let own = self.rooms.own.bytes().context("in use")?;
                let begin = Instant::now();
                probe.copy(Way::Plain, black_box(own), black_box(destination), rows);
                Ok(begin.elapsed())
            }
            Entrant::Bare(way) => {
                let mapping = self.pinned.map().await?;
                let begin = Instant::now();
                probe.copy(way, black_box(&mapping), black_box(destination), rows);
                Ok(begin.elapsed())
            }
            Entrant::Process => {
                let (pid, threads) = (self.held.peer.process.pid, probe::cma_threads(self.size));
                let begin = Instant::now();
                probe.read_process(pid, self.held.address, destination, rows, threads)?;
                Ok(begin.elapsed())
            }
        }
    }

    async fn pull(&mut self) -> anyhow::Result<Duration> {
        let records: [Record; 1] = [self.shape.record(self.size)];
        let target = self.rooms.destination.target().context("in use")?;
        let options = TransferOptions {
            deadline: Some(DEADLINE),
        };
        let begin = Instant::now();
        self.pinned.pull(&records, &target, options).await?;
        Ok(begin.elapsed())
    }

    /// The bare stream sends the bytes without a gap.
    fn check(&mut self, entrant: Entrant) -> anyhow::Result<()> {
        let shape = match entrant {
            Entrant::Map => return Ok(()),
            Entrant::Tcp => Shape::Whole,
            _ => self.shape,
        };
        check(self.rooms, &shape.record(self.size))
    }
}

/// Every byte of what arrived.
pub(super) fn check(rooms: &mut Rooms, record: &Record) -> anyhow::Result<()> {
    let own = rooms.own.bytes().context("in use")?;
    let found = rooms.destination.bytes().context("in use")?;
    for (src, dst) in record.row_offsets() {
        let (src, dst, width) = (src as usize, dst as usize, record.width as usize);
        ensure!(
            own[src..src + width] == found[dst..dst + width],
            "the bytes at {dst} are not those that were sent"
        );
    }
    Ok(())
}
