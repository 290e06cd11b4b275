use clap::Args;

use crate::args::{Global, ServerArgs};
use crate::client::{Client, Job};
use crate::exit::{EXIT_HELP, Exit, Fault};
use crate::output::Output;

const EXAMPLES: &str = "\
Examples:
  stagewire job 0192f0c1-7d2e-7a53-b6c1-0d9a3f6f5a10
  stagewire job $job --json | jq .stages";

/// Show one job: its stages, and why it waits or failed
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES, after_long_help = format!("{EXAMPLES}\n\n{EXIT_HELP}"))]
pub(crate) struct JobArgs {
    /// Id of the job, as `submit` and `jobs` print it
    #[arg(value_name = "JOB")]
    id: String,

    #[command(flatten)]
    pub(crate) server: ServerArgs,
}

/// Cancel one job; what runs stops at its next step
#[derive(Debug, Args)]
#[command(after_long_help = EXIT_HELP)]
pub(crate) struct CancelArgs {
    /// Id of the job
    #[arg(value_name = "JOB")]
    id: String,

    #[command(flatten)]
    pub(crate) server: ServerArgs,
}

pub(crate) async fn show(args: JobArgs, global: &Global, output: &Output) -> Result<Exit, Fault> {
    let client = Client::new(global.run_dir.as_deref(), &args.server)?;
    print(&client.job(&args.id).await?, output)
}

pub(crate) async fn cancel(args: CancelArgs, global: &Global, output: &Output) -> Result<Exit, Fault> {
    let client = Client::new(global.run_dir.as_deref(), &args.server)?;
    print(&client.cancel(&args.id).await?, output)
}

fn print(job: &Job, output: &Output) -> Result<Exit, Fault> {
    if output.json {
        output.document(job)?;
        return Ok(Exit::Done);
    }
    output.data(format_args!("{}  {}", job.id, job.state))?;
    let rows: Vec<_> = job
        .stages
        .iter()
        .map(|stage| {
            let note = match stage.note() {
                note if note.is_empty() => job.why(&stage.name).unwrap_or_default().to_owned(),
                note => note,
            };
            [stage.name.clone(), stage.state.clone(), note]
        })
        .collect();
    if !rows.is_empty() {
        output.table(["STAGE", "STATE", ""], &rows)?;
    }
    if let Some(failure) = &job.failure {
        output.data(failure)?;
    }
    Ok(Exit::Done)
}
