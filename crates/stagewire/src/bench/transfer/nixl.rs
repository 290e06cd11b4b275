//! Rows of `nixl`: our transport beside NIXL's own Python API, both over UCX.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde_json::json;
use stagewire_transfer::{Network, Nixl, NixlOptions, Pinned, TransferOptions};

use super::local::{check, pin};
use super::network::network_options;
use super::owner::Memory;
use super::raw;
use super::shape::{Shape, size_name};
use super::{Bench, DEADLINE, MIB, Rooms};
use crate::bench::contest::Contest;
use crate::bench::peers::{Driver, python};
use crate::bench::report::{Case, Goal, Target, Unit};

const OWN_API: Target = Target {
    text: ">= 0.95",
    goal: Goal::RatioAtLeast(0.95),
};

const SHAPES: [Shape; 2] = [Shape::Whole, Shape::Runs(128)];

/// One way to get the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Entrant {
    Pull,
    Raw,
    Python,
}

/// Agents of NIXL's Python package in two processes, and our own here. Ours at the owner are in its process.
struct Agents {
    target: Driver,
    initiator: Driver,
    ours: Arc<Nixl>,
}

struct Round<'a> {
    agents: &'a mut Agents,
    pinned: Box<dyn Pinned>,
    rooms: Rooms,
    raw: raw::Client,
    size: u64,
    shape: Shape,
}

fn case(size: u64, shape: Shape) -> String {
    format!("nixl copy, {}, {}", size_name(size), shape.name())
}

/// The file of NIXL's C interface in the environment of this interpreter.
pub(in crate::bench) fn library(python: &Path) -> Result<PathBuf, String> {
    let environment = python.parent().and_then(Path::parent).unwrap_or(python);
    let folders = |folder: &Path| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect()
    };
    let named = |path: &PathBuf, beginning: &str, end: &str| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with(beginning) && name.ends_with(end)
    };
    folders(&environment.join("lib"))
        .into_iter()
        .filter(|path| named(path, "python3", ""))
        .flat_map(|path| folders(&path.join("site-packages")))
        .filter(|path| named(path, ".nixl_cu", ".mesonpy.libs"))
        .map(|path| path.join("libnixl_capi.so"))
        .find(|path| path.exists())
        .ok_or_else(|| format!("{} has no wheel of NIXL", environment.display()))
}

impl Bench<'_> {
    pub(super) async fn nixl(&mut self, sizes: &[u64]) -> anyhow::Result<()> {
        let cases = sizes.iter().flat_map(|size| SHAPES.map(|shape| (*size, shape)));
        let wanted: Vec<(u64, Shape)> = cases.filter(|(size, shape)| self.wants(&case(*size, *shape))).collect();
        if wanted.is_empty() {
            return Ok(());
        }
        let found = python().and_then(|python| library(&python).map(|library| (python, library)));
        let started = match found {
            Ok((python, library)) => self.agents(&python, library).await?,
            Err(why) => Err(why),
        };
        let mut agents = match started {
            Ok(agents) => agents,
            Err(why) => {
                for (size, shape) in wanted {
                    self.report.skip(case(size, shape), "throughput", why.clone());
                }
                return Ok(());
            }
        };
        for (size, shape) in wanted {
            let case = case(size, shape);
            self.output.say(&case);
            self.nixl_case(size, shape, &mut agents).await.context(case)?;
        }
        agents.initiator.end().await;
        agents.target.end().await;
        Ok(())
    }

    async fn agents(&mut self, python: &Path, library: PathBuf) -> anyhow::Result<Result<Agents, String>> {
        let target = match Driver::spawn(python, "nixl", &["target"]).await? {
            Ok(target) => target,
            Err(why) => return Ok(Err(why)),
        };
        let initiator = match Driver::spawn(python, "nixl", &["initiator"]).await? {
            Ok(initiator) => initiator,
            Err(why) => return Ok(Err(why)),
        };
        if let Err(why) = self.owner.nixl(library.clone()).await? {
            return Ok(Err(why));
        }
        let network = Network::start(self.host.clone(), network_options(false)).await?;
        let options = NixlOptions {
            library: Some(library),
            ..NixlOptions::default()
        };
        let ours = Nixl::start(&network, options).await.map_err(|error| error.to_string());
        Ok(ours.map(|ours| Agents {
            target,
            initiator,
            ours,
        }))
    }

    async fn nixl_case(&mut self, size: u64, shape: Shape, agents: &mut Agents) -> anyhow::Result<()> {
        let span = shape.span(size);
        let theirs = agents.target.order(&json!({"do": "hold", "size": span})).await?;
        let runs = shape.rows(size).count;
        agents
            .initiator
            .order(&json!({"do": "reach", "held": theirs, "span": span, "size": size, "runs": runs}))
            .await?;
        let held = self.owner.hold(Memory::Borrowed, span, &["nixl"]).await?;
        let mut round = Round {
            pinned: pin(agents.ours.clone(), &held).await?,
            agents,
            rooms: Rooms::new(span, size)?,
            raw: raw::Client::connect(held.raw)?,
            size,
            shape,
        };
        let contest = round.contest(self.options.pairs).await?;
        drop(round);
        for (reference, what, target) in [
            (
                Entrant::Python,
                "NIXL's Python API",
                (size >= 16 * MIB).then_some(OWN_API),
            ),
            (Entrant::Raw, "raw TCP", None),
        ] {
            let row = Case {
                name: case(size, shape),
                metric: "throughput",
                unit: Unit::GigabytesPerSecond { bytes: size },
                reference: what.to_owned(),
                target,
            };
            self.report.add(row, &contest.pairs(Entrant::Pull, reference));
        }
        self.owner.release().await
    }
}

impl Round<'_> {
    async fn contest(&mut self, pairs: usize) -> anyhow::Result<Contest<Entrant>> {
        let entrants = [Entrant::Pull, Entrant::Raw, Entrant::Python];
        for entrant in entrants {
            self.rooms.destination.bytes().context("in use")?.fill(0);
            self.once(entrant).await.with_context(|| format!("{entrant:?}"))?;
            match entrant {
                Entrant::Pull => check(&mut self.rooms, &self.shape.record(self.size))?,
                Entrant::Raw => check(&mut self.rooms, &Shape::Whole.record(self.size))?,
                Entrant::Python => self.agents.initiator.check().await?,
            }
        }
        Contest::run(&entrants, pairs, async |entrant| self.once(entrant).await).await
    }

    async fn once(&mut self, entrant: Entrant) -> anyhow::Result<Duration> {
        match entrant {
            Entrant::Pull => {
                let target = self.rooms.destination.target().context("in use")?;
                let records = [self.shape.record(self.size)];
                let options = TransferOptions {
                    deadline: Some(DEADLINE),
                };
                let begin = Instant::now();
                self.pinned.pull(&records, &target, options).await?;
                Ok(begin.elapsed())
            }
            Entrant::Raw => {
                let destination = self.rooms.destination.bytes().context("in use")?;
                Ok(self.raw.read(&mut destination[..self.size as usize])?)
            }
            Entrant::Python => self.agents.initiator.time("read").await,
        }
    }
}
