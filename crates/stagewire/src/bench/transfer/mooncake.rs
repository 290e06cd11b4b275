//! Rows of `mooncake`: our client on a Transfer Engine of Mooncake's own wheel, beside the engine's client.

mod bare;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde_json::json;
use stagewire_transfer::{ConnectOptions, Mooncake, MooncakeOptions, Network, Segment, SegmentBuffer, TransferOptions};

use super::local::check;
use super::network::network_options;
use super::owner::Memory;
use super::raw;
use super::shape::{Shape, size_name};
use super::{Bench, DEADLINE, MIB, Rooms};
use crate::bench::contest::Contest;
use crate::bench::peers::{Driver, python};
use crate::bench::report::{Case, Goal, Target, Unit};

const RAW: Target = Target {
    text: ">= 0.9",
    goal: Goal::RatioAtLeast(0.9),
};

const SYNCHRONOUS: Target = Target {
    text: ">= 1.4",
    goal: Goal::RatioAtLeast(1.4),
};

/// One way to get the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Entrant {
    Pull,
    /// A stream with the congestion control that the engine's sockets have, too: the system's, which a client cannot choose
    /// for them.
    Untuned,
    Raw,
    /// What the engine gives to anybody.
    Bare,
    /// `transfer_sync_read`.
    Synchronous,
    /// `batch_transfer_async_read`, then asking until it is done.
    Submit,
}

/// Engines in two processes, and our client.
struct Engines {
    server: Driver,
    client: Driver,
    ours: Arc<Mooncake>,
}

struct Round<'a> {
    engines: &'a mut Engines,
    segment: Arc<Segment>,
    source: SegmentBuffer,
    rooms: Rooms,
    raw: raw::Client,
    untuned: raw::Client,
    bare: bare::Client,
    size: u64,
}

fn case(size: u64) -> String {
    format!("mooncake copy, {}, whole", size_name(size))
}

impl Bench<'_> {
    pub(super) async fn mooncake(&mut self, sizes: &[u64]) -> anyhow::Result<()> {
        let wanted: Vec<u64> = sizes.iter().copied().filter(|size| self.wants(&case(*size))).collect();
        if wanted.is_empty() {
            return Ok(());
        }
        let started = match python() {
            Ok(python) => self.engines(&python).await?,
            Err(why) => Err(why),
        };
        let mut engines = match started {
            Ok(engines) => engines,
            Err(why) => {
                for size in wanted {
                    self.report.skip(case(size), "throughput", why.clone());
                }
                return Ok(());
            }
        };
        for size in wanted {
            self.output.say(format_args!("mooncake, {}", size_name(size)));
            self.mooncake_size(size, &mut engines)
                .await
                .with_context(|| size_name(size))?;
        }
        engines.client.end().await;
        engines.server.end().await;
        Ok(())
    }

    /// This process's end of our own transport, of which a host has one.
    pub(super) async fn ours(&mut self) -> anyhow::Result<Arc<Mooncake>> {
        if let Some(ours) = &self.ours {
            return Ok(ours.clone());
        }
        let network = Network::start(self.host.clone(), network_options(false)).await?;
        let ours = Mooncake::start(network, MooncakeOptions::default()).await?;
        self.ours = Some(ours.clone());
        Ok(ours)
    }

    async fn engines(&mut self, python: &Path) -> anyhow::Result<Result<Engines, String>> {
        let server = match Driver::spawn(python, "mooncake", &["server"]).await? {
            Ok(server) => server,
            Err(why) => return Ok(Err(why)),
        };
        let client = match Driver::spawn(python, "mooncake", &["client"]).await? {
            Ok(client) => client,
            Err(why) => return Ok(Err(why)),
        };
        let ours = self.ours().await?;
        Ok(Ok(Engines { server, client, ours }))
    }

    async fn mooncake_size(&mut self, size: u64, engines: &mut Engines) -> anyhow::Result<()> {
        let held = engines.server.order(&json!({"do": "hold", "size": size})).await?;
        let name = held["segment"].as_str().context("no segment")?;
        let address = held["address"].as_u64().context("no address")?;
        let segment = engines.ours.open(name, ConnectOptions::default()).await?;
        engines
            .client
            .order(&json!({"do": "reach", "held": held, "size": size}))
            .await?;
        let raw = self.owner.hold(Memory::Borrowed, size, &[]).await?.raw;
        let mut round = Round {
            engines,
            segment,
            source: SegmentBuffer { address, len: size },
            rooms: Rooms::new(size, size)?,
            raw: raw::Client::connect(raw)?,
            untuned: raw::Client::untuned(raw)?,
            bare: bare::Client::connect(name)?,
            size,
        };
        let contest = round.contest(self.options.pairs).await?;
        drop(round);
        let untuned = format!("raw TCP, {}", raw::default_congestion());
        for (reference, what, target) in [
            (Entrant::Untuned, untuned.as_str(), (size >= MIB).then_some(RAW)),
            (Entrant::Raw, "raw TCP", None),
            (Entrant::Bare, "bare client", None),
            (
                Entrant::Synchronous,
                "TE sync",
                (size >= 16 * MIB).then_some(SYNCHRONOUS),
            ),
            (Entrant::Submit, "TE submit+poll", None),
        ] {
            let row = Case {
                name: case(size),
                metric: "throughput",
                unit: Unit::GigabytesPerSecond { bytes: size },
                reference: what.to_owned(),
                target,
            };
            self.report.add(row, &contest.pairs(Entrant::Pull, reference));
        }
        let bare = Case {
            name: format!("mooncake bare client, {}", size_name(size)),
            metric: "throughput",
            unit: Unit::GigabytesPerSecond { bytes: size },
            reference: untuned,
            target: None,
        };
        self.report.add(bare, &contest.pairs(Entrant::Bare, Entrant::Untuned));
        self.owner.release().await
    }
}

impl Round<'_> {
    async fn contest(&mut self, pairs: usize) -> anyhow::Result<Contest<Entrant>> {
        let entrants = [
            Entrant::Pull,
            Entrant::Untuned,
            Entrant::Raw,
            Entrant::Bare,
            Entrant::Synchronous,
            Entrant::Submit,
        ];
        for entrant in entrants {
            self.rooms.destination.bytes().context("in use")?.fill(0);
            self.once(entrant).await.with_context(|| format!("{entrant:?}"))?;
            match entrant {
                Entrant::Pull | Entrant::Untuned | Entrant::Raw | Entrant::Bare => {
                    check(&mut self.rooms, &Shape::Whole.record(self.size))?;
                }
                Entrant::Synchronous | Entrant::Submit => self.engines.client.check().await?,
            }
        }
        Contest::run(&entrants, pairs, async |entrant| self.once(entrant).await).await
    }

    async fn once(&mut self, entrant: Entrant) -> anyhow::Result<Duration> {
        match entrant {
            Entrant::Pull => {
                let target = self.rooms.destination.target().context("in use")?;
                let records = [Shape::Whole.record(self.size)];
                let options = TransferOptions {
                    deadline: Some(DEADLINE),
                };
                let begin = Instant::now();
                self.segment.pull(self.source, &records, &target, options).await?;
                Ok(begin.elapsed())
            }
            Entrant::Untuned | Entrant::Raw => {
                let raw = if entrant == Entrant::Raw {
                    &mut self.raw
                } else {
                    &mut self.untuned
                };
                let destination = self.rooms.destination.bytes().context("in use")?;
                Ok(raw.read(&mut destination[..self.size as usize])?)
            }
            Entrant::Bare => {
                let destination = self.rooms.destination.bytes().context("in use")?;
                self.bare
                    .read(self.source.address, &mut destination[..self.size as usize])
            }
            Entrant::Synchronous => self.engines.client.time("sync").await,
            Entrant::Submit => self.engines.client.time("submit").await,
        }
    }
}
