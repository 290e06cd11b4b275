use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};

use super::up::seconds;
use crate::args::{Global, ServerArgs};
use crate::client::{Client, PoolWorker};
use crate::exit::{EXIT_HELP, Exit, Fault};
use crate::output::Output;

const EXAMPLES: &str = "\
Examples:
  stagewire drain decode-0
  stagewire drain --stage decode --deadline 60";

/// Have a worker, or all that a stage has now, leave without losing anything
///
/// It gets no more work. What it runs goes on to its end, or is queued again for others at the deadline, at no cost to the
/// job. The store takes what others still need of it; then it leaves. `up` does not start it again.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES, after_long_help = format!("{EXAMPLES}\n\n{EXIT_HELP}"))]
pub(crate) struct DrainArgs {
    /// Name of the worker, or its incarnation
    #[arg(value_name = "WORKER", required_unless_present = "stage")]
    worker: Option<String>,

    /// Every worker of this stage
    #[arg(long, value_name = "STAGE", conflicts_with = "worker")]
    stage: Option<String>,

    /// Queue again what still runs after so many seconds. Default: it may run to its end
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    deadline: Option<Duration>,

    #[command(flatten)]
    pub(crate) server: ServerArgs,
}

pub(crate) async fn run(args: DrainArgs, global: &Global, output: &Output) -> Result<Exit, Fault> {
    let client = Client::new(global.run_dir.as_deref(), &args.server)?;
    let mut body = match (&args.worker, &args.stage) {
        (Some(worker), _) => json!({"worker": worker}),
        (None, stage) => json!({"stage": stage}),
    };
    if let Some(deadline) = args.deadline {
        body["deadline_s"] = json!(deadline.as_secs_f64());
    }
    let mut answer: Value = client.post("/v1/pipeline/drain", Some(&body)).await?;
    if output.json {
        output.document(&answer)?;
        return Ok(Exit::Done);
    }
    let workers: Vec<PoolWorker> = serde_json::from_value(answer["workers"].take())?;
    if workers.is_empty() {
        output.say("this stage has no worker");
        return Ok(Exit::Done);
    }
    let row = |worker: &PoolWorker| {
        let running = format!("{} of {}", worker.slots.running, worker.slots.advertised);
        [worker.label(), worker.standing(), running, worker.payloads.to_string()]
    };
    let rows: Vec<_> = workers.iter().map(row).collect();
    output.table(["WORKER", "STATE", "RUNNING", "HELD"], &rows)?;
    Ok(Exit::Done)
}
