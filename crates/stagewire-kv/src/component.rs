use std::ops::Range;

use serde::{Deserialize, Serialize};
use stagewire_core::DType;

use crate::window::TokenRange;
use crate::{GeometryError, Kind, Layout};

/// Most layers of a component.
const MAX_LAYERS: u32 = 65_536;

/// One pool of an engine's cache, over all its ranks: the full layers, the sliding-window layers, scales, state.
///
/// Each layer has a buffer for K and, where `v_dim` is not 0, one for V; with [`Layout::PageMajor`] one buffer holds all.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Component {
    /// Names the component and its page tables.
    pub name: String,
    /// What it holds.
    #[serde(default)]
    pub kind: Kind,
    /// How a page lies in memory.
    #[serde(default)]
    pub layout: Layout,
    /// Layers of the whole engine, all pipeline stages together.
    pub layers: u32,
    /// KV heads of the model, all tensor-parallel ranks together, replicas not counted.
    pub kv_heads: u32,
    /// Elements of one head of K.
    pub k_dim: u32,
    /// Elements of one head of V; 0 where there is no V buffer, as with a latent.
    #[serde(default)]
    pub v_dim: u32,
    /// Type of an element as it is stored: resolved, not `auto`.
    #[serde(with = "crate::dtype")]
    pub dtype: DType,
    /// Past tokens that the next one attends to, where that is not all: Hugging Face's `sliding_window - 1`.
    #[serde(default)]
    pub window: Option<u64>,
    /// Ids of the layers, where they are paired by id instead of by position.
    #[serde(default)]
    pub layer_ids: Option<Vec<u32>>,
    /// Elements that share one scale, of block-scaled formats: 32 for MXFP8. A [`Kind::BlockScale`] component then holds
    /// one element for each so many of its dims; any other has a scale of one byte beside them, with its own buffers.
    #[serde(default)]
    pub scales: Option<u32>,
}

impl Component {
    /// Full attention, NHD.
    pub fn mha(name: &str, layers: u32, kv_heads: u32, [k_dim, v_dim]: [u32; 2], dtype: DType) -> Self {
        Self {
            name: name.to_owned(),
            kind: Kind::Mha,
            layout: Layout::Nhd,
            layers,
            kv_heads,
            k_dim,
            v_dim,
            dtype,
            window: None,
            layer_ids: None,
            scales: None,
        }
    }

    /// A latent without V buffer.
    pub fn mla(name: &str, layers: u32, dim: u32, dtype: DType) -> Self {
        Self {
            kind: Kind::Mla,
            ..Self::mha(name, layers, 1, [dim, 0], dtype)
        }
    }

    /// Logical pages of a sequence that decode needs: those of the window; of state the one that there is. Page tables have
    /// as many entries as the end says.
    pub fn pages(&self, page_size: u32, seq_len: u64) -> Range<u64> {
        if self.kind == Kind::Mamba {
            return 0..1;
        }
        let page = u64::from(page_size);
        TokenRange::of(self.window, 0, seq_len, page).page_start / page..seq_len.div_ceil(page)
    }

    /// Whether there are scales, in this component or as this component.
    pub(crate) fn is_block_scaled(&self) -> bool {
        self.kind == Kind::BlockScale || self.scales.is_some()
    }

    /// Whether tokens and heads can be cut out of its pages.
    pub(crate) fn is_sliceable(&self) -> bool {
        self.layout.is_sliceable() && !self.is_block_scaled() && self.kind != Kind::Mamba
    }

    pub(crate) fn check(&self) -> Result<(), GeometryError> {
        let wrong = |field: &'static str, value: String, expected: &str| GeometryError::Field {
            component: self.name.clone(),
            field,
            value,
            expected: expected.to_owned(),
        };
        if self.name.is_empty() || self.name.len() > 64 {
            return Err(wrong("name", format!("{:?}", self.name), "1 to 64 bytes"));
        }
        if !(1..=MAX_LAYERS).contains(&self.layers) {
            return Err(wrong("layers", self.layers.to_string(), &format!("1 to {MAX_LAYERS}")));
        }
        if self.kv_heads == 0 {
            return Err(wrong("kv_heads", "0".to_owned(), "at least 1"));
        }
        if self.k_dim == 0 {
            return Err(wrong("k_dim", "0".to_owned(), "at least 1"));
        }
        if let Some(ids) = &self.layer_ids {
            let mut sorted = ids.clone();
            sorted.sort_unstable();
            sorted.dedup();
            if ids.len() != self.layers as usize || sorted.len() != ids.len() {
                return Err(wrong(
                    "layer_ids",
                    format!("{ids:?}"),
                    "as many different ids as layers",
                ));
            }
        }
        if let Some(scales) = self.scales
            && (scales == 0 || !self.k_dim.is_multiple_of(scales) || !self.v_dim.is_multiple_of(scales))
        {
            return Err(wrong("scales", scales.to_string(), "a divisor of k_dim and v_dim"));
        }
        if self.kind == Kind::Mamba && self.window.is_some() {
            return Err(wrong(
                "window",
                format!("{:?}", self.window),
                "none, as state has no tokens",
            ));
        }
        Ok(())
    }
}
