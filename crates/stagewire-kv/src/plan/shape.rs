use super::cuts::Cut;
use super::error::{PlanError, Side};
use crate::pair::Paired;
use crate::{HeadSlice, Layout};

/// Where the bytes of one buffer are on both sides, and which of its heads move.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) src: Ends,
    pub(super) dst: Ends,
    /// Heads that move.
    pub(super) heads: u64,
    /// Tokens of a page.
    pub(super) tokens: u64,
    /// Bytes of one head of one token.
    pub(super) head: u64,
    /// Head after head instead of token after token.
    pub(super) head_major: bool,
}

/// One side of a [`Shape`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Ends {
    /// Heads of the rank.
    pub(super) heads: u64,
    /// First of them that moves.
    pub(super) first: u64,
}

impl Shape {
    pub(super) fn new(paired: &Paired, slice: HeadSlice, head: u64, layout: Layout) -> Self {
        let side = |heads: u32, first: u32| Ends {
            heads: heads.into(),
            first: first.into(),
        };
        Self {
            src: side(paired.heads.0, slice.src_head_start),
            dst: side(paired.heads.1, slice.dst_head_start),
            heads: slice.num_heads.into(),
            tokens: paired.buffers.tokens,
            head,
            head_major: layout == Layout::Hnd,
        }
    }

    fn page_bytes(&self, side: Ends) -> u64 {
        self.tokens * side.heads * self.head
    }

    /// Every offset of these pages fits 64 bits; from here on, arithmetic cannot overflow.
    pub(super) fn check_reach(&self, component: &str, cuts: &[Cut]) -> Result<(), PlanError> {
        let furthest = |page: fn(&Cut) -> u64| cuts.iter().map(page).max().unwrap_or(0);
        let sides = [
            (Side::Prefill, self.src, furthest(|cut| cut.src_page)),
            (Side::Decode, self.dst, furthest(|cut| cut.dst_page)),
        ];
        for (side, ends, page) in sides {
            if (page + 1).checked_mul(self.page_bytes(ends)).is_none() {
                return Err(PlanError::Address {
                    component: component.to_owned(),
                    side,
                    page,
                    page_bytes: self.page_bytes(ends),
                });
            }
        }
        Ok(())
    }
}
