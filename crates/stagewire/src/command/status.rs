use clap::Args;
use serde_json::{Value, json};

use crate::args::{Global, ServerArgs};
use crate::client::{Client, Pipeline, Stats};
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
    let (about, numbers): (Value, Value) = (client.get("/v1/pipeline").await?, client.get("/v1/stats").await?);
    let pipeline: Pipeline = serde_json::from_value(about.clone())?;
    let exit = if pipeline.ready { Exit::Done } else { Exit::Failed };
    if output.json {
        output.document(&json!({"ready": pipeline.ready, "pipeline": about, "stats": numbers}))?;
        return Ok(exit);
    }
    let stats: Stats = serde_json::from_value(numbers)?;
    output.data(format_args!(
        "{} at {}: {}",
        pipeline.name,
        client.url()?,
        readiness(&pipeline)
    ))?;
    let rows: Vec<_> = pipeline
        .workers
        .iter()
        .map(|worker| {
            let taken = worker.slots.advertised.saturating_sub(worker.slots.free);
            let slots = format!("{taken} of {}", worker.slots.advertised);
            let pid = worker.pid.map_or_else(|| "elsewhere".to_owned(), |pid| pid.to_string());
            [
                worker.name.clone().unwrap_or_default(),
                worker.stage.clone(),
                worker.state.clone(),
                pid,
                slots,
            ]
        })
        .collect();
    if !rows.is_empty() {
        output.table(["WORKER", "STAGE", "STATE", "PID", "SLOTS TAKEN"], &rows)?;
    }
    let jobs = stats.jobs.iter().filter(|(_, count)| **count > 0);
    let jobs: Vec<String> = jobs.map(|(state, count)| format!("{count} {state}")).collect();
    output.data(format_args!(
        "jobs      {}",
        if jobs.is_empty() {
            "none".to_owned()
        } else {
            jobs.join(", ")
        }
    ))?;
    let (live, held) = (stats.live_payloads, bytes(stats.live_payload_bytes));
    output.data(format_args!("payloads  {live} live, {held}"))?;
    let (used, limit) = (bytes(stats.store.bytes), bytes(stats.store.limit_bytes));
    output.data(format_args!("store     {used} of {limit}"))?;
    Ok(exit)
}

fn readiness(pipeline: &Pipeline) -> String {
    if pipeline.ready {
        return "ready".to_owned();
    }
    let missing = pipeline.stages.iter().filter(|stage| !stage.ready);
    let missing: Vec<&str> = missing.map(|stage| stage.name.as_str()).collect();
    format!("not ready, no worker for {}", missing.join(", "))
}

pub(crate) async fn stages(args: StagesArgs, global: &Global, output: &Output) -> Result<Exit, Fault> {
    let client = Client::new(global.run_dir.as_deref(), &args.server)?;
    let about: Value = client.get("/v1/pipeline").await?;
    if output.json {
        output.document(&about)?;
        return Ok(Exit::Done);
    }
    let pipeline: Pipeline = serde_json::from_value(about)?;
    let stats: Stats = client.get("/v1/stats").await?;
    let rows: Vec<_> = pipeline
        .stages
        .iter()
        .map(|stage| {
            let workers = pipeline
                .ready_workers()
                .filter(|worker| worker.stage == stage.name)
                .count();
            let numbers = stats.stages.iter().find(|numbers| numbers.name == stage.name);
            let jobs = |phase: &str| {
                numbers
                    .and_then(|numbers| numbers.jobs.get(phase))
                    .copied()
                    .unwrap_or(0)
                    .to_string()
            };
            [
                stage.name.clone(),
                stage.kind.clone(),
                workers.to_string(),
                jobs("queued"),
                jobs("running"),
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
