//! How many bytes the outputs of a stage have, learnt from attempts that were completed.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Shapes of one stage that are remembered; the one that was seen last longest ago makes room.
const SHAPES: usize = 256;
/// Outputs of a shape after which those before them begin to be forgotten: one that was much larger than all the others
/// counts for as many more at least, and for twice as many at most.
const WINDOW: u32 = 16;
/// Outputs of a stage after which a shape that was not seen among them says nothing of other shapes any more.
const RECENT: u64 = 256;

/// Sizes of the outputs of one stage. What is set aside for an output must be enough for it, so that the largest of the
/// last ones of its shape counts, and not the mean.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct Volume {
    /// Number of outputs seen.
    seen: u64,
    shapes: BTreeMap<u64, Known>,
    /// The largest of the last outputs of the shapes that were seen lately, and the shape that it is of.
    largest: Option<(u64, u64)>,
}

/// What is known of a shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Known {
    /// The last outputs, up to [`WINDOW`] of them.
    now: Span,
    /// As many before those; at first the same.
    before: Span,
    count: u32,
    /// When the last one was seen, in outputs seen.
    last: u64,
}

/// The smallest and the largest of some outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Span {
    least: u64,
    most: u64,
}

impl Span {
    const fn of(nbytes: u64) -> Self {
        Self {
            least: nbytes,
            most: nbytes,
        }
    }

    fn with(self, other: Self) -> Self {
        Self {
            least: self.least.min(other.least),
            most: self.most.max(other.most),
        }
    }
}

impl Known {
    fn learn(&mut self, nbytes: u64) {
        if self.count == WINDOW {
            (self.before, self.now, self.count) = (self.now, Span::of(nbytes), 1);
        } else {
            (self.now, self.count) = (self.now.with(Span::of(nbytes)), self.count + 1);
        }
    }

    fn span(&self) -> Span {
        self.now.with(self.before)
    }
}

impl Volume {
    /// Learns from the output of an attempt that was completed.
    pub(crate) fn learn(&mut self, shape: u64, nbytes: u64) {
        self.seen += 1;
        if !self.shapes.contains_key(&shape) && self.shapes.len() >= SHAPES {
            let oldest = self.shapes.iter().min_by_key(|(_, known)| known.last);
            if let Some(oldest) = oldest.map(|(shape, _)| *shape) {
                self.shapes.remove(&oldest);
            }
        }
        let known = self.shapes.entry(shape).or_insert(Known {
            now: Span::of(nbytes),
            before: Span::of(nbytes),
            count: 0,
            last: 0,
        });
        known.learn(nbytes);
        known.last = self.seen;
        let most = known.span().most;
        match self.largest {
            Some((largest, _)) if most >= largest => self.largest = Some((most, shape)),
            // Most outputs are like those before them: nothing to look for.
            Some((_, of)) if of != shape && self.shapes.get(&of).is_some_and(|known| self.is_recent(known)) => {}
            _ => {
                let recent = self.shapes.iter().filter(|(_, known)| self.is_recent(known));
                self.largest = recent.map(|(shape, known)| (known.span().most, *shape)).max();
            }
        }
    }

    const fn is_recent(&self, known: &Known) -> bool {
        known.last + RECENT > self.seen
    }

    /// The largest of the last outputs of this shape; `None` where there was none.
    pub(crate) fn most_of(&self, shape: u64) -> Option<u64> {
        self.shapes.get(&shape).map(|known| known.span().most)
    }

    /// The smallest of the last outputs of this shape; `None` where there was none.
    pub(crate) fn least_of(&self, shape: u64) -> Option<u64> {
        self.shapes.get(&shape).map(|known| known.span().least)
    }

    /// The largest of the last outputs of any shape; `None` where there was none.
    pub(crate) fn most(&self) -> Option<u64> {
        self.largest.map(|(nbytes, _)| nbytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_of_each_shape_counts() {
        let mut volume = Volume::default();
        assert_eq!((volume.most_of(1), volume.most()), (None, None));
        for (shape, nbytes) in [(1, 10), (1, 30), (1, 20), (2, 5)] {
            volume.learn(shape, nbytes);
        }
        assert_eq!((volume.least_of(1), volume.most_of(1)), (Some(10), Some(30)));
        assert_eq!(
            (volume.most_of(2), volume.most_of(3), volume.most()),
            (Some(5), None, Some(30))
        );
    }

    #[test]
    fn one_that_was_much_larger_is_forgotten_after_some_others_and_not_before() {
        let mut volume = Volume::default();
        volume.learn(1, 10);
        volume.learn(1, 1 << 40);
        let mut after = 0;
        while volume.most_of(1) != Some(10) {
            volume.learn(1, 10);
            after += 1;
        }
        assert!((WINDOW..=2 * WINDOW).contains(&after), "after {after}");
        assert_eq!(volume.most(), Some(10));
    }

    #[test]
    fn a_shape_that_is_not_seen_any_more_says_nothing_of_others() {
        let mut volume = Volume::default();
        volume.learn(1, 1 << 40);
        for _ in 1..RECENT {
            volume.learn(2, 10);
        }
        assert_eq!(volume.most(), Some(1 << 40));
        volume.learn(2, 10);
        assert_eq!((volume.most(), volume.most_of(1)), (Some(10), Some(1 << 40)));
    }

    #[test]
    fn the_largest_is_that_of_all_shapes_seen_lately() {
        let mut volume = Volume::default();
        for step in 0..20_000_u64 {
            // Shapes and sizes without a pattern: some shapes stay away for long, some sizes are far out.
            let draw = step.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
            let nbytes = if draw % 97 == 0 { draw } else { draw % 1_000 };
            volume.learn((draw % 300) >> (step / 2_000), nbytes);
            let lately = volume.shapes.values().filter(|known| known.last + RECENT > volume.seen);
            assert_eq!(
                volume.most(),
                lately.map(|known| known.span().most).max(),
                "after {step}"
            );
        }
    }

    #[test]
    fn memory_is_bounded() {
        let mut volume = Volume::default();
        volume.learn(7, 1_000);
        for shape in 100..10_000 {
            volume.learn(shape, 1);
        }
        assert_eq!(volume.shapes.len(), SHAPES);
        assert_eq!((volume.most_of(7), volume.most()), (None, Some(1)));
    }
}
