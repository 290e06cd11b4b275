use serde::{Deserialize, Serialize};

use crate::{Classify, Device, ErrorClass};

/// One strided copy: `rows` rows of `width` bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// First byte in the source region.
    pub src_offset: u64,
    /// First byte in the destination.
    pub dst_offset: u64,
    /// Bytes of one row.
    pub width: u64,
    /// Number of rows.
    pub rows: u64,
    /// Bytes from one row to the next in the source.
    pub src_pitch: u64,
    /// Bytes from one row to the next in the destination.
    pub dst_pitch: u64,
}

/// A record that does not stay inside its memory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum RecordError {
    #[error("record {record:?} reaches byte {end} of a {side} of {len} bytes")]
    OutOfBounds {
        record: Record,
        side: &'static str,
        end: u64,
        len: u64,
    },
    #[error("record {record:?} overflows 64-bit offsets")]
    Overflow { record: Record },
    #[error("record {record:?} has rows that overlap in the destination")]
    Overlap { record: Record },
    #[error("the source is memory of {device}, which this copy cannot read; copy it to the host first")]
    Device { device: Device },
}

impl Classify for RecordError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Device { .. } => ErrorClass::Unsupported,
            _ => ErrorClass::Invalid,
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::Device { .. } => "transfer.device",
            _ => "transfer.bounds",
        }
    }
}

impl Record {
    /// A plain copy of `len` bytes.
    pub const fn contiguous(src_offset: u64, dst_offset: u64, len: u64) -> Self {
        Self {
            src_offset,
            dst_offset,
            width: len,
            rows: 1,
            src_pitch: len,
            dst_pitch: len,
        }
    }

    /// Bytes that the record moves; `u64::MAX` where they are more, which [`Record::check`] refuses.
    pub const fn nbytes(&self) -> u64 {
        self.width.saturating_mul(self.rows)
    }

    /// Proves that the record stays inside a source of `src_len` and a destination of `dst_len` bytes,
    /// and that no destination byte is written twice.
    ///
    /// # Errors
    /// [`RecordError`].
    pub fn check(&self, src_len: u64, dst_len: u64) -> Result<(), RecordError> {
        self.width
            .checked_mul(self.rows)
            .ok_or(RecordError::Overflow { record: *self })?;
        if self.rows > 1 && self.dst_pitch < self.width {
            return Err(RecordError::Overlap { record: *self });
        }
        let sides = [
            ("source", self.src_offset, self.src_pitch, src_len),
            ("destination", self.dst_offset, self.dst_pitch, dst_len),
        ];
        for (side, offset, pitch, len) in sides {
            let end = self.rows.saturating_sub(1).checked_mul(pitch);
            let end = end
                .and_then(|end| end.checked_add(self.width))
                .and_then(|end| end.checked_add(offset));
            let end = end.ok_or(RecordError::Overflow { record: *self })?;
            if end > len {
                return Err(RecordError::OutOfBounds {
                    record: *self,
                    side,
                    end,
                    len,
                });
            }
        }
        Ok(())
    }

    /// The same copy as few rows as possible: rows that touch on both sides become one.
    #[must_use]
    pub fn merged(self) -> Self {
        if self.rows > 1 && self.src_pitch == self.width && self.dst_pitch == self.width {
            Self::contiguous(self.src_offset, self.dst_offset, self.nbytes())
        } else {
            self
        }
    }

    /// Offsets of each row: (source, destination).
    pub fn row_offsets(&self) -> impl Iterator<Item = (u64, u64)> + use<> {
        let record = *self;
        (0..record.rows).map(move |row| {
            (
                record.src_offset + row * record.src_pitch,
                record.dst_offset + row * record.dst_pitch,
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_a_record_that_nobody_checked() {
        let record = Record {
            rows: 3,
            ..Record::contiguous(0, 0, u64::MAX / 2)
        };
        assert_eq!(record.nbytes(), u64::MAX);
        assert_eq!(record.check(10, 10), Err(RecordError::Overflow { record }));
    }
}
