use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Args;

use crate::args::{Global, ServerArgs};
use crate::client::{Client, JobList};
use crate::exit::{EXIT_HELP, Exit, Fault};
use crate::output::{Output, duration};

const EXAMPLES: &str = "\
Examples:
  stagewire jobs
  stagewire jobs --state failed
  stagewire jobs --json | jq -r '.jobs[].id'";

/// List the jobs, newest first
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES, after_long_help = format!("{EXAMPLES}\n\n{EXIT_HELP}"))]
pub(crate) struct JobsArgs {
    /// Only jobs in this state: active, cancelling, succeeded, failed, cancelled
    #[arg(long, value_name = "STATE")]
    state: Option<String>,

    /// At most so many
    #[arg(long, value_name = "N", default_value_t = 100)]
    limit: u16,

    #[command(flatten)]
    pub(crate) server: ServerArgs,
}

pub(crate) async fn run(args: JobsArgs, global: &Global, output: &Output) -> Result<Exit, Fault> {
    let client = Client::new(global.run_dir.as_deref(), &args.server)?;
    let found = client.jobs(args.state.as_deref(), args.limit).await?;
    if output.json {
        output.document(&found)?;
        return Ok(Exit::Done);
    }
    let jobs: JobList = serde_json::from_value(found)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let rows: Vec<_> = jobs
        .jobs
        .iter()
        .map(|job| {
            let age = duration(now.saturating_sub(Duration::from_nanos(job.submitted_ns)));
            [job.id.clone(), job.state.clone(), age, job.summary()]
        })
        .collect();
    output.table(["JOB", "STATE", "AGE", ""], &rows)?;
    Ok(Exit::Done)
}
