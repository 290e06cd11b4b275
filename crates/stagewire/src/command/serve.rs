use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;
use serde_json::json;
use stagewire_core::Classify;
use stagewire_server::{Config, RunDir, Server, ServerOptions};
use stagewire_store::KeeperCommand;

use super::keeper;
use crate::args::Global;
use crate::exit::{EXIT_HELP, Exit, Fault, OrExit};
use crate::output::Output;
use crate::signals::{Signals, Wish};

const EXAMPLES: &str = "\
Examples:
  stagewire serve examples/wan/stagewire.toml
  stagewire serve examples/wan/stagewire.toml --listen 127.0.0.1:8080 --run-dir /run/stagewire";

/// Serve a pipeline without workers: only the server, in the foreground
///
/// Workers are started elsewhere with `stagewire worker`; those of a server that was killed come back by themselves for
/// a minute. `up` is the command that starts both.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES, after_long_help = format!("{EXAMPLES}\n\n{EXIT_HELP}"))]
pub(crate) struct ServeArgs {
    /// The pipeline
    #[arg(value_name = "FILE")]
    pub(super) file: PathBuf,

    /// Listen here instead of where the file says; port 0 takes a free one
    #[arg(long, value_name = "ADDRESS:PORT", env = "STAGEWIRE_LISTEN", hide_env_values = true)]
    listen: Option<SocketAddr>,

    /// Keep journal and results here
    ///
    /// Default: `data-dir` of the file, else $XDG_STATE_HOME/stagewire/PIPELINE, else ~/.local/state/stagewire/PIPELINE.
    #[arg(long, value_name = "DIR", env = "STAGEWIRE_DATA_DIR", hide_env_values = true)]
    data_dir: Option<PathBuf>,

    /// Print one line of JSON to stdout when it serves
    #[arg(long)]
    pub(crate) json: bool,
}

pub(crate) async fn run(args: ServeArgs, global: &Global, output: &Output) -> Result<Exit, Fault> {
    let mut signals = Signals::listen()?;
    let config = load(&args)?;
    let server = start(&config, &args, Some(keeper::command()), global).await?;
    announce(&server, global, output);
    announce_json(&config, &server, global, output)?;
    let exit = tokio::select! {
        wish = signals.next() => Ok(ended_by(wish)),
        failure = server.stopped() => Err(Fault::failed(failure)),
    };
    output.topic("server", "stops");
    server.shutdown().await;
    exit
}

pub(super) fn load(args: &ServeArgs) -> Result<Config, Fault> {
    Config::load(&args.file).or_exit(Exit::Usage)
}

pub(super) async fn start(
    config: &Config,
    args: &ServeArgs,
    keeper: Option<KeeperCommand>,
    global: &Global,
) -> Result<Server, Fault> {
    let run_dir = RunDir::locate(global.run_dir.as_deref());
    let mut options = ServerOptions::new(config.clone(), run_dir);
    options.listen = args.listen;
    options.data_dir = args.data_dir.clone();
    options.keeper = keeper;
    Server::start(options).await.map_err(|error| Fault {
        exit: Exit::of(error.class()),
        error: error.into(),
    })
}

/// Says where the server is.
pub(super) fn announce(server: &Server, global: &Global, output: &Output) {
    let run_dir = RunDir::locate(global.run_dir.as_deref());
    let url = format!("http://{}", server.http_addr());
    output.topic(
        "server",
        format_args!("{url}, run directory {}", run_dir.path().display()),
    );
}

/// Says it to a machine, which takes the line as the sign that it may begin.
pub(super) fn announce_json(config: &Config, server: &Server, global: &Global, output: &Output) -> Result<(), Fault> {
    if !output.json {
        return Ok(());
    }
    let run_dir = RunDir::locate(global.run_dir.as_deref());
    output.data(json!({
        "url": format!("http://{}", server.http_addr()),
        "pipeline": config.pipeline.name,
        "run_dir": run_dir.path(),
        "pid": std::process::id(),
        "epoch": server.epoch(),
    }))
}

/// The status of a server that was asked to stop: who presses Ctrl-C sees 130, a service manager sees 0.
pub(super) const fn ended_by(wish: Wish) -> Exit {
    match wish {
        Wish::Interrupt => Exit::Interrupted,
        Wish::Terminate => Exit::Done,
    }
}
