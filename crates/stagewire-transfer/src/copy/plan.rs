use std::ops::Range;

use smallvec::SmallVec;
use stagewire_core::{Record, RecordError};

use crate::TransferError;
use crate::batch::records_writing;

/// Rows of one batch at most, after rows without a gap between them are taken together. Each costs some tens of bytes of
/// bookkeeping; a larger batch gains nothing.
pub const MAX_ROWS: u64 = 1 << 20;

/// Bytes of a batch when several threads share the work.
const BATCH: u64 = 1 << 20;

/// One contiguous copy: for those who move each row for itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) src: u64,
    pub(crate) dst: u64,
    pub(crate) len: u64,
}

/// How a transport wants its batches.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    /// From so many bytes, a copy is large: it is cut for several threads.
    pub(crate) large_from: u64,
    /// Rows of a batch at most.
    pub(crate) max_rows: u64,
}

/// Destination bytes, sorted and disjoint.
pub(crate) type Written = SmallVec<[Range<u64>; 1]>;

pub(crate) type Pieces = SmallVec<[Piece; 1]>;

type Records = SmallVec<[Record; 1]>;

/// What one pull copies: checked, merged, and cut into batches. Rows of a record stay together: a KV cache has a hundred
/// thousand of them in a thousand records. A plan of one record allocates nothing.
#[derive(Debug)]
pub(crate) struct Plan {
    records: Records,
    batches: SmallVec<[Range<usize>; 1]>,
    rows: u64,
    bytes: u64,
}

impl Plan {
    /// Checks the records and cuts them. Gives the plan, and the destination bytes it writes.
    pub(crate) fn new(
        records: &[Record],
        src_len: u64,
        dst_len: u64,
        shape: Shape,
    ) -> Result<(Self, Written), TransferError> {
        let mut rows = 0_u64;
        let mut bytes = 0_u64;
        for (index, record) in records.iter().enumerate() {
            let refused = |error| TransferError::Record { index, error };
            record.check(src_len, dst_len).map_err(refused)?;
            let record = record.merged();
            rows = rows.saturating_add(record.rows);
            let overflow = RecordError::Overflow { record };
            bytes = bytes.checked_add(record.nbytes()).ok_or(refused(overflow))?;
        }
        if rows > MAX_ROWS {
            return Err(TransferError::TooManyRows { rows, max: MAX_ROWS });
        }
        let written = written(records)?;
        let max_bytes = if bytes >= shape.large_from { BATCH } else { u64::MAX };
        let records = split(joined(records), max_bytes, shape.max_rows);
        let batches = cut(&records, max_bytes, shape.max_rows);
        let plan = Self {
            records,
            batches,
            rows,
            bytes,
        };
        Ok((plan, written))
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Rows of all records.
    pub(crate) fn rows(&self) -> u64 {
        self.rows
    }

    pub(crate) fn batches(&self) -> &[Range<usize>] {
        &self.batches
    }

    pub(crate) fn records(&self, batch: &Range<usize>) -> &[Record] {
        &self.records[batch.clone()]
    }

    /// All of it, each row for itself.
    pub(crate) fn pieces(&self) -> Pieces {
        pieces(&self.records)
    }
}

/// The rows of records, each for itself. One that goes on where the one before ends, on both sides, adds to it.
pub(crate) fn pieces(records: &[Record]) -> Pieces {
    let rows: u64 = records.iter().map(|record| record.rows).sum();
    let mut pieces = Pieces::with_capacity(rows as usize);
    for record in records {
        let len = record.width;
        let mut rows = record.row_offsets().map(|(src, dst)| Piece { src, dst, len });
        // Rows of one record that go on like that are one row by now.
        match (pieces.last_mut(), rows.next()) {
            (Some(last), Some(first)) if last.src + last.len == first.src && last.dst + last.len == first.dst => {
                last.len += len;
            }
            (_, first) => pieces.extend(first),
        }
        pieces.extend(rows);
    }
    pieces
}

/// Records with a byte, as few rows each as possible.
fn merged(records: &[Record]) -> impl Iterator<Item = Record> {
    records
        .iter()
        .map(|record| record.merged())
        .filter(|record| record.width > 0 && record.rows > 0)
}

/// The records; single rows that go on where the one before ends, on both sides, become one.
fn joined(records: &[Record]) -> Records {
    let mut joined = Records::with_capacity(records.len());
    for record in merged(records) {
        match joined.last_mut() {
            Some(last)
                if (last.rows, record.rows) == (1, 1)
                    && last.src_offset + last.width == record.src_offset
                    && last.dst_offset + last.width == record.dst_offset =>
            {
                *last = Record::contiguous(last.src_offset, last.dst_offset, last.width + record.width);
            }
            _ => joined.push(record),
        }
    }
    joined
}

/// The destination bytes, each proven to be written once.
fn written(records: &[Record]) -> Result<Written, TransferError> {
    let rows = || merged(records).flat_map(destination);
    let united = if rows().is_sorted_by_key(|row| row.start) {
        united(rows())
    } else {
        let mut rows: Vec<Range<u64>> = rows().collect();
        rows.sort_unstable_by_key(|row| row.start);
        united(rows)
    };
    united.map_err(|byte| {
        let mut writing = records_writing(records, byte);
        let mut next = || writing.next().unwrap_or_default();
        let (first, second) = (next(), next());
        TransferError::Overlap { byte, first, second }
    })
}

/// The destination bytes of a checked record: all of them at once, or row by row where they have gaps.
fn destination(record: Record) -> impl Iterator<Item = Range<u64>> {
    let Record {
        dst_offset,
        dst_pitch,
        width,
        rows,
        ..
    } = record;
    let (rows, len) = if dst_pitch == width {
        (1, width * rows)
    } else {
        (rows, width)
    };
    (0..rows)
        .map(move |row| dst_offset + row * dst_pitch)
        .map(move |start| start..start + len)
}

/// Sorted rows; those that touch become one. Fails with a byte that is in two of them.
fn united(rows: impl IntoIterator<Item = Range<u64>>) -> Result<Written, u64> {
    let mut united = Written::new();
    for row in rows {
        match united.last_mut() {
            Some(last) if row.start < last.end => return Err(row.start),
            Some(last) if row.start == last.end => last.end = row.end,
            _ => united.push(row),
        }
    }
    Ok(united)
}

/// Cuts long records between rows, and long rows, so that the threads end at about the same time.
fn split(records: Records, max_bytes: u64, max_rows: u64) -> Records {
    let fits = |record: &Record| record.nbytes() <= max_bytes && record.rows <= max_rows;
    if records.iter().all(fits) {
        return records;
    }
    let mut split = Records::new();
    for record in records {
        if record.width > max_bytes {
            let rows = record.row_offsets();
            split.extend(rows.flat_map(|(src, dst)| {
                let parts = (0..record.width).step_by(max_bytes as usize);
                parts.map(move |at| Record::contiguous(src + at, dst + at, max_bytes.min(record.width - at)))
            }));
            continue;
        }
        let most = (max_bytes / record.width).clamp(1, max_rows);
        split.extend((0..record.rows).step_by(most as usize).map(|row| Record {
            src_offset: record.src_offset + row * record.src_pitch,
            dst_offset: record.dst_offset + row * record.dst_pitch,
            rows: most.min(record.rows - row),
            ..record
        }));
    }
    split
}

/// Groups records into batches within both bounds.
fn cut(records: &[Record], max_bytes: u64, max_rows: u64) -> SmallVec<[Range<usize>; 1]> {
    let mut batches: SmallVec<[Range<usize>; 1]> = SmallVec::new();
    let (mut bytes, mut rows) = (0_u64, 0_u64);
    for (index, record) in records.iter().enumerate() {
        bytes = bytes.saturating_add(record.nbytes());
        rows = rows.saturating_add(record.rows);
        match batches.last_mut() {
            Some(batch) if bytes <= max_bytes && rows <= max_rows => batch.end = index + 1,
            _ => {
                batches.push(index..index + 1);
                (bytes, rows) = (record.nbytes(), record.rows);
            }
        }
    }
    batches
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SHAPE: Shape = Shape {
        large_from: 4 * BATCH,
        max_rows: 1024,
    };

    fn plan(records: &[Record], src: u64, dst: u64) -> Result<(Plan, Written), TransferError> {
        Plan::new(records, src, dst, SHAPE)
    }

    fn rows(rows: u64, width: u64, src_pitch: u64, dst_pitch: u64) -> Record {
        Record {
            src_offset: 0,
            dst_offset: 0,
            width,
            rows,
            src_pitch,
            dst_pitch,
        }
    }

    fn copy(pieces: &[Piece], source: &[u8], found: &mut [u8]) {
        for Piece { src, dst, len } in pieces {
            let (src, dst, len) = (*src as usize, *dst as usize, *len as usize);
            found[dst..dst + len].copy_from_slice(&source[src..src + len]);
        }
    }

    #[test]
    fn a_large_copy_becomes_batches_and_a_small_one_does_not() {
        let (large, written) = plan(&[Record::contiguous(0, 0, 10 * BATCH + 1)], u64::MAX, u64::MAX).expect("legal");
        assert_eq!((large.batches().len(), large.records.len()), (11, 11));
        assert_eq!((written.len(), &written[0]), (1, &(0..10 * BATCH + 1)));
        let (short, written) = plan(&[Record::contiguous(3, 4, 4096)], 1 << 20, 1 << 20).expect("legal");
        let allocated = short.records.spilled() || short.batches.spilled() || written.spilled();
        assert!(!allocated, "the plan of one piece allocates");
        let (strided, written) = plan(&[rows(1000, 8, 16, 8)], 1 << 20, 1 << 20).expect("legal");
        let allocated = strided.records.spilled() || strided.batches.spilled() || written.spilled();
        assert!(!allocated && strided.rows() == 1000, "the plan of one record allocates");
        let (small, _) = plan(&[rows(3000, 8, 16, 8)], 1 << 20, 1 << 20).expect("legal");
        let counts: Vec<u64> = small.records.iter().map(|record| record.rows).collect();
        assert_eq!((small.batches().len(), counts), (3, vec![1024, 1024, 952]));
        let (narrow, _) = plan(&[rows(1 << 16, 64, 128, 64)], 1 << 30, 1 << 30).expect("legal");
        assert!(narrow.batches().len() == 64, "{} batches", narrow.batches().len());
    }

    #[test]
    fn what_no_plan_allows() {
        let double = [Record::contiguous(0, 0, 10), Record::contiguous(50, 9, 5)];
        assert!(matches!(
            plan(&double, 100, 100),
            Err(TransferError::Overlap {
                byte: 9,
                first: 0,
                second: 1
            })
        ));
        assert!(matches!(plan(&[rows(MAX_ROWS + 1, 1, 2, 2)], u64::MAX, u64::MAX),
            Err(TransferError::TooManyRows { rows, .. }) if rows == MAX_ROWS + 1));
        assert!(matches!(
            plan(&[Record::contiguous(1, 0, 100)], 100, 100),
            Err(TransferError::Record { .. })
        ));
        assert!(matches!(
            plan(&[Record::contiguous(0, 1, 100)], 100, 100),
            Err(TransferError::Record { .. })
        ));
        assert!(
            plan(&[rows(5, 0, 3, 3)], 100, 100)
                .expect("nothing to do")
                .0
                .batches()
                .is_empty()
        );
    }

    prop_compose! {
        fn record()(src_offset in 0_u64..40, dst_offset in 0_u64..40, width in 0_u64..9, rows in 0_u64..5, src_pitch in 0_u64..12, dst_pitch in 0_u64..12) -> Record {
            Record { src_offset, dst_offset, width, rows, src_pitch, dst_pitch }
        }
    }

    proptest! {
        /// Against copying byte by byte, row by row, however it is cut.
        #[test]
        fn plans_move_the_same_bytes(
            records in prop::collection::vec(record(), 0..6),
            (max_bytes, max_rows) in (1_u64..20, 1_u64..6),
        ) {
            let source: Vec<u8> = (0..100).collect();
            let (mut expected, mut hits) = (vec![0; 100], vec![0; 100]);
            let legal = records.iter().all(|record| record.check(100, 100).is_ok());
            if legal {
                for record in &records {
                    for row in 0..record.rows {
                        for byte in 0..record.width {
                            let dst = (record.dst_offset + row * record.dst_pitch + byte) as usize;
                            expected[dst] = source[(record.src_offset + row * record.src_pitch + byte) as usize];
                            hits[dst] += 1;
                        }
                    }
                }
            }
            match plan(&records, 100, 100) {
                Ok((plan, written)) => {
                    prop_assert!(legal && hits.iter().all(|hits| *hits <= 1));
                    let mut found = vec![0; 100];
                    copy(&plan.pieces(), &source, &mut found);
                    prop_assert_eq!(&found, &expected);
                    found.fill(0);
                    let split = split(plan.records.clone(), max_bytes, max_rows);
                    let mut copied = 0;
                    for batch in cut(&split, max_bytes, max_rows) {
                        let batch = &split[batch];
                        prop_assert!(batch.iter().map(Record::nbytes).sum::<u64>() <= max_bytes);
                        prop_assert!(batch.iter().map(|record| record.rows).sum::<u64>() <= max_rows);
                        copied += batch.len();
                        copy(&pieces(batch), &source, &mut found);
                    }
                    prop_assert!(copied == split.len() && found == expected);
                    let counted: Vec<bool> = (0..100).map(|byte| written.iter().any(|row| row.contains(&byte))).collect();
                    let hit: Vec<bool> = hits.iter().map(|hits| *hits == 1).collect();
                    prop_assert_eq!(counted, hit);
                    prop_assert_eq!(plan.bytes(), records.iter().map(Record::nbytes).sum::<u64>());
                }
                Err(TransferError::Overlap { byte, first, second }) => {
                    prop_assert!(hits[byte as usize] > 1 && first < second, "{first} and {second}");
                    prop_assert!(records_writing(&records, byte).take(2).eq([first, second]));
                }
                Err(TransferError::Record { .. }) => prop_assert!(!legal),
                Err(other) => panic!("{other}"),
            }
        }
    }
}
