//! Which tokens of which physical pages move.

use std::ops::Range;

use super::error::{PlanError, Side};
use crate::Pair;
use crate::window::TokenRange;

/// Tokens `[lo, hi)` of one page, which is `src_page` in the source's pool and `dst_page` in the destination's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cut {
    pub(super) src_page: u64,
    pub(super) dst_page: u64,
    pub(super) lo: u64,
    pub(super) hi: u64,
}

/// Number of pages of a pool, where it is known.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pool(pub(super) Option<u64>);

/// The page tables of one component.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tables<'a> {
    pub(super) component: &'a str,
    pub(super) src: &'a [i64],
    pub(super) dst: &'a [i64],
    /// Entries that both must have.
    pub(super) pages: u64,
    /// Logical pages of the prefix, which the destination keeps.
    pub(super) held: u64,
    /// The tokens that move in all chunks of the sequence together.
    pub(super) all: TokenRange,
}

impl Tables<'_> {
    /// Cuts of a range of tokens, by destination page: strictly increasing, so that no byte is written twice.
    pub(super) fn cuts(self, range: TokenRange, page: u64, whole: bool, pair: &Pair) -> Result<Vec<Cut>, PlanError> {
        let logical = pages(range, page);
        if logical.is_empty() {
            return self.whole(logical, pair);
        }
        let mut cuts = self.resolve(logical.clone(), page, pair)?;
        if !whole {
            let last = cuts.len() - 1;
            cuts[last].hi = range.end - (logical.end - 1) * page;
            cuts[0].lo = range.start - logical.start * page;
        }
        self.sorted(cuts, logical, pages(self.all, page))
    }

    /// Whole pages of one token each: the state of a request.
    pub(super) fn whole(self, logical: Range<u64>, pair: &Pair) -> Result<Vec<Cut>, PlanError> {
        let cuts = self.resolve(logical.clone(), 1, pair)?;
        self.sorted(cuts, logical.clone(), logical)
    }

    /// Looks the pages up.
    fn resolve(self, logical: Range<u64>, page: u64, pair: &Pair) -> Result<Vec<Cut>, PlanError> {
        let (src_len, dst_len) = (self.src.len() as u64, self.dst.len() as u64);
        if src_len != self.pages || dst_len != self.pages {
            return Err(PlanError::TableLength {
                component: self.component.to_owned(),
                src_len,
                dst_len,
                expected: self.pages,
            });
        }
        let first = usize::try_from(logical.start).expect("a place in a table");
        let end = usize::try_from(logical.end).expect("a place in a table");
        let pools = [pair.prefill(), pair.decode()].map(|engine| engine.pool(self.component));
        let entries = self.src[first..end].iter().zip(&self.dst[first..end]);
        let cuts = entries.zip(logical).map(|((&src, &dst), logical)| {
            Ok(Cut {
                src_page: self.page(Side::Prefill, logical, src, pools[0])?,
                dst_page: self.page(Side::Decode, logical, dst, pools[1])?,
                lo: 0,
                hi: page,
            })
        });
        cuts.collect()
    }

    /// A page that is needed: there, not the padding page, inside the pool.
    fn page(self, side: Side, logical: u64, id: i64, pool: Option<u64>) -> Result<u64, PlanError> {
        let page = u64::try_from(id).ok().filter(|&page| page > 0);
        let page = page.ok_or_else(|| PlanError::NotResident {
            component: self.component.to_owned(),
            side,
            logical,
            page: id,
        })?;
        match pool {
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

    /// In the order of the destination's pages. None of them stands for another logical page too, be it one of the prefix,
    /// which others may share, or one that another chunk brings.
    fn sorted(self, mut cuts: Vec<Cut>, logical: Range<u64>, all: Range<u64>) -> Result<Vec<Cut>, PlanError> {
        if !cuts.is_sorted_by_key(|cut| cut.dst_page) {
            cuts.sort_by_key(|cut| cut.dst_page);
        }
        let holds = |&(_, place): &(&i64, u64)| place < self.held || all.contains(&place);
        let mut others = self
            .dst
            .iter()
            .zip(0..)
            .filter(|at| holds(at) && !logical.contains(&at.1))
            .filter_map(|(&id, _)| u64::try_from(id).ok().filter(|&page| page > 0));
        let twice = cuts.windows(2).find(|two| two[0].dst_page == two[1].dst_page);
        let shared = others.find(|page| cuts.binary_search_by_key(page, |cut| cut.dst_page).is_ok());
        let Some(page) = twice.map(|two| two[0].dst_page).or(shared) else {
            return Ok(cuts);
        };
        let places = self.dst.iter().zip(0..).filter(holds);
        Err(PlanError::WrittenTwice {
            component: self.component.to_owned(),
            page,
            logical: places
                .filter_map(|(&id, place)| (u64::try_from(id) == Ok(page)).then_some(place))
                .take(2)
                .collect(),
        })
    }
}

/// The logical pages of a range of tokens.
fn pages(range: TokenRange, page: u64) -> Range<u64> {
    if range.is_empty() {
        0..0
    } else {
        range.start / page..range.end.div_ceil(page)
    }
}
