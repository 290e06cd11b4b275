use std::ptr::NonNull;
use std::sync::Arc;

use stagewire_core::{ByteCount, ChunkSlice, Chunking, Handover, Run, TensorSpec};
use stagewire_transfer::{Mapping, Target};

/// One chunk of a payload: a view of every tensor.
#[derive(Debug, Clone)]
pub struct Chunk {
    /// Index of the chunk, from 0.
    pub index: u32,
    /// Number of chunks.
    pub count: u32,
    /// One view per tensor, in the order of [`Manifest::tensors`](stagewire_core::Manifest::tensors).
    pub tensors: Vec<ChunkView>,
    /// When and how it came.
    pub handover: Handover,
}

/// A whole payload.
#[derive(Debug, Clone)]
pub struct Fetched {
    /// One view per tensor, in the order of [`Manifest::tensors`](stagewire_core::Manifest::tensors).
    pub tensors: Vec<ChunkView>,
    /// When and how each chunk came.
    pub handovers: Vec<Handover>,
}

/// Memory behind a view; keeps it alive.
#[derive(Debug, Clone)]
pub enum ViewMemory {
    /// No bytes.
    Empty,
    /// The holder's own memory, read-only.
    Mapped(Mapping),
    /// Memory of this process: the caller's destination, or private.
    Target(Arc<Target>),
}

/// One tensor of one chunk: its part of the whole tensor's memory. Cloning is cheap.
#[derive(Debug, Clone)]
pub struct ChunkView {
    spec: TensorSpec,
    shape: Vec<u64>,
    run: Run,
    start: u64,
    memory: ViewMemory,
}

impl ChunkView {
    /// Chunk `index` of a tensor, or all of it.
    pub(super) fn new(spec: &TensorSpec, chunk: Option<(Chunking, ChunkSlice)>, memory: ViewMemory) -> Self {
        let mut shape = spec.shape().to_vec();
        let nbytes = spec.nbytes().0;
        let (mut start, mut run) = (
            0,
            Run {
                offset: 0,
                width: nbytes,
                rows: 1,
                pitch: nbytes,
            },
        );
        if let Some((chunking, slice)) = chunk {
            shape[chunking.dim() as usize] = slice.len;
            (start, run) = (slice.start, slice.run);
        }
        Self {
            spec: spec.clone(),
            shape,
            run,
            start,
            memory,
        }
    }

    /// The whole tensor that this is a part of.
    pub const fn tensor(&self) -> &TensorSpec {
        &self.spec
    }

    /// Extents of the part.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// First element of the part along the chunk dimension.
    pub const fn start(&self) -> u64 {
        self.start
    }

    /// Distance between neighbours along each dimension, in elements. They are those of the whole tensor.
    pub fn strides(&self) -> Vec<u64> {
        let mut strides = vec![1; self.spec.shape().len()];
        for dim in (1..strides.len()).rev() {
            // An extent of 0 has no neighbours; 1 keeps the outer strides what consumers expect of an empty tensor.
            strides[dim - 1] = strides[dim] * self.spec.shape()[dim].max(1);
        }
        strides
    }

    /// Where the part lies in its memory.
    pub const fn run(&self) -> Run {
        self.run
    }

    /// Bytes of the part.
    pub const fn nbytes(&self) -> ByteCount {
        ByteCount(self.run.width * self.run.rows)
    }

    /// The memory of the whole tensor. Bytes outside the part may still change.
    pub const fn memory(&self) -> &ViewMemory {
        &self.memory
    }

    /// The part's first byte; dangling where it has none. Memory that is mapped must not be written to.
    pub fn as_ptr(&self) -> NonNull<u8> {
        let base = match &self.memory {
            ViewMemory::Empty => return NonNull::dangling(),
            ViewMemory::Mapped(mapping) => mapping.as_ptr().cast_mut(),
            ViewMemory::Target(target) => target.as_ptr().as_ptr(),
        };
        // The run was checked to lie inside the memory; `wrapping_add` asks for no proof of it.
        NonNull::new(base.wrapping_add(usize::try_from(self.run.offset).unwrap_or_default()))
            .unwrap_or(NonNull::dangling())
    }

    /// The part's rows of bytes, in order.
    ///
    /// # Panics
    /// Never: the rows of a chunk that was handed out are there.
    pub fn rows(&self) -> impl Iterator<Item = &[u8]> {
        let Run {
            offset,
            width,
            rows,
            pitch,
        } = self.run;
        let rows = if self.nbytes().0 == 0 { 0 } else { rows };
        (0..rows).map(move |row| {
            let start = offset + row * pitch;
            let range = start..start + width;
            match &self.memory {
                ViewMemory::Empty => &[][..],
                ViewMemory::Mapped(mapping) => {
                    let index = |at| usize::try_from(at).expect("it is mapped, so it can be addressed");
                    &mapping[index(range.start)..index(range.end)]
                }
                ViewMemory::Target(target) => target.slice(range).expect("the chunk was pulled before it was shown"),
            }
        })
    }

    /// A contiguous copy of the part, row-major.
    pub fn to_vec(&self) -> Vec<u8> {
        self.rows().flatten().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use stagewire_core::DType;

    use super::*;

    #[test]
    fn a_view_has_the_chunks_shape_and_the_tensors_strides() {
        let spec = TensorSpec::new(DType::F32, [2, 5, 3]).expect("small");
        let chunking = Chunking::new(1, 2).expect("2 chunks");
        let slice = chunking.slice(&spec, 1).expect("there");
        let view = ChunkView::new(&spec, Some((chunking, slice)), ViewMemory::Empty);
        assert_eq!((view.shape(), view.start()), ([2, 2, 3].as_slice(), 3));
        assert_eq!(view.strides(), [15, 3, 1]);
        assert_eq!(view.nbytes(), ByteCount(2 * 2 * 3 * 4));
    }

    #[test]
    fn scalars_and_empty_tensors_have_views() {
        let scalar = ChunkView::new(
            &TensorSpec::new(DType::F64, []).expect("scalar"),
            None,
            ViewMemory::Empty,
        );
        assert_eq!(
            (scalar.shape(), scalar.strides().len(), scalar.nbytes()),
            ([].as_slice(), 0, ByteCount(8))
        );
        let empty = ChunkView::new(
            &TensorSpec::new(DType::I8, [3, 0, 2]).expect("empty"),
            None,
            ViewMemory::Empty,
        );
        assert_eq!((empty.rows().count(), empty.to_vec().len()), (0, 0));
        assert_eq!(empty.strides(), [2, 2, 1]);
    }
}
