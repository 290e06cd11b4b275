use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::command::{
    bench, dlq, doctor, drain, explain, job, jobs, kv, pause, pools, serve, sim, status, store, submit, up, worker,
};
use crate::exit::EXIT_HELP;

const EXAMPLES: &str = "\
Examples:
  stagewire up examples/wan/stagewire.toml          serve a pipeline: the server and all its workers
  stagewire submit \"a red cat\" --out cat.mp4        ask it for a video and watch it being made
  stagewire status                                  what runs, what waits
  stagewire jobs --json | jq '.jobs[].state'        every command speaks JSON

Data goes to stdout, everything else to stderr. `stagewire COMMAND --help` has examples of each command.";

/// Serves generative models whose stages run in different processes.
///
/// A pipeline is a TOML file that names its stages and a Python module that holds them. `up` serves it: one server and
/// the workers of each stage, on this host. The other commands talk to that server; they find it through the run
/// directory.
#[derive(Debug, Parser)]
#[command(
    name = "stagewire",
    version,
    arg_required_else_help = true,
    after_help = EXAMPLES,
    after_long_help = format!("{EXAMPLES}\n\n{EXIT_HELP}"),
    max_term_width = 100
)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Options of every command.
#[derive(Debug, Args)]
#[command(next_help_heading = "Options of every command")]
pub(crate) struct Global {
    /// Directory where server, workers and commands find each other
    ///
    /// Default: $XDG_RUNTIME_DIR/stagewire, else /tmp/stagewire-UID. Two servers need two directories.
    #[arg(
        long,
        global = true,
        value_name = "DIR",
        env = "STAGEWIRE_RUN_DIR",
        hide_env_values = true
    )]
    pub(crate) run_dir: Option<PathBuf>,

    /// Say nothing on stderr but warnings and errors
    #[arg(long, short, global = true)]
    pub(crate) quiet: bool,

    /// Log to stderr what happens inside; -vv more. RUST_LOG chooses in detail
    #[arg(long, short, global = true, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
}

/// Options of the commands that talk to a server.
#[derive(Debug, Args)]
#[command(next_help_heading = "Options of every command that asks a server")]
pub(crate) struct ServerArgs {
    /// Address of the server, where the run directory is not the way to it
    #[arg(long, value_name = "URL", env = "STAGEWIRE_URL", hide_env_values = true)]
    pub(crate) url: Option<String>,

    /// File that holds the bearer token of a server that asks for one
    #[arg(long, value_name = "FILE", env = "STAGEWIRE_TOKEN_FILE", hide_env_values = true)]
    pub(crate) token_file: Option<PathBuf>,

    /// Print one JSON document to stdout instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Up(up::UpArgs),
    Serve(serve::ServeArgs),
    Worker(worker::WorkerArgs),
    Store(store::StoreArgs),
    Submit(submit::SubmitArgs),
    Jobs(jobs::JobsArgs),
    Job(job::JobArgs),
    Explain(explain::ExplainArgs),
    Cancel(job::CancelArgs),
    Dlq(dlq::DlqArgs),
    Status(status::StatusArgs),
    Stages(status::StagesArgs),
    Pools(pools::PoolsArgs),
    Drain(drain::DrainArgs),
    Pause(pause::PauseArgs),
    Resume(pause::ResumeArgs),
    Doctor(doctor::DoctorArgs),
    Kv(kv::KvArgs),
    Sim(sim::SimArgs),
    Bench(bench::BenchArgs),
    /// The process that keeps a store's memory while the store is dead.
    #[command(hide = true)]
    Keeper,
    /// The producing process of `bench`.
    #[command(hide = true)]
    BenchProducer(bench::ProducerArgs),
    /// One of the two processes of `doctor`.
    #[command(hide = true)]
    DoctorPeer(doctor::PeerArgs),
}

impl Command {
    /// Whether a machine reads stdout.
    pub(crate) fn json(&self) -> bool {
        match self {
            Self::Up(args) => args.serve.json,
            Self::Serve(args) => args.json,
            Self::Store(args) => args.json,
            Self::Submit(args) => args.server.json,
            Self::Jobs(args) => args.server.json,
            Self::Job(args) => args.server.json,
            Self::Explain(args) => args.server.json,
            Self::Cancel(args) => args.server.json,
            Self::Dlq(args) => args.json(),
            Self::Status(args) => args.server.json,
            Self::Stages(args) => args.server.json,
            Self::Pools(args) => args.server.json,
            Self::Drain(args) => args.server.json,
            Self::Pause(args) => args.server.json,
            Self::Resume(args) => args.server.json,
            Self::Doctor(args) => args.json,
            Self::Kv(args) => args.json(),
            Self::Sim(args) => args.json(),
            Self::Bench(args) => args.json == Some(None),
            Self::Worker(_) | Self::Keeper | Self::BenchProducer(_) | Self::DoctorPeer(_) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
