use std::collections::BTreeMap;

use super::error::{PlanError, Side};
use crate::Geometry;
use crate::pair::Paired;
use crate::window::TokenRange;

/// What is to be planned: one room, from one rank to another.
#[derive(Debug, Clone)]
pub struct PlanRequest<'a> {
    /// The source's rank. Offsets of data-parallel replicas do not matter.
    pub src_rank: u32,
    /// The destination's rank.
    pub dst_rank: u32,
    /// Tokens of the prompt, the same on both sides: without the one that prefill has sampled.
    pub seq_len: u64,
    /// For each component the physical page of each logical page, -1 where not resident, at the source.
    pub src_pages: BTreeMap<&'a str, &'a [i64]>,
    /// The same at the destination.
    pub dst_pages: BTreeMap<&'a str, &'a [i64]>,
    /// Tokens that the destination holds already, whole pages, by component. Those of a window only if their pages were kept.
    pub prefix: BTreeMap<&'a str, u64>,
    /// One prefill chunk, `[lo, hi)`; `None` for the whole sequence.
    pub tokens: Option<(u64, u64)>,
    /// The components that move; `None` for all.
    pub components: Option<Vec<&'a str>>,
    /// Move the needed tokens only, not the rest of their pages.
    pub exact_window: bool,
}

impl<'a> PlanRequest<'a> {
    /// The whole sequence, every component, whole pages, no prefix.
    pub fn new(src_rank: u32, dst_rank: u32, seq_len: u64) -> Self {
        Self {
            src_rank,
            dst_rank,
            seq_len,
            src_pages: BTreeMap::new(),
            dst_pages: BTreeMap::new(),
            prefix: BTreeMap::new(),
            tokens: None,
            components: None,
            exact_window: false,
        }
    }

    /// With the page tables of one component.
    #[must_use]
    pub fn pages(mut self, component: &'a str, src: &'a [i64], dst: &'a [i64]) -> Self {
        self.src_pages.insert(component, src);
        self.dst_pages.insert(component, dst);
        self
    }

    /// With page tables by component, in place of those that are there.
    #[must_use]
    pub fn tables(mut self, src: &'a BTreeMap<String, Vec<i64>>, dst: &'a BTreeMap<String, Vec<i64>>) -> Self {
        [self.src_pages, self.dst_pages] = [src, dst].map(|tables| {
            let pairs = tables.iter().map(|(name, pages)| (name.as_str(), pages.as_slice()));
            pairs.collect()
        });
        self
    }

    pub(super) fn asks_for(&self, component: &str) -> bool {
        self.components.as_ref().is_none_or(|names| names.contains(&component))
    }

    pub(super) fn prefix(&self, component: &str) -> u64 {
        self.prefix.get(component).copied().unwrap_or(0)
    }

    pub(super) fn table(&self, component: &str, side: Side) -> Result<&'a [i64], PlanError> {
        let tables = match side {
            Side::Prefill => &self.src_pages,
            Side::Decode => &self.dst_pages,
        };
        tables.get(component).copied().ok_or_else(|| PlanError::NoTable {
            component: component.to_owned(),
            side,
        })
    }

    /// Everything that does not depend on one component.
    pub(super) fn check(&self, known: &[&str]) -> Result<(), PlanError> {
        let named = self
            .src_pages
            .keys()
            .chain(self.dst_pages.keys())
            .chain(self.prefix.keys());
        let mut named = named.chain(self.components.iter().flatten());
        if let Some(name) = named.find(|name| !known.contains(name)) {
            return Err(PlanError::UnknownComponent {
                component: (*name).to_owned(),
                known: known.join(", "),
            });
        }
        match self.tokens {
            Some((lo, hi)) if lo > hi || hi > self.seq_len => Err(PlanError::Tokens {
                lo,
                hi,
                seq_len: self.seq_len,
            }),
            _ => Ok(()),
        }
    }

    /// The tokens of one component that move.
    pub(super) fn range(&self, paired: &Paired, geometry: &Geometry, state: bool) -> Result<TokenRange, PlanError> {
        let page = u64::from(geometry.page_size);
        let prefix = self.prefix(&paired.name);
        if prefix > self.seq_len || !prefix.is_multiple_of(page) || (state && prefix > 0) {
            return Err(PlanError::Prefix {
                component: paired.name.clone(),
                prefix,
                page_size: page,
                seq_len: self.seq_len,
            });
        }
        if state {
            // The state after the last token replaces all others.
            let last = self.tokens.is_none_or(|(lo, hi)| lo < hi && hi == self.seq_len);
            let start = if last { 0 } else { self.seq_len };
            return Ok(TokenRange {
                page_start: start,
                start,
                end: self.seq_len,
            });
        }
        let all = TokenRange::of(paired.window, prefix, self.seq_len, page);
        let chunk = |tokens| all.chunk(tokens, self.seq_len, page, self.exact_window);
        Ok(self.tokens.map_or(all, chunk))
    }
}
