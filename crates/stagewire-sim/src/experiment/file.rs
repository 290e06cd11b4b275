//! An experiment as it stands in TOML.

mod stage;

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;
use stagewire_core::{ByteCount, StageName};
use stagewire_sched::ClassSpec;

use super::{Arrivals, Class, Deaths, Experiment, Network, SimError, Spot, Stage, trace};
use crate::service::{Measured, WORKLOADS, workload};

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct File {
    #[serde(default = "one")]
    seed: u64,
    workload: Option<String>,
    service_file: Option<String>,
    #[serde(default)]
    spread: f64,
    arrivals: ArrivalsFile,
    #[serde(default, rename = "class")]
    classes: Vec<ClassFile>,
    #[serde(rename = "stage")]
    stages: Vec<stage::StageFile>,
    #[serde(default)]
    network: NetworkFile,
    store_capacity: Option<ByteCount>,
    byte_credits: Option<ByteCount>,
    deaths: Option<DeathsFile>,
    spot: Option<SpotFile>,
    colocated: Option<BTreeMap<String, f64>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct ArrivalsFile {
    trace: Option<String>,
    jobs: Option<u64>,
    rate_per_s: Option<f64>,
    burst: Option<f64>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct ClassFile {
    name: String,
    #[serde(default = "one")]
    weight: u32,
    #[serde(default = "unit")]
    share: f64,
    #[serde(default = "unit")]
    scale: f64,
    slo_s: Option<f64>,
    queue_deadline_s: Option<f64>,
    #[serde(default)]
    preempts: Vec<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct NetworkFile {
    nic_bytes_per_s: Option<ByteCount>,
    store_bytes_per_s: Option<ByteCount>,
    shared_bytes_per_s: Option<ByteCount>,
    latency_us: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct DeathsFile {
    mean_s: f64,
    #[serde(default)]
    noticed_s: f64,
    restart_s: f64,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct SpotFile {
    stage: String,
    mean_s: f64,
    notice_s: f64,
    away_s: f64,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct ServiceFile {
    stage: BTreeMap<String, ServiceStage>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct ServiceStage {
    time_s: f64,
    #[serde(default)]
    output_bytes: ByteCount,
}

fn one<T: From<u8>>() -> T {
    T::from(1)
}

const fn unit() -> f64 {
    1.0
}

pub(super) fn parse(text: &str, mut read: impl FnMut(&str) -> Result<String, String>) -> Result<Experiment, SimError> {
    let file: File = toml::from_str(text).map_err(|error| SimError::Syntax(error.to_string()))?;
    let mut open = |name: &str| {
        read(name).map_err(|error| SimError::File {
            file: name.to_owned(),
            error,
        })
    };
    let classes = file.classes.iter().map(class).collect::<Result<Vec<_>, _>>()?;
    let classes = if classes.is_empty() { defaults() } else { classes };
    let measured = measured(&file, &mut open)?;
    let stages = stage::stages(&file.stages, &measured)?;
    let stage = |name: &str| {
        let position = stages.iter().position(|stage| stage.spec.name.as_str() == name);
        position.ok_or_else(|| wrong("a stage", name, &known(&stages)))
    };
    let spot = match &file.spot {
        Some(spot) => Some(Spot {
            stage: stage(&spot.stage)?,
            mean: positive("spot.mean-s", spot.mean_s)?,
            notice: seconds("spot.notice-s", spot.notice_s)?,
            away: seconds("spot.away-s", spot.away_s)?,
        }),
        None => None,
    };
    let deaths = match &file.deaths {
        Some(deaths) => Some(Deaths {
            mean: positive("deaths.mean-s", deaths.mean_s)?,
            noticed: seconds("deaths.noticed-s", deaths.noticed_s)?,
            restart: seconds("deaths.restart-s", deaths.restart_s)?,
        }),
        None => None,
    };
    let colocated = match &file.colocated {
        Some(slowdowns) => {
            if let Some(stage) = stages.iter().find(|stage| stage.world > 1 || stage.streams) {
                let must = "left out where a stage streams or has ranks: one GPU that runs all is no match for that";
                return Err(wrong("[colocated]", &format!("beside stage {}", stage.spec.name), must));
            }
            let mut all = vec![1.0; stages.len()];
            for (name, slowdown) in slowdowns {
                all[stage(name)?] = number(&format!("colocated.{name}"), *slowdown, 0.01, 100.0)?;
            }
            Some(all)
        }
        None => None,
    };
    let arrivals = arrivals(&file.arrivals, &classes, &mut open)?;
    let experiment = Experiment {
        seed: file.seed,
        arrivals,
        spread: number("spread", file.spread, 0.0, 2.0)?,
        network: network(&file.network)?,
        store_capacity: file.store_capacity,
        byte_credits: file.byte_credits,
        deaths,
        spot,
        colocated,
        classes,
        stages,
    };
    experiment.topology()?;
    Ok(experiment)
}

fn defaults() -> Vec<Class> {
    let class = |spec: ClassSpec| {
        let share = if spec.name.as_str() == "standard" { 1.0 } else { 0.0 };
        let (scale, slo) = (1.0, None);
        Class {
            spec,
            share,
            scale,
            slo,
        }
    };
    ClassSpec::defaults().into_iter().map(class).collect()
}

fn class(file: &ClassFile) -> Result<Class, SimError> {
    let name = StageName::new(&file.name).map_err(|error| wrong("a class", &file.name, &error.to_string()))?;
    let key = |key: &str| format!("{key} of class {name}");
    let duration = |name: &str, value: Option<f64>| value.map(|value| positive(&key(name), value)).transpose();
    let queue_deadline = duration("queue-deadline-s", file.queue_deadline_s)?;
    let preempted =
        |other: &String| StageName::new(other).map_err(|error| wrong(&key("preempts"), other, &error.to_string()));
    Ok(Class {
        share: number(&key("share"), file.share, 0.0, 1e6)?,
        scale: number(&key("scale"), file.scale, 1e-6, 1e6)?,
        slo: duration("slo-s", file.slo_s)?,
        spec: ClassSpec {
            queue_deadline,
            preempts: file.preempts.iter().map(preempted).collect::<Result<_, _>>()?,
            ..ClassSpec::new(name, file.weight)
        },
    })
}

fn measured(file: &File, open: &mut impl FnMut(&str) -> Result<String, SimError>) -> Result<Measured, SimError> {
    let mut measured = match &file.workload {
        Some(name) => workload(name).ok_or_else(|| {
            let names: Vec<_> = WORKLOADS.iter().map(|workload| workload.name).collect();
            wrong("workload", name, &format!("one of {}", names.join(", ")))
        })?,
        None => Measured::new(),
    };
    if let Some(name) = &file.service_file {
        let text = open(name)?;
        let service: ServiceFile =
            toml::from_str(&text).map_err(|error| SimError::Syntax(format!("{name}: {error}")))?;
        let stages = service.stage.into_iter();
        measured.extend(stages.map(|(stage, service)| (stage, (service.time_s, service.output_bytes.0))));
    }
    Ok(measured)
}

fn arrivals(
    file: &ArrivalsFile,
    classes: &[Class],
    open: &mut impl FnMut(&str) -> Result<String, SimError>,
) -> Result<Arrivals, SimError> {
    match (&file.trace, file.jobs, file.rate_per_s) {
        (Some(name), None, None) => {
            let names: Vec<_> = classes.iter().map(|class| class.spec.name.as_str()).collect();
            Ok(Arrivals::Trace(trace::parse(&open(name)?, &names)?))
        }
        (None, Some(jobs), Some(rate)) => {
            let rate = number("arrivals.rate-per-s", rate, 1e-9, 1e6)?;
            if classes.iter().all(|class| class.share == 0.0) {
                return Err(wrong("share of every class", "0", "more than that for one of them"));
            }
            let burst = number("burst", file.burst.unwrap_or(1.0), 1.0, 1e6)?;
            if !(1..=10_000_000).contains(&jobs) {
                return Err(wrong("jobs", &jobs.to_string(), "1 to 10000000"));
            }
            Ok(Arrivals::Model { jobs, rate, burst })
        }
        _ => Err(wrong(
            "arrivals",
            "incomplete",
            "either a trace, or jobs and rate-per-s",
        )),
    }
}

fn network(file: &NetworkFile) -> Result<Network, SimError> {
    let rate = |key: &str, value: Option<ByteCount>, default: u64| match value.map_or(default, |value| value.0) {
        0 => Err(wrong(key, "0", "more than that")),
        value => Ok(value),
    };
    // 10 GbE and what a host copies by default.
    Ok(Network {
        nic: rate("network.nic-bytes-per-s", file.nic_bytes_per_s, 1_250_000_000)?,
        store: rate("network.store-bytes-per-s", file.store_bytes_per_s, 5_000_000_000)?,
        shared: rate("network.shared-bytes-per-s", file.shared_bytes_per_s, u64::MAX)?,
        latency: Duration::from_micros(file.latency_us.unwrap_or(500)),
    })
}

fn known(stages: &[Stage]) -> String {
    let names: Vec<_> = stages.iter().map(|stage| stage.spec.name.as_str()).collect();
    format!("one of the stages before: {}", names.join(", "))
}

fn seconds(key: &str, value: f64) -> Result<Duration, SimError> {
    number(key, value, 0.0, 1e9).map(Duration::from_secs_f64)
}

fn positive(key: &str, value: f64) -> Result<Duration, SimError> {
    number(key, value, 1e-6, 1e9).map(Duration::from_secs_f64)
}

fn number(key: &str, value: f64, least: f64, most: f64) -> Result<f64, SimError> {
    if (least..=most).contains(&value) {
        Ok(value)
    } else {
        Err(wrong(key, &value.to_string(), &format!("{least} to {most}")))
    }
}

fn wrong(key: &str, value: &str, must: &str) -> SimError {
    SimError::Value {
        key: key.to_owned(),
        value: value.to_owned(),
        must: must.to_owned(),
    }
}
