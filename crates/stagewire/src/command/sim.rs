mod print;

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use stagewire_core::Classify;
use stagewire_sim::{Experiment, Layout, Report, fewest, simulate};

use crate::exit::{EXIT_HELP, Exit, Fault};
use crate::output::Output;

const EXAMPLES: &str = "\
Examples:
  stagewire sim run examples/sim/wan.toml
  stagewire sim run examples/sim/wan.toml --seed 7 --out results
  stagewire sim plan examples/sim/sharing.toml --target 0.99
  stagewire sim run examples/sim/equal-gpus.toml --json | jq '.[].throughput_per_s'

The file names a workload, the workers of each stage, and who comes when:
  workload = \"wan-dfx\"
  arrivals = { jobs = 2000, rate-per-s = 0.25 }
  stage = [
      { name = \"encode\", workers = 1 },
      { name = \"denoise\", workers = 6 },
      { name = \"decode\", workers = 1, chunks = 8 },
  ]
docs/simulator.md has every key.";

/// Simulate a cluster: what it does per second, how long jobs take, how many workers a stage needs
///
/// The scheduler is the one that serves; workers, network, store and jobs are models. Needs no server and no GPU. A seed decides
/// everything: the same file gives the same events.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES, after_long_help = format!("{EXAMPLES}\n\n{EXIT_HELP}"))]
pub(crate) struct SimArgs {
    #[command(subcommand)]
    command: SimCommand,
}

#[derive(Debug, Subcommand)]
enum SimCommand {
    /// Simulate the cluster of a file; with "colocated" also the same GPUs where each runs all stages
    Run(RunArgs),
    /// Find the fewest workers of a stage with which every class meets its slo-s
    Plan(PlanArgs),
}

#[derive(Debug, Args)]
struct FileArgs {
    /// The experiment
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Decides every random number, instead of that of the file
    #[arg(long, value_name = "N")]
    seed: Option<u64>,

    /// Print one JSON document to stdout instead of text
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct RunArgs {
    #[command(flatten)]
    file: FileArgs,

    /// Also write jobs and levels as CSV, and two plots as SVG, to DIR
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

#[derive(Debug, Args)]
struct PlanArgs {
    #[command(flatten)]
    file: FileArgs,

    /// The stage
    #[arg(long, value_name = "STAGE", default_value = "decode")]
    stage: String,

    /// Part of the jobs of every class that must be done within its slo-s
    #[arg(long, value_name = "PART", default_value_t = 0.99)]
    target: f64,

    /// Most workers to try
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    most: u32,
}

impl SimArgs {
    pub(crate) const fn json(&self) -> bool {
        match &self.command {
            SimCommand::Run(args) => args.file.json,
            SimCommand::Plan(args) => args.file.json,
        }
    }
}

pub(crate) fn run(args: &SimArgs, output: &Output) -> Result<Exit, Fault> {
    match &args.command {
        SimCommand::Run(args) => run_one(args, output),
        SimCommand::Plan(args) => plan(args, output),
    }
}

fn run_one(args: &RunArgs, output: &Output) -> Result<Exit, Fault> {
    let experiment = read(&args.file)?;
    let mut reports = vec![simulate(&experiment, Layout::Disaggregated).map_err(|error| fault(&error))?];
    if experiment.colocated.is_some() {
        reports.push(simulate(&experiment, Layout::Colocated).map_err(|error| fault(&error))?);
    }
    if let Some(dir) = &args.out {
        for report in &reports {
            write(dir, report)?;
        }
        output.topic("saved", dir.display());
    }
    if output.json {
        output.document(&reports)?;
    } else {
        print::reports(&reports, output)?;
    }
    Ok(Exit::Done)
}

fn plan(args: &PlanArgs, output: &Output) -> Result<Exit, Fault> {
    if !(0.0..=1.0).contains(&args.target) {
        return Err(Fault::usage("--target is a part of the jobs: 0 to 1"));
    }
    let experiment = read(&args.file)?;
    let trials = fewest(&experiment, &args.stage, args.target, args.most).map_err(|error| fault(&error))?;
    let answer = trials
        .iter()
        .filter(|trial| trial.enough)
        .map(|trial| trial.workers)
        .min();
    if output.json {
        output.document(
            &serde_json::json!({ "stage": args.stage, "target": args.target, "workers": answer, "trials": trials }),
        )?;
    } else {
        print::trials(&args.stage, &trials, output)?;
        // 0.57 is 57 %, not 56.99999999999999.
        let target = (args.target * 1e5).round() / 1e3;
        match answer {
            Some(workers) => output.data(format_args!(
                "{workers} workers of {} are enough for {target} %",
                args.stage
            ))?,
            None => output.data(format_args!(
                "{} workers of {} are not enough for {target} %",
                args.most, args.stage
            ))?,
        }
    }
    Ok(if answer.is_some() { Exit::Done } else { Exit::Failed })
}

fn read(args: &FileArgs) -> Result<Experiment, Fault> {
    let path = &args.file;
    let wrong =
        |problem: &dyn std::fmt::Display| Fault::new(Exit::Usage, format_args!("{}: {problem}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| wrong(&error))?;
    let dir = path.parent().unwrap_or(Path::new("."));
    let open = |name: &str| std::fs::read_to_string(dir.join(name)).map_err(|error| error.to_string());
    let mut experiment = Experiment::parse(&text, open).map_err(|error| {
        let (class, reason) = (error.class(), error.reason());
        wrong(&format_args!("{error} [{class}: {reason}]"))
    })?;
    experiment.seed = args.seed.unwrap_or(experiment.seed);
    Ok(experiment)
}

fn write(dir: &Path, report: &Report) -> Result<(), Fault> {
    let failed = |error| Fault::failed(format!("cannot write to {}: {error}", dir.display()));
    std::fs::create_dir_all(dir).map_err(failed)?;
    for (name, kind, text) in [
        ("jobs", "csv", report.jobs_csv()),
        ("levels", "csv", report.samples_csv()),
        ("latency", "svg", report.latency_svg()),
        ("queues", "svg", report.queues_svg()),
    ] {
        std::fs::write(dir.join(format!("{}-{name}.{kind}", report.layout)), text).map_err(failed)?;
    }
    Ok(())
}

/// Class and reason at the end, as of everything that is refused.
fn fault(error: &impl Classify) -> Fault {
    let (class, reason) = (error.class(), error.reason());
    Fault::new(Exit::of(class), format_args!("{error} [{class}: {reason}]"))
}
