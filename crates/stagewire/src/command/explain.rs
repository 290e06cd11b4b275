use std::time::Duration;

use clap::Args;
use serde_json::json;

use crate::args::{Global, ServerArgs};
use crate::client::{Client, Waiting};
use crate::exit::{EXIT_HELP, Exit, Fault};
use crate::output::{Output, duration};

const EXAMPLES: &str = "\
Examples:
  stagewire explain 0192f0c1-7d2e-7a53-b6c1-0d9a3f6f5a10
  stagewire explain $job --json | jq '.waiting[].ahead'";

/// Say what a job waits for, stage by stage, with all numbers
///
/// Of each stage that is not done: the cause, in words, and the numbers behind it, such as its rank in its class, slots
/// that are in use, and bytes that are missing.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES, after_long_help = format!("{EXAMPLES}\n\n{EXIT_HELP}"))]
pub(crate) struct ExplainArgs {
    /// Id of the job, as `submit` and `jobs` print it
    #[arg(value_name = "JOB")]
    id: String,

    #[command(flatten)]
    pub(crate) server: ServerArgs,
}

pub(crate) async fn run(args: ExplainArgs, global: &Global, output: &Output) -> Result<Exit, Fault> {
    let client = Client::new(global.run_dir.as_deref(), &args.server)?;
    let job = client.job(&args.id).await?;
    if output.json {
        output.document(&json!({"id": job.id, "state": job.state, "waiting": job.waiting}))?;
        return Ok(Exit::Done);
    }
    output.data(format_args!("{}  {}", job.id, job.state))?;
    let rows: Vec<_> = job.waiting.iter().flat_map(rows).collect();
    if !rows.is_empty() {
        output.table(["STAGE", "CAUSE", "FOR", ""], &rows)?;
    }
    if let Some(failure) = &job.failure {
        output.data(failure)?;
    }
    Ok(Exit::Done)
}

/// The words, and under them the numbers.
fn rows(waiting: &Waiting) -> Vec<[String; 4]> {
    let stage = waiting.stage.clone().unwrap_or_default();
    let waited = waiting.waited_ns.map(Duration::from_nanos);
    let waited = waited.map(duration).unwrap_or_default();
    let numbers: Vec<String> = waiting
        .numbers()
        .map(|(name, value)| format!("{name} {value}"))
        .collect();
    let mut rows = vec![[stage, waiting.cause.clone(), waited, waiting.message.clone()]];
    if !numbers.is_empty() {
        rows.push([String::new(), String::new(), String::new(), numbers.join(", ")]);
    }
    rows
}
