use serde::{Deserialize, Serialize};

use crate::{Record, SchemaError, TensorSpec};

/// How a payload is cut: into `count` chunks along dimension `dim` of every tensor.
///
/// Counts need not divide: `n` elements into `k` chunks gives the first `n mod k` chunks one element more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chunking {
    dim: u32,
    count: u32,
}

/// Equal rows of bytes at equal distances: where a chunk lies inside its row-major tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Bytes from the start of the tensor to the first row.
    pub offset: u64,
    /// Bytes of one row.
    pub width: u64,
    /// Number of rows.
    pub rows: u64,
    /// Bytes from the start of one row to the start of the next.
    pub pitch: u64,
}

impl Run {
    /// The copy of this chunk between two tensors of the same shape.
    pub fn record(&self) -> Record {
        Record {
            src_offset: self.offset,
            dst_offset: self.offset,
            width: self.width,
            rows: self.rows,
            src_pitch: self.pitch,
            dst_pitch: self.pitch,
        }
    }
}

/// One chunk of one tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkSlice {
    /// First element along the chunk dimension.
    pub start: u64,
    /// Number of elements along the chunk dimension.
    pub len: u64,
    /// Where its bytes lie.
    pub run: Run,
}

impl Chunking {
    /// Highest number of chunks of one payload.
    pub const MAX: u32 = 65_536;

    /// Cuts along `dim` into `count` chunks.
    ///
    /// # Errors
    /// [`SchemaError::ChunkCount`] where `count` is 0 or above [`Chunking::MAX`].
    pub fn new(dim: u32, count: u32) -> Result<Self, SchemaError> {
        if (1..=Self::MAX).contains(&count) {
            Ok(Self { dim, count })
        } else {
            Err(SchemaError::ChunkCount {
                count: count.into(),
                max: Self::MAX.into(),
            })
        }
    }

    /// The dimension that is cut.
    pub const fn dim(&self) -> u32 {
        self.dim
    }

    /// Number of chunks.
    pub const fn count(&self) -> u32 {
        self.count
    }

    /// Chunk `index` of `tensor`. For `[B, C, T, H, W]` cut along T it is B × C runs of `len × H × W` elements.
    ///
    /// # Errors
    /// [`SchemaError`] where the tensor has no such dimension, fewer elements there than chunks, or no such chunk.
    pub fn slice(&self, tensor: &TensorSpec, index: u32) -> Result<ChunkSlice, SchemaError> {
        let (dim, count, shape) = (self.dim as usize, u64::from(self.count), tensor.shape());
        let Some(&extent) = shape.get(dim) else {
            return Err(SchemaError::ChunkDim {
                dim: dim as u64,
                rank: shape.len() as u64,
                shape: shape.to_vec(),
            });
        };
        if extent < count {
            return Err(SchemaError::ChunkTooFine {
                dim: dim as u64,
                shape: shape.to_vec(),
                count,
                extent,
            });
        }
        if index >= self.count {
            return Err(SchemaError::NoSuchChunk {
                index,
                count: self.count,
            });
        }
        let (base, longer, index) = (extent / count, extent % count, u64::from(index));
        let start = index * base + index.min(longer);
        let len = base + u64::from(index < longer);
        let rows = shape[..dim].iter().product();
        // A chunk of an empty tensor lies nowhere, so that it is inside.
        let inner = match rows {
            0 => 0,
            _ => shape[dim + 1..].iter().product::<u64>() * tensor.dtype().size(),
        };
        let run = Run {
            offset: start * inner,
            width: len * inner,
            rows,
            pitch: extent * inner,
        };
        Ok(ChunkSlice { start, len, run })
    }

    /// Checks again what [`Chunking::new`] checks, for a value that came from outside.
    pub(crate) fn check(&self) -> Result<(), SchemaError> {
        Self::new(self.dim, self.count).map(drop)
    }
}
