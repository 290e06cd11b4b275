use std::collections::BTreeMap;

use stagewire_core::{Classify, ErrorClass};

use crate::{Component, Kind, Layout};

/// Why two engines cannot hand over to each other, whatever the room. Nothing has moved; other pairs go on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum Incompatible {
    #[error(
        "this side speaks version {ours} of the KV handshake, the other side {theirs}; run the same release on both"
    )]
    Version { ours: u16, theirs: u16 },
    #[error("the other side's hello of {len} bytes is no geometry: {problem}")]
    Hello { problem: String, len: usize },
    #[error("page_size is {prefill} at prefill and {decode} at decode; start both engines with the same")]
    PageSize { prefill: u32, decode: u32 },
    #[error("the components are [{prefill}] at prefill and [{decode}] at decode; give the same, in the same order")]
    Components { prefill: String, decode: String },
    #[error(
        "component {component:?} holds {prefill} at prefill and {decode} at decode; start both engines with the same type"
    )]
    DType {
        component: String,
        prefill: String,
        decode: String,
    },
    #[error(
        "component {component:?} has layout {prefill} at prefill and {decode} at decode; equal sizes are no proof of \
         equal bytes, so start both engines with the same layout"
    )]
    Layout {
        component: String,
        prefill: Layout,
        decode: Layout,
    },
    #[error(
        "component {component:?} has {what} {prefill} at prefill and {decode} at decode; these are different models"
    )]
    Model {
        component: String,
        what: &'static str,
        prefill: String,
        decode: String,
    },
    #[error("component {component:?} has layers {prefill} at prefill and {decode} at decode, which do not pair up")]
    Layers {
        component: String,
        prefill: String,
        decode: String,
    },
    #[error(
        "component {component:?} has {heads} KV heads, which do not split over tp_size {prefill_tp} at prefill and \
         {decode_tp} at decode: heads and ranks must divide each other"
    )]
    HeadSplit {
        component: String,
        heads: u32,
        prefill_tp: u32,
        decode_tp: u32,
    },
    #[error(
        "component {component:?} has layout {layout}, whose pages cannot be cut by heads: tp_size {prefill_tp} at prefill \
         and {decode_tp} at decode must be equal, or use nhd or hnd"
    )]
    LayoutTp {
        component: String,
        layout: Layout,
        prefill_tp: u32,
        decode_tp: u32,
    },
    #[error(
        "component {component:?} is block-scaled, and its scales cannot be cut by heads: tp_size {prefill_tp} at prefill \
         and {decode_tp} at decode must be equal"
    )]
    BlockScale {
        component: String,
        prefill_tp: u32,
        decode_tp: u32,
    },
    #[error(
        "component {component:?} is {kind} state of unknown split: tp_size {prefill_tp} at prefill and {decode_tp} at \
         decode must be equal"
    )]
    State {
        component: String,
        kind: Kind,
        prefill_tp: u32,
        decode_tp: u32,
    },
    #[error(
        "component {component:?} ({kind}) is not handed over between pipeline stages at these sizes: pp_size is \
         {prefill_pp} at prefill and {decode_pp} at decode, tp_size is {prefill_tp} and {decode_tp}; use pp_size 1 on both \
         sides"
    )]
    StatePipeline {
        component: String,
        kind: Kind,
        prefill_pp: u32,
        decode_pp: u32,
        prefill_tp: u32,
        decode_tp: u32,
    },
    #[error("pp_size is {prefill} at prefill and {decode} at decode; decode must have 1 or as many stages as prefill")]
    Pipeline { prefill: u32, decode: u32 },
    #[error(
        "component {component:?} has {layers} layers, which do not split evenly over pp_size {prefill_pp} at prefill and \
         {decode_pp} at decode"
    )]
    PipelineSplit {
        component: String,
        layers: u32,
        prefill_pp: u32,
        decode_pp: u32,
    },
    #[error("cp_size is {prefill} at prefill and {decode} at decode; both must be 1")]
    Context { prefill: u32, decode: u32 },
}

impl Incompatible {
    /// A list of components in the form that [`Incompatible::Components`] shows.
    pub(crate) fn list(components: &[Component]) -> String {
        let names: Vec<_> = components.iter().map(|c| format!("{} ({})", c.name, c.kind)).collect();
        names.join(", ")
    }

    fn beside(&self) -> Vec<(&'static str, String)> {
        match self {
            Self::Hello { problem, len } => vec![("problem", problem.clone()), ("len", len.to_string())],
            Self::Model { what, .. } => vec![("field", (*what).to_owned())],
            Self::HeadSplit { heads, .. } => vec![("heads", heads.to_string())],
            Self::LayoutTp { layout, .. } => vec![("layout", layout.to_string())],
            Self::State { kind, .. } => vec![("kind", kind.to_string())],
            Self::StatePipeline {
                kind,
                prefill_tp,
                decode_tp,
                ..
            } => vec![
                ("kind", kind.to_string()),
                ("prefill_tp", prefill_tp.to_string()),
                ("decode_tp", decode_tp.to_string()),
            ],
            Self::PipelineSplit { layers, .. } => vec![("layers", layers.to_string())],
            _ => vec![],
        }
    }

    fn values(&self) -> (Option<&String>, String, String) {
        match self {
            Self::Version { ours, theirs } => (None, ours.to_string(), theirs.to_string()),
            Self::Hello { .. } => (None, String::new(), String::new()),
            Self::PageSize { prefill, decode }
            | Self::Pipeline { prefill, decode }
            | Self::Context { prefill, decode } => (None, prefill.to_string(), decode.to_string()),
            Self::Components { prefill, decode } => (None, prefill.clone(), decode.clone()),
            Self::DType {
                component,
                prefill,
                decode,
            }
            | Self::Model {
                component,
                prefill,
                decode,
                ..
            }
            | Self::Layers {
                component,
                prefill,
                decode,
            } => (Some(component), prefill.clone(), decode.clone()),
            Self::Layout {
                component,
                prefill,
                decode,
            } => (Some(component), prefill.to_string(), decode.to_string()),
            Self::HeadSplit {
                component,
                prefill_tp: prefill,
                decode_tp: decode,
                ..
            }
            | Self::LayoutTp {
                component,
                prefill_tp: prefill,
                decode_tp: decode,
                ..
            }
            | Self::BlockScale {
                component,
                prefill_tp: prefill,
                decode_tp: decode,
            }
            | Self::State {
                component,
                prefill_tp: prefill,
                decode_tp: decode,
                ..
            }
            | Self::StatePipeline {
                component,
                prefill_pp: prefill,
                decode_pp: decode,
                ..
            }
            | Self::PipelineSplit {
                component,
                prefill_pp: prefill,
                decode_pp: decode,
                ..
            } => (Some(component), prefill.to_string(), decode.to_string()),
        }
    }
}

impl Classify for Incompatible {
    fn class(&self) -> ErrorClass {
        ErrorClass::Unsupported
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::Version { .. } => "kv.version",
            Self::Hello { .. } => "kv.hello",
            Self::PageSize { .. } => "kv.page_size",
            Self::Components { .. } => "kv.components",
            Self::DType { .. } => "kv.dtype",
            Self::Layout { .. } => "kv.layout",
            Self::Model { .. } => "kv.model",
            Self::Layers { .. } => "kv.layers",
            Self::HeadSplit { .. } => "kv.head_split",
            Self::LayoutTp { .. } => "kv.layout_tp",
            Self::BlockScale { .. } => "kv.block_scale",
            Self::State { .. } => "kv.state",
            Self::StatePipeline { .. } => "kv.state_pipeline",
            Self::Pipeline { .. } => "kv.pipeline",
            Self::PipelineSplit { .. } => "kv.pipeline_split",
            Self::Context { .. } => "kv.context",
        }
    }

    /// `prefill` and `decode` hold both sides' values, `component` the pool where it is one; `field` says of which model
    /// property they are, and what the sizes do not go with stands beside them.
    fn details(&self) -> BTreeMap<String, String> {
        let (component, prefill, decode) = self.values();
        let (first, second) = match self {
            Self::Version { .. } => ("ours", "theirs"),
            _ => ("prefill", "decode"),
        };
        let mut details = self.beside();
        if !matches!(self, Self::Hello { .. }) {
            details.extend([(first, prefill), (second, decode)]);
        }
        details.extend(component.map(|name| ("component", name.clone())));
        details
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value))
            .collect()
    }
}
