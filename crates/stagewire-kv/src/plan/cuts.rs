//! Which tokens of which physical pages move.

use std::ops::Range;

use super::error::{PlanError, Side};
use crate::window::TokenRange;

/// Tokens `[lo, hi)` of one page, which is `src_page` in the source's pool and `dst_page` in the destination's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cut {
    pub(super) src_page: u64,
    pub(super) dst_page: u64,
    pub(super) lo: u64,
    pub(super) hi: u64,
}

/// The page tables of one component.
#[derive(Debug, Clone)]
pub(super) struct Tables<'a> {
    pub(super) component: &'a str,
    pub(super) src: &'a [i64],
    pub(super) dst: &'a [i64],
    /// Logical pages that the destination needs, whoever brings them or brought them; both tables go up to their end.
    pub(super) needed: Range<u64>,
    /// Number of pages of prefill's pool and of decode's, where they are known.
    pub(super) pools: [Option<u64>; 2],
}

impl Tables<'_> {
    /// Cuts of a range of tokens, by destination page: strictly increasing, so that no byte is written twice.
    pub(super) fn cuts(&self, range: TokenRange, page: u64, exact: bool) -> Result<Vec<Cut>, PlanError> {
        let (src_len, dst_len) = (self.src.len() as u64, self.dst.len() as u64);
        if src_len != self.needed.end || dst_len != self.needed.end {
            return Err(PlanError::TableLength {
                component: self.component.to_owned(),
                src_len,
                dst_len,
                expected: self.needed.end,
            });
        }
        let logical = match range.is_empty() {
            true => 0..0,
            false => range.start / page..range.end.div_ceil(page),
        };
        let first = usize::try_from(logical.start).expect("a place in a table");
        let end = usize::try_from(logical.end).expect("a place in a table");
        let entries = self.src[first..end].iter().zip(&self.dst[first..end]);
        let cuts = entries.zip(logical.clone()).map(|((&src, &dst), logical)| {
            let (lo, hi) = match exact {
                true => (range.start.max(logical * page), range.end.min((logical + 1) * page)),
                false => (logical * page, (logical + 1) * page),
            };
            Ok(Cut {
                src_page: self.page(Side::Prefill, logical, src)?,
                dst_page: self.page(Side::Decode, logical, dst)?,
                lo: lo - logical * page,
                hi: hi - logical * page,
            })
        });
        self.sorted(cuts.collect::<Result<_, _>>()?, logical)
    }

    /// A page that is needed: there, not the padding page, inside the pool.
    fn page(&self, side: Side, logical: u64, id: i64) -> Result<u64, PlanError> {
        let page = u64::try_from(id).ok().filter(|&page| page > 0);
        let page = page.ok_or_else(|| PlanError::NotResident {
            component: self.component.to_owned(),
            side,
            logical,
            page: id,
        })?;
        match self.pools[side as usize] {
            Some(num_pages) if page >= num_pages => Err(PlanError::PastPool {
                component: self.component.to_owned(),
                side,
                logical,
                page,
                num_pages,
            }),
            _ => Ok(page),
        }
    }

    /// In the order of the destination's pages. None of them stands for another needed page too, be it one of the prefix,
    /// which others may share, or one that another chunk brings. What has left the window is nobody's.
    fn sorted(&self, mut cuts: Vec<Cut>, logical: Range<u64>) -> Result<Vec<Cut>, PlanError> {
        if !cuts.is_sorted_by_key(|cut| cut.dst_page) {
            cuts.sort_by_key(|cut| cut.dst_page);
        }
        let needed = self
            .dst
            .iter()
            .zip(0..)
            .filter(|(_, place)| self.needed.contains(place));
        let mut others = needed
            .clone()
            .filter(|(_, place)| !logical.contains(place))
            .filter_map(|(&id, _)| u64::try_from(id).ok().filter(|&page| page > 0));
        let twice = cuts.windows(2).find(|two| two[0].dst_page == two[1].dst_page);
        let shared = others.find(|page| cuts.binary_search_by_key(page, |cut| cut.dst_page).is_ok());
        let Some(page) = twice.map(|two| two[0].dst_page).or(shared) else {
            return Ok(cuts);
        };
        Err(PlanError::WrittenTwice {
            component: self.component.to_owned(),
            page,
            logical: needed
                .filter_map(|(&id, place)| (u64::try_from(id) == Ok(page)).then_some(place))
                .take(2)
                .collect(),
        })
    }
}
