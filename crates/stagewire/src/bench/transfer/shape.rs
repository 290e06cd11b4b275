use stagewire_core::Record;
use stagewire_transfer::probe::Rows;

/// How the bytes of a copy lie in the owner's memory. They are packed at the reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    Whole,
    /// A chunk of a tensor: so many runs, with as many bytes of another chunk between them.
    Runs(u64),
}

impl Shape {
    pub(super) fn name(self) -> String {
        match self {
            Self::Whole => "whole".to_owned(),
            Self::Runs(count) => format!("{count} runs"),
        }
    }

    /// Bytes of the owner's memory.
    pub(super) const fn span(self, size: u64) -> u64 {
        match self {
            Self::Whole => size,
            Self::Runs(_) => 2 * size,
        }
    }

    pub(super) const fn record(self, size: u64) -> Record {
        match self {
            Self::Whole => Record::contiguous(0, 0, size),
            Self::Runs(rows) => Record {
                src_offset: 0,
                dst_offset: 0,
                width: size / rows,
                rows,
                src_pitch: 2 * (size / rows),
                dst_pitch: size / rows,
            },
        }
    }

    pub(super) const fn rows(self, size: u64) -> Rows {
        match self {
            Self::Whole => Rows::whole(size as usize),
            Self::Runs(count) => Rows {
                count: count as usize,
                width: (size / count) as usize,
                pitch: (2 * (size / count)) as usize,
            },
        }
    }
}

/// `64 MiB`.
pub(in crate::bench) fn size_name(size: u64) -> String {
    match size {
        1_073_741_824.. => format!("{} GiB", size >> 30),
        1_048_576.. => format!("{} MiB", size >> 20),
        _ => format!("{} KiB", size >> 10),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_and_bare_rows_are_the_same_bytes() {
        for shape in [Shape::Whole, Shape::Runs(16), Shape::Runs(128)] {
            let size = 64 << 10;
            let (record, rows) = (shape.record(size), shape.rows(size));
            assert_eq!(record.nbytes(), size);
            record.check(shape.span(size), size).expect("inside");
            let bare = (rows.count as u64, rows.width as u64, rows.pitch as u64);
            assert_eq!(bare, (record.rows, record.width, record.src_pitch.max(record.width)));
        }
        assert_eq!(
            (size_name(4096), size_name(64 << 20), size_name(1 << 30)),
            ("4 KiB".to_owned(), "64 MiB".to_owned(), "1 GiB".to_owned())
        );
    }
}
