mod file;

use std::path::PathBuf;

use clap::{Args, Subcommand};
use serde::Serialize;
use stagewire_core::Classify;
use stagewire_kv::{Engine, Pair, Plan, PlanRequest, handshake};

use crate::exit::{EXIT_HELP, Exit, Fault};
use crate::output::{Output, bytes};
use file::{File, Room};

const EXAMPLES: &str = "\
Examples:
  stagewire kv check geometry.toml
  stagewire kv plan geometry.toml --seq-len 8192
  stagewire kv plan geometry.toml --json | jq '[.routes[].nbytes] | add'

geometry.toml:
  [[component]]
  name = \"full\"
  layers = 18
  kv-heads = 8
  k-dim = 64
  v-dim = 64
  dtype = \"bfloat16\"

  [prefill]
  tp-size = 1
  page-size = 64

  [decode]
  tp-size = 4
  page-size = 64";

/// See whether a prefill and a decode engine can hand over a KV cache, and what would move
///
/// Reads the geometry of both engines from a TOML file, needs no server and moves nothing. What is refused is refused as it
/// would be at the first handshake, with both sides' values.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES, after_long_help = format!("{EXAMPLES}\n\n{EXIT_HELP}"))]
pub(crate) struct KvArgs {
    #[command(subcommand)]
    command: KvCommand,
}

#[derive(Debug, Subcommand)]
enum KvCommand {
    /// Shake hands: which rank sends which heads to which, or why not
    Check(CheckArgs),
    /// Plan one room: records, runs of bytes and bytes of every pair of ranks
    Plan(PlanArgs),
}

#[derive(Debug, Args)]
struct CheckArgs {
    /// Geometry of both engines
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Print one JSON document to stdout instead of text
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct PlanArgs {
    #[command(flatten)]
    check: CheckArgs,

    /// Tokens of the prompt, instead of those of the file; page tables that the file lacks are one run from page 1, without pages before a window
    #[arg(long, value_name = "TOKENS")]
    seq_len: Option<u64>,

    /// Move the needed tokens only, not the rest of their pages
    #[arg(long)]
    exact_window: bool,
}

impl KvArgs {
    pub(crate) fn json(&self) -> bool {
        match &self.command {
            KvCommand::Check(args) => args.json,
            KvCommand::Plan(args) => args.check.json,
        }
    }
}

pub(crate) fn run(args: &KvArgs, output: &Output) -> Result<Exit, Fault> {
    match &args.command {
        KvCommand::Check(args) => check(args, output),
        KvCommand::Plan(args) => plan(args, output),
    }
}

/// The heads that one rank sends to another.
#[derive(Debug, Serialize)]
struct Slice {
    src_rank: u32,
    dst_rank: u32,
    component: String,
    src_head_start: u32,
    dst_head_start: u32,
    num_heads: u32,
}

/// What one component of one plan moves.
#[derive(Debug, Serialize)]
struct Route {
    src_rank: u32,
    dst_rank: u32,
    component: String,
    /// First token of the first page, first needed token, end.
    tokens: [u64; 3],
    packing: &'static str,
    records: usize,
    descriptors: usize,
    nbytes: u64,
}

fn check(args: &CheckArgs, output: &Output) -> Result<Exit, Fault> {
    let pair = pair(&File::read(&args.file)?)?;
    let slices = slices(&pair);
    if output.json {
        output.document(&serde_json::json!({ "slices": slices }))?;
        return Ok(Exit::Done);
    }
    let rows: Vec<_> = slices.iter().map(Slice::cells).collect();
    output.table(["SRC", "DST", "COMPONENT", "SRC HEADS", "DST HEADS"], &rows)?;
    Ok(Exit::Done)
}

fn plan(args: &PlanArgs, output: &Output) -> Result<Exit, Fault> {
    let file = File::read(&args.check.file)?;
    let pair = pair(&file)?;
    let mut room = file.room.unwrap_or_default();
    room.seq_len = args.seq_len.or(room.seq_len);
    room.exact_window |= args.exact_window;
    let room = room.complete(pair.decode())?;
    let mut routes = Vec::new();
    for route in pair.routes() {
        let planned = pair.plan(&request(&room, route)).map_err(|error| fault(&error))?;
        routes.extend(sections(&planned));
    }
    if output.json {
        output.document(&serde_json::json!({ "routes": routes }))?;
        return Ok(Exit::Done);
    }
    let rows: Vec<_> = routes.iter().map(Route::cells).collect();
    output.table(
        ["SRC", "DST", "COMPONENT", "TOKENS", "PACK", "RECORDS", "RUNS", "BYTES"],
        &rows,
    )?;
    let sum = |count: fn(&Route) -> u64| routes.iter().map(count).sum::<u64>();
    output.topic(
        "total",
        format_args!(
            "{} in {} records, {} runs of bytes without them",
            bytes(sum(|route| route.nbytes)),
            sum(|route| route.records as u64),
            sum(|route| route.descriptors as u64)
        ),
    );
    Ok(Exit::Done)
}

fn pair(file: &File) -> Result<Pair, Fault> {
    let [prefill, decode] = file.geometries().map(Engine::new);
    let prefill = prefill.map_err(|error| fault(&error))?;
    let decode = decode.map_err(|error| fault(&error))?;
    handshake(&prefill, &decode).map_err(|error| fault(&error))
}

fn slices(pair: &Pair) -> Vec<Slice> {
    let mut slices = Vec::new();
    for (src_rank, dst_rank) in pair.routes() {
        for component in &pair.decode().geometry().components {
            slices.extend(pair.slice(&component.name, src_rank, dst_rank).map(|slice| Slice {
                src_rank,
                dst_rank,
                component: component.name.clone(),
                src_head_start: slice.src_head_start,
                dst_head_start: slice.dst_head_start,
                num_heads: slice.num_heads,
            }));
        }
    }
    slices
}

fn request(room: &Room, (src_rank, dst_rank): (u32, u32)) -> PlanRequest<'_> {
    let prefix = room.prefix.iter().map(|(name, &tokens)| (name.as_str(), tokens));
    PlanRequest {
        prefix: prefix.collect(),
        exact_window: room.exact_window,
        ..PlanRequest::new(src_rank, dst_rank, room.seq_len.unwrap_or(0)).tables(&room.src_pages, &room.dst_pages)
    }
}

fn sections(plan: &Plan) -> Vec<Route> {
    let sections = plan.sections().iter().filter(|section| section.nbytes() > 0);
    let route = sections.map(|section| {
        let range = section.token_range();
        Route {
            src_rank: plan.src_rank(),
            dst_rank: plan.dst_rank(),
            component: section.name().to_owned(),
            tokens: [range.page_start, range.start, range.end],
            packing: section.packing().name(),
            records: section.record_count(),
            descriptors: section.descriptor_count(),
            nbytes: section.nbytes(),
        }
    });
    route.collect()
}

impl Slice {
    fn cells(&self) -> [String; 5] {
        let heads = |start: u32| format!("{start} to {}", start + self.num_heads - 1);
        [
            self.src_rank.to_string(),
            self.dst_rank.to_string(),
            self.component.clone(),
            heads(self.src_head_start),
            heads(self.dst_head_start),
        ]
    }
}

impl Route {
    fn cells(&self) -> [String; 8] {
        let [_, start, end] = self.tokens;
        [
            self.src_rank.to_string(),
            self.dst_rank.to_string(),
            self.component.clone(),
            format!("{start} to {}", end.saturating_sub(1)),
            self.packing.to_owned(),
            self.records.to_string(),
            self.descriptors.to_string(),
            bytes(self.nbytes),
        ]
    }
}

/// Class and reason at the end, as of everything that is refused.
fn fault(error: &impl Classify) -> Fault {
    let (class, reason) = (error.class(), error.reason());
    Fault::new(Exit::of(class), format_args!("{error} [{class}: {reason}]"))
}
