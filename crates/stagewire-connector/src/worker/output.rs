use stagewire_api::{WireError, v1};
use stagewire_core::{ByteCount, Chunking, Entry, EntryValue, Manifest, PayloadKind, SchemaError, TensorSpec};
use stagewire_transfer::Memory;

/// What an attempt produced: a named bundle and its memory.
#[derive(Debug, Clone)]
pub struct Output {
    /// What it is for.
    pub kind: PayloadKind,
    /// Names and what stands under them.
    pub entries: Vec<Entry>,
    /// JSON text, which consumers get to the letter; `null` for none.
    pub metadata: String,
    /// Memory of every tensor, in the order of the entries. It must not change until the payload is released.
    pub tensors: Vec<Memory>,
}

impl Output {
    /// One tensor under one name, without metadata.
    pub fn tensor(kind: PayloadKind, name: impl Into<String>, spec: TensorSpec, memory: impl Into<Memory>) -> Self {
        Self {
            kind,
            entries: vec![Entry {
                name: name.into(),
                value: EntryValue::Tensor(spec),
            }],
            metadata: "null".to_owned(),
            tensors: vec![memory.into()],
        }
    }

    pub(super) fn manifest(&self, plan: &OutputPlan) -> Result<Manifest, SchemaError> {
        let manifest = Manifest::new(self.kind, self.entries.clone())?.with_metadata_text(self.metadata.as_str())?;
        match plan.chunking {
            Some(chunking) => {
                // The plan holds for every job of the pipeline; a short clip has fewer elements than chunks.
                let extents = manifest
                    .tensors()
                    .filter_map(|tensor| tensor.shape().get(chunking.dim() as usize));
                let shortest = extents.min().copied().unwrap_or_default();
                let count = u64::from(chunking.count()).min(shortest).max(1);
                let count = u32::try_from(count).unwrap_or(chunking.count());
                manifest.with_chunking(Chunking::new(chunking.dim(), count)?)
            }
            None => Ok(manifest),
        }
    }
}

/// How the orchestrator wants the output handed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutputPlan {
    /// For another stage; otherwise it is the result of the job.
    pub publish: bool,
    /// Through the store instead of from this process.
    pub stored: bool,
    /// How it is cut; `None` is whole. A tensor with fewer elements along the dimension gives fewer chunks.
    pub chunking: Option<Chunking>,
    /// Most bytes of all its tensors.
    pub max_nbytes: Option<ByteCount>,
}

impl OutputPlan {
    /// Reads what the offer says. A missing plan is that of a last stage.
    pub(super) fn read(output: Option<v1::Output>) -> Result<Self, SchemaError> {
        let output = output.unwrap_or_default();
        let chunking = match output.chunks {
            0 => None,
            count => Some(Chunking::new(output.chunk_dim, count)?),
        };
        Ok(Self {
            publish: output.publish,
            stored: output.stored,
            chunking,
            max_nbytes: (output.max_nbytes > 0).then_some(ByteCount(output.max_nbytes)),
        })
    }
}

/// Why an offer cannot be taken.
#[derive(Debug, thiserror::Error)]
pub(super) enum OfferError {
    #[error("the offer is malformed")]
    Wire(#[from] WireError),
    #[error("the offer's output cannot be cut so")]
    Output(#[from] SchemaError),
    #[error("the handle of the input is not readable")]
    Handle(#[from] stagewire_core::HandleError),
    #[error("an input, or the checkpoint, has no payload")]
    NoPayload,
}

#[cfg(test)]
mod tests {
    use stagewire_core::DType;
    use stagewire_transfer::Borrowed;

    use super::*;

    fn chunks(shape: [u64; 2], dim: u32, count: u32) -> Result<u32, SchemaError> {
        let spec = TensorSpec::new(DType::U8, shape)?;
        let memory = Borrowed::from(vec![0; usize::try_from(spec.nbytes().0).expect("small")]);
        let plan = OutputPlan {
            publish: true,
            stored: false,
            chunking: Some(Chunking::new(dim, count)?),
            max_nbytes: None,
        };
        let output = Output::tensor(PayloadKind::Latent, "x", spec, memory);
        output.manifest(&plan).map(|manifest| manifest.chunks())
    }

    #[test]
    fn metadata_is_kept_to_the_letter() {
        let spec = TensorSpec::new(DType::U8, [1]).expect("small");
        let mut output = Output::tensor(PayloadKind::Latent, "x", spec, Borrowed::from(vec![0]));
        let plan = OutputPlan::read(None).expect("that of a last stage");
        for metadata in ["null", r#"{"z":1,"a":123456789012345678901234567890, "f":1.10}"#] {
            output.metadata = metadata.to_owned();
            let manifest = output.manifest(&plan);
            assert_eq!(manifest.as_ref().map(Manifest::metadata), Ok(metadata));
        }
        output.metadata = "{".to_owned();
        assert!(matches!(
            output.manifest(&plan),
            Err(SchemaError::MetadataNotJson { .. })
        ));
    }

    #[test]
    fn a_short_output_has_fewer_chunks_than_planned() {
        assert_eq!(chunks([2, 21], 1, 8), Ok(8));
        assert_eq!(chunks([2, 3], 1, 8), Ok(3));
        assert_eq!(chunks([2, 1], 1, 8), Ok(1));
        assert!(chunks([2, 0], 1, 8).is_err(), "nothing to cut");
        assert!(chunks([2, 3], 2, 8).is_err(), "no such dimension");
    }
}
