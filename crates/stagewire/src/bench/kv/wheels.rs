//! The same slices over the libraries of others, as their users move them: a descriptor for each token, made for each
//! request. Ours beside them is the bare transport, which gets the records of the plan.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde_json::{Value, json};
use stagewire_core::Record;
use stagewire_transfer::probe::Room;
use stagewire_transfer::{
    ConnectOptions, Mooncake, MooncakeOptions, Nixl, NixlOptions, Pinned, Segment, SegmentBuffer, Target,
    TransferOptions,
};

use super::Bench;
use super::moves::{DEADLINE, Ends, Move};
use crate::bench::contest::Contest;
use crate::bench::paint::paint;
use crate::bench::peers::{self, Driver};
use crate::bench::report::{Case, Unit};
use crate::bench::transfer::local::pin;
use crate::bench::transfer::nixl::library;
use crate::bench::transfer::owner::Memory;
use crate::exit::Fault;

/// A library of others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wheel {
    Nixl,
    Mooncake,
}

impl Wheel {
    const ALL: [Self; 2] = [Self::Nixl, Self::Mooncake];

    const fn name(self) -> &'static str {
        match self {
            Self::Nixl => "nixl",
            Self::Mooncake => "mooncake",
        }
    }

    const fn reference(self) -> &'static str {
        match self {
            Self::Nixl => "NIXL's Python API",
            Self::Mooncake => "batch_transfer_sync_read",
        }
    }

    /// What the process that owns the bytes is called, and the one that reads them.
    const fn roles(self) -> [&'static str; 2] {
        match self {
            Self::Nixl => ["target", "initiator"],
            Self::Mooncake => ["server", "client"],
        }
    }
}

/// How our side reads.
enum Ours {
    Pinned {
        pinned: Box<dyn Pinned>,
        /// Kept as long.
        _nixl: Arc<Nixl>,
    },
    Segment(Arc<Segment>, SegmentBuffer, Arc<Mooncake>),
}

impl Ours {
    async fn pull(&self, records: &[Record], target: &Target) -> anyhow::Result<()> {
        let options = TransferOptions {
            deadline: Some(DEADLINE),
        };
        match self {
            Self::Pinned { pinned, .. } => pinned.pull(records, target, options).await?,
            Self::Segment(segment, source, _) => segment.pull(*source, records, target, options).await?,
        }
        Ok(())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Entrant {
    Ours,
    Theirs,
}

impl Bench<'_> {
    /// Rows beside NIXL and Mooncake.
    pub(super) async fn wheels(&mut self) -> Result<(), Fault> {
        for wheel in Wheel::ALL {
            let name = format!("{}, TP 1 to 4, slices of 256 bytes", wheel.name());
            if !self.wants(&name) {
                continue;
            }
            let moved = Move::of([1, 4], true)?;
            match self.wheel(wheel, &moved).await.context(name.clone())? {
                Ok(contest) => {
                    let row = Case {
                        name,
                        metric: "throughput",
                        unit: Unit::GigabytesPerSecond { bytes: moved.nbytes },
                        reference: wheel.reference().to_owned(),
                        target: None,
                    };
                    self.report.add(row, &contest.pairs(Entrant::Ours, Entrant::Theirs));
                }
                Err(why) => self.report.skip(name, "throughput", why),
            }
        }
        Ok(())
    }

    /// The inner error is why the library does not work here.
    async fn wheel(&self, wheel: Wheel, moved: &Move) -> anyhow::Result<Result<Contest<Entrant>, String>> {
        let python = match peers::python() {
            Ok(python) => python,
            Err(why) => return Ok(Err(why)),
        };
        let mut drivers = Vec::new();
        for role in wheel.roles() {
            match Driver::spawn(&python, wheel.name(), &[role]).await? {
                Ok(driver) => drivers.push(driver),
                Err(why) => return Ok(Err(why)),
            }
        }
        let [mut server, mut client] = <[Driver; 2]>::try_from(drivers).ok().context("two processes")?;
        let held = server.order(&json!({"do": "hold", "size": moved.spans[0]})).await?;
        let rows = |record: &Record| {
            let Record {
                src_offset,
                dst_offset,
                width,
                rows,
                src_pitch,
                dst_pitch,
            } = *record;
            json!([src_offset, dst_offset, width, rows, src_pitch, dst_pitch])
        };
        let records: Vec<Value> = moved.records.iter().map(rows).collect();
        let [span, size] = moved.spans;
        client
            .order(&json!({"do": "reach_slices", "held": held, "span": span, "size": size, "records": records}))
            .await?;
        let (mut ends, dir) = Ends::start().await?;
        let ours = match wheel {
            Wheel::Nixl => ends.nixl(&python, moved).await?,
            Wheel::Mooncake => Ok(ends.mooncake(&held, moved).await?),
        };
        let ours = match ours {
            Ok(ours) => ours,
            Err(why) => return Ok(Err(why)),
        };
        let room = |len: u64| Room::new(usize::try_from(len)?).context("there is not enough memory");
        let (mut own, mut destination) = (room(span)?, room(size)?);
        paint(own.bytes().context("in use")?, 0);
        once(Entrant::Ours, moved, &ours, &mut client, &mut destination).await?;
        moved.check(&moved.records, &mut own, &mut destination)?;
        drop(own);
        client.time("read_slices").await?;
        client.check_by("check_slices").await?;
        let entrants = [Entrant::Ours, Entrant::Theirs];
        let contest = Contest::run(&entrants, self.options.pairs, async |entrant| {
            once(entrant, moved, &ours, &mut client, &mut destination).await
        });
        let contest = contest.await?;
        if let Ours::Segment(.., mooncake) = &ours {
            mooncake.shutdown().await;
        }
        drop(ours);
        client.end().await;
        server.end().await;
        ends.end().await?;
        drop(dir);
        Ok(Ok(contest))
    }
}

async fn once(
    entrant: Entrant,
    moved: &Move,
    ours: &Ours,
    client: &mut Driver,
    destination: &mut Room,
) -> anyhow::Result<Duration> {
    if entrant == Entrant::Theirs {
        return client.time("read_slices").await;
    }
    let target = destination.target().context("in use")?;
    let begin = Instant::now();
    ours.pull(&moved.records, &target).await?;
    Ok(begin.elapsed())
}

impl Ends {
    async fn nixl(&mut self, python: &Path, moved: &Move) -> anyhow::Result<Result<Ours, String>> {
        let library: PathBuf = match library(python) {
            Ok(library) => library,
            Err(why) => return Ok(Err(why)),
        };
        if let Err(why) = self.owner.nixl(library.clone()).await? {
            return Ok(Err(why));
        }
        let options = NixlOptions {
            library: Some(library),
            ..NixlOptions::default()
        };
        let nixl = match Nixl::start(&self.network, options).await {
            Ok(nixl) => nixl,
            Err(error) => return Ok(Err(error.to_string())),
        };
        let held = self.owner.hold(Memory::Borrowed, moved.spans[0], &["nixl"]).await?;
        Ok(Ok(Ours::Pinned {
            pinned: pin(nixl.clone(), &held).await?,
            _nixl: nixl,
        }))
    }

    /// Ours reads from their engine.
    async fn mooncake(&mut self, held: &Value, moved: &Move) -> anyhow::Result<Ours> {
        let mooncake = Mooncake::start(self.network.clone(), MooncakeOptions::default()).await?;
        let name = held["segment"].as_str().context("no segment")?;
        let segment = mooncake.open(name, ConnectOptions::default()).await?;
        let source = SegmentBuffer {
            address: held["address"].as_u64().context("no address")?,
            len: moved.spans[0],
        };
        Ok(Ours::Segment(segment, source, mooncake))
    }
}
