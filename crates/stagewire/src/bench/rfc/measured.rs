//! Two workers that run all stages against one for encoding and denoising and one for decoding: real processes, one
//! thread each, the tiny Wan pipeline of the examples, whose stages are made to take equally long.
//!
//! Both deployments are up all the time and serve in turns. Each frame of one is that of the other, bit for bit.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use futures::{StreamExt, TryStreamExt, stream};
use stagewire_sim::Random;

use super::Bench;
use super::deployment::{self, Deployment};
use super::served::{Served, span};
use super::validated;
use crate::bench::report::Unit;
use crate::bench::stats::{Pairs, quantile_of};
use crate::python::Python;

const APART: &str = include_str!("apart.toml");
const TOGETHER: &str = include_str!("together.toml");

const ROUNDS: u64 = 5;
/// The part of what the slower deployment can do that comes at a steady load.
const LOAD: f64 = 0.7;

/// Jobs of one round.
#[derive(Debug, Clone, Copy)]
struct Size {
    /// That come all at once.
    burst: u32,
    /// That come one by one.
    paced: u32,
}

const FULL: Size = Size { burst: 20, paced: 30 };
const QUICK: Size = Size { burst: 8, paced: 12 };
/// Before anything counts: the first jobs of a process take longer. The second time tells how fast it is.
const WARM_UP: u32 = 8;

/// What was served at a steady load, round by round, by stages apart.
pub(super) type Point = Vec<Vec<Served>>;

fn names(size: Size) -> [String; 5] {
    let paced = format!("measured, 2 workers, {} % busy: apart", 100.0 * LOAD);
    [
        format!("measured, 2 workers, bursts of {} jobs: apart", size.burst),
        format!("{paced}, median to the first frames"),
        format!("{paced}, P99 to the first frames"),
        format!("{paced}, median to the result"),
        format!("{paced}, P99 to the result"),
    ]
}

/// The rows of both deployments, and what the simulator can be held against.
pub(super) async fn run(bench: &mut Bench<'_>) -> anyhow::Result<Option<Point>> {
    let size = if bench.options.quick { QUICK } else { FULL };
    let names = names(size);
    let (own, point) = (bench.wants(&names), bench.wants(&validated::NAMES.map(str::to_owned)));
    if !own && !point {
        return Ok(None);
    }
    let python = match deployment::python(bench.options.python.as_deref()) {
        Ok(python) => python,
        Err(why) => {
            bench.skip(&names, "colocated", &why);
            bench.skip(&validated::NAMES.map(str::to_owned), "validation", &why);
            return Ok(None);
        }
    };
    bench.output.say("measured: workers load their models");
    let dir = tempfile::Builder::new().prefix("stagewire-bench-").tempdir()?;
    let [apart, together] = start(dir.path(), &python).await?;
    let mut both = Both { apart, together, size };
    let rounds = both.rounds(bench).await;
    let ended = both.end().await;
    let rounds = rounds?;
    ended?;
    report(bench, size, &names, &rounds);
    Ok(Some(rounds.into_iter().map(|round| round.paced[0].clone()).collect()))
}

/// Both at once; one that does not start takes the other along.
async fn start(dir: &Path, python: &Python) -> anyhow::Result<[Deployment; 2]> {
    let [apart, together] = ["apart", "together"].map(|name| dir.join(name));
    let (apart, together) = tokio::join!(
        Deployment::start(&apart, APART, python),
        Deployment::start(&together, TOGETHER, python)
    );
    match (apart, together) {
        (Ok(apart), Ok(together)) => Ok([apart, together]),
        (Ok(up), Err(error)) | (Err(error), Ok(up)) => {
            up.end().await?;
            Err(error)
        }
        (Err(error), Err(_)) => Err(error),
    }
}

/// What was served in one round: apart, together.
#[derive(Debug)]
struct Round {
    burst: [Vec<Served>; 2],
    paced: [Vec<Served>; 2],
}

struct Both {
    apart: Deployment,
    together: Deployment,
    size: Size,
}

impl Both {
    async fn rounds(&mut self, bench: &Bench<'_>) -> anyhow::Result<Vec<Round>> {
        let mut rounds = Vec::new();
        let mut slowest = Duration::ZERO;
        for deployment in [&mut self.apart, &mut self.together] {
            at_once(deployment, 0, WARM_UP).await?;
            slowest = slowest.max(span(&at_once(deployment, 0, WARM_UP).await?) / WARM_UP);
        }
        let every = slowest.div_f64(LOAD);
        let rate = 1.0 / every.as_secs_f64();
        for round in 1..=ROUNDS {
            let output = bench.output;
            output.say(format_args!(
                "measured: round {round} of {ROUNDS}, steady load is {rate:.1} jobs/s"
            ));
            rounds.push(self.round(round, every).await?);
        }
        Ok(rounds)
    }

    async fn round(&mut self, round: u64, every: Duration) -> anyhow::Result<Round> {
        let (seed, size) = (round * 1_000, self.size);
        let (mut burst, mut paced) = ([const { Vec::new() }; 2], [const { Vec::new() }; 2]);
        for step in 0..4 {
            // In turns, so that neither always has the same one before it.
            let which = usize::from((round + step) % 2 == 1);
            let deployment = [&mut self.apart, &mut self.together].into_iter().nth(which);
            let deployment = deployment.context("there are two")?;
            if step < 2 {
                burst[which] = at_once(deployment, seed, size.burst).await?;
            } else {
                paced[which] = one_by_one(deployment, seed, size.paced, every).await?;
            }
        }
        for [apart, together] in [&burst, &paced] {
            let same = apart
                .iter()
                .zip(together)
                .all(|(apart, together)| apart.frames == together.frames);
            ensure!(same, "the frames of stages apart are not those of all on each worker");
        }
        Ok(Round { burst, paced })
    }

    async fn end(self) -> anyhow::Result<()> {
        let (apart, together) = tokio::join!(self.apart.end(), self.together.end());
        apart.and(together)
    }
}

async fn at_once(deployment: &mut Deployment, seed: u64, jobs: u32) -> anyhow::Result<Vec<Served>> {
    let submissions = stream::iter((0..u64::from(jobs)).map(|job| deployment.submit(seed + job)));
    let submitted: Vec<String> = submissions.buffered(8).try_collect().await?;
    deployment.served(&submitted).await
}

/// Jobs that come independently of each other; of equal seeds, at the same times.
async fn one_by_one(deployment: &mut Deployment, seed: u64, jobs: u32, every: Duration) -> anyhow::Result<Vec<Served>> {
    let mut chance = Random::branch(seed, "arrivals");
    let mut at = Instant::now();
    let times = (0..u64::from(jobs)).map(|job| {
        at += chance.exponential(every);
        (job, at)
    });
    let times: Vec<_> = times.collect();
    let submit = async |(job, at): (u64, Instant)| {
        tokio::time::sleep_until(at.into()).await;
        deployment.submit(seed + job).await
    };
    let submitted = futures::future::try_join_all(times.into_iter().map(submit)).await?;
    deployment.served(&submitted).await
}

fn report(bench: &mut Bench<'_>, size: Size, names: &[String; 5], rounds: &[Round]) {
    let mut pairs = Pairs::default();
    for Round {
        burst: [apart, together],
        ..
    } in rounds
    {
        pairs.push(span(apart), span(together));
    }
    let unit = Unit::JobsPerSecond { count: size.burst };
    bench.add(&names[0], "throughput", unit, "colocated", None, &pairs);
    let times: [fn(&Served) -> Duration; 2] = [Served::to_first, Served::to_result];
    for (time, names) in times.into_iter().zip([&names[1..3], &names[3..5]]) {
        let of = |served: &[Served], quantile| {
            let times: Vec<_> = served.iter().map(time).collect();
            quantile_of(&times, quantile)
        };
        let pairs = |quantile| {
            let mut pairs = Pairs::default();
            for Round {
                paced: [apart, together],
                ..
            } in rounds
            {
                pairs.push(of(apart, quantile), of(together, quantile));
            }
            pairs
        };
        bench.add(&names[0], "latency", Unit::Milliseconds, "colocated", None, &pairs(0.5));
        // The jobs of one round are too few for it.
        let all = [0, 1].map(|which| {
            let served: Vec<Served> = rounds.iter().flat_map(|round| round.paced[which].clone()).collect();
            of(&served, 0.99)
        });
        bench.pool(&names[1], "latency", "colocated", None, all, &pairs(0.99));
    }
}
