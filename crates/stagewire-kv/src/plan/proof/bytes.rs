//! Two sequences of records, compared byte after byte.

use stagewire_core::Record;

/// Whether two sequences move the same bytes to the same places in the same order; else the first (source, destination)
/// that is another, or that only one of them has.
pub(super) fn compare(
    planned: impl Iterator<Item = Record>,
    needed: impl Iterator<Item = Record>,
) -> Result<(), String> {
    let (mut planned, mut needed) = (Bytes::new(planned), Bytes::new(needed));
    loop {
        match (planned.here(), needed.here()) {
            (None, None) => return Ok(()),
            (Some(planned), Some(needed)) if planned == needed => {}
            (planned, needed) => return Err(format!("it moves {planned:?} where {needed:?} is needed")),
        }
        let (rows, bytes) = planned.common(&needed);
        planned.skip(rows, bytes);
        needed.skip(rows, bytes);
    }
}

/// A place in a sequence of records, read byte after byte; rows of the same form are skipped as one.
struct Bytes<I> {
    rest: I,
    record: Option<Record>,
    row: u64,
    column: u64,
}

impl<I: Iterator<Item = Record>> Bytes<I> {
    fn new(mut rest: I) -> Self {
        Self {
            record: rest.next(),
            rest,
            row: 0,
            column: 0,
        }
    }

    /// (Source, destination) of the next byte.
    fn here(&self) -> Option<(u64, u64)> {
        let record = self.record?;
        Some((
            record.src_offset + self.row * record.src_pitch + self.column,
            record.dst_offset + self.row * record.dst_pitch + self.column,
        ))
    }

    /// How far two sequences at the same byte go on alike: whole rows, or bytes of a row.
    fn common<J>(&self, other: &Bytes<J>) -> (u64, u64) {
        let (Some(one), Some(two)) = (self.record, other.record) else {
            return (0, 0);
        };
        let form = |record: Record| (record.width, record.src_pitch, record.dst_pitch);
        if self.column == 0 && other.column == 0 && form(one) == form(two) {
            return ((one.rows - self.row).min(two.rows - other.row), 0);
        }
        (0, (one.width - self.column).min(two.width - other.column))
    }

    fn skip(&mut self, rows: u64, bytes: u64) {
        let Some(record) = self.record else { return };
        self.row += rows;
        self.column += bytes;
        if self.column == record.width {
            self.column = 0;
            self.row += 1;
        }
        if self.row == record.rows {
            self.record = self.rest.next();
            self.row = 0;
        }
    }
}
