use clap::Args;
use serde_json::Value;

use crate::args::{Global, ServerArgs};
use crate::client::Client;
use crate::exit::{EXIT_HELP, Exit, Fault};
use crate::output::Output;

/// Let no more jobs begin; those that have begun go on
///
/// Jobs are still accepted, and wait. It lasts until `stagewire resume`, also across restarts of the server.
#[derive(Debug, Args)]
#[command(after_long_help = EXIT_HELP)]
pub(crate) struct PauseArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
}

/// Let jobs begin again after `stagewire pause`
#[derive(Debug, Args)]
#[command(after_long_help = EXIT_HELP)]
pub(crate) struct ResumeArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
}

pub(crate) async fn pause(args: PauseArgs, global: &Global, output: &Output) -> Result<Exit, Fault> {
    tell(&args.server, "pause", global, output).await
}

pub(crate) async fn resume(args: ResumeArgs, global: &Global, output: &Output) -> Result<Exit, Fault> {
    tell(&args.server, "resume", global, output).await
}

async fn tell(server: &ServerArgs, what: &str, global: &Global, output: &Output) -> Result<Exit, Fault> {
    let client = Client::new(global.run_dir.as_deref(), server)?;
    let answer: Value = client.post(&format!("/v1/pipeline/{what}"), None).await?;
    if output.json {
        output.document(&answer)?;
    } else {
        output.data(if answer["paused"] == true {
            "paused"
        } else {
            "not paused"
        })?;
    }
    Ok(Exit::Done)
}
