use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use clap::Args;
use stagewire_core::StageName;

use crate::args::Global;
use crate::exit::{EXIT_HELP, Exit, Fault};
use crate::python::Python;

const EXAMPLES: &str = "\
Examples:
  stagewire worker --pipeline examples/wan/stagewire.toml --stage decode
  stagewire worker --pipeline examples/wan/pipeline.py --stage decode --slots 1 --python ~/envs/wan/bin/python";

/// Run one worker of one stage, beside those that `up` started or for a server that `serve` started
///
/// Becomes the Python process of the worker: finds a Python (--python, else the active virtual environment, else a
/// .venv beside the pipeline or above it, else python3), checks that it has the package, and runs `python -m
/// stagewire.worker`. The worker loads its model, attaches to the server of the run directory and takes work until
/// SIGTERM. It outlives a server by a minute.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES, after_long_help = format!("{EXAMPLES}\n\n{EXIT_HELP}"))]
pub(crate) struct WorkerArgs {
    /// The pipeline: its TOML file or its Python module
    #[arg(long, value_name = "FILE")]
    pipeline: PathBuf,

    /// The stage to run
    #[arg(long, value_name = "NAME")]
    stage: StageName,

    /// Attempts at once [default: what the TOML file says, else 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    slots: Option<u32>,

    /// Jobs of one shape that it runs together [default: what the TOML file says, else 1]
    ///
    /// For work queues, with one slot, and stage functions that take a list of jobs. A batch is what waits when the worker
    /// is free: it is never waited for.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_batch: Option<u32>,

    /// The group that runs every attempt together, of which this process is one rank
    ///
    /// For stages of kind admission, with one slot. The group gets work while all its ranks are attached; rank 0 publishes;
    /// the loss of a rank ends the attempt on all of them.
    #[arg(long, value_name = "NAME", requires = "rank", requires = "world")]
    group: Option<StageName>,

    /// Which rank of its group it is, from 0 on
    #[arg(long, value_name = "N", requires = "group")]
    rank: Option<u32>,

    /// Number of ranks of the group
    #[arg(long, value_name = "N", requires = "group", value_parser = clap::value_parser!(u32).range(1..))]
    world: Option<u32>,

    /// The NUMA node that it runs on, where you pin it to one
    ///
    /// What reads another worker's payload is preferably run near that one, where a worker there is free: on its NUMA
    /// node, else its host, else its rail.
    #[arg(long, value_name = "N")]
    numa: Option<u32>,

    /// The rail of the network that it is on, where the network has several
    #[arg(long, value_name = "N")]
    rail: Option<u32>,

    /// Name shown to people [default: STAGE-PID]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,

    /// The Python to run
    #[arg(long, value_name = "FILE", env = "STAGEWIRE_PYTHON", hide_env_values = true)]
    python: Option<PathBuf>,
}

pub(crate) fn run(args: &WorkerArgs, global: &Global) -> Result<Exit, Fault> {
    if !args.pipeline.is_file() {
        return Err(Fault::usage(format!(
            "there is no pipeline file {}",
            args.pipeline.display()
        )));
    }
    let python = Python::find(args.python.as_deref(), &args.pipeline)?;
    let mut command = Command::new(&python.program);
    command
        .args(["-m", "stagewire.worker", "--pipeline"])
        .arg(&args.pipeline);
    command.args(["--stage", args.stage.as_str()]);
    if let Some(slots) = args.slots {
        command.args(["--slots", &slots.to_string()]);
    }
    if let Some(max_batch) = args.max_batch {
        command.args(["--max-batch", &max_batch.to_string()]);
    }
    if let (Some(group), Some(rank), Some(world)) = (&args.group, args.rank, args.world) {
        let (rank, world) = (rank.to_string(), world.to_string());
        command.args(["--group", group.as_str(), "--rank", &rank, "--world", &world]);
    }
    for (option, value) in [("--numa", args.numa), ("--rail", args.rail)] {
        if let Some(value) = value {
            command.args([option, &value.to_string()]);
        }
    }
    if let Some(name) = &args.name {
        command.args(["--name", name]);
    }
    if let Some(run_dir) = &global.run_dir {
        command.arg("--run-dir").arg(run_dir);
    }
    let error = command.exec();
    Err(Fault::failed(format!("cannot run Python {python}: {error}")))
}
