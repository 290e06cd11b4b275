//! Which chunks of a payload are complete.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The chunks of one payload that are complete, in the order in which they became so. It only grows, so that who follows it
/// needs no copy, and looks at each chunk once.
#[derive(Debug, Default)]
pub(crate) struct Complete(Mutex<Log>);

#[derive(Debug, Default)]
struct Log {
    order: Vec<u32>,
    has: Vec<bool>,
    /// How many there are before the first that is not complete.
    readable: u32,
    /// Of each chunk, where its producer wants them compared; else empty.
    digests: Vec<Option<u64>>,
}

impl Complete {
    /// None of so many chunks.
    pub(crate) fn none_of(chunks: u32) -> Self {
        Self(Mutex::new(Log {
            has: vec![false; chunks as usize],
            ..Log::default()
        }))
    }

    fn lock(&self) -> MutexGuard<'_, Log> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A chunk is complete. Said twice, and of one that does not exist, it changes nothing.
    pub(crate) fn add(&self, index: u32, digest: Option<u64>) {
        self.lock().add(index, digest);
    }

    /// Stretches of chunks are complete, with a digest for each chunk, or for none.
    pub(crate) fn extend(&self, stretches: &[Range<u32>], digests: &[u64]) {
        let mut log = self.lock();
        let chunks = log.has.len() as u32;
        let known = stretches
            .iter()
            .flat_map(|stretch| stretch.start..stretch.end.min(chunks));
        for (nth, index) in known.enumerate() {
            log.add(index, digests.get(nth).copied());
        }
    }

    pub(crate) fn has(&self, index: u32) -> bool {
        self.lock().has.get(index as usize).is_some_and(|has| *has)
    }

    /// Number of chunks that are complete.
    pub(crate) fn len(&self) -> usize {
        self.lock().order.len()
    }

    /// Chunks that may be read, counted from the first.
    pub(crate) fn readable(&self) -> u32 {
        self.lock().readable
    }

    /// Digest of a complete chunk, where its producer wants it compared.
    pub(crate) fn digest(&self, index: u32) -> Option<u64> {
        *self.lock().digests.get(index as usize)?
    }

    /// Whether a chunk that is complete is to be compared.
    pub(crate) fn has_digests(&self) -> bool {
        !self.lock().digests.is_empty()
    }

    /// The chunks that became complete since there were `known` of them, which are counted in `known` then.
    pub(crate) fn since(&self, known: &mut usize) -> Vec<u32> {
        let log = self.lock();
        let new = log.order[*known..].to_vec();
        *known = log.order.len();
        new
    }

    /// As [`Complete::since`], in stretches, with what [`Complete::extend`] takes.
    pub(crate) fn stretches_since(&self, known: &mut usize) -> (Vec<Range<u32>>, Vec<u64>) {
        let mut new = self.since(known);
        new.sort_unstable();
        let mut stretches: Vec<Range<u32>> = Vec::new();
        for index in &new {
            match stretches.last_mut() {
                Some(last) if last.end == *index => last.end += 1,
                _ => stretches.push(*index..*index + 1),
            }
        }
        let log = self.lock();
        let digest = |index: &u32| log.digests.get(*index as usize).copied().flatten();
        (stretches, new.iter().filter_map(digest).collect())
    }
}

impl Log {
    fn add(&mut self, index: u32, digest: Option<u64>) {
        match self.has.get_mut(index as usize) {
            Some(has) if !*has => *has = true,
            _ => return,
        }
        self.order.push(index);
        if let Some(digest) = digest {
            self.digests.resize(self.has.len(), None);
            self.digests[index as usize] = Some(digest);
        }
        let rest = &self.has[self.readable as usize..];
        self.readable += rest.iter().take_while(|has| **has).count() as u32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_chunk_is_told_once_in_whatever_order_they_come() {
        let (there, here) = (Complete::none_of(6), Complete::none_of(6));
        let mut known = 0;
        for (chunks, told, readable) in [
            (vec![5], vec![(5, 6)], 0),
            (vec![2, 1, 2, 9], vec![(1, 3)], 0),
            (vec![], vec![], 0),
            (vec![0, 4], vec![(0, 1), (4, 5)], 3),
            (vec![3], vec![(3, 4)], 6),
        ] {
            for chunk in chunks {
                there.add(chunk, Some(chunk.into()));
            }
            let (stretches, digests) = there.stretches_since(&mut known);
            let ends: Vec<_> = stretches.iter().map(|stretch| (stretch.start, stretch.end)).collect();
            assert_eq!(ends, told);
            here.extend(&stretches, &digests);
            assert_eq!((here.readable(), there.readable()), (readable, readable));
            assert_eq!((0..7).filter(|chunk| here.has(*chunk)).count(), here.len());
        }
        let digests: Vec<_> = (0..7).map(|chunk| here.digest(chunk)).collect();
        assert_eq!(digests, [Some(0), Some(1), Some(2), Some(3), Some(4), Some(5), None]);
    }

    #[test]
    fn what_a_holder_says_of_chunks_that_do_not_exist_is_not_kept() {
        let complete = Complete::none_of(2);
        let backwards = Range { start: 5, end: 3 };
        complete.extend(&[1..u32::MAX, backwards, 7..9], &[]);
        assert_eq!((complete.len(), complete.readable(), complete.has(1)), (1, 0, true));
        assert!(!complete.has_digests());
    }
}
