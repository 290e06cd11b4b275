use std::collections::BTreeMap;
use std::fmt;

use stagewire_core::{Classify, ErrorClass};

use crate::Layout;

/// One of the two engines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// The source.
    Prefill,
    /// The destination.
    Decode,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        })
    }
}

/// Why one room cannot be planned. Other rooms of the pair go on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum PlanError {
    #[error("prefill rank {src_rank} sends nothing to decode rank {dst_rank}, which gets all from ranks {writers:?}")]
    Route {
        src_rank: u32,
        dst_rank: u32,
        writers: Vec<u32>,
    },
    #[error("{component:?} is no component of this pair; there are {known}")]
    UnknownComponent { component: String, known: String },
    #[error("component {component:?}: there is no page table of the {side} side")]
    NoTable { component: String, side: Side },
    #[error(
        "component {component:?}: the page tables have {src_len} entries at prefill and {dst_len} at decode; the sequence \
         has {expected} pages, and pages that are not resident are -1"
    )]
    TableLength {
        component: String,
        src_len: u64,
        dst_len: u64,
        expected: u64,
    },
    #[error(
        "component {component:?}: logical page {logical} is needed, but its page at {side} is {page}; pages count from 1"
    )]
    NotResident {
        component: String,
        side: Side,
        logical: u64,
        page: i64,
    },
    #[error(
        "component {component:?}: logical page {logical} is page {page} at {side}, whose pool ends with page {last}",
        last = num_pages.saturating_sub(1)
    )]
    PastPool {
        component: String,
        side: Side,
        logical: u64,
        page: u64,
        num_pages: u64,
    },
    #[error("component {component:?}: page {page} at decode stands for two logical pages of the sequence, {logical:?}")]
    WrittenTwice {
        component: String,
        page: u64,
        logical: Vec<u64>,
    },
    #[error(
        "component {component:?}: a prefix of {prefix} tokens is no number of whole pages of {page_size} inside {seq_len} \
         tokens, or the component has no tokens"
    )]
    Prefix {
        component: String,
        prefix: u64,
        page_size: u64,
        seq_len: u64,
    },
    #[error("tokens {lo} to {hi} are no part of a sequence of {seq_len}")]
    Tokens { lo: u64, hi: u64, seq_len: u64 },
    #[error(
        "component {component:?}: a part of a page cannot be cut out of its layout ({layout}) or its scales; plan without \
         exact_window"
    )]
    Exact { component: String, layout: Layout },
    #[error("component {component:?}: page {page} of {page_bytes} bytes at {side} is beyond 64-bit offsets")]
    Address {
        component: String,
        side: Side,
        page: u64,
        page_bytes: u64,
    },
    #[error("component {component:?}: the plan could not be proven, so nothing moves: {problem}; please report this")]
    Unproven { component: String, problem: String },
    #[error(
        "{entries} entries of a plan need {nbytes} bytes of memory, which there are not; plan fewer tokens at once"
    )]
    Memory { entries: u64, nbytes: u64 },
}

impl Classify for PlanError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Exact { .. } => ErrorClass::Unsupported,
            Self::Unproven { .. } => ErrorClass::Internal,
            Self::Memory { .. } => ErrorClass::Exhausted,
            _ => ErrorClass::Invalid,
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::Route { .. } => "kv.route",
            Self::UnknownComponent { .. } => "kv.unknown_component",
            Self::NoTable { .. } => "kv.no_table",
            Self::TableLength { .. } => "kv.table_length",
            Self::NotResident { .. } => "kv.not_resident",
            Self::PastPool { .. } => "kv.past_pool",
            Self::WrittenTwice { .. } => "kv.written_twice",
            Self::Prefix { .. } => "kv.prefix",
            Self::Tokens { .. } => "kv.tokens",
            Self::Exact { .. } => "kv.exact",
            Self::Address { .. } => "kv.address",
            Self::Unproven { .. } => "kv.unproven",
            Self::Memory { .. } => "kv.memory",
        }
    }

    fn details(&self) -> BTreeMap<String, String> {
        let list: Vec<(&str, String)> = match self {
            Self::Route {
                src_rank,
                dst_rank,
                writers,
            } => vec![
                ("src_rank", src_rank.to_string()),
                ("dst_rank", dst_rank.to_string()),
                ("writers", format!("{writers:?}")),
            ],
            Self::UnknownComponent { component, known } => {
                vec![("component", component.clone()), ("known", known.clone())]
            }
            Self::Unproven { component, problem } => {
                vec![("component", component.clone()), ("problem", problem.clone())]
            }
            Self::Memory { entries, nbytes } => {
                vec![("entries", entries.to_string()), ("nbytes", nbytes.to_string())]
            }
            Self::NoTable { component, side } => vec![("component", component.clone()), ("side", side.to_string())],
            Self::TableLength {
                component,
                src_len,
                dst_len,
                expected,
            } => vec![
                ("component", component.clone()),
                ("prefill", src_len.to_string()),
                ("decode", dst_len.to_string()),
                ("expected", expected.to_string()),
            ],
            Self::NotResident {
                component,
                side,
                logical,
                page,
            } => vec![
                ("component", component.clone()),
                ("side", side.to_string()),
                ("logical", logical.to_string()),
                ("page", page.to_string()),
            ],
            Self::PastPool {
                component,
                side,
                logical,
                page,
                num_pages,
            } => vec![
                ("component", component.clone()),
                ("side", side.to_string()),
                ("logical", logical.to_string()),
                ("page", page.to_string()),
                ("num_pages", num_pages.to_string()),
            ],
            Self::WrittenTwice {
                component,
                page,
                logical,
            } => vec![
                ("component", component.clone()),
                ("page", page.to_string()),
                ("logical", format!("{logical:?}")),
            ],
            Self::Prefix {
                component,
                prefix,
                page_size,
                seq_len,
            } => vec![
                ("component", component.clone()),
                ("prefix", prefix.to_string()),
                ("page_size", page_size.to_string()),
                ("seq_len", seq_len.to_string()),
            ],
            Self::Tokens { lo, hi, seq_len } => vec![
                ("lo", lo.to_string()),
                ("hi", hi.to_string()),
                ("seq_len", seq_len.to_string()),
            ],
            Self::Exact { component, layout } => {
                vec![("component", component.clone()), ("layout", layout.to_string())]
            }
            Self::Address {
                component,
                side,
                page,
                page_bytes,
            } => vec![
                ("component", component.clone()),
                ("side", side.to_string()),
                ("page", page.to_string()),
                ("page_bytes", page_bytes.to_string()),
            ],
        };
        list.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }
}
