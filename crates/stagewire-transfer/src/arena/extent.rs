use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};
use std::slice;

use stagewire_core::{Device, Record, RecordError};

use super::{Inner, Segment};
use crate::Borrowed;
use crate::sync::{Arc, AtomicBool, Ordering};

/// A range of the arena; goes back to it when the last reference is dropped.
struct Range {
    arena: Arc<Inner>,
    segment: Arc<Segment>,
    offset: u64,
    len: u64,
    reserved: u64,
    /// Whether an [`ExtentWriter`] may still change bytes.
    open: AtomicBool,
    /// Whether another process may have the bytes when this one is done with them.
    left: AtomicBool,
}

impl Range {
    fn new(arena: Arc<Inner>, segment: Arc<Segment>, offset: u64, len: u64, reserved: u64) -> Self {
        Self {
            arena,
            segment,
            offset,
            len,
            reserved,
            open: AtomicBool::new(false),
            left: AtomicBool::new(false),
        }
    }

    fn as_ptr(&self) -> NonNull<u8> {
        self.segment.at(self.offset)
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        if !self.left.load(Ordering::Acquire) {
            self.arena.free(self.segment.id(), self.offset, self.reserved);
        }
    }
}

impl fmt::Debug for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at {}+{}", self.len, self.segment.id(), self.offset)
    }
}

/// Freshly allocated bytes of the arena, for one writer.
#[derive(Debug)]
pub struct ExtentMut {
    range: Arc<Range>,
}

impl ExtentMut {
    pub(super) fn new(arena: Arc<Inner>, segment: Arc<Segment>, offset: u64, len: u64, reserved: u64) -> Self {
        let range = Arc::new(Range::new(arena, segment, offset, len, reserved));
        Self { range }
    }

    /// Ends writing.
    pub fn freeze(self) -> Extent {
        Extent::whole(self.range)
    }

    /// Splits into an extent that can be registered now and a writer that still fills it, chunk by chunk. A chunk must
    /// not be written any more once it was announced to a reader.
    pub fn open(self) -> (Extent, ExtentWriter) {
        self.range.open.store(true, Ordering::Release);
        let extent = Extent::whole(self.range.clone());
        (extent, ExtentWriter { range: self.range })
    }

    /// The first byte.
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.range.as_ptr()
    }
}

impl Deref for ExtentMut {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the range is mapped for as long as the segment lives, always initialised (fresh pages are zero), and
        // belongs to this value alone: peers learn of it only once it is an `Extent`.
        unsafe { slice::from_raw_parts(self.range.as_ptr().as_ptr(), self.range.len as usize) }
    }
}

impl DerefMut for ExtentMut {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `deref`, and `&mut self` excludes every other reference of this process.
        unsafe { slice::from_raw_parts_mut(self.range.as_ptr().as_ptr(), self.range.len as usize) }
    }
}

/// Bytes of the arena that can be registered. Cloning is cheap and shares the bytes.
#[derive(Debug, Clone)]
pub struct Extent {
    range: Arc<Range>,
    /// Which part of the range this is.
    start: u64,
    len: u64,
}

impl Extent {
    /// Bytes of an adopted segment: nobody can write to them any more.
    pub(super) fn adopted(arena: Arc<Inner>, segment: Arc<Segment>, offset: u64, len: u64, reserved: u64) -> Self {
        Self::whole(Arc::new(Range::new(arena, segment, offset, len, reserved)))
    }

    fn whole(range: Arc<Range>) -> Self {
        let len = range.len;
        Self { range, start: 0, len }
    }

    /// `len` of these bytes from `offset` on, shared with this extent; `None` where they are not all in it, or none.
    pub fn slice(&self, offset: u64, len: u64) -> Option<Self> {
        let inside = len > 0 && offset.checked_add(len).is_some_and(|end| end <= self.len);
        inside.then(|| Self {
            range: self.range.clone(),
            start: self.start + offset,
            len,
        })
    }

    /// Bytes, as asked for.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Never: there is at least one byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The first byte.
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.range.segment.at(self.offset())
    }

    /// Leaves the bytes to another process, which reads them: this arena uses them for nothing else any more, also when
    /// the last reference is dropped.
    pub fn leave(&self) {
        self.range.left.store(true, Ordering::Release);
    }

    /// Whether an [`ExtentWriter`] may still change bytes.
    pub(crate) fn is_open(&self) -> bool {
        self.range.open.load(Ordering::Acquire)
    }

    /// The bytes, unless an [`ExtentWriter`] may still change them.
    pub fn bytes(&self) -> Option<&[u8]> {
        if self.is_open() {
            return None;
        }
        // SAFETY: mapped and initialised as in `ExtentMut::deref`, and a slice lies inside the range. There is no writer,
        // and none can come back: a writer comes only from an `ExtentMut`, which ended when this was made.
        Some(unsafe { slice::from_raw_parts(self.as_ptr().as_ptr(), self.len as usize) })
    }

    pub(crate) fn segment(&self) -> &Segment {
        &self.range.segment
    }

    /// First byte within the segment.
    pub(crate) fn offset(&self) -> u64 {
        self.range.offset + self.start
    }

    pub(super) fn arena(&self) -> &Arc<Inner> {
        &self.range.arena
    }
}

/// The only writer of an extent that readers may already see in parts.
#[derive(Debug)]
pub struct ExtentWriter {
    range: Arc<Range>,
}

impl ExtentWriter {
    /// The first byte.
    pub(crate) fn as_ptr(&self) -> NonNull<u8> {
        self.range.as_ptr()
    }

    /// Bytes of the extent.
    pub(crate) fn len(&self) -> u64 {
        self.range.len
    }

    /// Copies records from `source` into the extent. Blocks for as long as the copy takes.
    ///
    /// # Errors
    /// [`RecordError`]; nothing is written then.
    pub fn copy(&mut self, records: &[Record], source: &Borrowed) -> Result<(), RecordError> {
        match source.device() {
            Device::Cpu => {}
            device => return Err(RecordError::Device { device }),
        }
        for record in records {
            record.check(source.len() as u64, self.range.len)?;
        }
        let rows = records
            .iter()
            .map(|record| record.merged())
            .flat_map(|record| record.row_offsets().map(move |(src, dst)| (src, dst, record.width)));
        for (src, dst, width) in rows {
            // SAFETY: `check` proved that both rows lie inside their memory. The source is host memory, readable by the
            // contract of `Borrowed::new`. The destination is written by this writer alone, and shown as a slice by nobody.
            // The two may be the same memory, which `copy` allows.
            unsafe {
                let from = source.as_ptr().as_ptr().add(src as usize);
                let to = self.range.as_ptr().as_ptr().add(dst as usize);
                ptr::copy(from, to, width as usize);
            }
        }
        Ok(())
    }
}

impl Drop for ExtentWriter {
    fn drop(&mut self) {
        self.range.open.store(false, Ordering::Release);
    }
}
