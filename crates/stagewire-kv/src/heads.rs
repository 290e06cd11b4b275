//! Which rank holds which heads, and which rank sends them.
//!
//! Source of the ownership rule: `QKVParallelLinear` of vLLM and SGLang. With at most as many ranks as heads each rank has
//! an equal run of heads; with more ranks than heads, consecutive ranks share one. What a pair moves is the intersection
//! of what both own, which also holds where neither size divides the other.

/// Heads `[start, end)`, counted over the whole model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct HeadRange {
    /// The first head.
    pub(crate) start: u32,
    /// The one after the last.
    pub(crate) end: u32,
}

impl HeadRange {
    /// Number of heads.
    pub(crate) const fn len(self) -> u32 {
        self.end - self.start
    }
}

/// The heads that one source rank sends to one destination rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HeadSlice {
    /// The source's tensor-parallel rank.
    pub src_rank: u32,
    /// The destination's tensor-parallel rank.
    pub dst_rank: u32,
    /// First of the heads, counted in the source rank's own.
    pub src_head_start: u32,
    /// First of the heads, counted in the destination rank's own.
    pub dst_head_start: u32,
    /// How many.
    pub num_heads: u32,
}

/// Whether `heads` can be spread over `tp` ranks: one must divide the other.
pub(crate) const fn divides(heads: u32, tp: u32) -> bool {
    heads > 0 && tp > 0 && (heads.is_multiple_of(tp) || tp.is_multiple_of(heads))
}

/// The heads of one rank, where [`divides`] holds.
pub(crate) const fn owned(heads: u32, tp: u32, rank: u32) -> HeadRange {
    if tp <= heads {
        let each = heads / tp;
        HeadRange {
            start: rank * each,
            end: (rank + 1) * each,
        }
    } else {
        let head = rank / (tp / heads);
        HeadRange {
            start: head,
            end: head + 1,
        }
    }
}

/// Who sends what to `dst_rank`: one writer for each of its heads, where [`divides`] holds for both sizes.
///
/// Of the replicas of a head, the writer is the one that the peers' routing would ask first, so that replicas share the
/// destinations among them: the source rank that lies across `dst_rank`, moved into the ranks that hold the head.
pub(crate) fn slices(heads: u32, src_tp: u32, dst_tp: u32, dst_rank: u32) -> Vec<HeadSlice> {
    let wanted = owned(heads, dst_tp, dst_rank);
    let across = across(src_tp, dst_tp, dst_rank);
    let mut found = Vec::new();
    let mut head = wanted.start;
    while head < wanted.end {
        let src_rank = if src_tp <= heads {
            head / (heads / src_tp)
        } else {
            let replicas = src_tp / heads;
            across.clamp(head * replicas, (head + 1) * replicas - 1)
        };
        let held = owned(heads, src_tp, src_rank);
        let end = held.end.min(wanted.end);
        found.push(HeadSlice {
            src_rank,
            dst_rank,
            src_head_start: head - held.start,
            dst_head_start: head - wanted.start,
            num_heads: end - head,
        });
        head = end;
    }
    found
}

/// Who sends all `heads` to `dst_rank`, where every rank holds all of them.
pub(crate) fn replicated(heads: u32, src_tp: u32, dst_tp: u32, dst_rank: u32) -> HeadSlice {
    HeadSlice {
        src_rank: across(src_tp, dst_tp, dst_rank),
        dst_rank,
        src_head_start: 0,
        dst_head_start: 0,
        num_heads: heads,
    }
}

/// The source rank that lies across a destination rank when both sides are drawn equally long.
fn across(src_tp: u32, dst_tp: u32, dst_rank: u32) -> u32 {
    let rank = u64::from(dst_rank) * u64::from(src_tp) / u64::from(dst_tp);
    u32::try_from(rank).expect("a rank of the source")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn starts(heads: u32, src_tp: u32, dst_tp: u32) -> (Vec<u32>, Vec<u32>) {
        let all: Vec<_> = (0..dst_tp)
            .flat_map(|rank| slices(heads, src_tp, dst_tp, rank))
            .collect();
        let src = all.iter().map(|slice| slice.src_head_start).collect();
        (src, all.iter().map(|slice| slice.dst_head_start).collect())
    }

    #[test]
    fn published_head_starts() {
        assert_eq!(starts(8, 4, 2).1, [0, 2, 0, 2]);
        assert_eq!(starts(8, 2, 4).0, [0, 2, 0, 2]);
        assert_eq!(starts(2, 1, 4).0, [0, 0, 1, 1]);
    }

    #[test]
    fn every_head_has_one_writer_that_owns_it() {
        for heads in 1..=24 {
            let sizes = || (1..=32).filter(move |&tp| divides(heads, tp));
            for (src_tp, dst_tp) in sizes().flat_map(|src| sizes().map(move |dst| (src, dst))) {
                for rank in 0..dst_tp {
                    let wanted = owned(heads, dst_tp, rank);
                    let mut next = wanted.start;
                    for slice in slices(heads, src_tp, dst_tp, rank) {
                        let held = owned(heads, src_tp, slice.src_rank);
                        assert_eq!(wanted.start + slice.dst_head_start, next);
                        assert_eq!(held.start + slice.src_head_start, next);
                        next += slice.num_heads;
                        assert!(next <= held.end, "{heads} heads, {src_tp} -> {dst_tp}, {slice:?}");
                    }
                    assert_eq!(next, wanted.end);
                }
            }
        }
    }

    #[test]
    fn replicas_share_the_destinations() {
        let writers = |src_tp, dst_tp| -> Vec<u32> {
            (0..dst_tp)
                .flat_map(|rank| slices(2, src_tp, dst_tp, rank))
                .map(|slice| slice.src_rank)
                .collect()
        };
        assert_eq!(writers(8, 4), [0, 2, 4, 6]);
        assert_eq!(writers(4, 8), [0, 0, 1, 1, 2, 2, 3, 3]);
        assert_eq!(writers(8, 1), [0, 4]);
    }
}
