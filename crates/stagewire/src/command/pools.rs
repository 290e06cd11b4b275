use clap::Args;
use serde_json::Value;

use crate::args::{Global, ServerArgs};
use crate::client::{Client, Pools};
use crate::exit::{EXIT_HELP, Exit, Fault};
use crate::output::{Output, bytes};

const EXAMPLES: &str = "\
Examples:
  stagewire pools
  stagewire pools --json | jq '.stages[] | {name, waiting, payload_bytes}'";

/// Show what each stage and each of its workers does and holds
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES, after_long_help = format!("{EXAMPLES}\n\n{EXIT_HELP}"))]
pub(crate) struct PoolsArgs {
    #[command(flatten)]
    pub(crate) server: ServerArgs,
}

pub(crate) async fn run(args: PoolsArgs, global: &Global, output: &Output) -> Result<Exit, Fault> {
    let client = Client::new(global.run_dir.as_deref(), &args.server)?;
    let found: Value = client.get("/v1/pools").await?;
    if output.json {
        output.document(&found)?;
        return Ok(Exit::Done);
    }
    let pools: Pools = serde_json::from_value(found)?;
    let mut rows = Vec::new();
    for stage in &pools.stages {
        rows.push([
            stage.name.clone(),
            String::new(),
            stage.waiting.to_string(),
            format!("{} of {}", stage.slots.running, stage.slots.advertised),
            format!("{} of {}", stage.held, stage.max_held),
            bytes(stage.payload_bytes),
        ]);
        for worker in &stage.workers {
            rows.push([
                format!("  {}", worker.label()),
                worker.standing(),
                String::new(),
                format!("{} of {}", worker.slots.running, worker.slots.advertised),
                worker.payloads.to_string(),
                bytes(worker.payload_bytes),
            ]);
        }
    }
    output.table(["POOL", "STATE", "WAITING", "RUNNING", "HELD", "BYTES"], &rows)?;
    let (held, reserved) = (bytes(pools.bytes.held), bytes(pools.bytes.reserved));
    let all = bytes(pools.bytes.advertised);
    output.data(format_args!("outputs  {held} held, {reserved} reserved, of {all}"))?;
    if pools.paused {
        output.data("paused: jobs that have not begun wait until `stagewire resume`")?;
    }
    Ok(Exit::Done)
}
