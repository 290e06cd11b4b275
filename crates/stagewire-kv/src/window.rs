/// Which tokens of a component move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TokenRange {
    /// The first token of the page that holds the first needed one.
    pub page_start: u64,
    /// The first needed token.
    pub start: u64,
    /// The one after the last needed token.
    pub end: u64,
}

impl TokenRange {
    /// Of a sequence of `seq_len` tokens of which the destination holds the first `prefix`, a multiple of `page`.
    ///
    /// A window of `w` past tokens needs `[seq_len - w, seq_len)`; its first page is that token's, rounded down, as
    /// SGLang's `floor_page(max(0, seq_len - window))`.
    pub(crate) fn of(window: Option<u64>, prefix: u64, seq_len: u64, page: u64) -> Self {
        let needed = window.map_or(0, |window| seq_len.saturating_sub(window));
        let start = needed.max(prefix);
        Self {
            page_start: start - start % page,
            start,
            end: seq_len,
        }
    }

    /// The part that a prefill chunk of tokens `[lo, hi)` brings.
    ///
    /// Whole pages move unless `exact`: then a chunk that does not end the sequence leaves its last, unfinished page to the
    /// next chunk, and a chunk that begins inside a page takes up that page.
    pub(crate) fn chunk(self, tokens: (u64, u64), seq_len: u64, page: u64, exact: bool) -> Self {
        let down = |token: u64| token - token % page;
        let (lo, hi) = match tokens {
            // No token, no page: the page of `lo` is that of another chunk.
            (lo, hi) if exact || lo == hi => (lo, hi),
            (lo, hi) if hi < seq_len => (down(lo), down(hi)),
            (lo, hi) => (down(lo), hi),
        };
        let end = self.end.min(hi);
        // Where they have nothing in common, an empty range.
        let start = self.start.max(lo).min(end);
        Self {
            page_start: down(start),
            start,
            end,
        }
    }

    /// The same as the one page of state that stands for all tokens.
    pub(crate) fn as_state(self) -> Self {
        Self {
            page_start: 0,
            start: 0,
            end: u64::from(!self.is_empty()),
        }
    }

    /// Whether no token moves.
    pub const fn is_empty(self) -> bool {
        self.start >= self.end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(window: Option<u64>, prefix: u64, seq_len: u64, page: u64) -> (u64, u64, u64) {
        let range = TokenRange::of(window, prefix, seq_len, page);
        (range.page_start, range.start, range.end)
    }

    #[test]
    fn published_windows() {
        assert_eq!(range(Some(32), 0, 50, 16), (16, 18, 50));
        assert_eq!(range(Some(16), 12, 20, 4), (12, 12, 20));
        assert_eq!(range(Some(127), 0, 300, 64), (128, 173, 300));
        assert_eq!(range(None, 0, 300, 64), (0, 0, 300));
    }

    #[test]
    fn a_window_longer_than_the_sequence_is_all_of_it() {
        assert_eq!(range(Some(500), 0, 20, 4), (0, 0, 20));
    }

    #[test]
    fn chunks_of_whole_pages_share_no_page_and_leave_none_out() {
        for seq_len in 0..40 {
            for window in [None, Some(1), Some(7), Some(100)] {
                for exact in [false, true] {
                    let whole = TokenRange::of(window, 0, seq_len, 4);
                    let mut sent = Vec::new();
                    let chunks = (0..seq_len).step_by(7).map(|lo| (lo, (lo + 7).min(seq_len)));
                    for chunk in chunks.chain([(seq_len, seq_len)]) {
                        let part = whole.chunk(chunk, seq_len, 4, exact);
                        assert!(part.page_start <= part.start && part.start <= part.end);
                        sent.extend(part.start..part.end);
                    }
                    assert_eq!(sent, (whole.start..whole.end).collect::<Vec<_>>());
                }
            }
        }
    }
}
