//! A server process with its journal, a thousand workers on sockets of their own, and jobs that do nothing.
//!
//! A job has one stage. It counts as dispatched when its worker hears that it may run: by then the server has made the
//! submission and the grant durable, one after the other. Workers and clients are tasks of this process and share the
//! cores with the server.

mod cluster;
mod disk;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::Context;

use self::cluster::Cluster;
use self::disk::Disk;
use super::Options;
use super::report::{Case, Goal, Report, Target, Unit};
use super::stats::{Pairs, quantile_of};
use crate::exit::Fault;
use crate::output::Output;

const WORKERS: usize = 1_000;
/// Jobs of one sample of the rate, and how many submissions are under way at once.
const BURST: u32 = 500;
const AT_ONCE: usize = 128;
/// Jobs of one round at a steady pace, and what passes between two of them.
const PACED: usize = 800;
const PACE: Duration = Duration::from_millis(5);
/// Rounds of several seconds.
const ROUNDS: usize = 5;
/// For so long nothing is done.
const IDLE: Duration = Duration::from_secs(10);
/// Syncs of the disk that stand beside one round, and beside one burst.
const SYNCS: usize = 300;
const FEW_SYNCS: u32 = 25;

const RATE: Target = Target {
    text: ">= 1000 op/s",
    goal: Goal::AtLeast(1_000.0),
};
const PROMPT: Target = Target {
    text: "<= 3 x fsync P99 + 5 ms",
    goal: Goal::RatioAtMost(1.0),
};
const ONE_PERCENT: Target = Target {
    text: "<= 1 % of a core",
    goal: Goal::AtMost(1.0),
};

pub(super) async fn run(options: &Options, output: &Output) -> Result<Report, Fault> {
    let mut report = Report::new("server");
    let names = [
        "idle, no worker".to_owned(),
        format!("idle, {WORKERS} workers"),
        format!("submitted to dispatched, {WORKERS} workers"),
        format!("dispatch at 200 jobs/s, {WORKERS} workers, median"),
        format!("dispatch at 200 jobs/s, {WORKERS} workers, P99"),
    ];
    let wanted = |name: &String| options.only.as_deref().is_none_or(|only| name.contains(only));
    if !names.iter().any(wanted) {
        return report.of(options.only.as_deref(), BTreeSet::from(names));
    }
    let [alone, idle, rate, median, late] = names;
    let mut cluster = Cluster::start().await?;
    let mut disk = Disk::beside(cluster.data_dir())?;
    if wanted(&alone) {
        output.say(&alone);
        report.count(alone, "cpu", idle_percent(&cluster).await?, "%", ONE_PERCENT);
    }
    output.say("workers attach");
    cluster.attach(WORKERS).await?;
    if wanted(&idle) {
        output.say(&idle);
        report.count(idle, "cpu", idle_percent(&cluster).await?, "%", ONE_PERCENT);
    }
    if wanted(&rate) {
        output.say(&rate);
        let mut pairs = Pairs::default();
        cluster.burst(BURST, AT_ONCE).await?;
        for _ in 0..options.pairs {
            let syncs: Duration = disk.syncs(FEW_SYNCS as usize)?.iter().sum();
            pairs.push(cluster.burst(BURST, AT_ONCE).await?, syncs * BURST / FEW_SYNCS);
        }
        report.add(
            Case {
                name: rate,
                metric: "jobs",
                unit: Unit::OperationsPerSecond { count: BURST },
                reference: "fsync, one by one".to_owned(),
                target: Some(RATE),
            },
            &pairs,
        );
    }
    if wanted(&median) || wanted(&late) {
        output.say(&late);
        let [mut medians, mut lates] = [Pairs::default(), Pairs::default()];
        for _ in 0..ROUNDS {
            let syncs = disk.syncs(SYNCS)?;
            let times = cluster.paced(PACED, PACE).await?;
            medians.push(quantile_of(&times, 0.5), quantile_of(&syncs, 0.5));
            let allowed = quantile_of(&syncs, 0.99) * 3 + Duration::from_millis(5);
            lates.push(quantile_of(&times, 0.99), allowed);
        }
        let case = |name, reference: &str, target| Case {
            name,
            metric: "latency",
            unit: Unit::Milliseconds,
            reference: reference.to_owned(),
            target,
        };
        report.add(case(median, "fsync median", None), &medians);
        report.add(case(late, "3 x fsync P99 + 5 ms", Some(PROMPT)), &lates);
    }
    cluster.end().await.context("the server did not end well")?;
    Ok(report)
}

/// CPU time of the server while nobody wants anything, in percent of one core.
async fn idle_percent(cluster: &Cluster) -> anyhow::Result<f64> {
    // What connecting has left behind is not idleness.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let (before, begin) = (cluster.cpu()?, Instant::now());
    tokio::time::sleep(IDLE).await;
    Ok(100.0 * (cluster.cpu()? - before).as_secs_f64() / begin.elapsed().as_secs_f64())
}
