//! What one rank holds of a component, by definition.

use std::ops::Range;

use crate::{Component, Geometry, Kind, Layout};

/// One rank's part of one component.
#[derive(Debug, Clone)]
pub(super) struct Held<'a> {
    pub(super) component: &'a Component,
    /// Heads of the model.
    pub(super) heads: Range<u64>,
    /// Places in the component's list of layers.
    pub(super) layers: Range<u32>,
    /// Tokens of a page.
    pub(super) tokens: u64,
    /// Pages of the pool, where that is known.
    pub(super) pages: Option<u64>,
}

impl<'a> Held<'a> {
    pub(super) fn of(geometry: &'a Geometry, index: u32, rank: u32) -> Self {
        let component = &geometry.components[index as usize];
        let stage = rank / geometry.tp_size % geometry.pp_size;
        let [heads, ranks, rank] = [component.kv_heads, geometry.tp_size, rank % geometry.tp_size].map(u64::from);
        let each = component.layers / geometry.pp_size;
        Self {
            component,
            heads: match component.kind {
                Kind::Mla | Kind::Dsa => 0..heads,
                // Rank `r` of `n` has what lies between the `r`-th and the next of `n` equal parts, if only partly: then
                // other ranks have it too.
                _ => rank * heads / ranks..((rank + 1) * heads).div_ceil(ranks),
            },
            layers: stage * each..(stage + 1) * each,
            tokens: match component.kind {
                Kind::Mamba => 1,
                _ => geometry.page_size.into(),
            },
            pages: geometry.num_pages.get(&component.name).copied(),
        }
    }

    /// The buffers that there are: 0 = K, 1 = V, 2 and 3 their scales.
    pub(super) fn buffers(&self) -> impl Iterator<Item = u32> {
        (0..4).filter(|&kv| self.head_bytes(kv) > 0)
    }

    /// Bytes of one head of one token.
    pub(super) fn head_bytes(&self, kv: u32) -> u64 {
        if self.component.layout != Layout::PageMajor {
            return self.layer_bytes(kv);
        }
        let layer: u64 = (0..4).map(|kv| self.layer_bytes(kv)).sum();
        if kv == 0 {
            layer * u64::from(self.layers.end - self.layers.start)
        } else {
            0
        }
    }

    fn layer_bytes(&self, kv: u32) -> u64 {
        let Component {
            kind,
            k_dim,
            v_dim,
            dtype,
            scales,
            ..
        } = self.component;
        let dim = u64::from(if kv.is_multiple_of(2) { *k_dim } else { *v_dim });
        let scaled = scales.map_or(0, |elements| dim / u64::from(elements));
        match (kind, kv) {
            (Kind::BlockScale, 0 | 1) if scales.is_some() => scaled * dtype.size(),
            (_, 0 | 1) => dim * dtype.size(),
            (Kind::BlockScale, _) => 0,
            _ => scaled,
        }
    }

    pub(super) fn page_bytes(&self, head_bytes: u64) -> u64 {
        self.tokens * (self.heads.end - self.heads.start) * head_bytes
    }

    /// Where a head of a token of a page begins. Pages of other layouts than these two move whole, so that any order of
    /// their inside will do.
    pub(super) fn offset(&self, page: u64, token: u64, head: u64, head_bytes: u64) -> u64 {
        let (heads, head) = (self.heads.end - self.heads.start, head - self.heads.start);
        let place = match self.component.layout {
            Layout::Hnd => (page * heads + head) * self.tokens + token,
            _ => (page * self.tokens + token) * heads + head,
        };
        place * head_bytes
    }

    /// The layers in the rank's own order: their ids, or their places where they have none.
    pub(super) fn layer_ids(&self) -> impl Iterator<Item = u32> {
        let ids = self.component.layer_ids.as_deref();
        self.layers
            .clone()
            .map(move |place| ids.map_or(place, |ids| ids[place as usize]))
    }
}
