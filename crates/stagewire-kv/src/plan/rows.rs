use stagewire_core::Record;

use super::error::PlanError;

/// One run of bytes of one buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) src_off: u64,
    pub(super) dst_off: u64,
    pub(super) nbytes: u64,
}

/// The rows of records, those that touch on both sides as one.
pub(super) fn rows(records: &[Record]) -> Result<Vec<Row>, PlanError> {
    let mut rows: Vec<Row> = Vec::new();
    super::reserve(&mut rows, count(records))?;
    for record in records {
        let mut offsets = record.row_offsets();
        // Inside a record rows do not touch on both sides, or they would be one; at its beginning they may.
        if let Some(last) = rows.last_mut()
            && (last.src_off + last.nbytes, last.dst_off + last.nbytes) == (record.src_offset, record.dst_offset)
        {
            last.nbytes += record.width;
            offsets.next();
        }
        rows.extend(offsets.map(|(src, dst)| Row::new(src, dst, record.width)));
    }
    Ok(rows)
}

/// How many [`rows`] there are.
pub(super) fn count(records: &[Record]) -> usize {
    let all: u64 = records.iter().map(|record| record.rows).sum();
    let joined = records.windows(2).filter(|two| {
        let last = |offset: u64, pitch: u64| offset + (two[0].rows - 1) * pitch + two[0].width;
        last(two[0].src_offset, two[0].src_pitch) == two[1].src_offset
            && last(two[0].dst_offset, two[0].dst_pitch) == two[1].dst_offset
    });
    usize::try_from(all).expect("rows of one buffer can be counted") - joined.count()
}

impl Row {
    fn new(src_off: u64, dst_off: u64, nbytes: u64) -> Self {
        Self {
            src_off,
            dst_off,
            nbytes,
        }
    }
}
