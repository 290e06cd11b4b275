//! Rows of `tcp`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use stagewire_transfer::probe::{Rows, Way};
use stagewire_transfer::{Network, NetworkOptions, Pinned, TcpOptions, TransferOptions};

use super::apart::Apart;
use super::local::{check, pin};
use super::owner::Memory;
use super::raw;
use super::shape::{Shape, size_name};
use super::{Bench, DEADLINE, MIB, Rooms};
use crate::bench::contest::Contest;
use crate::bench::report::{Case, Goal, Target, Unit};

const RAW: Target = Target {
    text: ">= 0.95",
    goal: Goal::RatioAtLeast(0.95),
};

const RAW_WITH_DIGEST: Target = Target {
    text: ">= 0.75",
    goal: Goal::RatioAtLeast(0.75),
};

const ROUND_TRIP: Target = Target {
    text: "<= 1.3",
    goal: Goal::RatioAtMost(1.3),
};

const CONTIGUOUS: Target = Target {
    text: ">= 0.8",
    goal: Goal::RatioAtLeast(0.8),
};

/// Runs of the chunk that has a target.
const RUNS: u64 = 128;

/// One way to get the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Entrant {
    Pull {
        digest: bool,
        shape: Shape,
    },
    Raw,
    /// Raw, with a hash of every piece at both ends.
    RawHashed,
    Memcpy,
}

/// Everything that a round of one size needs.
struct Round<'a> {
    bench: &'a Bench<'a>,
    /// Without digests, and with them.
    pinned: [Box<dyn Pinned>; 2],
    rooms: Rooms,
    raw: raw::Client,
    size: u64,
}

fn case(what: &str, size: u64, shape: Shape) -> String {
    format!("{what}, {}, {}", size_name(size), shape.name())
}

/// Loopback, any port.
pub(in crate::bench) fn network_options(digest: bool) -> NetworkOptions {
    NetworkOptions {
        tcp: TcpOptions {
            digest,
            ..TcpOptions::default()
        },
        ..NetworkOptions::default()
    }
}

impl Bench<'_> {
    pub(super) async fn network(&mut self, sizes: &[u64], shapes: &[Shape]) -> anyhow::Result<()> {
        let mut networks = Vec::new();
        // A side that wants digests has them: the owner does not.
        for digest in [false, true] {
            networks.push(Network::start(self.host.clone(), network_options(digest)).await?);
        }
        for size in sizes {
            let copies = shapes.iter().map(|shape| case("tcp copy", *size, *shape));
            let hashed = ["tcp copy with digest", "raw TCP, hashed"].map(|what| case(what, *size, Shape::Whole));
            if copies.chain(hashed).any(|case| self.wants(&case)) {
                self.output.say(format_args!("tcp, {}", size_name(*size)));
                let done = self.tcp(*size, shapes, &networks).await;
                done.with_context(|| format!("tcp, {}", size_name(*size)))?;
            }
        }
        for network in networks {
            network.shutdown().await;
        }
        Ok(())
    }

    async fn tcp(&mut self, size: u64, shapes: &[Shape], networks: &[Arc<Network>]) -> anyhow::Result<()> {
        let span = shapes.iter().map(|shape| shape.span(size)).max().unwrap_or(size);
        let held = self.owner.hold(Memory::Borrowed, span, &["tcp"]).await?;
        let mut round = Round {
            pinned: [
                pin(networks[0].tcp(), &held).await?,
                pin(networks[1].tcp(), &held).await?,
            ],
            bench: self,
            rooms: Rooms::new(span, size)?,
            raw: raw::Client::connect(held.raw)?,
            size,
        };
        let plain = shapes.iter().map(|shape| Entrant::Pull {
            digest: false,
            shape: *shape,
        });
        let hashed = Entrant::Pull {
            digest: true,
            shape: Shape::Whole,
        };
        let whole = Entrant::Pull {
            digest: false,
            shape: Shape::Whole,
        };
        let bare = [Entrant::Raw, Entrant::RawHashed, Entrant::Memcpy];
        let entrants: Vec<_> = plain.clone().chain([hashed]).chain(bare).collect();
        let apart = Apart::new(self.owner.pid().context("the owner has ended")?)?;
        let contest = round.contest(&entrants).await?;
        drop((round, apart));
        let from_mib = |target| (size >= MIB).then_some(target);
        let name = |what: &str, shape: Shape| case(what, size, shape);
        if size < 64 << 10 {
            let unit = Unit::Microseconds;
            let case = name("tcp copy", Shape::Whole);
            self.tcp_row(
                case,
                unit,
                &contest,
                whole,
                (Entrant::Raw, "raw round trip"),
                Some(ROUND_TRIP),
            );
        }
        let unit = Unit::GigabytesPerSecond { bytes: size };
        for entrant in plain {
            let Entrant::Pull { shape, .. } = entrant else {
                continue;
            };
            let case = || name("tcp copy", shape);
            if shape == Shape::Whole {
                self.tcp_row(
                    case(),
                    unit,
                    &contest,
                    entrant,
                    (Entrant::Raw, "raw TCP"),
                    from_mib(RAW),
                );
                self.tcp_row(case(), unit, &contest, entrant, (Entrant::Memcpy, "memcpy"), None);
            } else {
                let target = from_mib(CONTIGUOUS).filter(|_| shape == Shape::Runs(RUNS));
                self.tcp_row(case(), unit, &contest, entrant, (whole, "contiguous"), target);
                self.tcp_row(case(), unit, &contest, entrant, (Entrant::Raw, "raw TCP"), None);
            }
        }
        let case = || name("tcp copy with digest", Shape::Whole);
        self.tcp_row(
            case(),
            unit,
            &contest,
            hashed,
            (Entrant::Raw, "raw TCP"),
            from_mib(RAW_WITH_DIGEST),
        );
        let limit = (Entrant::RawHashed, "raw TCP, hashed");
        self.tcp_row(case(), unit, &contest, hashed, limit, None);
        let limit = name("raw TCP, hashed", Shape::Whole);
        self.tcp_row(
            limit,
            unit,
            &contest,
            Entrant::RawHashed,
            (Entrant::Raw, "raw TCP"),
            None,
        );
        self.owner.release().await
    }

    fn tcp_row(
        &mut self,
        name: String,
        unit: Unit,
        contest: &Contest<Entrant>,
        entrant: Entrant,
        (reference, reference_name): (Entrant, &str),
        target: Option<Target>,
    ) {
        if self.wants(&name) {
            let row = Case {
                name,
                metric: if unit == Unit::Microseconds {
                    "latency"
                } else {
                    "throughput"
                },
                unit,
                reference: reference_name.to_owned(),
                target,
            };
            self.report.add(row, &contest.pairs(entrant, reference));
        }
    }
}

impl Round<'_> {
    async fn contest(&mut self, entrants: &[Entrant]) -> anyhow::Result<Contest<Entrant>> {
        for entrant in entrants {
            self.rooms.destination.bytes().context("in use")?.fill(0);
            self.once(*entrant).await.with_context(|| format!("{entrant:?}"))?;
            let shape = match entrant {
                Entrant::Pull { shape, .. } => *shape,
                Entrant::Raw | Entrant::RawHashed | Entrant::Memcpy => Shape::Whole,
            };
            check(&mut self.rooms, &shape.record(self.size)).with_context(|| format!("{entrant:?}"))?;
        }
        let pairs = self.bench.options.pairs;
        Contest::run(entrants, pairs, async |entrant| self.once(entrant).await).await
    }

    async fn once(&mut self, entrant: Entrant) -> anyhow::Result<Duration> {
        if let Entrant::Pull { digest, shape } = entrant {
            let target = self.rooms.destination.target().context("in use")?;
            let records = [shape.record(self.size)];
            let options = TransferOptions {
                deadline: Some(DEADLINE),
            };
            let begin = Instant::now();
            self.pinned[usize::from(digest)]
                .pull(&records, &target, options)
                .await?;
            return Ok(begin.elapsed());
        }
        let destination = self.rooms.destination.bytes().context("in use")?;
        let destination = &mut destination[..self.size as usize];
        match entrant {
            Entrant::Raw => return Ok(self.raw.read(destination)?),
            Entrant::RawHashed => return Ok(self.raw.read_hashed(destination)?),
            Entrant::Pull { .. } | Entrant::Memcpy => {}
        }
        let own = self.rooms.own.bytes().context("in use")?;
        let begin = Instant::now();
        self.bench
            .probe
            .copy(Way::Plain, own, destination, Rows::whole(self.size as usize));
        Ok(begin.elapsed())
    }
}
