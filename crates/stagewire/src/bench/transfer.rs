//! Moves the same bytes over each transport, each copy beside a memcpy, a TCP stream and a bare copy of the same kind.
//!
//! The owner is another process. A copy begins when the reader, who has pinned the region, calls `pull`, and ends when the
//! bytes count.

pub(super) mod apart;
mod idle;
pub(super) mod local;
mod mooncake;
pub(super) mod network;
pub(super) mod nixl;
pub(super) mod owner;
mod raw;
mod shape;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use stagewire_core::{ByteCount, Incarnation};
use stagewire_transfer::probe::{Probe, Room};
use stagewire_transfer::{Host, HostOptions, Mooncake};
use uuid::Uuid;

use self::owner::{Memory, Owner};
use self::shape::Shape;
pub(super) use self::shape::size_name;
use super::Options;
use super::paint::paint;
use super::report::Report;
use crate::exit::Fault;
use crate::output::Output;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

const SIZES: [u64; 7] = [4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB];

/// Where the thresholds are, in a minute.
const QUICK_SIZES: [u64; 3] = [4 * KIB, MIB, 64 * MIB];

const SHAPES: [Shape; 4] = [Shape::Whole, Shape::Runs(16), Shape::Runs(32), Shape::Runs(128)];

const QUICK_SHAPES: [Shape; 2] = [Shape::Whole, Shape::Runs(128)];

/// Longest time of one operation.
const DEADLINE: Duration = Duration::from_secs(60);

/// What all sections use.
struct Bench<'a> {
    options: &'a Options,
    output: &'a Output,
    report: Report,
    /// Rows there are, for who asks for none of them.
    offered: RefCell<BTreeSet<String>>,
    host: Arc<Host>,
    owner: Owner,
    probe: Probe,
    /// Once it is started.
    ours: Option<Arc<Mooncake>>,
}

/// Memory of the reader for one size.
struct Rooms {
    /// The same bytes as the owner's, for memcpy.
    own: Room,
    destination: Room,
}

pub(super) async fn run(options: &Options, output: &Output) -> Result<Report, Fault> {
    let dir = tempfile::Builder::new().prefix("stagewire-bench-").tempdir()?;
    let dir = dir.path().join("peers");
    let host = Host::start(HostOptions {
        dir: dir.clone(),
        incarnation: Incarnation(Uuid::new_v4()),
        arena_limit: ByteCount(0),
    });
    let mut bench = Bench {
        options,
        output,
        report: Report::new("transfer"),
        offered: RefCell::default(),
        host: host.await?,
        owner: Owner::spawn(&dir)?,
        probe: Probe::start().context("cannot start a thread")?,
        ours: None,
    };
    let (sizes, shapes) = if options.quick {
        (&QUICK_SIZES[..], &QUICK_SHAPES[..])
    } else {
        (&SIZES[..], &SHAPES[..])
    };
    for size in sizes {
        bench.local(*size, shapes).await.with_context(|| size_name(*size))?;
    }
    bench.network(sizes, shapes).await?;
    bench.mooncake(sizes).await.context("mooncake")?;
    bench.nixl(sizes).await.context("nixl")?;
    bench.idle().await.context("idle cost")?;
    bench.owner.end().await?;
    if let Some(ours) = bench.ours.take() {
        ours.shutdown().await;
    }
    bench.host.shutdown().await;
    bench.report.of(options.only.as_deref(), bench.offered.into_inner())
}

impl Rooms {
    fn new(span: u64, size: u64) -> anyhow::Result<Self> {
        let room = |len: u64| Room::new(len as usize).context("there is not enough memory");
        let mut rooms = Self {
            own: room(span)?,
            destination: room(size)?,
        };
        paint(rooms.own.bytes().context("in use")?, 0);
        Ok(rooms)
    }
}

impl Bench<'_> {
    /// shm and cma, of one size.
    async fn local(&mut self, size: u64, shapes: &[Shape]) -> anyhow::Result<()> {
        let case = |what: &str, shape: &Shape| format!("{what}, {}, {}", size_name(size), shape.name());
        let copies = shapes
            .iter()
            .flat_map(|shape| ["shm copy", "cma copy"].map(|what| case(what, shape)));
        let map = format!("shm map, {}", size_name(size));
        if !copies.chain([map]).any(|case| self.wants(&case)) {
            return Ok(());
        }
        let span = shapes.iter().map(|shape| shape.span(size)).max().unwrap_or(size);
        let mut rooms = Rooms::new(span, size)?;
        self.output.say(format_args!("shm, {}", size_name(size)));
        let held = self.owner.hold(Memory::Arena, span, &["shm"]).await?;
        self.shm(size, shapes, &held, &mut rooms).await.context("shm")?;
        self.output.say(format_args!("cma, {}", size_name(size)));
        let held = self.owner.hold(Memory::Borrowed, span, &["cma"]).await?;
        self.cma(size, shapes, &held, &mut rooms).await.context("cma")?;
        self.owner.release().await
    }

    /// Whether a row is asked for.
    fn wants(&self, case: &str) -> bool {
        let only = self.options.only.as_ref();
        let wanted = only.is_none_or(|only| case.contains(only.as_str()));
        if !wanted {
            self.offered.borrow_mut().insert(case.to_owned());
        }
        wanted
    }
}
