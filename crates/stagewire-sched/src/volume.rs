//! How many bytes the outputs of a stage have, learnt from those that were published.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Shapes of one stage that are remembered; the one that was seen last longest ago makes room.
const SHAPES: usize = 256;

/// Sizes of the outputs of one stage. What is set aside for an output must be enough for it, so that the largest one of its
/// shape counts, and not the mean.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct Volume {
    /// Number of outputs seen.
    seen: u64,
    shapes: BTreeMap<u64, Known>,
    /// The largest output of these shapes.
    largest: Option<u64>,
}

/// What is known of a shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Known {
    least: u64,
    most: u64,
    /// When the last one was seen, in outputs seen.
    last: u64,
}

impl Volume {
    /// Learns from an output that was published.
    pub(crate) fn learn(&mut self, shape: u64, nbytes: u64) {
        self.seen += 1;
        if !self.shapes.contains_key(&shape) && self.shapes.len() >= SHAPES {
            let oldest = self.shapes.iter().min_by_key(|(_, known)| known.last);
            if let Some(oldest) = oldest.map(|(shape, _)| *shape) {
                self.shapes.remove(&oldest);
                self.largest = self.shapes.values().map(|known| known.most).max();
            }
        }
        self.largest = self.largest.max(Some(nbytes));
        let known = self.shapes.entry(shape).or_insert(Known {
            least: nbytes,
            most: nbytes,
            last: 0,
        });
        *known = Known {
            least: known.least.min(nbytes),
            most: known.most.max(nbytes),
            last: self.seen,
        };
    }

    /// The largest output of this shape; `None` where there was none.
    pub(crate) fn most_of(&self, shape: u64) -> Option<u64> {
        self.shapes.get(&shape).map(|known| known.most)
    }

    /// The smallest output of this shape; `None` where there was none.
    pub(crate) fn least_of(&self, shape: u64) -> Option<u64> {
        self.shapes.get(&shape).map(|known| known.least)
    }

    /// The largest output of any shape; `None` where there was none.
    pub(crate) const fn most(&self) -> Option<u64> {
        self.largest
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
