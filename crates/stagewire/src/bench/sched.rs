//! The scheduler's core on one thread, with 4,096 busy workers and more and more jobs waiting behind them.
//!
//! Jobs of three classes go through encode, denoise and decode. Each attempt is offered, granted, renewed three times with
//! progress, published where it has a consumer, and completed; a job that has ended is replaced by a new one, so that as
//! many wait all the time. Deciding, applying and polling are timed; there is no journal and no network.

mod load;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::Context;

use self::load::Load;
use super::report::{Case, Goal, Report, Target, Unit};
use super::stats::Pairs;
use super::{Options, memory};
use crate::exit::Fault;

/// Jobs that wait in the reference.
const FEW: usize = 1_000;
/// Jobs that wait, and by how much the logarithm of their number is above that of the reference.
const MORE: [(usize, Target); 3] = [
    (10_000, at_least("log: >= 0.75", 0.75)),
    (100_000, at_least("log: >= 0.60", 0.60)),
    (1_000_000, at_least("log: >= 0.50", 0.50)),
];
/// The row that has a target of its own.
const MANY: usize = 100_000;
/// Attempts that one sample ends.
const STEPS: usize = 2_000;
/// Events that times are given for.
const EVENTS: u32 = 1_000;

const MILLION: Target = Target {
    text: ">= 1000000 op/s",
    goal: Goal::AtLeast(1e6),
};

const FOUR_KIB: Target = Target {
    text: "<= 4096 B",
    goal: Goal::AtMost(4096.0),
};

const fn at_least(text: &'static str, ratio: f64) -> Target {
    let goal = Goal::RatioAtLeast(ratio);
    Target { text, goal }
}

pub(super) async fn run(options: &Options) -> Result<Report, Fault> {
    let options = options.clone();
    let measured = tokio::task::spawn_blocking(move || measure(&options)).await;
    measured.context("the benchmark panicked")?
}

fn measure(options: &Options) -> Result<Report, Fault> {
    let mut report = Report::new("sched");
    let mut offered = BTreeSet::new();
    let mut few = Load::new(FEW);
    // None is dropped before the end: the next would take the memory that it gave back, and seem smaller.
    let mut loads = Vec::new();
    for (queued, logarithm) in MORE {
        if options.quick && queued > MANY {
            continue;
        }
        let [curve, speed, resident] =
            ["events", "events per second", "resident per job"].map(|what| format!("{queued} jobs wait, {what}"));
        let has_target = queued == MANY;
        let names = [Some(&curve), has_target.then_some(&speed), Some(&resident)];
        offered.extend(names.into_iter().flatten().cloned());
        let wanted = |name: &str| options.only.as_deref().is_none_or(|only| name.contains(only));
        if !names.into_iter().flatten().any(|name| wanted(name)) {
            continue;
        }
        let before = memory::resident()?;
        let mut many = Load::new(queued);
        let taken = memory::resident()?.saturating_sub(before);
        let mut pairs = Pairs::default();
        for _ in 0..options.pairs {
            let reference = sample(&mut few);
            pairs.push(sample(&mut many), reference);
        }
        let case = |name: &String, target| Case {
            name: name.clone(),
            metric: "events",
            unit: Unit::OperationsPerSecond { count: EVENTS },
            reference: format!("{FEW} jobs wait"),
            target: Some(target),
        };
        if wanted(&curve) {
            report.add(case(&curve, logarithm), &pairs);
        }
        if has_target && wanted(&speed) {
            report.add(case(&speed, MILLION), &pairs);
        }
        if wanted(&resident) {
            #[expect(clippy::cast_precision_loss, reason = "far fewer bytes than 2^52")]
            let each = taken as f64 / many.jobs() as f64;
            report.count(resident, "resident", each, "B", FOUR_KIB);
        }
        loads.push(many);
    }
    report.of(options.only.as_deref(), offered)
}

/// How long [`EVENTS`] events take.
fn sample(load: &mut Load) -> Duration {
    let (before, begin) = (load.events, Instant::now());
    for _ in 0..STEPS {
        load.step();
    }
    let events = u32::try_from(load.events - before).expect("a sample has thousands of events");
    begin.elapsed() * EVENTS / events
}
