use clap::Args;

use crate::args::{Global, ServerArgs};
use crate::client::{Client, JobList};
use crate::exit::{EXIT_HELP, Exit, Fault};
use crate::output::Output;

const EXAMPLES: &str = "\
Examples:
  stagewire jobs
  stagewire jobs --json | jq -r '.jobs[] | select(.state == \"failed\") | .id'";

/// List the jobs, newest first
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES, after_long_help = format!("{EXAMPLES}\n\n{EXIT_HELP}"))]
pub(crate) struct JobsArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
}

pub(crate) async fn run(args: JobsArgs, global: &Global, output: &Output) -> Result<Exit, Fault> {
    let client = Client::new(global.run_dir.as_deref(), &args.server)?;
    if output.json {
        output.document(&client.get::<serde_json::Value>("/v1/jobs").await?)?;
        return Ok(Exit::Done);
    }
    let jobs: JobList = client.get("/v1/jobs").await?;
    let rows: Vec<_> = jobs
        .jobs
        .iter()
        .map(|job| [job.id.clone(), job.state.clone(), job.summary()])
        .collect();
    output.table(["JOB", "STATE", ""], &rows)?;
    Ok(Exit::Done)
}
