use serde::{Deserialize, Serialize};

use crate::{ByteCount, Classify, DType, Device, ErrorClass};

/// Why a tensor, chunking or manifest is not allowed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum SchemaError {
    #[error("unknown dtype {name:?}")]
    UnknownDType { name: String },
    #[error("a tensor of shape {shape:?} and dtype {dtype} does not fit in 64-bit sizes")]
    TooLarge { shape: Vec<u64>, dtype: DType },
    #[error("num_chunks is {count}; it must be 1 to {max}")]
    ChunkCount { count: u64, max: u64 },
    #[error("chunk_dim {dim} is out of range: the tensor has {rank} dimensions (shape {shape:?})")]
    ChunkDim { dim: u64, rank: u64, shape: Vec<u64> },
    #[error("cannot cut dimension {dim} of shape {shape:?} into {count} chunks: it has {extent} elements")]
    ChunkTooFine {
        dim: u64,
        shape: Vec<u64>,
        count: u64,
        extent: u64,
    },
    #[error("chunk {index} does not exist: the payload has {count}")]
    NoSuchChunk { index: u32, count: u32 },
    #[error("the payload names tensor {name:?} twice")]
    DuplicateName { name: String },
    #[error("the payload has no tensor to cut into {count} chunks")]
    NothingToChunk { count: u32 },
    #[error("metadata of {size} bytes is above the limit of {limit} bytes")]
    MetadataTooLarge { size: usize, limit: usize },
    #[error("metadata is not JSON: {error}")]
    MetadataNotJson { error: String },
    #[error("unknown payload kind {name:?}; it is one of embedding, latent, checkpoint, feature, frames")]
    UnknownKind { name: String },
}

impl Classify for SchemaError {
    fn class(&self) -> ErrorClass {
        ErrorClass::Invalid
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::UnknownDType { .. } => "tensor.dtype",
            Self::TooLarge { .. } => "tensor.too_large",
            Self::MetadataTooLarge { .. } | Self::MetadataNotJson { .. } => "payload.metadata",
            Self::DuplicateName { .. } => "payload.duplicate_name",
            Self::UnknownKind { .. } => "payload.kind",
            _ => "payload.chunks",
        }
    }
}

/// Shape, element type and place of one tensor. Layout is row-major and contiguous (C order).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorSpec {
    dtype: DType,
    shape: Vec<u64>,
    device: Device,
}

impl TensorSpec {
    /// A tensor in host memory. An empty shape is a scalar; an extent of 0 is an empty tensor.
    ///
    /// # Errors
    /// [`SchemaError::TooLarge`] where the size in bytes does not fit in 63 bits.
    pub fn new(dtype: DType, shape: impl Into<Vec<u64>>) -> Result<Self, SchemaError> {
        let shape = shape.into();
        // Checked without the zeros, so that no partial product can overflow in whatever order it is taken.
        let bound = shape
            .iter()
            .filter(|extent| **extent != 0)
            .try_fold(dtype.size(), |a, b| a.checked_mul(*b));
        match bound {
            Some(bytes) if bytes <= i64::MAX as u64 => Ok(Self {
                dtype,
                shape,
                device: Device::Cpu,
            }),
            _ => Err(SchemaError::TooLarge { shape, dtype }),
        }
    }

    /// The same tensor on another device.
    #[must_use]
    pub fn on(mut self, device: Device) -> Self {
        self.device = device;
        self
    }

    /// Element type.
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// Extents, outermost first.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Where the memory is.
    pub const fn device(&self) -> Device {
        self.device
    }

    /// Size of all elements.
    pub fn nbytes(&self) -> ByteCount {
        ByteCount(self.shape.iter().product::<u64>() * self.dtype.size())
    }

    /// Checks again what [`TensorSpec::new`] checks, for a value that came from outside.
    ///
    /// # Errors
    /// [`SchemaError::TooLarge`].
    pub(crate) fn check(&self) -> Result<(), SchemaError> {
        Self::new(self.dtype, self.shape.clone()).map(drop)
    }
}
