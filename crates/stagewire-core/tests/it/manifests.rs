use stagewire_core::{Chunking, DType, Entry, EntryValue, Manifest, PayloadKind, SchemaError, TensorSpec};

fn tensor(shape: &[u64]) -> TensorSpec {
    TensorSpec::new(DType::F16, shape).expect("small")
}

fn entry(name: &str, value: EntryValue) -> Entry {
    Entry {
        name: name.to_owned(),
        value,
    }
}

#[test]
fn a_bundle_counts_the_bytes_of_all_its_tensors() {
    let manifest = Manifest::new(
        PayloadKind::Embedding,
        vec![
            entry("prompt_embeds", EntryValue::Tensor(tensor(&[1, 4, 8]))),
            entry("mask", EntryValue::None),
            entry(
                "features",
                EntryValue::List(vec![tensor(&[2, 4]), tensor(&[0, 4]), tensor(&[])]),
            ),
        ],
    )
    .expect("a bundle");
    assert_eq!(manifest.tensors().count(), 4);
    assert_eq!(manifest.nbytes().0, 2 * (32 + 8 + 1));
    assert_eq!((manifest.chunks(), manifest.chunk_nbytes(0)), (1, manifest.nbytes()));
}

#[test]
fn chunk_sizes_add_up_to_the_whole() {
    let manifest = Manifest::new(
        PayloadKind::Latent,
        vec![
            entry("video", EntryValue::Tensor(tensor(&[1, 16, 21, 6, 10]))),
            entry("audio", EntryValue::Tensor(tensor(&[1, 8, 40]))),
        ],
    )
    .and_then(|manifest| manifest.with_chunking(Chunking::new(2, 8)?))
    .expect("both tensors have 8 elements along dimension 2");
    let sum: u64 = (0..8).map(|chunk| manifest.chunk_nbytes(chunk).0).sum();
    assert_eq!(sum, manifest.nbytes().0);
}

#[test]
fn every_tensor_of_a_bundle_must_be_cuttable() {
    let entries = vec![
        entry("latents", EntryValue::Tensor(tensor(&[1, 16, 21]))),
        entry("short", EntryValue::Tensor(tensor(&[1, 16, 2]))),
    ];
    let manifest = Manifest::new(PayloadKind::Latent, entries).expect("uncut");
    let cut = manifest.with_chunking(Chunking::new(2, 8).expect("8 chunks"));
    assert!(
        matches!(cut, Err(SchemaError::ChunkTooFine { extent: 2, .. })),
        "{cut:?}"
    );
}

#[test]
fn a_name_stands_once() {
    let twice = vec![entry("a", EntryValue::None), entry("a", EntryValue::None)];
    let manifest = Manifest::new(PayloadKind::Feature, twice);
    assert!(matches!(manifest, Err(SchemaError::DuplicateName { name }) if name == "a"));
}

#[test]
fn metadata_comes_back_as_it_was() {
    let metadata = serde_json::json!({"prompt": "ein rotes Kätzchen 🐈", "nested": [null, {"deep": 1.5}], "long": "x".repeat(65_536)});
    let manifest = Manifest::new(PayloadKind::Latent, vec![])
        .and_then(|manifest| manifest.with_metadata(&metadata))
        .expect("JSON");
    let back: serde_json::Value = serde_json::from_str(manifest.metadata()).expect("JSON");
    assert_eq!(back, metadata);
}

#[test]
fn sizes_that_overflow_are_refused() {
    for shape in [vec![u64::MAX, 2], vec![1 << 40, 1 << 40], vec![u64::MAX, u64::MAX, 0]] {
        let spec = TensorSpec::new(DType::F64, shape.clone());
        assert!(
            matches!(spec, Err(SchemaError::TooLarge { .. })),
            "{shape:?} gave {spec:?}"
        );
    }
}
