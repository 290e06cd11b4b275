use anyhow::ensure;
use stagewire_connector::ChunkView;
use stagewire_core::{Chunking, DType, Entry, EntryValue, Manifest, PayloadKind, SchemaError, TensorSpec};

/// A video latent of 14.3 MB, as Wan 2.1 makes it for 121 frames of 1280×720: bf16, `[B, C, T, H, W]`.
const SHAPE: [u64; 5] = [1, 16, 31, 90, 160];

/// Dimension that chunks are cut along: time.
const CHUNK_DIM: u32 = 2;

/// The bytes of a latent, different in each round.
#[derive(Debug)]
pub(super) struct Latent {
    bytes: Vec<u8>,
}

impl Latent {
    pub(super) fn new() -> Self {
        let spec = TensorSpec::new(DType::BF16, SHAPE).expect("small");
        let len = usize::try_from(spec.nbytes().0).expect("small");
        Self { bytes: vec![0; len] }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    pub(in crate::bench) fn paint(&mut self, round: u64) {
        paint(&mut self.bytes, round);
    }

    /// Every byte of a chunk, against this latent.
    pub(super) fn check(&self, view: &ChunkView) -> anyhow::Result<()> {
        let run = view.run();
        for (index, row) in (0..).zip(view.rows()) {
            let start = usize::try_from(run.offset + index * run.pitch)?;
            ensure!(
                self.bytes.get(start..start + row.len()) == Some(row),
                "the bytes at {start} are not those that were sent"
            );
        }
        Ok(())
    }
}

/// Fills memory with bytes that tell rounds and places apart.
pub(in crate::bench) fn paint(bytes: &mut [u8], round: u64) {
    for (index, word) in (1_u64..).zip(bytes.chunks_mut(8)) {
        let value = (index ^ round << 32).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes();
        word.copy_from_slice(&value[..word.len()]);
    }
}

/// The latent in this many chunks.
pub(in crate::bench) fn manifest(chunks: u32) -> Result<Manifest, SchemaError> {
    let latents = Entry {
        name: "latents".to_owned(),
        value: EntryValue::Tensor(TensorSpec::new(DType::BF16, SHAPE)?),
    };
    let manifest = Manifest::new(PayloadKind::Latent, vec![latents])?;
    if chunks == 1 {
        return Ok(manifest);
    }
    manifest.with_chunking(Chunking::new(CHUNK_DIM, chunks)?)
}
