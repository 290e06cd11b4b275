use stagewire_core::{Chunking, DType, Entry, EntryValue, Manifest, PayloadKind, SchemaError, TensorSpec};

/// A video latent of 14.3 MB, as Wan 2.1 makes it for 121 frames of 1280×720: bf16, `[B, C, T, H, W]`.
const SHAPE: [u64; 5] = [1, 16, 31, 90, 160];

/// Dimension that chunks are cut along: time.
const CHUNK_DIM: u32 = 2;

/// The latent in this many chunks.
pub(super) fn latent(chunks: u32) -> Result<Manifest, SchemaError> {
    let latents = TensorSpec::new(DType::BF16, SHAPE)?;
    manifest("latents", latents, CHUNK_DIM, chunks)
}

/// Plain bytes in this many chunks.
pub(super) fn flat(nbytes: u64, chunks: u32) -> Result<Manifest, SchemaError> {
    let bytes = TensorSpec::new(DType::U8, [nbytes])?;
    manifest("bytes", bytes, 0, chunks)
}

fn manifest(name: &str, spec: TensorSpec, chunk_dim: u32, chunks: u32) -> Result<Manifest, SchemaError> {
    let entry = Entry {
        name: name.to_owned(),
        value: EntryValue::Tensor(spec),
    };
    let manifest = Manifest::new(PayloadKind::Latent, vec![entry])?;
    match chunks {
        1 => Ok(manifest),
        chunks => manifest.with_chunking(Chunking::new(chunk_dim, chunks)?),
    }
}
