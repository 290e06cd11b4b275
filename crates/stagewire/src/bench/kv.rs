//! Planning a KV-cache transfer, and moving what is planned: gpt-oss-120b, prefill at TP 1, decode at TP 4.
//!
//! Planning: 8192 tokens. A plan begins with page tables and ends with its rows in memory, proof included. The fragmented tables
//! have no two pages that follow each other on both sides; that is the worst case. The planner in NumPy makes columns as
//! the peers' do, in a process of its own that runs meanwhile; that it plans the same is checked.

mod moves;
mod prefill;
mod rooms;
mod wheels;

use std::collections::BTreeSet;
use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::json;
use stagewire_core::DType;
use stagewire_kv::{Component, Descriptor, Engine, Geometry, Pair, Plan, PlanRequest, handshake};

use super::Options;
use super::peers::{self, Driver};
use super::report::{Case, Goal, Report, Target, Unit};
use super::stats::Pairs;
use crate::exit::Fault;

pub(super) use prefill::serve;

const TOKENS: u64 = 8192;
const PAGES: i64 = 128;

/// Rounds before anything counts: tables and results are in memory then.
const WARM_UP: usize = 3;

/// Where the pages of the sequence are.
struct Tables {
    name: &'static str,
    src: Vec<i64>,
    dst: Vec<i64>,
}

pub(super) async fn run(options: &Options) -> Result<Report, Fault> {
    let one_run = Tables {
        name: "one page run",
        src: (1..=PAGES).collect(),
        dst: (1..=PAGES).collect(),
    };
    let fragmented = Tables {
        name: "fragmented",
        src: (1..=PAGES).map(|page| 2 * page).collect(),
        dst: (1..=PAGES).collect(),
    };
    let mut bench = Bench {
        pair: pair([1, 4])?,
        options,
        report: Report::new("kv"),
        offered: BTreeSet::new(),
    };
    bench.expanded(&fragmented)?;
    bench.numpy(&fragmented).await?;
    for tables in [&fragmented, &one_run] {
        bench.strided(tables)?;
    }
    bench.counts(&one_run, "<= 288", 288.0)?;
    bench.counts(&fragmented, "<= 18720", 18_720.0)?;
    bench.moves().await?;
    bench.rooms().await?;
    bench.wheels().await?;
    bench.report.of(options.only.as_deref(), bench.offered)
}

/// gpt-oss-120b at these tensor-parallel sizes.
fn pair(tp: [u32; 2]) -> anyhow::Result<Pair> {
    let full = Component::mha("full", 18, 8, [64, 64], DType::BF16);
    let swa = Component {
        name: "swa".to_owned(),
        window: Some(127),
        ..full.clone()
    };
    let engine = |tp| Engine::new(Geometry::new(tp, 64, vec![full.clone(), swa.clone()]));
    Ok(handshake(&engine(tp[0])?, &engine(tp[1])?)?)
}

struct Bench<'a> {
    pair: Pair,
    options: &'a Options,
    report: Report,
    /// Rows there are, for who asks for none of them.
    offered: BTreeSet<String>,
}

impl Bench<'_> {
    /// Whether this row is asked for.
    fn wants(&mut self, name: &str) -> bool {
        self.offered.insert(name.to_owned());
        self.options.only.as_deref().is_none_or(|only| name.contains(only))
    }

    /// As many rounds as are asked for; each gives our time and that of the reference.
    fn pairs(&self, mut round: impl FnMut() -> anyhow::Result<[Duration; 2]>) -> anyhow::Result<Pairs> {
        let mut pairs = Pairs::default();
        for at in 0..WARM_UP + self.options.pairs {
            let [ours, reference] = round()?;
            if at >= WARM_UP {
                pairs.push(ours, reference);
            }
        }
        Ok(pairs)
    }

    /// One entry for each run of bytes, beside a copy of these entries.
    fn expanded(&mut self, tables: &Tables) -> Result<(), Fault> {
        let name = format!("plan, one pair, expanded, {}", tables.name);
        if !self.wants(&name) {
            return Ok(());
        }
        let mut rows: Vec<Descriptor> = Vec::new();
        let mut copy: Vec<Descriptor> = Vec::new();
        let pairs = self.pairs(|| {
            let planned = expand(&self.pair, tables, &mut rows)?;
            let begin = Instant::now();
            copy.clear();
            copy.extend_from_slice(black_box(&rows));
            black_box(&copy);
            Ok([planned, begin.elapsed()])
        })?;
        let target = Target {
            text: "<= 10 ns",
            goal: Goal::AtMost(10.0),
        };
        self.each(name, "copy of them", Some(target), &rows, &pairs)
    }

    /// The same, beside a planner in NumPy.
    async fn numpy(&mut self, tables: &Tables) -> Result<(), Fault> {
        let name = format!("plan, one pair, expanded, {}, beside NumPy", tables.name);
        if !self.wants(&name) {
            return Ok(());
        }
        let started = match peers::python() {
            Ok(python) => Driver::spawn(&python, "planner", &[&numpy_spec(tables)]).await?,
            Err(why) => Err(why),
        };
        let mut driver = match started {
            Ok(driver) => driver,
            Err(why) => {
                self.report.skip(name, "time per descriptor", why);
                return Ok(());
            }
        };
        let mut rows: Vec<Descriptor> = Vec::new();
        let mut pairs = Pairs::default();
        for round in 0..WARM_UP + self.options.pairs {
            let ours = expand(&self.pair, tables, &mut rows)?;
            let theirs = driver.time("plan").await?;
            if round >= WARM_UP {
                pairs.push(ours, theirs);
            }
        }
        let sums = driver.order(&json!({"do": "sums"})).await?;
        let sum = |offset: fn(&Descriptor) -> u64| rows.iter().map(offset).sum::<u64>();
        let ours = json!({"count": rows.len(), "sums": [sum(|row| row.src_off), sum(|row| row.dst_off)]});
        ensure_same(&ours, &sums)?;
        driver.end().await;
        self.each(name, "columns of NumPy", None, &rows, &pairs)
    }

    /// A row of time per descriptor.
    fn each(
        &mut self,
        name: String,
        reference: &str,
        target: Option<Target>,
        rows: &[Descriptor],
        pairs: &Pairs,
    ) -> Result<(), Fault> {
        let count = u32::try_from(rows.len()).context("too many rows")?;
        let case = Case {
            name,
            metric: "time per descriptor",
            unit: Unit::NanosecondsEach { count },
            reference: reference.to_owned(),
            target,
        };
        self.report.add(case, pairs);
        Ok(())
    }

    /// One record for each run of pages, beside the same plan expanded.
    fn strided(&mut self, tables: &Tables) -> Result<(), Fault> {
        let name = format!("plan, one pair, strided, {}", tables.name);
        if !self.wants(&name) {
            return Ok(());
        }
        let mut rows: Vec<Descriptor> = Vec::new();
        let pairs = self.pairs(|| {
            let begin = Instant::now();
            black_box(plan(&self.pair, tables, 2)?.records()?);
            let strided = begin.elapsed();
            Ok([strided, expand(&self.pair, tables, &mut rows)?])
        })?;
        let target = Target {
            text: "<= 100 us",
            goal: Goal::AtMost(100.0),
        };
        let case = Case {
            name,
            metric: "time",
            unit: Unit::Microseconds,
            reference: "expanded".to_owned(),
            target: Some(target),
        };
        self.report.add(case, &pairs);
        Ok(())
    }

    /// Records of all ranks; the peers have a descriptor for each token.
    fn counts(&mut self, tables: &Tables, text: &'static str, most: f64) -> Result<(), Fault> {
        let name = format!("records, all ranks, {}", tables.name);
        if !self.wants(&name) {
            return Ok(());
        }
        let (mut records, mut descriptors) = (0, 0);
        for (_, dst_rank) in self.pair.routes() {
            let plan = plan(&self.pair, tables, dst_rank)?;
            records += u32::try_from(plan.record_count()).context("too many records")?;
            descriptors += u32::try_from(plan.descriptor_count()).context("too many descriptors")?;
        }
        let target = Target {
            text,
            goal: Goal::AtMost(most),
        };
        let case = format!("{name} (a descriptor for each token: {descriptors})");
        self.report.count(case, "records", records.into(), "records", target);
        Ok(())
    }
}

/// The slices of decode rank 2 for the planner in NumPy: heads 4 and 5 of 8, which are all of that rank's.
fn numpy_spec(tables: &Tables) -> String {
    let (head, page) = (64 * 2, 64);
    let side = |pages: &[i64], heads: u64, first: u64| json!([pages, page * heads * head, first * head]);
    let pool = |from: usize| json!([side(&tables.src[from..], 8, 4), side(&tables.dst[from..], 2, 0)]);
    // The window of 127 tokens begins in the last page but one.
    let pools = [pool(0), pool(tables.src.len() - 2)];
    json!({"page": page, "buffers": 36, "nbytes": 2 * head, "pools": pools}).to_string()
}

fn ensure_same(ours: &serde_json::Value, theirs: &serde_json::Value) -> anyhow::Result<()> {
    ensure!(
        ours == theirs,
        "the planner in NumPy plans something else: {theirs} instead of {ours}"
    );
    Ok(())
}

/// Plans the third of the four pairs of ranks with one entry for each run of bytes.
fn expand(pair: &Pair, tables: &Tables, rows: &mut Vec<Descriptor>) -> anyhow::Result<Duration> {
    let begin = Instant::now();
    rows.clear();
    plan(pair, tables, 2)?.descriptors_into(rows)?;
    black_box(&rows);
    Ok(begin.elapsed())
}

fn plan(pair: &Pair, tables: &Tables, dst_rank: u32) -> anyhow::Result<Plan> {
    plan_of(pair, tables, dst_rank, TOKENS)
}

fn plan_of(pair: &Pair, tables: &Tables, dst_rank: u32, seq_len: u64) -> anyhow::Result<Plan> {
    let request = PlanRequest::new(0, dst_rank, seq_len)
        .pages("full", &tables.src, &tables.dst)
        .pages("swa", &tables.src, &tables.dst);
    Ok(pair.plan(&request)?)
}
