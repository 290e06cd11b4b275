//! One side of a batch of records: which bytes of a memory, in which order.

use stagewire_core::Record;

/// Rows of one width at one distance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    /// First byte.
    pub(crate) offset: u64,
    /// Bytes of a row.
    pub(crate) width: u64,
    pub(crate) rows: u64,
    /// Bytes from one row to the next.
    pub(crate) pitch: u64,
}

impl Run {
    /// Where the records read.
    pub(crate) fn source(record: &Record) -> Self {
        Self {
            offset: record.src_offset,
            width: record.width,
            rows: record.rows,
            pitch: record.src_pitch,
        }
    }

    /// Where the records write.
    pub(crate) fn destination(record: &Record) -> Self {
        Self {
            offset: record.dst_offset,
            width: record.width,
            rows: record.rows,
            pitch: record.dst_pitch,
        }
    }

    /// Bytes of all rows, where they fit 64 bits.
    pub(crate) fn nbytes(&self) -> Option<u64> {
        self.width.checked_mul(self.rows)
    }

    /// First byte behind the last row, where it fits 64 bits.
    pub(crate) fn end(&self) -> Option<u64> {
        let last = self.rows.saturating_sub(1).checked_mul(self.pitch)?;
        last.checked_add(self.width)?.checked_add(self.offset)
    }

    /// The same bytes in as few rows as possible.
    fn merged(self) -> Self {
        if self.rows > 1 && self.pitch == self.width {
            let width = self.width * self.rows;
            Self {
                width,
                rows: 1,
                pitch: width,
                ..self
            }
        } else {
            self
        }
    }
}

/// Runs one after the other, as a stream of bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rows {
    runs: Vec<Run>,
    bytes: u64,
    count: u64,
}

impl Rows {
    /// `None` where a run leaves 64-bit offsets or the first `len` bytes.
    pub(crate) fn new(runs: impl IntoIterator<Item = Run>, len: u64) -> Option<Self> {
        let mut rows = Self {
            runs: Vec::new(),
            bytes: 0,
            count: 0,
        };
        for run in runs {
            let nbytes = run.nbytes()?;
            if run.end()? > len {
                return None;
            }
            rows.bytes = rows.bytes.checked_add(nbytes)?;
            if nbytes > 0 {
                let run = run.merged();
                rows.count = rows.count.checked_add(run.rows)?;
                rows.runs.push(run);
            }
        }
        Some(rows)
    }

    /// Bytes of the stream.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether the rows are so narrow on average that moving them one by one through a system call costs more than
    /// copying them together first.
    pub(crate) fn is_narrow(&self) -> bool {
        self.bytes < self.count.saturating_mul(NARROW)
    }
}

/// Whether the owner will find these rows narrow, as [`Rows::is_narrow`] says.
pub(crate) fn are_narrow(runs: &[Run]) -> bool {
    let (mut bytes, mut count) = (0_u64, 0_u64);
    for run in runs.iter().filter(|run| run.width > 0).map(|run| run.merged()) {
        bytes = bytes.saturating_add(run.width.saturating_mul(run.rows));
        count = count.saturating_add(run.rows);
    }
    bytes < count.saturating_mul(NARROW)
}

/// Measured: below, a kernel vector per row costs more than one more copy of it.
const NARROW: u64 = 2 << 10;

/// A place in the stream.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Cursor {
    run: usize,
    row: u64,
    at: u64,
}

impl Cursor {
    /// Walks over the next `bytes` bytes of the stream, or to its end: calls `visit` with offset and length of each
    /// contiguous part.
    pub(crate) fn walk(&mut self, rows: &Rows, bytes: u64, mut visit: impl FnMut(u64, usize)) {
        self.stride(rows, bytes, |run, _| {
            for row in 0..run.rows {
                visit(run.offset + row * run.pitch, run.width as usize);
            }
        });
    }

    /// As [`Cursor::walk`], with rows that lie at one distance together, and the run that begins behind them.
    pub(crate) fn stride(&mut self, rows: &Rows, mut bytes: u64, mut visit: impl FnMut(Run, Option<&Run>)) {
        while bytes > 0
            && let Some(run) = rows.runs.get(self.run)
        {
            let offset = run.offset + self.row * run.pitch + self.at;
            let whole = (bytes / run.width).min(run.rows - self.row);
            let (width, count) = if self.at == 0 && whole > 0 {
                self.row += whole;
                (run.width, whole)
            } else {
                let width = bytes.min(run.width - self.at);
                self.at += width;
                (width, 1)
            };
            if self.at == run.width {
                (self.row, self.at) = (self.row + 1, 0);
            }
            if self.row == run.rows {
                (self.run, self.row) = (self.run + 1, 0);
            }
            bytes -= width * count;
            let part = Run {
                offset,
                width,
                rows: count,
                ..*run
            };
            visit(part, rows.runs.get(self.run));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(offset: u64, width: u64, rows: u64, pitch: u64) -> Run {
        Run {
            offset,
            width,
            rows,
            pitch,
        }
    }

    #[test]
    fn rows_that_touch_are_one() {
        let rows = Rows::new([run(8, 4, 3, 4), run(0, 4, 0, 9)], 20).expect("inside");
        assert_eq!((rows.bytes(), rows.count), (12, 1));
        let mut seen = Vec::new();
        Cursor::default().walk(&rows, u64::MAX, |offset, len| seen.push((offset, len)));
        assert_eq!(seen, [(8, 12)]);
    }

    #[test]
    fn rows_that_lie_at_one_distance_stay_together() {
        let rows = Rows::new([run(1, 4, 3, 10), run(50, 2, 2, 5)], 100).expect("inside");
        let (mut cursor, mut seen) = (Cursor::default(), Vec::new());
        for bytes in [9, 4, 9] {
            cursor.stride(&rows, bytes, |part, next| {
                seen.push((part.offset, part.width, part.rows, next.map(|next| next.offset)));
            });
        }
        let (second, end) = (Some(50), None);
        let expected = [
            (1, 4, 2, Some(1)),
            (21, 1, 1, Some(1)),
            (22, 3, 1, second),
            (50, 1, 1, second),
            (51, 1, 1, second),
            (55, 2, 1, end),
        ];
        assert_eq!(seen, expected);
    }

    #[test]
    fn both_sides_find_the_same_rows_narrow() {
        for (runs, narrow) in [
            ([run(0, 0, 9, 0), run(0, NARROW, 2, 5000)], false),
            ([run(0, 64, 64, 64), run(0, 2, 0, 9)], false),
            ([run(0, 256, 64, 1024), run(0, 2, 1, 9)], true),
        ] {
            let rows = Rows::new(runs, 1 << 20).expect("inside");
            assert_eq!((are_narrow(&runs), rows.is_narrow()), (narrow, narrow), "{runs:?}");
        }
    }

    #[test]
    fn what_leaves_its_memory_is_refused() {
        assert!(Rows::new([run(8, 4, 3, 4)], 19).is_none());
        assert!(Rows::new([run(u64::MAX, 1, 1, 0)], u64::MAX).is_none());
        assert!(Rows::new([run(0, 2, u64::MAX, 0)], u64::MAX).is_none());
        assert!(Rows::new([run(0, 1, u64::MAX, 2)], u64::MAX).is_none());
        assert!(Rows::new([run(0, 1, u64::MAX, 0); 2], u64::MAX).is_none());
    }

    proptest! {
        /// Against one byte after the other, whatever the steps.
        #[test]
        fn a_walk_in_steps_meets_each_byte_once_in_order(
            runs in prop::collection::vec((0_u64..50, 0_u64..9, 0_u64..6, 0_u64..12), 0..6),
            steps in prop::collection::vec(1_u64..40, 1..40),
        ) {
            let runs: Vec<Run> = runs.into_iter().map(|(offset, width, rows, pitch)| run(offset, width, rows, pitch)).collect();
            let expected: Vec<u64> = runs
                .iter()
                .flat_map(|run| (0..run.rows).flat_map(move |row| (0..run.width).map(move |at| run.offset + row * run.pitch + at)))
                .collect();
            let rows = Rows::new(runs, 200).expect("inside");
            prop_assert_eq!(rows.bytes(), expected.len() as u64);
            let (mut cursor, mut found) = (Cursor::default(), Vec::new());
            for step in steps.iter().cycle().take(1000) {
                let before = found.len();
                cursor.walk(&rows, *step, |offset, len| found.extend(offset..offset + len as u64));
                prop_assert_eq!(found.len(), expected.len().min(before + *step as usize));
            }
            prop_assert_eq!(found, expected);
        }
    }
}
