//! Where pulled bytes go.

mod fill;
mod ledger;

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::slice;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub use fill::Filling;
use ledger::Ledger;
use stagewire_core::Device;

use crate::budget::Spent;
use crate::buffer::Buffer;
use crate::copy::Written;
use crate::{Extent, ExtentMut, ExtentWriter, Memory, TargetError};

/// Pause between two looks whether a target is idle.
const IDLE_PAUSE: Duration = Duration::from_micros(200);

/// Destination memory for pulls; copies in flight keep it alive.
///
/// It keeps books of its bytes: each is pulled at most once between resets, never by two pulls at a time, and
/// [`Target::slice`] shows only bytes of pulls that succeeded. So no safe code sees a byte that may still change or
/// never arrived.
pub struct Target {
    inner: Arc<Inner>,
}

struct Inner {
    ptr: NonNull<u8>,
    len: u64,
    device: Device,
    keep: Keep,
    ledger: Mutex<Ledger>,
}

enum Keep {
    Owner(#[expect(dead_code, reason = "held, never looked at")] Arc<dyn Any + Send + Sync>),
    Private(#[expect(dead_code, reason = "held, never looked at")] Buffer),
    Extent(ExtentMut),
    Writer(ExtentWriter),
}

// SAFETY: the bytes have no thread affinity (contract of `new`; the other kinds are plain memory), and who touches
// which of them is decided by the ledger.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Target {
    /// Memory of the caller, which stays valid for as long as `owner` is not dropped.
    ///
    /// # Safety
    /// Until `owner` is dropped, the bytes must be initialised, readable and writable at this address from any thread,
    /// and nobody may read or write bytes while a pull into them is in flight: from the call of
    /// [`Pinned::pull`](crate::Pinned::pull) or [`Target::fill`] until it returned, or, when its future was dropped or ran
    /// out of time, until [`Target::is_idle`]; and as long as there is a [`Filling`].
    pub unsafe fn new(ptr: NonNull<u8>, len: usize, owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self::from_parts(ptr, len as u64, Device::Cpu, Keep::Owner(owner))
    }

    /// Memory of a device, which only a transport with [`Abilities::device`](crate::Abilities::device) fills; the others
    /// refuse. [`Target::slice`] shows none of it.
    ///
    /// # Safety
    /// As [`Target::new`], where readable and writable mean: by the device's driver.
    pub unsafe fn on_device(
        device: Device,
        address: NonNull<u8>,
        len: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Self::from_parts(address, len as u64, device, Keep::Owner(owner))
    }

    /// Private memory, page-aligned, from a pool of buffers that were used before where one fits. The pool keeps at most
    /// 256 MiB of the process.
    ///
    /// # Errors
    /// [`TargetError::Memory`] where the system gives none.
    pub fn allocate(len: u64) -> Result<Self, TargetError> {
        let buffer = Buffer::take(len).ok_or(TargetError::Memory { len })?;
        Ok(Self::from_parts(
            buffer.as_ptr(),
            len,
            Device::Cpu,
            Keep::Private(buffer),
        ))
    }

    /// The same memory, to be pulled into again and again, such as the pages of a cache: bytes of a pull that has ended may
    /// be pulled anew without [`Target::reset`]. Two pulls at a time still write no byte both. In return
    /// [`Target::slice`] shows none of it: who owns the memory looks at it himself, once no pull is in flight.
    #[must_use]
    pub fn rewritable(self) -> Self {
        self.inner.ledger().forget_written();
        self
    }

    fn from_parts(ptr: NonNull<u8>, len: u64, device: Device, keep: Keep) -> Self {
        let ledger = Mutex::default();
        Self {
            inner: Arc::new(Inner {
                ptr,
                len,
                device,
                keep,
                ledger,
            }),
        }
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.inner.len
    }

    /// Whether there is no byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where it is.
    pub fn device(&self) -> Device {
        self.inner.device
    }

    /// The first byte. What may be read through it, and when, [`Target::slice`] tells.
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.inner.ptr
    }

    /// Bytes that were pulled.
    ///
    /// # Errors
    /// [`TargetError::Unwritten`] where one of them was not, [`TargetError::OutOfBounds`], [`TargetError::Device`].
    pub fn slice(&self, range: Range<u64>) -> Result<&[u8], TargetError> {
        let (start, end, len) = (range.start, range.end, self.len());
        if start > end || end > len {
            return Err(TargetError::OutOfBounds { start, end, len });
        }
        if self.inner.device != Device::Cpu {
            let device = self.inner.device;
            return Err(TargetError::Device { device });
        }
        if !self.inner.ledger().is_written(&range) {
            return Err(TargetError::Unwritten { start, end });
        }
        // SAFETY: in bounds, initialised, and written by a pull that ended; the ledger lets no other pull write these
        // bytes before `reset`, which needs this value without such a borrow.
        Ok(unsafe { slice::from_raw_parts(self.inner.ptr.as_ptr().add(start as usize), (end - start) as usize) })
    }

    /// All bytes.
    ///
    /// # Errors
    /// As [`Target::slice`].
    pub fn as_slice(&self) -> Result<&[u8], TargetError> {
        self.slice(0..self.len())
    }

    /// Whether no copy writes into it.
    pub fn is_idle(&self) -> bool {
        self.inner.ledger().is_idle()
    }

    /// Whether no copy writes into these bytes.
    pub fn is_idle_in(&self, range: Range<u64>) -> bool {
        self.inner.ledger().is_idle_in(&range)
    }

    /// Returns once it is idle.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn idle(&self) {
        // Copies end on threads that nobody waits for, within milliseconds.
        while !self.is_idle() {
            tokio::time::sleep(IDLE_PAUSE).await;
        }
    }

    /// Forgets what was pulled, so that all of it can be pulled again.
    ///
    /// # Errors
    /// [`TargetError::Busy`] while a copy writes into it, be it one whose future was dropped.
    pub fn reset(&mut self) -> Result<(), TargetError> {
        self.inner.ledger().reset()
    }

    /// Makes an extent for readers out of a target that was made of one.
    ///
    /// # Errors
    /// Gives the target back where it was not made from an [`ExtentMut`], or a copy still writes into it.
    pub fn into_extent(self) -> Result<Extent, Self> {
        if !matches!(self.inner.keep, Keep::Extent(_)) {
            return Err(self);
        }
        match Arc::try_unwrap(self.inner) {
            Ok(Inner {
                keep: Keep::Extent(extent),
                ..
            }) => Ok(extent.freeze()),
            Ok(_) => unreachable!("checked above"),
            Err(inner) => Err(Self { inner }),
        }
    }

    /// Claims the bytes of `rows`, sorted and disjoint, for one pull.
    pub(crate) fn claim(&self, rows: impl Into<Written>) -> Result<Claim, TargetError> {
        let rows = rows.into();
        self.inner.ledger().claim(&rows)?;
        Ok(Claim {
            inner: self.inner.clone(),
            rows,
            spent: None,
        })
    }
}

impl From<ExtentMut> for Target {
    fn from(extent: ExtentMut) -> Self {
        Self::from_parts(extent.as_ptr(), extent.len() as u64, Device::Cpu, Keep::Extent(extent))
    }
}

/// Bytes that others may already reach, to be filled again and again, as [`Target::rewritable`] says. A reader that is told
/// of them before they are filled, or still reads them when they are filled anew, gets some of both.
impl From<ExtentWriter> for Target {
    fn from(writer: ExtentWriter) -> Self {
        let (ptr, len) = (writer.as_ptr(), writer.len());
        Self::from_parts(ptr, len, Device::Cpu, Keep::Writer(writer)).rewritable()
    }
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Target({} bytes)", self.len())
    }
}

impl Inner {
    /// Whether some of its bytes are some of this memory, which only those of an open extent can be.
    fn is_shared_with(&self, memory: &Memory) -> bool {
        let Keep::Writer(writer) = &self.keep else { return false };
        let (begin, other) = (writer.as_ptr().addr().get() as u64, memory.as_ptr().addr().get() as u64);
        begin < other.saturating_add(memory.len()) && other < begin.saturating_add(writer.len())
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes of a target that one pull writes. Dropped without [`Claim::commit`], they count as never written.
pub(crate) struct Claim {
    inner: Arc<Inner>,
    /// Empty once they are committed.
    rows: Written,
    /// Counts as in flight as long as anything may write.
    spent: Option<Spent>,
}

impl Claim {
    /// The first byte of the target.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.inner.ptr
    }

    /// Has these bytes count as in flight until the claim is committed or given up.
    pub(crate) fn spend(&mut self, spent: Spent) {
        self.spent = Some(spent);
    }

    /// The bytes are exact.
    pub(crate) fn commit(mut self) {
        self.inner.ledger().commit(&std::mem::take(&mut self.rows));
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if !self.rows.is_empty() {
            self.inner.ledger().give_up(&self.rows);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(target: &Target, row: Range<u64>) -> Result<Claim, TargetError> {
        target.claim([row])
    }

    #[test]
    fn only_pulled_bytes_show_and_none_is_pulled_twice() {
        let mut target = Target::allocate(100).expect("memory");
        assert_eq!(
            target.as_slice().unwrap_err(),
            TargetError::Unwritten { start: 0, end: 100 }
        );
        let first = target.claim(vec![0..10, 20..30]).expect("free");
        assert!(!target.is_idle());
        assert_eq!(target.reset().unwrap_err(), TargetError::Busy { start: 0, end: 10 });
        assert!(matches!(claim(&target, 29..31), Err(TargetError::Busy { .. })));
        first.commit();
        assert_eq!(target.slice(20..30).expect("pulled").len(), 10);
        assert!(target.slice(5..25).is_err(), "a hole was shown");
        assert!(matches!(claim(&target, 9..11), Err(TargetError::Written { .. })));
        drop(claim(&target, 10..20).expect("free"));
        assert!(target.slice(10..20).is_err(), "bytes of a failed pull were shown");
        claim(&target, 10..20).expect("free again").commit();
        assert_eq!(target.slice(0..30).expect("no hole left").len(), 30);
        target.reset().expect("idle");
        assert!(target.slice(0..1).is_err());
        assert!(matches!(target.slice(0..101), Err(TargetError::OutOfBounds { .. })));
    }

    #[tokio::test]
    async fn an_open_extent_is_filled_again_and_again() {
        let arena = crate::Arena::new(stagewire_core::ByteCount(1 << 20));
        let (extent, writer) = arena.allocate(10).expect("room").open();
        let target = Target::from(writer);
        for byte in [1_u8, 2] {
            let source = crate::Memory::from(crate::Borrowed::from(vec![byte; 10]));
            target.fill(&source).await.expect("it is rewritable");
            assert_eq!(extent.bytes(), None, "it may be filled again");
            assert!(target.as_slice().is_err());
        }
        drop(target);
        assert_eq!(extent.bytes(), Some(&[2; 10][..]));
    }

    #[test]
    fn a_rewritable_target_takes_bytes_again_and_shows_none() {
        let target = Target::allocate(100).expect("memory").rewritable();
        for _ in 0..2 {
            let first = claim(&target, 10..20).expect("free");
            assert!(matches!(claim(&target, 15..30), Err(TargetError::Busy { .. })));
            assert!(!target.is_idle_in(19..40) && target.is_idle_in(20..40));
            first.commit();
            assert!(target.is_idle_in(0..100));
            assert!(matches!(target.slice(10..20), Err(TargetError::Unwritten { .. })));
        }
    }
}
