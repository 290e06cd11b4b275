use std::collections::BTreeMap;

use stagewire_core::{Handover, PayloadId};

/// Most handovers that one attempt reports: with the longest names, about 1 MiB of a message.
const MOST: usize = 4096;

/// What an attempt has read: the newest handover of each chunk, of the newest chunks.
#[derive(Debug, Default)]
pub(crate) struct Handovers {
    by_chunk: BTreeMap<(PayloadId, u32), u64>,
    by_age: BTreeMap<u64, Handover>,
    next: u64,
}

impl Handovers {
    pub(super) fn note(&mut self, handover: &Handover) {
        let chunk = (handover.payload, handover.chunk);
        if let Some(before) = self.by_chunk.insert(chunk, self.next) {
            self.by_age.remove(&before);
        }
        self.by_age.insert(self.next, handover.clone());
        self.next += 1;
        if self.by_age.len() > MOST
            && let Some((_, oldest)) = self.by_age.pop_first()
        {
            self.by_chunk.remove(&(oldest.payload, oldest.chunk));
        }
    }
}

/// Oldest first.
impl IntoIterator for Handovers {
    type Item = Handover;
    type IntoIter = std::collections::btree_map::IntoValues<u64, Handover>;

    fn into_iter(self) -> Self::IntoIter {
        self.by_age.into_values()
    }
}

#[cfg(test)]
mod tests {
    use stagewire_core::{StageName, Timestamp, TransferMode};
    use uuid::Uuid;

    use super::*;

    fn handover(payload: u128, chunk: usize, end: u64) -> Handover {
        Handover {
            payload: PayloadId(Uuid::from_u128(payload)),
            from: StageName::new("encode").expect("a name"),
            chunk: u32::try_from(chunk).expect("small"),
            chunks: u32::MAX,
            nbytes: 1,
            mode: TransferMode::P2p,
            path: "shm".to_owned(),
            begin: Timestamp(0),
            end: Timestamp(end),
        }
    }

    #[test]
    fn a_chunk_that_is_read_again_counts_once() {
        let mut handovers = Handovers::default();
        for end in 0..3 {
            handovers.note(&handover(1, 0, end));
            handovers.note(&handover(2, 0, end));
        }
        handovers.note(&handover(1, 1, 3));
        let kept: Vec<_> = handovers.into_iter().collect();
        assert_eq!(kept, [handover(1, 0, 2), handover(2, 0, 2), handover(1, 1, 3)]);
    }

    #[test]
    fn the_newest_chunks_are_kept() {
        let mut handovers = Handovers::default();
        for chunk in 0..MOST + 2 {
            handovers.note(&handover(1, chunk, 0));
        }
        // One that was dropped may come again.
        handovers.note(&handover(1, 0, 1));
        let kept: Vec<_> = handovers.into_iter().map(|handover| handover.chunk as usize).collect();
        assert_eq!((kept.len(), kept[0], kept[MOST - 1]), (MOST, 3, 0));
    }
}
