use std::ops::Range;

use stagewire_core::{
    Capability, Chunking, DType, Entry, EntryValue, Handle, HandleError, Incarnation, Manifest, PayloadId, PayloadKind,
    Peer, ProcessRef, RegionRef, TensorSpec, TransferMode, TransportAddress,
};
use uuid::Uuid;

/// Where the checksum stands in a handle.
const CHECKSUM: Range<usize> = 6..14;

/// A handle with its manifest, as it stands in queues. A wrong checksum is put right first: no fuzzer finds one.
pub fn handle(bytes: &[u8]) -> bool {
    let mut bytes = bytes.to_vec();
    if let Err(HandleError::Checksum { computed, .. }) = Handle::from_bytes(&bytes) {
        bytes[CHECKSUM].copy_from_slice(&computed.to_le_bytes());
    }
    let Ok(handle) = Handle::from_bytes(&bytes) else {
        return false;
    };
    assert_eq!(Handle::from_bytes(&handle.to_bytes()).as_ref(), Ok(&handle));
    let manifest = &handle.manifest;
    let chunks = manifest.chunks();
    let whole = manifest.nbytes();
    for index in [0, 1, chunks / 2, chunks - 1, chunks, u32::MAX] {
        assert!(manifest.chunk_nbytes(index) <= whole);
        let Some(chunking) = manifest.chunking() else {
            continue;
        };
        for tensor in manifest.tensors() {
            if let Ok(slice) = chunking.slice(tensor, index) {
                let len = tensor.nbytes().0;
                let inside = slice.run.record().check(len, len);
                inside.expect("chunks lie inside their tensor");
            }
        }
    }
    true
}

pub(super) fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let latent = TensorSpec::new(DType::BF16, [1, 16, 21, 60, 104]).expect("fits");
    let scalar = TensorSpec::new(DType::F32, []).expect("fits");
    let empty = TensorSpec::new(DType::F32, [0, 7]).expect("fits");
    let entry = |name: &str, value| Entry {
        name: name.to_owned(),
        value,
    };
    let entries = vec![
        entry("latent", EntryValue::Tensor(latent.clone())),
        entry("mask", EntryValue::None),
        entry("steps", EntryValue::List(vec![scalar, empty])),
    ];
    let whole = Manifest::new(PayloadKind::Embedding, entries).expect("allowed");
    let whole = whole.with_metadata_text(r#"{"seed":7,"prompt":"a cat"}"#);
    let cut = Manifest::new(PayloadKind::Latent, vec![entry("latent", EntryValue::Tensor(latent))]);
    let cut = cut
        .expect("allowed")
        .with_chunking(Chunking::new(2, 8).expect("allowed"));
    let bytes = |manifest: Manifest| {
        let regions = manifest.tensors().enumerate().map(|(region, tensor)| RegionRef {
            transport: "shm".to_owned(),
            region: region as u64,
            generation: 1,
            capability: Capability::from_random([9; 16]),
            len: tensor.nbytes().0,
        });
        let regions = regions.collect();
        let handle = Handle {
            payload: PayloadId(Uuid::from_u128(1)),
            request: "job-1".to_owned(),
            stage: "denoise".parse().expect("a name"),
            manifest,
            mode: TransferMode::P2p,
            holder: Peer {
                incarnation: Incarnation(Uuid::from_u128(2)),
                process: ProcessRef { pid: 3, started: 4 },
                socket: "/run/peers/2.ctl".to_owned(),
                transports: vec![TransportAddress {
                    transport: "shm".to_owned(),
                    address: vec![1, 2, 3],
                }],
            },
            capability: Capability::from_random([8; 16]),
            regions,
        };
        handle.to_bytes()
    };
    vec![
        ("whole", bytes(whole.expect("JSON"))),
        ("cut", bytes(cut.expect("allowed"))),
    ]
}
