use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use stagewire_server::{Config, RunDir, Server, Stage};
use tokio::sync::watch;

use crate::args::Global;
use crate::client::Client;
use crate::command::keeper;
use crate::command::serve::{self, ServeArgs};
use crate::exit::{EXIT_HELP, Exit, Fault};
use crate::output::{Output, duration};
use crate::python::Python;
use crate::signals::{Signals, Wish};
use crate::supervisor::{Patience, Supervisor, WorkerPlan};

const EXAMPLES: &str = "\
Examples:
  stagewire up examples/wan/stagewire.toml
  stagewire up examples/wan/stagewire.toml --python ~/envs/wan/bin/python
  stagewire up examples/wan/stagewire.toml --listen 127.0.0.1:8080 --json      one line of JSON when all is ready";

/// Serve a pipeline: the server and all its workers, until Ctrl-C
///
/// Starts as many worker processes for each stage as the file says, and starts again those that die. Ctrl-C stops the
/// workers, then the server; a second Ctrl-C does not wait. Jobs that have not ended go on with the next `up`. When
/// `up` itself is killed, its workers run on for a minute and the next `up` takes them over.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES, after_long_help = format!("{EXAMPLES}\n\n{EXIT_HELP}"))]
pub(crate) struct UpArgs {
    #[command(flatten)]
    pub(crate) serve: ServeArgs,

    /// The Python that runs the workers [default: the active or the project's virtual environment]
    #[arg(long, value_name = "FILE", env = "STAGEWIRE_PYTHON", hide_env_values = true)]
    python: Option<PathBuf>,

    /// Seconds until every worker must have loaded its model
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = seconds)]
    start_timeout: Duration,

    /// Seconds that a worker has to leave before it is ended by force
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    stop_timeout: Duration,

    /// Stop when standard input ends, too, as it does when the process that started this one is gone
    ///
    /// Nothing is left running then: what jobs that have not ended have in the store is made again by the next `up`.
    #[arg(long)]
    until_input_ends: bool,
}

/// A number of seconds that a person may wait.
pub(super) fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text
        .parse()
        .map_err(|_| format!("{text:?} is not a number of seconds"))?;
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}

pub(crate) async fn run(args: UpArgs, global: &Global, output: &Output) -> Result<Exit, Fault> {
    let mut signals = Signals::listen()?;
    if args.until_input_ends {
        signals.heed_input();
    }
    let began = Instant::now();
    let config = serve::load(&args.serve)?;
    let python = Python::find(args.python.as_deref(), &config.path)?;
    // What belongs to another process leaves none behind.
    let keeper = (!args.until_input_ends).then(keeper::command);
    let server = serve::start(&config, &args.serve, keeper, global).await?;
    output.topic(
        "pipeline",
        format_args!("{} of {}", config.pipeline.name, config.path.display()),
    );
    serve::announce(&server, global, output);
    output.topic("python", &python);
    let run_dir = RunDir::locate(global.run_dir.as_deref());
    let client = Client::of_run_dir(&run_dir, token(&config)?);
    let (pids, ready) = watch::channel(BTreeSet::new());
    let watcher = tokio::spawn(watch_workers(client, pids));
    let patience = Patience {
        start: args.start_timeout,
        stop: args.stop_timeout,
    };
    let plans = plans(&config, &python, run_dir.path());
    let started = Supervisor::start(plans, &run_dir, &ready, patience, output).await;
    let ended = match started {
        Err(fault) => Err(fault),
        Ok(mut supervisor) => {
            let ended = attend(&mut supervisor, &server, &mut signals, || {
                output.topic(
                    "ready",
                    format_args!(
                        "after {}: stagewire submit \"...\"; Ctrl-C stops",
                        duration(began.elapsed())
                    ),
                );
                serve::announce_json(&config, &server, global, output)
            })
            .await;
            output.topic("workers", "stop");
            tokio::select! {
                () = supervisor.stop() => {}
                _ = signals.next() => supervisor.kill().await,
            }
            ended
        }
    };
    watcher.abort();
    output.topic("server", "stops");
    server.shutdown().await;
    ended.map(serve::ended_by)
}

/// Until somebody wishes the end, or server or workers cannot go on.
async fn attend(
    supervisor: &mut Supervisor,
    server: &Server,
    signals: &mut Signals,
    on_ready: impl FnOnce() -> Result<(), Fault>,
) -> Result<Wish, Fault> {
    let mut on_ready = Some(on_ready);
    let settled = supervisor.settled();
    tokio::pin!(settled);
    loop {
        tokio::select! {
            wish = signals.next() => return Ok(wish),
            failure = server.stopped() => return Err(Fault::failed(failure)),
            fault = supervisor.failed() => return Err(fault),
            () = &mut settled, if on_ready.is_some() => {
                if let Some(on_ready) = on_ready.take() {
                    on_ready()?;
                }
            }
        }
    }
}

/// The processes that the file asks for: for each worker one, or all the ranks of its group.
fn plans(config: &Config, python: &Python, run_dir: &Path) -> Vec<WorkerPlan> {
    let plan = |stage: &Stage, index: u32, rank: u32| {
        let group = format!("{}-{index}", stage.name);
        let name = if stage.world > 1 {
            format!("{group}-{rank}")
        } else {
            group.clone()
        };
        let mut env = vec![("PYTHONUNBUFFERED".to_owned(), "1".to_owned())];
        if let Some(threads) = stage.threads {
            for variable in ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "STAGEWIRE_TORCH_THREADS"] {
                env.push((variable.to_owned(), threads.to_string()));
            }
        }
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let mut command = vec![
            text(&python.program),
            "-m".to_owned(),
            "stagewire.worker".to_owned(),
            "--pipeline".to_owned(),
            text(&config.path),
            "--stage".to_owned(),
            stage.name.to_string(),
            "--slots".to_owned(),
            stage.slots.to_string(),
            "--max-batch".to_owned(),
            stage.max_batch.to_string(),
            "--name".to_owned(),
            name.clone(),
            "--run-dir".to_owned(),
            text(run_dir),
        ];
        if stage.world > 1 {
            let (rank, world) = (rank.to_string(), stage.world.to_string());
            let member = ["--group", &group, "--rank", &rank, "--world", &world];
            command.extend(member.map(str::to_owned));
        }
        WorkerPlan { name, command, env }
    };
    let stages = config.stages.iter();
    stages
        .flat_map(|stage| {
            (0..stage.workers).flat_map(move |index| (0..stage.world).map(move |rank| (stage, index, rank)))
        })
        .map(|(stage, index, rank)| plan(stage, index, rank))
        .collect()
}

/// The token that this server asks of its clients.
fn token(config: &Config) -> Result<Option<String>, Fault> {
    let Some(file) = &config.server.token_file else {
        return Ok(None);
    };
    let text = std::fs::read_to_string(file)
        .map_err(|error| Fault::usage(format!("cannot read token-file {}: {error}", file.display())))?;
    Ok(Some(text.trim().to_owned()))
}

/// Keeps the pids of the workers that the server can give work to.
async fn watch_workers(client: Client, pids: watch::Sender<BTreeSet<u32>>) {
    const EVERY: Duration = Duration::from_millis(200);
    loop {
        // A server that does not answer is the affair of `Server::stopped`.
        if let Ok(pipeline) = client.pipeline().await {
            let found: BTreeSet<u32> = pipeline.ready_workers().filter_map(|worker| worker.pid).collect();
            pids.send_if_modified(|known| {
                let changed = *known != found;
                *known = found;
                changed
            });
        }
        tokio::select! {
            () = tokio::time::sleep(EVERY) => {}
            () = pids.closed() => return,
        }
    }
}
