//! The host store beside Mooncake Store from its wheel, whose objects lie in memory of the client's own process or of
//! another.
//!
//! A put begins when the bytes are in memory of the writer and ends when others can read the object; a get begins with its
//! key and ends when the bytes are in memory of the reader. Both copy once, on either side. Pages are warm, and objects are
//! removed outside of the times.

mod daemon;
mod embedded;
mod mooncake;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::Context;
use stagewire_transfer::probe::Way;

use self::daemon::Daemon;
use self::embedded::Embedded;
use self::mooncake::{Peers, Place};
use super::contest::Contest;
use super::report::{Case, Goal, Report, Target, Unit};
use super::transfer::size_name;
use super::{Options, peers};
use crate::exit::Fault;
use crate::output::Output;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Memory of each store. The largest object must find room beside one that is kept to be read.
const CAPACITY: u64 = 768 * MIB;

const SIZES: [u64; 5] = [MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB];

const QUICK_SIZES: [u64; 2] = [MIB, 64 * MIB];

const SMALL: [u64; 2] = [KIB, 4 * KIB];

/// Objects that one sample of small ones writes or reads.
const COUNT: usize = 64;

/// Longest time of one operation.
const DEADLINE: Duration = Duration::from_secs(30);

const THREE_TIMES: Target = Target {
    text: ">= 3",
    goal: Goal::RatioAtLeast(3.0),
};

/// What is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Act {
    Put,
    Get,
    Map,
}

impl Act {
    const fn name(self) -> &'static str {
        match self {
            Self::Put => "put",
            Self::Get => "get",
            Self::Map => "map",
        }
    }
}

/// Who does it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Entrant {
    /// The host store, in the process that uses it.
    Embedded,
    /// A copy of the same bytes and nothing else, which no store can be faster than.
    Bare(Way),
    /// The host store of `stagewire store`, another process, through a connector.
    Daemon,
    /// All objects of a sample at the same time.
    DaemonAtOnce,
    Mooncake(Place),
    /// All objects of a sample in one call.
    Batch(Place),
}

struct Bench<'a> {
    options: &'a Options,
    output: &'a Output,
    report: Report,
    /// Rows there are, for who asks for none of them.
    offered: RefCell<BTreeSet<String>>,
    embedded: Embedded,
    daemon: Daemon,
    /// Why there are none, once they were asked for.
    peers: Option<Result<Peers, String>>,
}

pub(super) async fn run(options: &Options, output: &Output) -> Result<Report, Fault> {
    let dir = tempfile::Builder::new().prefix("stagewire-bench-").tempdir()?;
    let mut bench = Bench {
        options,
        output,
        report: Report::new("store"),
        offered: RefCell::default(),
        embedded: Embedded::start(&dir.path().join("embedded")).await?,
        daemon: Daemon::start(&dir.path().join("daemon")).await?,
        peers: None,
    };
    let measured = bench.all().await;
    // Also after an error: a store that is killed leaves its keeper.
    if let Some(Ok(peers)) = bench.peers {
        peers.end().await;
    }
    let ended = bench.daemon.end().await;
    bench.embedded.end().await;
    measured.and(ended)?;
    bench.report.of(options.only.as_deref(), bench.offered.into_inner())
}

impl Bench<'_> {
    async fn all(&mut self) -> anyhow::Result<()> {
        let sizes = if self.options.quick {
            &QUICK_SIZES[..]
        } else {
            &SIZES[..]
        };
        for act in [Act::Put, Act::Get, Act::Map] {
            for size in sizes {
                self.large(act, *size).await.with_context(|| size_name(*size))?;
            }
        }
        for act in [Act::Put, Act::Get] {
            for size in SMALL {
                self.small(act, size).await.with_context(|| size_name(size))?;
            }
        }
        Ok(())
    }

    /// One object after the other.
    async fn large(&mut self, act: Act, size: u64) -> anyhow::Result<()> {
        let embedded = format!("{}, {}", act.name(), size_name(size));
        let daemon = format!("daemon {embedded}");
        let metric = if act == Act::Map { "handover" } else { "throughput" };
        let wanted = [embedded, daemon].map(|case| self.wants(&case).then_some(case));
        if !self.begin(&wanted, metric, size, 1).await? {
            return Ok(());
        }
        let unit = match act {
            Act::Map => Unit::Microseconds,
            _ => Unit::GigabytesPerSecond { bytes: size },
        };
        let target = (act != Act::Map).then_some(THREE_TIMES);
        let [embedded, daemon] = wanted;
        let mut entrants = Vec::new();
        let (own, foreign) = (Entrant::Mooncake(Place::Own), Entrant::Mooncake(Place::Foreign));
        let limits = [Way::PlainTwice, Way::StreamingTwice].map(Entrant::Bare);
        if embedded.is_some() && act != Act::Map {
            entrants.extend(limits);
        }
        entrants.extend(
            embedded
                .as_ref()
                .map(|_| [Entrant::Embedded, own])
                .into_iter()
                .flatten(),
        );
        entrants.extend(daemon.as_ref().map(|_| Entrant::Daemon));
        entrants.push(foreign);
        let contest = self.contest(act, &entrants).await?;
        if let (Some(name), Some(limit @ Entrant::Bare(way))) = (&embedded, contest.best(limits)) {
            let row = Case {
                name: name.clone(),
                metric,
                unit,
                reference: format!("{}, nothing else", way.name()),
                target: None,
            };
            self.report.add(row, &contest.pairs(Entrant::Embedded, limit));
        }
        let references = [(Entrant::Embedded, own, embedded.clone())].into_iter().chain([
            (Entrant::Embedded, foreign, embedded),
            (Entrant::Daemon, foreign, daemon),
        ]);
        for (entrant, reference, name) in references {
            if let Some(name) = name {
                self.row(name, metric, unit, &contest, entrant, (reference, act), target);
            }
        }
        Ok(())
    }

    /// Many small objects, one after the other; Mooncake may also take them in one call, the daemon at the same time.
    async fn small(&mut self, act: Act, size: u64) -> anyhow::Result<()> {
        let embedded = format!("{}, {}", act.name(), size_name(size));
        let daemon = format!("daemon {embedded}");
        let at_once = format!("{daemon}, {COUNT} at once");
        let wanted = [embedded, daemon, at_once].map(|case| self.wants(&case).then_some(case));
        let metric = "operations";
        if !self.begin(&wanted, metric, size, COUNT).await? {
            return Ok(());
        }
        let unit = Unit::OperationsPerSecond { count: COUNT as u32 };
        let [own, foreign] = [Place::Own, Place::Foreign].map(Entrant::Mooncake);
        let [own_batch, foreign_batch] = [Place::Own, Place::Foreign].map(Entrant::Batch);
        let rows = [
            (Entrant::Embedded, &[own, own_batch, foreign, foreign_batch][..]),
            (Entrant::Daemon, &[foreign]),
            (Entrant::DaemonAtOnce, &[foreign_batch]),
        ];
        let named = rows.into_iter().zip(wanted);
        let named: Vec<_> = named.filter_map(|(row, name)| Some((row, name?))).collect();
        let mut entrants = vec![own, own_batch, foreign, foreign_batch];
        entrants.extend(named.iter().map(|((entrant, _), _)| *entrant));
        let contest = self.contest(act, &entrants).await?;
        for ((entrant, references), name) in named {
            for reference in references {
                let reference = (*reference, act);
                self.row(
                    name.clone(),
                    metric,
                    unit,
                    &contest,
                    entrant,
                    reference,
                    Some(THREE_TIMES),
                );
            }
        }
        Ok(())
    }

    /// Has everybody hold objects of this size, and checks that all give the same bytes. `false` where there is nothing to
    /// compare with, or nothing was asked for; the rows say so.
    async fn begin(
        &mut self,
        wanted: &[Option<String>],
        metric: &'static str,
        size: u64,
        count: usize,
    ) -> anyhow::Result<bool> {
        let mut names = wanted.iter().flatten().peekable();
        let Some(first) = names.peek() else { return Ok(false) };
        self.output.say(first);
        if self.peers.is_none() {
            self.peers = Some(match peers::python() {
                Ok(python) => Peers::start(&python, CAPACITY).await?,
                Err(why) => Err(why),
            });
        }
        match self.peers.as_mut() {
            Some(Ok(peers)) => peers.hold(size, count).await?,
            Some(Err(why)) => {
                for name in names {
                    self.report.skip(name.clone(), metric, why.clone());
                }
                return Ok(false);
            }
            None => unreachable!("made above"),
        }
        self.embedded.hold(size, count).await.context("embedded")?;
        self.daemon.hold(size, count).await.context("daemon")?;
        Ok(true)
    }

    async fn contest(&mut self, act: Act, entrants: &[Entrant]) -> anyhow::Result<Contest<Entrant>> {
        let pairs = self.options.pairs;
        let contest = Contest::run(entrants, pairs, async |entrant| {
            let once = self.once(entrant, act).await;
            once.with_context(|| format!("{entrant:?}"))
        });
        contest.await
    }

    async fn once(&mut self, entrant: Entrant, act: Act) -> anyhow::Result<Duration> {
        match (entrant, self.peers.as_mut()) {
            (Entrant::Embedded, _) => self.embedded.once(act).await,
            (Entrant::Bare(way), _) => self.embedded.bare(way),
            (Entrant::Daemon, _) => self.daemon.once(act, false).await,
            (Entrant::DaemonAtOnce, _) => self.daemon.once(act, true).await,
            (Entrant::Mooncake(place), Some(Ok(peers))) => peers.once(place, act, false).await,
            (Entrant::Batch(place), Some(Ok(peers))) => peers.once(place, act, true).await,
            _ => unreachable!("rows without peers are skipped"),
        }
    }

    #[expect(clippy::too_many_arguments, reason = "the columns of a row")]
    fn row(
        &mut self,
        name: String,
        metric: &'static str,
        unit: Unit,
        contest: &Contest<Entrant>,
        entrant: Entrant,
        (reference, act): (Entrant, Act),
        target: Option<Target>,
    ) {
        let (Entrant::Mooncake(place) | Entrant::Batch(place)) = reference else {
            unreachable!("ours is beside theirs")
        };
        let batch = matches!(reference, Entrant::Batch(_));
        let row = Case {
            name,
            metric,
            unit,
            reference: format!("Mooncake {}, {}", mooncake::call(act, batch), place.name()),
            target,
        };
        self.report.add(row, &contest.pairs(entrant, reference));
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
