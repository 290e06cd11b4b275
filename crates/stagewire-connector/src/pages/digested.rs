use stagewire_core::{Chunking, Manifest, Record, TensorSpec};
use stagewire_transfer::Memory;

/// The producer's bytes, to be digested chunk by chunk as they are shown.
#[derive(Debug)]
pub(super) struct Digested {
    tensors: Vec<(TensorSpec, Memory)>,
    chunking: Option<Chunking>,
}

impl Digested {
    pub(super) fn new(manifest: &Manifest, tensors: &[Memory]) -> Self {
        Self {
            tensors: manifest.tensors().cloned().zip(tensors.iter().cloned()).collect(),
            chunking: manifest.chunking(),
        }
    }

    /// Digest of chunk `index` of every tensor.
    pub(super) fn of(&self, index: u32) -> u64 {
        let digests = self.tensors.iter().map(|(spec, memory)| {
            let record = match self.chunking {
                None => Record::contiguous(0, 0, spec.nbytes().0),
                // The manifest was checked, so that there is such a chunk.
                Some(chunking) => chunking
                    .slice(spec, index)
                    .map_or(Record::contiguous(0, 0, 0), |slice| slice.run.record()),
            };
            let record = if record.nbytes() == 0 {
                Record::contiguous(0, 0, 0)
            } else {
                record
            };
            // Only memory of a device cannot be read, which is not published here.
            memory.digest(&record).unwrap_or_default()
        });
        crate::digest::combine(digests)
    }
}
