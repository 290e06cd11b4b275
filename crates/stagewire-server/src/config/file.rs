//! The file as it is written. What the keys mean is documented at the public types; unknown ones are refused.

use std::collections::BTreeMap;

use serde::Deserialize;
use stagewire_core::{ByteCount, StageName, TransferMode};
use toml::Spanned;

use super::params::ParamType;
use super::values::Span;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct File {
    pub(super) pipeline: Pipeline,
    #[serde(default)]
    pub(super) class: Vec<Spanned<Class>>,
    #[serde(default)]
    pub(super) stage: Vec<Spanned<Stage>>,
    #[serde(default)]
    pub(super) edge: Vec<Spanned<Edge>>,
    #[serde(default)]
    pub(super) server: Server,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Pipeline {
    pub(super) name: StageName,
    pub(super) module: Spanned<String>,
    #[serde(default)]
    pub(super) params: BTreeMap<Spanned<String>, Param>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Param {
    pub(super) r#type: ParamType,
    pub(super) help: Option<String>,
    pub(super) default: Option<Spanned<toml::Value>>,
    pub(super) min: Option<Spanned<toml::Value>>,
    pub(super) max: Option<Spanned<toml::Value>>,
    #[serde(default)]
    pub(super) shape: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Class {
    pub(super) name: Spanned<StageName>,
    #[serde(default = "one")]
    pub(super) weight: Spanned<u32>,
    pub(super) queue_deadline: Option<Span>,
    #[serde(default)]
    pub(super) preempts: Vec<StageName>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Kind {
    WorkQueue,
    Admission,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Stage {
    pub(super) name: Spanned<StageName>,
    #[serde(default = "work_queue")]
    pub(super) kind: Kind,
    #[serde(default = "one")]
    pub(super) workers: Spanned<u32>,
    #[serde(default = "one")]
    pub(super) slots: Spanned<u32>,
    #[serde(default = "one")]
    pub(super) max_batch: Spanned<u32>,
    #[serde(default = "one")]
    pub(super) world: Spanned<u32>,
    #[serde(default = "sixteen")]
    pub(super) max_held: Spanned<u32>,
    pub(super) max_payload: Option<Spanned<ByteCount>>,
    #[serde(default = "five_minutes")]
    pub(super) no_progress: Span,
    #[serde(default = "one")]
    pub(super) max_attempts: Spanned<u32>,
    pub(super) backoff: Option<Spanned<Span>>,
    pub(super) max_backoff: Option<Spanned<Span>>,
    pub(super) threads: Option<Spanned<u32>>,
    pub(super) skip_if: Option<Spanned<String>>,
    pub(super) cache: Option<Spanned<Vec<String>>>,
    pub(super) cache_version: Option<Spanned<String>>,
    #[serde(default)]
    pub(super) checkpoint: bool,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Handover {
    Whole,
    Stream,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Edge {
    pub(super) from: Spanned<String>,
    pub(super) to: Spanned<String>,
    #[serde(default = "whole")]
    pub(super) handover: Handover,
    pub(super) chunks: Option<Spanned<u32>>,
    pub(super) chunk_dim: Option<Spanned<u32>>,
    #[serde(default = "p2p")]
    pub(super) mode: TransferMode,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Server {
    pub(super) listen: Option<Spanned<String>>,
    pub(super) token_file: Option<String>,
    #[serde(default)]
    pub(super) allowed_hosts: Vec<String>,
    pub(super) store_bytes: Option<ByteCount>,
    pub(super) arena_bytes: Option<ByteCount>,
    pub(super) data_dir: Option<String>,
    pub(super) max_body: Option<Spanned<ByteCount>>,
    pub(super) max_queued: Option<u64>,
    pub(super) max_input: Option<Spanned<ByteCount>>,
    pub(super) input_bytes: Option<Spanned<ByteCount>>,
    pub(super) input_idle: Option<Span>,
    pub(super) affinity_step: Option<Span>,
}

// A span of 0..0 marks a value that the file does not write.
fn one() -> Spanned<u32> {
    Spanned::new(0..0, 1)
}

fn sixteen() -> Spanned<u32> {
    Spanned::new(0..0, 16)
}

const fn five_minutes() -> Span {
    Span(std::time::Duration::from_mins(5))
}

const fn work_queue() -> Kind {
    Kind::WorkQueue
}

const fn whole() -> Handover {
    Handover::Whole
}

const fn p2p() -> TransferMode {
    TransferMode::P2p
}
