use proptest::prelude::*;
use stagewire_core::{Chunking, DType, Record, SchemaError, TensorSpec};

/// Which chunk each byte of a row-major tensor belongs to, from the definition: by the index along `dim`.
fn owner_of_each_byte(shape: &[u64], size: u64, dim: usize, count: u64) -> Vec<u64> {
    let elements: u64 = shape.iter().product();
    let inner: u64 = shape[dim + 1..].iter().product();
    let mut owners = Vec::new();
    for element in 0..elements {
        let index = element / inner % shape[dim];
        // The chunk that holds `index`: sizes are listed longest first and differ by at most one.
        let sizes: Vec<u64> = (0..count)
            .map(|chunk| (shape[dim] + count - 1 - chunk) / count)
            .collect();
        let mut end = 0;
        let owner = sizes.iter().position(|size| {
            end += size;
            index < end
        });
        for _ in 0..size {
            owners.push(owner.expect("sizes add up to the extent") as u64);
        }
    }
    owners
}

proptest! {
    #[test]
    fn chunks_cover_every_byte_exactly_once(
        shape in prop::collection::vec(0_u64..7, 1..6),
        dim in 0_usize..6,
        count in 1_u32..7,
        dtype in prop::sample::select(DType::all().collect::<Vec<_>>()),
    ) {
        prop_assume!(dim < shape.len() && u64::from(count) <= shape[dim]);
        let tensor = TensorSpec::new(dtype, shape.clone()).expect("small");
        let chunking = Chunking::new(u32::try_from(dim).expect("small"), count).expect("not zero");
        let mut owners = vec![u64::MAX; usize::try_from(tensor.nbytes().0).expect("small")];
        let mut start = 0;
        for chunk in 0..count {
            let slice = chunking.slice(&tensor, chunk).expect("checked above");
            prop_assert_eq!(slice.start, start);
            start += slice.len;
            let record = slice.run.record();
            record.check(tensor.nbytes().0, tensor.nbytes().0).expect("inside the tensor");
            for (source, destination) in record.row_offsets() {
                prop_assert_eq!(source, destination);
                for byte in source..source + record.width {
                    let owner = &mut owners[usize::try_from(byte).expect("small")];
                    prop_assert_eq!(*owner, u64::MAX, "byte {} is in two chunks", byte);
                    *owner = u64::from(chunk);
                }
            }
        }
        prop_assert_eq!(owners, owner_of_each_byte(&shape, dtype.size(), dim, u64::from(count)));
    }

    #[test]
    fn merging_moves_the_same_bytes(width in 0_u64..9, rows in 0_u64..5, gap in 0_u64..3) {
        let pitch = width + gap;
        let record = Record { src_offset: 3, dst_offset: 5, width, rows, src_pitch: pitch, dst_pitch: width };
        let bytes = |record: Record| {
            let mut pairs: Vec<(u64, u64)> = record
                .row_offsets()
                .flat_map(|(source, destination)| (0..record.width).map(move |byte| (source + byte, destination + byte)))
                .collect();
            pairs.sort_unstable();
            pairs
        };
        prop_assert_eq!(bytes(record.merged()), bytes(record));
        prop_assert_eq!(record.merged().nbytes(), record.nbytes());
    }

    #[test]
    fn checked_records_never_leave_their_memory(
        offset in any::<u64>(), width in any::<u64>(), rows in any::<u64>(), pitch in any::<u64>(), len in any::<u64>(),
    ) {
        let record = Record { src_offset: offset, dst_offset: 0, width, rows, src_pitch: pitch, dst_pitch: width };
        if record.check(len, u64::MAX).is_ok() && rows > 0 {
            let last = u128::from(offset) + u128::from(rows - 1) * u128::from(pitch) + u128::from(width);
            prop_assert!(last <= u128::from(len));
        }
    }
}

#[test]
fn chunks_of_an_empty_tensor_lie_inside_it() {
    let tensor = TensorSpec::new(DType::BF16, [0, 21, 104]).expect("fits");
    let chunking = Chunking::new(1, 8).expect("8 chunks");
    for index in 0..8 {
        let slice = chunking.slice(&tensor, index).expect("exists");
        assert_eq!(
            (slice.run.width * slice.run.rows, slice.run.record().check(0, 0)),
            (0, Ok(()))
        );
    }
}

#[test]
fn latents_of_odd_length_are_cut_unevenly() {
    let latent = TensorSpec::new(DType::BF16, [1, 16, 31, 90, 160]).expect("14.3 MB");
    let chunking = Chunking::new(2, 8).expect("8 chunks");
    let lens: Vec<u64> = (0..8)
        .map(|chunk| chunking.slice(&latent, chunk).expect("exists").len)
        .collect();
    assert_eq!(lens, [4, 4, 4, 4, 4, 4, 4, 3]);
}

#[test]
fn what_cannot_be_cut_is_refused_with_both_values() {
    let tensor = TensorSpec::new(DType::F32, [2, 3]).expect("small");
    let slice = |dim, count, index| Chunking::new(dim, count).and_then(|chunking| chunking.slice(&tensor, index));
    assert!(matches!(slice(0, 0, 0), Err(SchemaError::ChunkCount { count: 0, .. })));
    assert!(matches!(
        slice(2, 1, 0),
        Err(SchemaError::ChunkDim { dim: 2, rank: 2, .. })
    ));
    assert!(matches!(
        slice(1, 4, 0),
        Err(SchemaError::ChunkTooFine {
            count: 4,
            extent: 3,
            ..
        })
    ));
    assert!(matches!(
        slice(1, 3, 3),
        Err(SchemaError::NoSuchChunk { index: 3, count: 3 })
    ));
}

#[test]
fn overlapping_destination_rows_are_refused() {
    let record = Record {
        src_offset: 0,
        dst_offset: 0,
        width: 8,
        rows: 2,
        src_pitch: 8,
        dst_pitch: 4,
    };
    assert!(record.check(64, 64).is_err());
}
