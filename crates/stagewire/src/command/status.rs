use clap::Args;
use serde_json::{Value, json};

use crate::args::{Global, ServerArgs};
use crate::client::{Client, Pipeline};
use crate::exit::{EXIT_HELP, Exit, Fault};
use crate::output::{Output, bytes};

const STATUS_EXAMPLES: &str = "\
Examples:
  stagewire status
  stagewire status --json | jq .stats";

/// Show whether the server is ready, its workers, and what it holds
///
/// The exit status is 0 where every stage has a worker and 1 where one lacks it, so that scripts can wait for it.
#[derive(Debug, Args)]
#[command(after_help = STATUS_EXAMPLES, after_long_help = format!("{STATUS_EXAMPLES}\n\n{EXIT_HELP}"))]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
}

/// List the stages of the pipeline and the parameters that a job may give
#[derive(Debug, Args)]
#[command(after_long_help = EXIT_HELP)]
pub(crate) struct StagesArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
}

pub(crate) async fn run(args: StatusArgs, global: &Global, output: &Output) -> Result<Exit, Fault> {
    let client = Client::new(global.run_dir.as_deref(), &args.server)?;
    let document: Value = client.get("/v1/pipeline").await?;
    let stats: Value = client.get("/v1/stats").await?;
    let pipeline: Pipeline = serde_json::from_value(document.clone())?;
    let missing: Vec<&str> = pipeline
        .stages
        .iter()
        .map(|stage| stage.name.as_str())
        .filter(|stage| !pipeline.ready_workers().any(|worker| worker.stage == *stage))
        .collect();
    let exit = if missing.is_empty() { Exit::Done } else { Exit::Failed };
    if output.json {
        output.document(&json!({"ready": missing.is_empty(), "pipeline": document, "stats": stats}))?;
        return Ok(exit);
    }
    let state = if missing.is_empty() {
        "ready".to_owned()
    } else {
        format!("not ready: no worker for {}", missing.join(", "))
    };
    output.data(format_args!("{} at {}: {state}", pipeline.name, client.url()?))?;
    let rows: Vec<_> = pipeline
        .workers
        .iter()
        .map(|worker| {
            let slots = format!("{}/{}", worker.held, worker.slots);
            [
                worker.name.clone(),
                worker.stage.clone(),
                worker.state.clone(),
                worker.pid.to_string(),
                slots,
            ]
        })
        .collect();
    if !rows.is_empty() {
        output.table(["WORKER", "STAGE", "STATE", "PID", "SLOTS"], &rows)?;
    }
    for (name, value) in stats.as_object().into_iter().flatten() {
        let shown = match value.as_u64() {
            Some(count) if name.ends_with("_bytes") => bytes(count),
            _ => value.to_string(),
        };
        output.data(format_args!("{name:<24} {shown}"))?;
    }
    Ok(exit)
}

pub(crate) async fn stages(args: StagesArgs, global: &Global, output: &Output) -> Result<Exit, Fault> {
    let client = Client::new(global.run_dir.as_deref(), &args.server)?;
    let document: Value = client.get("/v1/pipeline").await?;
    if output.json {
        output.document(&document)?;
        return Ok(Exit::Done);
    }
    let pipeline: Pipeline = serde_json::from_value(document)?;
    let rows: Vec<_> = pipeline
        .stages
        .iter()
        .map(|stage| {
            let workers = pipeline
                .ready_workers()
                .filter(|worker| worker.stage == stage.name)
                .count();
            [
                stage.name.clone(),
                stage.kind.clone(),
                workers.to_string(),
                stage.queued.to_string(),
                stage.running.to_string(),
            ]
        })
        .collect();
    output.table(["STAGE", "KIND", "WORKERS", "QUEUED", "RUNNING"], &rows)?;
    output.data("")?;
    let rows: Vec<_> = pipeline
        .params
        .iter()
        .map(|(name, spec)| {
            let default = spec
                .default
                .as_ref()
                .map_or_else(|| "must be given".to_owned(), Value::to_string);
            [
                name.clone(),
                spec.kind.clone(),
                default,
                spec.help.clone().unwrap_or_default(),
            ]
        })
        .collect();
    output.table(["PARAMETER", "TYPE", "DEFAULT", ""], &rows)?;
    Ok(Exit::Done)
}
