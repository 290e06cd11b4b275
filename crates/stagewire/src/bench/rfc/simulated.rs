//! What the simulator says: with the experiments of `examples/sim`.

use std::time::Duration;

use anyhow::Context;
use stagewire_sim::{Arrivals, Experiment, Layout, Report, fewest, simulate};

use super::Bench;
use crate::bench::report::Unit;
use crate::bench::stats::Pairs;

const EQUAL: &str = include_str!("../../../../../examples/sim/equal-gpus.toml");
const OFFLOAD: &str = include_str!("../../../../../examples/sim/offload.toml");
const SHARING: &str = include_str!("../../../../../examples/sim/sharing.toml");

/// Time to the first frame is compared where stages apart are this busy: behind a backlog it says how long that is.
const LOAD: f64 = 0.75;
/// Part of the jobs that must be done in time.
const TARGET: f64 = 0.99;
/// Denoisers that share decoders.
const DENOISERS: [u32; 4] = [6, 12, 24, 48];

/// Stages apart against all stages on each of as many GPUs.
pub(super) fn colocated(bench: &mut Bench<'_>) -> anyhow::Result<()> {
    for (text, what) in [
        (EQUAL, "8 GPUs, equal speeds"),
        (OFFLOAD, "32 GPUs, weights offloaded where colocated"),
    ] {
        let names = [
            format!("simulated, {what}: apart"),
            format!("simulated, {what}: apart, P99 to the first frames"),
        ];
        if !bench.wants(&names) {
            continue;
        }
        bench.output.say(&names[0]);
        let [rate, first] = &names;
        let mut experiment = parse(text)?;
        let [apart, together] = both(&experiment)?;
        let mut pairs = Pairs::default();
        pairs.push(each(&apart), each(&together));
        let unit = Unit::JobsPerSecond { count: 1 };
        bench.add(rate, "throughput", unit, "colocated", None, &pairs);
        if let Arrivals::Model { rate, .. } = &mut experiment.arrivals {
            *rate = LOAD * apart.throughput_per_s;
        }
        let [apart, together] = both(&experiment)?.map(|report| Duration::from_secs_f64(report.first_s.p99));
        let mut pairs = Pairs::default();
        pairs.push(apart, together);
        bench.add(first, "first frame", Unit::Seconds, "colocated", None, &pairs);
    }
    Ok(())
}

/// The fewest decoders for so many denoisers, where each denoiser has the jobs that `examples/sim/sharing.toml` gives it.
pub(super) fn shared(bench: &mut Bench<'_>) -> anyhow::Result<()> {
    let names = DENOISERS.map(|denoisers| format!("simulated, {denoisers} denoisers, 99 % within 45 s: decoders"));
    if !bench.wants(&names) {
        return Ok(());
    }
    let experiment = parse(SHARING)?;
    let [denoise, decode] = ["denoise", "decode"].map(|name| experiment.stage(name));
    let (denoise, decode) = denoise
        .zip(decode)
        .context("examples/sim/sharing.toml has other stages")?;
    for (denoisers, name) in DENOISERS.into_iter().zip(&names) {
        if !bench.is_named(name) {
            continue;
        }
        bench.output.say(name);
        let mut experiment = experiment.clone();
        let before = experiment.stages[denoise].workers;
        for stage in &mut experiment.stages[..=denoise] {
            stage.workers = (stage.workers * denoisers).div_ceil(before);
        }
        let time = experiment.stages[decode].time;
        let Arrivals::Model { rate, .. } = &mut experiment.arrivals else {
            anyhow::bail!("examples/sim/sharing.toml has no rate");
        };
        *rate *= f64::from(denoisers) / f64::from(before);
        let busy = *rate * time.as_secs_f64();
        let trials = fewest(&experiment, "decode", TARGET, denoisers)?;
        let enough = trials.iter().filter(|trial| trial.enough);
        match enough.map(|trial| trial.workers).min() {
            Some(workers) => {
                let figure = (f64::from(workers), "always busy", busy);
                bench.report.figure(name.clone(), "sharing", "workers", figure);
            }
            None => {
                let why = format!("no {denoisers} decoders are enough: so few denoisers let some jobs wait too long");
                bench.report.skip(name.clone(), "sharing", why);
            }
        }
    }
    Ok(())
}

fn parse(text: &str) -> anyhow::Result<Experiment> {
    Ok(Experiment::parse(text, |file| Err(format!("there is no {file}")))?)
}

/// Apart, and together on as many GPUs.
fn both(experiment: &Experiment) -> anyhow::Result<[Report; 2]> {
    let apart = simulate(experiment, Layout::Disaggregated)?;
    Ok([apart, simulate(experiment, Layout::Colocated)?])
}

/// Time for each job, over all.
fn each(report: &Report) -> Duration {
    Duration::from_secs_f64(1.0 / report.throughput_per_s)
}
