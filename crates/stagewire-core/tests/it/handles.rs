use proptest::prelude::*;
use stagewire_core::{
    Capability, DType, Entry, EntryValue, Handle, HandleError, Manifest, PayloadKind, Peer, ProcessRef, RegionRef,
    StageName, TensorSpec, TransferMode, TransportAddress,
};

fn handle() -> Handle {
    let tensor = TensorSpec::new(DType::BF16, [1, 16, 21, 6, 10]).expect("small");
    let len = tensor.nbytes().0;
    let entries = vec![Entry {
        name: "latents".to_owned(),
        value: EntryValue::Tensor(tensor),
    }];
    Handle {
        payload: "0190163d-8694-739b-aea5-966c26f8ad90".parse().expect("an id"),
        request: "request 7".to_owned(),
        stage: StageName::new("denoise").expect("a name"),
        manifest: Manifest::new(PayloadKind::Latent, entries).expect("a manifest"),
        mode: TransferMode::P2p,
        holder: Peer {
            incarnation: "0190163d-8694-739b-aea5-966c26f8ad91".parse().expect("an id"),
            process: ProcessRef { pid: 7, started: 9 },
            socket: "peers/x.ctl".to_owned(),
            transports: vec![TransportAddress {
                transport: "shm".to_owned(),
                address: vec![1, 2, 3],
            }],
        },
        capability: Capability::from_random([7; 16]),
        regions: vec![RegionRef {
            transport: "shm".to_owned(),
            region: 1,
            generation: 1,
            capability: Capability::from_random([9; 16]),
            len,
        }],
    }
}

#[test]
fn handles_survive_the_queue() {
    assert_eq!(Handle::from_bytes(&handle().to_bytes()), Ok(handle()));
}

#[test]
fn the_secret_of_a_handle_is_not_shown() {
    let shown = format!("{:?}", handle());
    assert!(shown.contains("redacted") && !shown.contains("7, 7, 7, 7"), "{shown}");
}

#[test]
fn another_version_is_named() {
    let mut bytes = handle().to_bytes();
    bytes[4] = 9;
    assert!(matches!(
        Handle::from_bytes(&bytes),
        Err(HandleError::Version { found: 9, expected: 1 })
    ));
}

#[test]
fn regions_must_fit_their_tensors() {
    let mut short = handle();
    short.regions[0].len -= 1;
    assert!(matches!(
        Handle::from_bytes(&short.to_bytes()),
        Err(HandleError::RegionSize { index: 0, .. })
    ));
    short.regions.clear();
    assert!(matches!(
        Handle::from_bytes(&short.to_bytes()),
        Err(HandleError::RegionCount { regions: 0, tensors: 1 })
    ));
}

#[test]
fn every_truncation_is_an_error() {
    let bytes = handle().to_bytes();
    for len in 0..bytes.len() {
        assert!(
            Handle::from_bytes(&bytes[..len]).is_err(),
            "{len} of {} bytes decode",
            bytes.len()
        );
    }
}

proptest! {
    #[test]
    fn noise_never_panics(noise in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = Handle::from_bytes(&noise);
        let mut bytes = b"SWH\n\x01\0".to_vec();
        bytes.extend_from_slice(&xxhash_rust::xxh3::xxh3_64(&noise).to_le_bytes());
        bytes.extend_from_slice(&noise);
        // The checksum fits, so this reaches the decoder.
        let decoded = Handle::from_bytes(&bytes);
        prop_assert!(!matches!(decoded, Err(HandleError::Checksum { .. })), "the checksum should fit");
    }

    #[test]
    fn a_flipped_bit_is_found(position in any::<prop::sample::Index>(), bit in 0_u8..8) {
        let mut bytes = handle().to_bytes();
        let position = position.index(bytes.len());
        bytes[position] ^= 1 << bit;
        prop_assert!(Handle::from_bytes(&bytes).is_err());
    }
}
