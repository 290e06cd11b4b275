use std::hash::Hasher;
use std::slice;

use stagewire_core::{Device, Record, RecordError};
use twox_hash::XxHash3_64;

use super::Memory;

/// Digest (XXH3, 64 bits) of rows of bytes, as if they stood one behind the other.
pub fn digest<'a>(rows: impl IntoIterator<Item = &'a [u8]>) -> u64 {
    let mut hasher = XxHash3_64::new();
    rows.into_iter().for_each(|row| hasher.write(row));
    hasher.finish()
}

impl Memory {
    /// Digest of the bytes that the record reads, row after row. They must be announced: nobody may write them any more.
    ///
    /// # Errors
    /// [`RecordError`] where the record leaves the memory, or this is memory that peers may write or that of a device.
    pub fn digest(&self, record: &Record) -> Result<u64, RecordError> {
        record.check(self.len(), u64::MAX)?;
        let device = self.device();
        if device != Device::Cpu {
            return Err(RecordError::Device { device });
        }
        if self.is_writable() {
            let (side, end, len) = ("memory that peers may write", self.len(), 0);
            let record = *record;
            return Err(RecordError::OutOfBounds { record, side, end, len });
        }
        let width = record.width as usize;
        let rows = record.row_offsets().map(|(offset, _)| {
            // SAFETY: the record was checked to lie inside the memory, which is initialised and kept by `self`; whoever
            // lent it promised that announced bytes are not written any more.
            unsafe { slice::from_raw_parts(self.as_ptr().as_ptr().add(offset as usize), width) }
        });
        Ok(digest(rows))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Borrowed, Writable};

    #[test]
    fn rows_are_one_stream() {
        let memory = Memory::from(Borrowed::from((0..20).collect::<Vec<u8>>()));
        let record = Record {
            src_offset: 2,
            dst_offset: 0,
            width: 3,
            rows: 2,
            src_pitch: 10,
            dst_pitch: 3,
        };
        assert_eq!(memory.digest(&record), Ok(digest([[2, 3, 4, 12, 13, 14].as_slice()])));
        assert_ne!(memory.digest(&Record::contiguous(2, 0, 6)), memory.digest(&record));
        assert!(memory.digest(&Record::contiguous(15, 0, 6)).is_err(), "outside");
        let writable = Memory::from(Writable::allocate(8).expect("memory"));
        assert!(writable.digest(&Record::contiguous(0, 0, 8)).is_err(), "it may change");
    }
}
