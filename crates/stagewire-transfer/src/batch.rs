//! Which record of a batch something happened to.

use stagewire_core::Record;

/// The record whose bytes are the next ones of the batch after so many. The last one behind the end.
pub(crate) fn record_after(records: &[Record], mut bytes: u64) -> usize {
    for (index, record) in records.iter().enumerate() {
        match bytes.checked_sub(record.nbytes()) {
            Some(rest) => bytes = rest,
            None => return index,
        }
    }
    records.len().saturating_sub(1)
}

/// The record that reads this byte of its source, or the next one behind it: the first of several.
pub(crate) fn record_reading(records: &[Record], byte: u64) -> usize {
    let reads = records.iter().enumerate().filter_map(|(index, record)| {
        let next = next_byte(record, record.src_offset, record.src_pitch, byte)?;
        Some((next, index))
    });
    reads.min().map_or(0, |(_, index)| index)
}

/// The records that write this byte of their destination.
pub(crate) fn records_writing(records: &[Record], byte: u64) -> impl Iterator<Item = usize> {
    let writes = move |record: &Record| next_byte(record, record.dst_offset, record.dst_pitch, byte) == Some(byte);
    let writing = records.iter().enumerate().filter(move |(_, record)| writes(record));
    writing.map(|(index, _)| index)
}

/// The first byte of the rows from this one on, of a record that was checked.
fn next_byte(record: &Record, offset: u64, pitch: u64, byte: u64) -> Option<u64> {
    let last = record.rows.checked_sub(1).filter(|_| record.width > 0)?;
    let Some(beyond) = byte.checked_sub(offset) else {
        return Some(offset);
    };
    // Rows may overlap in a source: the last one that has begun by then ends last.
    let row = beyond.checked_div(pitch).map_or(last, |row| row.min(last));
    if beyond - row * pitch < record.width {
        return Some(byte);
    }
    (row < last).then(|| offset + (row + 1) * pitch)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    prop_compose! {
        fn record()(src_offset in 0_u64..40, dst_offset in 0_u64..40, width in 0_u64..9, rows in 0_u64..5, src_pitch in 0_u64..12, dst_pitch in 0_u64..12) -> Record {
            Record { src_offset, dst_offset, width, rows, src_pitch, dst_pitch }
        }
    }

    proptest! {
        /// Against a list of every byte.
        #[test]
        fn the_record_of_a_byte_is_the_one_that_moves_it(records in prop::collection::vec(record(), 1..6), byte in 0_u64..100) {
            let moves: Vec<(usize, u64, u64)> = records
                .iter()
                .enumerate()
                .flat_map(|(index, record)| {
                    let rows = record.row_offsets();
                    rows.flat_map(move |(src, dst)| (0..record.width).map(move |at| (index, src + at, dst + at)))
                })
                .collect();
            let expected = moves.get(byte as usize).map_or(records.len() - 1, |(index, ..)| *index);
            prop_assert_eq!(record_after(&records, byte), expected);
            let reads = moves.iter().filter(|(_, src, _)| *src >= byte).map(|(index, src, _)| (*src, *index)).min();
            prop_assert_eq!(record_reading(&records, byte), reads.map_or(0, |(_, index)| index));
            let mut writes: Vec<usize> = moves.iter().filter(|(.., dst)| *dst == byte).map(|(index, ..)| *index).collect();
            writes.dedup();
            prop_assert_eq!(records_writing(&records, byte).collect::<Vec<_>>(), writes);
        }
    }
}
