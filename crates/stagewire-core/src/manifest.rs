use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{ByteCount, Chunking, SchemaError, TensorSpec};

/// Longest metadata of one payload, as JSON text: 16 MiB.
pub const MAX_METADATA: usize = 16 << 20;

/// What a payload is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PayloadKind {
    /// Conditions: text or image embeddings.
    Embedding,
    /// Latents on their way to a decoder or another denoiser.
    Latent,
    /// What an interrupted attempt needs to go on.
    Checkpoint,
    /// Intermediate features that can be used again.
    Feature,
    /// Decoded pictures, video or encoded files.
    Frames,
}

const KINDS: [(PayloadKind, &str); 5] = [
    (PayloadKind::Embedding, "embedding"),
    (PayloadKind::Latent, "latent"),
    (PayloadKind::Checkpoint, "checkpoint"),
    (PayloadKind::Feature, "feature"),
    (PayloadKind::Frames, "frames"),
];

impl fmt::Display for PayloadKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(KINDS[*self as usize].1)
    }
}

impl FromStr for PayloadKind {
    type Err = SchemaError;

    fn from_str(name: &str) -> Result<Self, SchemaError> {
        KINDS
            .iter()
            .find(|row| row.1 == name)
            .map(|row| row.0)
            .ok_or_else(|| SchemaError::UnknownKind { name: name.to_owned() })
    }
}

/// One name of a bundle and what stands under it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The name, unique in the bundle.
    pub name: String,
    /// What stands there.
    pub value: EntryValue,
}

/// What can stand under a name of a bundle.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum EntryValue {
    /// The name is there, without a tensor.
    None,
    /// One tensor.
    Tensor(TensorSpec),
    /// Several tensors.
    List(Vec<TensorSpec>),
}

impl EntryValue {
    /// The tensors under this name.
    pub fn tensors(&self) -> &[TensorSpec] {
        match self {
            Self::None => &[],
            Self::Tensor(tensor) => std::slice::from_ref(tensor),
            Self::List(tensors) => tensors,
        }
    }
}

/// Describes a payload: a named bundle `{name: tensor | none | [tensor]}`, JSON metadata, and how it is cut.
///
/// Memory regions of a payload are in the order of [`Manifest::tensors`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    kind: PayloadKind,
    entries: Vec<Entry>,
    metadata: String,
    chunking: Option<Chunking>,
}

impl Manifest {
    /// Describes a payload that is not cut and has no metadata.
    ///
    /// # Errors
    /// [`SchemaError::DuplicateName`].
    pub fn new(kind: PayloadKind, entries: Vec<Entry>) -> Result<Self, SchemaError> {
        let manifest = Self {
            kind,
            entries,
            metadata: "null".to_owned(),
            chunking: None,
        };
        manifest.check()?;
        Ok(manifest)
    }

    /// The same payload with metadata, any JSON value.
    ///
    /// # Errors
    /// [`SchemaError::MetadataTooLarge`] above [`MAX_METADATA`].
    pub fn with_metadata(mut self, metadata: &serde_json::Value) -> Result<Self, SchemaError> {
        self.metadata = metadata.to_string();
        self.check()?;
        Ok(self)
    }

    /// The same payload with metadata that is JSON text already. It is kept to the letter: numbers of any size and
    /// the order of names survive.
    ///
    /// # Errors
    /// [`SchemaError::MetadataTooLarge`] above [`MAX_METADATA`], [`SchemaError::MetadataNotJson`].
    pub fn with_metadata_text(mut self, metadata: impl Into<String>) -> Result<Self, SchemaError> {
        self.metadata = metadata.into();
        self.check()?;
        Ok(self)
    }

    /// The same payload, cut. Every tensor of the bundle is cut along the same dimension.
    ///
    /// # Errors
    /// [`SchemaError`] where a tensor cannot be cut so, or there is none.
    pub fn with_chunking(mut self, chunking: Chunking) -> Result<Self, SchemaError> {
        self.chunking = Some(chunking);
        self.check()?;
        Ok(self)
    }

    /// What the payload is for.
    pub const fn kind(&self) -> PayloadKind {
        self.kind
    }

    /// Names and what stands under them, in the producer's order.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The metadata as JSON text; `null` where there is none.
    pub fn metadata(&self) -> &str {
        &self.metadata
    }

    /// How the payload is cut; `None` is one chunk.
    pub const fn chunking(&self) -> Option<Chunking> {
        self.chunking
    }

    /// Number of chunks, at least 1.
    pub fn chunks(&self) -> u32 {
        self.chunking.map_or(1, |chunking| chunking.count())
    }

    /// All tensors, in the order of the entries.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorSpec> {
        self.entries.iter().flat_map(|entry| entry.value.tensors())
    }

    /// Bytes of all tensors.
    pub fn nbytes(&self) -> ByteCount {
        ByteCount(self.tensors().map(|tensor| tensor.nbytes().0).sum())
    }

    /// Bytes of chunk `index`, over all tensors; 0 where there is no such chunk.
    pub fn chunk_nbytes(&self, index: u32) -> ByteCount {
        let Some(chunking) = self.chunking else {
            return if index == 0 { self.nbytes() } else { ByteCount(0) };
        };
        let runs = self.tensors().filter_map(|tensor| chunking.slice(tensor, index).ok());
        ByteCount(runs.map(|slice| slice.run.width * slice.run.rows).sum())
    }

    /// Checks every bound, also of a manifest that came from outside.
    ///
    /// # Errors
    /// [`SchemaError`].
    pub(crate) fn check(&self) -> Result<(), SchemaError> {
        let mut names = BTreeSet::new();
        for entry in &self.entries {
            if !names.insert(&entry.name) {
                return Err(SchemaError::DuplicateName {
                    name: entry.name.clone(),
                });
            }
        }
        let mut total = 0_u64;
        for tensor in self.tensors() {
            tensor.check()?;
            total = total
                .checked_add(tensor.nbytes().0)
                .filter(|total| *total <= i64::MAX as u64)
                .ok_or_else(|| SchemaError::TooLarge {
                    shape: tensor.shape().to_vec(),
                    dtype: tensor.dtype(),
                })?;
        }
        if self.metadata.len() > MAX_METADATA {
            return Err(SchemaError::MetadataTooLarge {
                size: self.metadata.len(),
                limit: MAX_METADATA,
            });
        }
        serde_json::from_str::<serde::de::IgnoredAny>(&self.metadata).map_err(|error| {
            SchemaError::MetadataNotJson {
                error: error.to_string(),
            }
        })?;
        if let Some(chunking) = self.chunking {
            chunking.check()?;
            if self.tensors().next().is_none() {
                return Err(SchemaError::NothingToChunk {
                    count: chunking.count(),
                });
            }
            for tensor in self.tensors() {
                chunking.slice(tensor, 0)?;
            }
        }
        Ok(())
    }
}
