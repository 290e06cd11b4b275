//! A batch of records, cut into requests.

use stagewire_core::Record;

/// Cuts the batch into parts of at most `max_records` records and `max_bytes` bytes, in order. Records without bytes
/// vanish; one that is too large is cut between rows, or inside one. The records must be legal.
pub(crate) fn parts(records: &[Record], max_records: usize, max_bytes: u64) -> Vec<Vec<Record>> {
    let mut parts: Vec<Vec<Record>> = Vec::new();
    let mut room = 0;
    for record in records {
        // What is left of the record, what comes first on top.
        let mut left = vec![record.merged()];
        while let Some(record) = left.pop() {
            if record.nbytes() == 0 {
                continue;
            }
            let part = match parts.last_mut() {
                Some(part) if part.len() < max_records && room > 0 => part,
                _ => {
                    room = max_bytes.max(1);
                    parts.push_mut(Vec::new())
                }
            };
            let head = cut(record, room, &mut left);
            room -= head.nbytes();
            part.push(head);
        }
    }
    parts
}

/// The beginning of a record, at most `bytes` of it; the rest goes onto `left`.
fn cut(record: Record, bytes: u64, left: &mut Vec<Record>) -> Record {
    if record.nbytes() <= bytes {
        return record;
    }
    let Record {
        src_offset,
        dst_offset,
        width,
        ..
    } = record;
    let behind = |rows: u64| Record {
        src_offset: src_offset + rows * record.src_pitch,
        dst_offset: dst_offset + rows * record.dst_pitch,
        rows: record.rows - rows,
        ..record
    };
    let rows = bytes / width;
    if rows > 0 {
        left.push(behind(rows));
        return Record { rows, ..record };
    }
    if record.rows > 1 {
        left.push(behind(1));
    }
    left.push(Record::contiguous(
        src_offset + bytes,
        dst_offset + bytes,
        width - bytes,
    ));
    Record::contiguous(src_offset, dst_offset, bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bytes(records: &[Record]) -> Vec<(u64, u64)> {
        let rows = records.iter().flat_map(|record| {
            let width = record.width;
            record.row_offsets().map(move |offsets| (offsets, width))
        });
        rows.flat_map(|((src, dst), width)| (0..width).map(move |at| (src + at, dst + at)))
            .collect()
    }

    proptest! {
        /// Against one pair of offsets per byte.
        #[test]
        fn parts_are_the_batch_in_order_and_keep_their_bounds(
            records in prop::collection::vec((0_u64..40, 0_u64..40, 0_u64..9, 0_u64..6, 0_u64..12, 0_u64..12), 0..6),
            max_records in 1_usize..5,
            max_bytes in 1_u64..40,
        ) {
            let records: Vec<Record> = records
                .into_iter()
                .map(|(src_offset, dst_offset, width, rows, src_pitch, dst_pitch)| Record { src_offset, dst_offset, width, rows, src_pitch, dst_pitch })
                .collect();
            let parts = parts(&records, max_records, max_bytes);
            for part in &parts {
                let sum: u64 = part.iter().map(Record::nbytes).sum();
                prop_assert!(!part.is_empty() && part.len() <= max_records && sum <= max_bytes);
            }
            prop_assert_eq!(bytes(&parts.concat()), bytes(&records));
        }
    }
}
