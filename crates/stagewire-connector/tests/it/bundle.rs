//! Bundles with bytes that tell where they belong.

use proptest::prelude::*;
use serde::{Deserialize, Serialize};
use stagewire_connector::{ChunkView, Owner};
use stagewire_core::{Chunking, DType, Entry, EntryValue, Lease, Manifest, PayloadKind, TensorSpec};
use stagewire_transfer::{Arena, Borrowed, Memory};

/// A payload that its consumer deletes.
pub(crate) const CONSUMED: Owner = Owner::Lease(Lease::DeleteOnConsume);

/// A bundle to publish: what is under each name, how it is cut, and where its bytes are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Bundle {
    pub(crate) entries: Vec<EntryValue>,
    pub(crate) chunking: Option<(u32, u32)>,
    pub(crate) arena: bool,
    /// Makes the bytes of one bundle differ from those of another.
    pub(crate) seed: u64,
}

impl Bundle {
    pub(crate) fn one(shape: &[u64]) -> Self {
        Self::many(vec![EntryValue::Tensor(spec(DType::F32, shape))])
    }

    pub(crate) fn many(entries: Vec<EntryValue>) -> Self {
        Self {
            entries,
            chunking: None,
            arena: true,
            seed: 1,
        }
    }

    pub(crate) fn cut(mut self, dim: u32, count: u32) -> Self {
        self.chunking = Some((dim, count));
        self
    }

    pub(crate) fn borrowed(mut self) -> Self {
        self.arena = false;
        self
    }

    pub(crate) fn seeded(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    pub(crate) fn manifest(&self) -> Manifest {
        let entries = self.entries.iter().enumerate().map(|(index, value)| Entry {
            name: format!("entry{index}"),
            value: value.clone(),
        });
        let manifest = Manifest::new(PayloadKind::Latent, entries.collect()).expect("names differ");
        match self.chunking {
            Some((dim, count)) => manifest
                .with_chunking(Chunking::new(dim, count).expect("a count"))
                .expect("it can be cut so"),
            None => manifest,
        }
    }

    /// The bytes of tensor `index`.
    pub(crate) fn bytes(&self, index: usize, len: u64) -> Vec<u8> {
        self.bytes_at(index, 0..len)
    }

    fn bytes_at(&self, index: usize, range: std::ops::Range<u64>) -> Vec<u8> {
        let salt = self.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (index as u64).wrapping_mul(0xD1B5_4A32_D192_ED03);
        range
            .map(|at| ((salt ^ at).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 56) as u8)
            .collect()
    }

    pub(crate) fn memory(&self, arena: &Arena) -> Vec<Memory> {
        let manifest = self.manifest();
        let tensors = manifest.tensors().enumerate().map(|(index, tensor)| {
            let bytes = self.bytes(index, tensor.nbytes().0);
            if !self.arena || bytes.is_empty() {
                return Memory::Borrowed(Borrowed::from(bytes));
            }
            let mut extent = arena.allocate(bytes.len() as u64).expect("the arena has room");
            extent.copy_from_slice(&bytes);
            Memory::Arena(extent.freeze())
        });
        tensors.collect()
    }

    /// Checks views of one chunk, or of the whole payload.
    pub(crate) fn check(&self, views: &[ChunkView], chunk: Option<u32>) {
        let manifest = self.manifest();
        assert_eq!(views.len(), manifest.tensors().count(), "views");
        for (index, (tensor, view)) in manifest.tensors().zip(views).enumerate() {
            let expected: Vec<u8> = match (manifest.chunking(), chunk) {
                (Some(chunking), Some(chunk)) => {
                    let slice = chunking.slice(tensor, chunk).expect("there is such a chunk");
                    assert_eq!(view.shape()[chunking.dim() as usize], slice.len);
                    assert_eq!(view.start(), slice.start);
                    let rows = slice.run.record().row_offsets();
                    let row = |(at, _): (u64, u64)| self.bytes_at(index, at..at + slice.run.width);
                    rows.flat_map(row).collect()
                }
                _ => {
                    assert_eq!(view.shape(), tensor.shape());
                    self.bytes(index, tensor.nbytes().0)
                }
            };
            assert!(
                view.to_vec() == expected,
                "tensor {index}, chunk {chunk:?}: other bytes than were published"
            );
        }
    }
}

pub(crate) fn spec(dtype: DType, shape: &[u64]) -> TensorSpec {
    TensorSpec::new(dtype, shape).expect("a small tensor")
}

/// A few tensors of random dtypes and of these shapes, cut along a dimension that all of them have.
pub(crate) fn bundles(shape: impl Strategy<Value = Vec<u64>>) -> impl Strategy<Value = Bundle> {
    let dtype = prop::sample::select(DType::all().collect::<Vec<_>>());
    let tensors = prop::collection::vec((dtype, shape), 1..4);
    (
        tensors,
        any::<bool>(),
        any::<u64>(),
        any::<prop::sample::Index>(),
        any::<prop::sample::Index>(),
    )
        .prop_map(|(tensors, arena, seed, dim, count)| {
            let ranks = tensors.iter().map(|(_, shape)| shape.len()).min().unwrap_or(1);
            let dim = dim.index(ranks);
            let extent = tensors.iter().map(|(_, shape)| shape[dim]).min().unwrap_or(1);
            let count = count.index(usize::try_from(extent).expect("small")) as u32 + 1;
            let entries = tensors
                .iter()
                .map(|(dtype, shape)| EntryValue::Tensor(spec(*dtype, shape)))
                .collect();
            Bundle {
                arena,
                seed,
                ..Bundle::many(entries).cut(dim as u32, count)
            }
        })
}
