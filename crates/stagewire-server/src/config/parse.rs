//! From text to a checked [`Config`]; every error knows its line.

mod server;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use stagewire_core::{ByteCount, Chunking, StageName, TransferMode};
use stagewire_sched::{Backoff, ClassSpec, EdgeSpec, Flow, StageKind, StageSpec, Topology, TopologyError};
use toml::Spanned;

use super::caches::{Cached, Caches};
use super::error::UnknownName;
use super::params::{ParamSpec, ParamType, Params, less};
use super::values::Span;
use super::{Config, ConfigError, Pipeline, Skips, Stage, file};
use crate::nearest::{did_you_mean, nearest};

/// The text under its name, to turn places in it into errors.
struct Source<'a> {
    text: &'a str,
    path: &'a Path,
}

impl Source<'_> {
    fn line(&self, span: &Range<usize>) -> usize {
        let before = self.text.get(..span.start).unwrap_or(self.text);
        before.matches('\n').count() + 1
    }

    /// The header of the table that a place is in, as the file writes it.
    fn table(&self, span: &Range<usize>) -> String {
        let end = self.text[span.start..]
            .find('\n')
            .map_or(self.text.len(), |n| span.start + n);
        let mut headers = self.text[..end].lines().rev().map(str::trim_start);
        let header = headers.find(|line| line.starts_with('['));
        let header = header.and_then(|line| line.rfind(']').map(|end| &line[..=end]));
        match header {
            // The place is a header itself: what it names stands at the top level.
            Some(header) if self.text[..span.start].ends_with('[') && !header.contains('.') => "this file".to_owned(),
            Some(header) => header.to_owned(),
            None => "this file".to_owned(),
        }
    }

    /// The key that stands before the value at a place, quoted, with a space behind it.
    fn key(&self, span: &Range<usize>) -> String {
        let start = self.text[..span.start].rfind('\n').map_or(0, |newline| newline + 1);
        let key = self.text[start..span.start].split_once('=').map(|(key, _)| key.trim());
        key.filter(|key| !key.is_empty())
            .map_or_else(String::new, |key| format!("{key:?} "))
    }

    fn error(&self, span: &Range<usize>, message: impl Into<String>) -> ConfigError {
        ConfigError::Value {
            path: self.path.to_owned(),
            line: self.line(span),
            message: message.into(),
        }
    }

    fn topology(&self, span: &Range<usize>, error: TopologyError) -> ConfigError {
        ConfigError::Topology {
            path: self.path.to_owned(),
            line: self.line(span),
            error,
        }
    }

    /// Gives an error of the TOML reader the form of ours.
    fn reader_error(&self, error: &toml::de::Error) -> ConfigError {
        let span = error.span().unwrap_or(0..0);
        let message = error.message();
        for (start, what) in [("unknown field `", "key"), ("unknown variant `", "value")] {
            if let Some(rest) = message.strip_prefix(start) {
                let mut quoted = rest.split('`').step_by(2).map(str::to_owned);
                let name = quoted.next().unwrap_or_default();
                let valid: Vec<String> = quoted.collect();
                return ConfigError::Unknown {
                    path: self.path.to_owned(),
                    line: self.line(&span),
                    unknown: Box::new(UnknownName {
                        what,
                        table: self.table(&span),
                        nearest: nearest(&name, valid.iter().map(String::as_str)).map(str::to_owned),
                        name,
                        valid,
                    }),
                };
            }
        }
        let message = message
            .trim()
            .replace('`', "\"")
            .replace("missing field", "missing key");
        if self.text.parse::<toml::Table>().is_err() {
            return ConfigError::Syntax {
                path: self.path.to_owned(),
                line: self.line(&span),
                message: message.replace('\n', "; "),
            };
        }
        let message = message
            .replace("expected u32", "expected a whole number from 0 to 4294967295")
            .replace("expected u64", "expected a whole number, not negative");
        self.error(&span, format!("{}in {}: {message}", self.key(&span), self.table(&span)))
    }

    /// A path of the file, relative to the file's directory.
    fn resolve(&self, path: &str) -> PathBuf {
        self.path.parent().unwrap_or(Path::new("")).join(path)
    }
}

pub(super) fn parse(text: &str, path: &Path) -> Result<Config, ConfigError> {
    let source = Source { text, path };
    let file: file::File = toml::from_str(text).map_err(|error| source.reader_error(&error))?;
    let params = params(&source, file.pipeline.params)?;
    let skips = skips(&source, &file.stage, &params)?;
    let caches = caches(&source, &file.stage, &file.edge, &params)?;
    let (stages, spans) = stages(&source, file.stage)?;
    let edges = edges(&source, file.edge, &stages)?;
    let topology = classes(&source, topology(&source, (&stages, &spans), edges)?, file.class)?;
    let server = server::read(&source, file.server)?;
    payloads_fit(&source, &topology, (&stages, &spans), server.store_bytes)?;
    Ok(Config {
        path: path.to_owned(),
        pipeline: Pipeline {
            name: file.pipeline.name,
            module: source.resolve(file.pipeline.module.get_ref()),
            params,
            skips,
            caches,
        },
        stages,
        topology,
        server,
    })
}

/// A stage that could never run, as its output and those of the stages after it have no room together, is refused now.
fn payloads_fit(
    source: &Source<'_>,
    topology: &Topology,
    (stages, spans): (&[Stage], &[Range<usize>]),
    all: ByteCount,
) -> Result<(), ConfigError> {
    for (stage, span) in stages.iter().zip(spans) {
        let needed = topology.max_payloads(&stage.name);
        if needed > all {
            return Err(source.error(
                span,
                format!(
                    "\"max-payload\" of stage {} and of those after it are {needed} together, and \"store-bytes\" in \
                     [server] is {all}: no job could ever run; lower them, or raise \"store-bytes\"",
                    stage.name
                ),
            ));
        }
    }
    Ok(())
}

/// The error for a module that is not there, at the line that names it.
pub(super) fn module_missing(text: &str, path: &Path, module: &Path) -> ConfigError {
    let source = Source { text, path };
    let span = toml::from_str::<file::File>(text).map_or(0..0, |file| file.pipeline.module.span());
    source.error(
        &span,
        format!(
            "the pipeline module {} is not a file; \"module\" is relative to this file",
            module.display()
        ),
    )
}

fn at_least_one(source: &Source<'_>, key: &str, value: &Spanned<u32>) -> Result<u32, ConfigError> {
    match *value.get_ref() {
        0 => Err(source.error(&value.span(), format!("{key:?} must be at least 1"))),
        n => Ok(n),
    }
}

/// Values and where they stand.
type Spanneds<T> = (Vec<T>, Vec<Range<usize>>);

fn stages(source: &Source<'_>, raw: Vec<Spanned<file::Stage>>) -> Result<Spanneds<Stage>, ConfigError> {
    if raw.is_empty() {
        return Err(source.topology(&(0..0), TopologyError::NoStage));
    }
    let mut stages = Vec::with_capacity(raw.len());
    let mut spans = Vec::with_capacity(raw.len());
    for stage in raw {
        let stage = stage.into_inner();
        spans.push(stage.name.span());
        stages.push(Stage {
            name: stage.name.get_ref().clone(),
            kind: match stage.kind {
                file::Kind::WorkQueue => StageKind::WorkQueue,
                file::Kind::Admission => StageKind::Admission,
            },
            workers: *stage.workers.get_ref(),
            slots: at_least_one(source, "slots", &stage.slots)?,
            max_batch: max_batch(source, &stage)?,
            world: world(source, &stage)?,
            max_held: at_least_one(source, "max-held", &stage.max_held)?,
            max_payload: stage.max_payload.as_ref().map(|most| *most.get_ref()),
            no_progress: stage.no_progress.0,
            max_attempts: at_least_one(source, "max-attempts", &stage.max_attempts)?,
            backoff: backoff(source, stage.backoff, stage.max_backoff)?,
            checkpoint: stage.checkpoint,
            threads: stage
                .threads
                .map(|threads| at_least_one(source, "threads", &threads))
                .transpose()?,
        });
    }
    Ok((stages, spans))
}

/// A bound that only one of the keys gives is stretched to fit the other.
fn backoff(
    source: &Source<'_>,
    first: Option<Spanned<Span>>,
    longest: Option<Spanned<Span>>,
) -> Result<Backoff, ConfigError> {
    let default = Backoff::default();
    match (first, longest) {
        (Some(first), Some(longest)) if longest.get_ref().0 < first.get_ref().0 => Err(source.error(
            &longest.span(),
            format!(
                "\"max-backoff\" is {:?}, below \"backoff\", which is {:?}",
                longest.get_ref().0,
                first.get_ref().0
            ),
        )),
        (first, longest) => {
            let (first, longest) = (
                first.map(|first| first.get_ref().0),
                longest.map(|longest| longest.get_ref().0),
            );
            Ok(Backoff {
                first: first.unwrap_or(default.first.min(longest.unwrap_or(default.first))),
                longest: longest.unwrap_or(default.longest.max(first.unwrap_or_default())),
            })
        }
    }
}

fn max_batch(source: &Source<'_>, stage: &file::Stage) -> Result<u32, ConfigError> {
    let max_batch = at_least_one(source, "max-batch", &stage.max_batch)?;
    if max_batch > 1 && (matches!(stage.kind, file::Kind::Admission) || *stage.slots.get_ref() > 1) {
        let message =
            "\"max-batch\" is for stages of kind work-queue with one slot; start more workers instead of slots";
        return Err(source.error(&stage.max_batch.span(), message));
    }
    Ok(max_batch)
}

fn world(source: &Source<'_>, stage: &file::Stage) -> Result<u32, ConfigError> {
    let world = at_least_one(source, "world", &stage.world)?;
    if world > 1 && (matches!(stage.kind, file::Kind::WorkQueue) || *stage.slots.get_ref() > 1) {
        let message = "\"world\" is for stages of kind admission with one slot: its processes run one attempt together";
        return Err(source.error(&stage.world.span(), message));
    }
    Ok(world)
}

/// What makes jobs skip a stage: a parameter that can be given, or be true.
fn skips(source: &Source<'_>, stages: &[Spanned<file::Stage>], params: &Params) -> Result<Skips, ConfigError> {
    let mut skips = Vec::new();
    for stage in stages {
        let stage = stage.get_ref();
        let Some(param) = &stage.skip_if else { continue };
        let name = param.get_ref();
        let Some(spec) = params.0.get(name) else {
            return Err(source.error(&param.span(), no_param("skip-if", name, params)));
        };
        if matches!(spec.param_type, ParamType::Integer | ParamType::Number) {
            let message = format!(
                "\"skip-if\" names parameter {name:?}, which is {}; name a boolean, which skips the stage where it is \
                 true, or an input or a string, which does where it is not empty",
                spec.param_type
            );
            return Err(source.error(&param.span(), message));
        }
        skips.push((stage.name.get_ref().clone(), name.clone()));
    }
    Ok(Skips(skips))
}

/// A key of a stage names a parameter that the pipeline does not have.
fn no_param(key: &str, name: &str, params: &Params) -> String {
    let mut hint = did_you_mean(name, params.0.keys().map(String::as_str));
    if hint.is_empty() {
        "; add [pipeline.params.…] for it".clone_into(&mut hint);
    }
    format!("{key:?} names no parameter of the pipeline: {name:?}{hint}")
}

/// What the outputs depend on that are made once for all jobs, and lie in the store for that.
fn caches(
    source: &Source<'_>,
    stages: &[Spanned<file::Stage>],
    edges: &[Spanned<file::Edge>],
    params: &Params,
) -> Result<Caches, ConfigError> {
    let mut caches = Vec::new();
    for stage in stages {
        let stage = stage.get_ref();
        let Some(cache) = &stage.cache else {
            if let Some(version) = &stage.cache_version {
                let message = "\"cache-version\" stands without \"cache\", which names what is cached";
                return Err(source.error(&version.span(), message));
            }
            continue;
        };
        let name = stage.name.get_ref();
        if cache.get_ref().is_empty() {
            let message = "\"cache\" is empty; name the parameters that what the stage makes depends on";
            return Err(source.error(&cache.span(), message));
        }
        if let Some(other) = cache.get_ref().iter().find(|param| !params.0.contains_key(*param)) {
            return Err(source.error(&cache.span(), no_param("cache", other, params)));
        }
        let own = || {
            edges
                .iter()
                .map(Spanned::get_ref)
                .filter(|edge| edge.from.get_ref() == name.as_str())
        };
        if own().next().is_none() {
            let message = format!("\"cache\" stands at {name}, a last stage; it is for what other stages read");
            return Err(source.error(&cache.span(), message));
        }
        if let Some(edge) = own().find(|edge| edge.mode != TransferMode::Store) {
            let message = format!(
                "\"cache\" stands at {name}, and the edge to {} is of mode p2p; only the store keeps what several jobs \
                 read: write mode = \"store\" there",
                edge.to.get_ref()
            );
            return Err(source.error(&cache.span(), message));
        }
        let mut depends = cache.get_ref().clone();
        depends.sort_unstable();
        depends.dedup();
        caches.push(Cached {
            stage: name.clone(),
            version: stage
                .cache_version
                .as_ref()
                .map_or_else(String::new, |version| version.get_ref().clone()),
            params: depends,
        });
    }
    Ok(Caches(caches))
}

fn edges(
    source: &Source<'_>,
    raw: Vec<Spanned<file::Edge>>,
    stages: &[Stage],
) -> Result<Spanneds<EdgeSpec>, ConfigError> {
    let known = |key: &str, name: &Spanned<String>| {
        let found = stages.iter().find(|stage| stage.name.as_str() == name.get_ref());
        found.map(|stage| stage.name.clone()).ok_or_else(|| {
            let hint = did_you_mean(name.get_ref(), stages.iter().map(|stage| stage.name.as_str()));
            source.error(
                &name.span(),
                format!("{key:?} names no [[stage]]: {:?}{hint}", name.get_ref()),
            )
        })
    };
    let mut edges = Vec::with_capacity(raw.len());
    let mut spans = Vec::with_capacity(raw.len());
    for edge in raw {
        let span = edge.span();
        let edge = edge.into_inner();
        edges.push(EdgeSpec {
            from: known("from", &edge.from)?,
            to: known("to", &edge.to)?,
            flow: flow(source, &edge, &span)?,
            mode: edge.mode,
        });
        spans.push(span);
    }
    Ok((edges, spans))
}

/// The graph of the stages; what the scheduler finds wrong with it is said of the line that is to blame.
fn topology(
    source: &Source<'_>,
    (stages, stage_spans): (&[Stage], &[Range<usize>]),
    (edges, edge_spans): Spanneds<EdgeSpec>,
) -> Result<Topology, ConfigError> {
    let specs = stages.iter().map(|stage| StageSpec {
        name: stage.name.clone(),
        kind: stage.kind,
        max_held: stage.max_held,
        max_payload: stage.max_payload,
        no_progress: stage.no_progress,
        max_attempts: stage.max_attempts,
        backoff: stage.backoff,
        checkpoint: stage.checkpoint,
    });
    let last_stage = |name: &StageName| {
        stages
            .iter()
            .rposition(|stage| stage.name == *name)
            .map(|n| &stage_spans[n])
    };
    let last_edge = |wanted: &dyn Fn(&EdgeSpec) -> bool| edges.iter().rposition(wanted).map(|n| &edge_spans[n]);
    Topology::new(specs.collect(), edges.clone()).map_err(|error| {
        let span = match &error {
            TopologyError::DuplicateStage { stage }
            | TopologyError::ZeroBound { stage, .. }
            | TopologyError::Checkpoint { stage } => last_stage(stage),
            TopologyError::Disconnected { apart, .. } => apart.first().and_then(last_stage),
            TopologyError::DuplicateEdge { from, to } => last_edge(&|edge| edge.from == *from && edge.to == *to),
            TopologyError::Cycle { stages } => {
                last_edge(&|edge| stages.windows(2).any(|pair| edge.from == pair[0] && edge.to == pair[1]))
            }
            TopologyError::MixedModes { stage } | TopologyError::MixedChunks { stage, .. } => {
                last_edge(&|edge| edge.from == *stage)
            }
            _ => None,
        };
        source.topology(span.unwrap_or(&(0..0)), error)
    })
}

/// The pipeline with the classes that the file declares, if it declares any.
fn classes(source: &Source<'_>, topology: Topology, raw: Vec<Spanned<file::Class>>) -> Result<Topology, ConfigError> {
    if raw.is_empty() {
        return Ok(topology);
    }
    let raw: Vec<_> = raw.into_iter().map(Spanned::into_inner).collect();
    let specs = raw.iter().map(|class| ClassSpec {
        name: class.name.get_ref().clone(),
        weight: *class.weight.get_ref(),
        queue_deadline: class.queue_deadline.map(|deadline| deadline.0),
        preempts: class.preempts.clone(),
    });
    topology.with_classes(specs.collect()).map_err(|error| {
        let last = |wanted: &StageName| raw.iter().rfind(|class| class.name.get_ref() == wanted);
        let span = match &error {
            TopologyError::DuplicateClass { class } | TopologyError::UnknownPreempted { class, .. } => {
                last(class).map(|class| class.name.span())
            }
            TopologyError::Weight { class, .. } => last(class).map(|class| class.weight.span()),
            _ => raw.last().map(|class| class.name.span()),
        };
        source.topology(&span.unwrap_or(0..0), error)
    })
}

fn flow(source: &Source<'_>, edge: &file::Edge, span: &Range<usize>) -> Result<Flow, ConfigError> {
    match (edge.handover, &edge.chunks, &edge.chunk_dim) {
        (file::Handover::Whole, None, None) => Ok(Flow::Whole),
        (file::Handover::Whole, Some(value), _) | (file::Handover::Whole, None, Some(value)) => Err(source.error(
            &value.span(),
            "\"chunks\" and \"chunk-dim\" go with handover = \"stream\"; this edge hands over the whole payload",
        )),
        (file::Handover::Stream, Some(chunks), Some(dim)) => {
            let chunking = Chunking::new(*dim.get_ref(), *chunks.get_ref());
            let chunking = chunking.map_err(|_| {
                let (count, max) = (chunks.get_ref(), Chunking::MAX);
                source.error(&chunks.span(), format!("\"chunks\" is {count}; it must be 1 to {max}"))
            })?;
            Ok(Flow::Stream {
                chunks: chunking.count(),
                chunk_dim: chunking.dim(),
            })
        }
        (file::Handover::Stream, ..) => Err(source.error(
            span,
            "handover = \"stream\" needs \"chunks\" (how many) and \"chunk-dim\" (which dimension is cut)",
        )),
    }
}

fn params(source: &Source<'_>, raw: BTreeMap<Spanned<String>, file::Param>) -> Result<Params, ConfigError> {
    let mut params = BTreeMap::new();
    for (name, raw) in raw {
        let key = name.get_ref();
        let allowed = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
        if key.is_empty() || key.len() > 64 || !key.chars().all(allowed) {
            let message = format!("parameter {key:?}: use 1 to 64 of a-z, A-Z, 0-9, '_' and '-'");
            return Err(source.error(&name.span(), message));
        }
        let spec = param(source, key, &raw)?;
        params.insert(name.into_inner(), spec);
    }
    Ok(Params(params))
}

fn param(source: &Source<'_>, name: &str, raw: &file::Param) -> Result<ParamSpec, ConfigError> {
    let bound = |key: &str, value: &Option<Spanned<toml::Value>>| {
        let Some(value) = value else { return Ok(None) };
        let number = match (raw.r#type, value.get_ref()) {
            (ParamType::Integer | ParamType::Number, toml::Value::Integer(n)) => Some((*n).into()),
            (ParamType::Number, toml::Value::Float(n)) => serde_json::Number::from_f64(*n),
            _ => None,
        };
        number.map(Some).ok_or_else(|| {
            let message = match raw.r#type {
                ParamType::Integer | ParamType::Number => {
                    format!("{key:?} of parameter {name:?} must be {}", raw.r#type)
                }
                other => format!("{key:?} is for numbers; parameter {name:?} is {other}"),
            };
            source.error(&value.span(), message)
        })
    };
    let (min, max) = (bound("min", &raw.min)?, bound("max", &raw.max)?);
    if let (Some(low), Some(high), Some(value)) = (&min, &max, &raw.max)
        && less(high, low)
    {
        let message = format!("\"max\" of parameter {name:?} is {high}, below its \"min\" {low}");
        return Err(source.error(&value.span(), message));
    }
    let mut spec = ParamSpec {
        param_type: raw.r#type,
        help: raw.help.clone(),
        default: None,
        min,
        max,
        shape: raw.shape,
    };
    if let Some(default) = &raw.default {
        let value = serde_json::to_value(default.get_ref()).unwrap_or_default();
        let problem = match raw.r#type {
            ParamType::Input if value == "" => None,
            ParamType::Input => Some("may only be \"\", for none: inputs come and go".to_owned()),
            _ => spec.problem(&value),
        };
        if let Some(problem) = problem {
            let message = format!("\"default\" of parameter {name:?} {problem}");
            return Err(source.error(&default.span(), message));
        }
        spec.default = Some(value);
    }
    Ok(spec)
}
