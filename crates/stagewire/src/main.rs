//! The `stagewire` command line.
//!
//! *What it is.* One file under `command` for each command; `supervisor` keeps worker processes running; `client`
//! speaks the server's HTTP API; `bench` measures; `doctor` looks at the host. Everything else is in the crates below.
//!
//! *Guarantees.* Data goes to stdout, talk to stderr, `--json` prints one document. The exit status says what
//! `exit::Exit` lists. What `up` starts has ended when `up` has ended, unless `up` itself was killed: then the workers
//! wait up to a minute for the next one.

mod args;
mod bench;
mod client;
mod command;
mod doctor;
mod exit;
mod output;
mod progress;
mod python;
mod signals;
mod supervisor;

use std::process::ExitCode;

use clap::Parser;
use tracing_subscriber::EnvFilter;

use crate::args::{Cli, Command, Global};
use crate::exit::{Exit, Fault};
use crate::output::Output;

fn main() -> ExitCode {
    let cli = Cli::parse();
    log(&cli.global);
    let output = Output::new(cli.command.json(), cli.global.quiet);
    let exit = run(cli, &output).unwrap_or_else(|fault| {
        output.error(&fault);
        fault.exit
    });
    exit.into()
}

fn run(cli: Cli, output: &Output) -> Result<Exit, Fault> {
    let global = &cli.global;
    match cli.command {
        // Replaces this process: no runtime, no threads.
        Command::Worker(args) => command::worker::run(&args, global),
        Command::Keeper => command::keeper::run(),
        Command::Kv(args) => command::kv::run(&args, output),
        Command::Sim(args) => command::sim::run(&args, output),
        command => {
            let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
            let exit = runtime.block_on(async {
                match command {
                    Command::Up(args) => command::up::run(args, global, output).await,
                    Command::Serve(args) => command::serve::run(args, global, output).await,
                    Command::Store(args) => command::store::run(args, global, output).await,
                    Command::Submit(args) => command::submit::run(args, global, output).await,
                    Command::Jobs(args) => command::jobs::run(args, global, output).await,
                    Command::Job(args) => command::job::show(args, global, output).await,
                    Command::Explain(args) => command::explain::run(args, global, output).await,
                    Command::Cancel(args) => command::job::cancel(args, global, output).await,
                    Command::Dlq(args) => command::dlq::run(args, global, output).await,
                    Command::Status(args) => command::status::run(args, global, output).await,
                    Command::Stages(args) => command::status::stages(args, global, output).await,
                    Command::Pools(args) => command::pools::run(args, global, output).await,
                    Command::Drain(args) => command::drain::run(args, global, output).await,
                    Command::Pause(args) => command::pause::pause(args, global, output).await,
                    Command::Resume(args) => command::pause::resume(args, global, output).await,
                    Command::Doctor(args) => command::doctor::run(args, global, output).await,
                    Command::Bench(args) => command::bench::run(args, output).await,
                    Command::BenchProducer(args) => bench::produce(args).await,
                    Command::DoctorPeer(args) => doctor::peer(args).await,
                    Command::Worker(_) | Command::Keeper | Command::Kv(_) | Command::Sim(_) => {
                        unreachable!("handled above")
                    }
                }
            });
            // What still runs in the background has nothing left to do for anyone.
            runtime.shutdown_background();
            exit
        }
    }
}

fn log(global: &Global) {
    let level = match global.verbose {
        0 => "warn",
        1 => "info,stagewire=debug",
        _ => "debug",
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(console::colors_enabled_stderr())
        .init();
}
