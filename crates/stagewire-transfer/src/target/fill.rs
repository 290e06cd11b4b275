use std::ptr::NonNull;
use std::slice;

use stagewire_core::{Device, Record};

use super::{Claim, Target};
use crate::copy::{self, MoveError, Mover, Plan, Written, copy_records};
use crate::shm::SHAPE;
use crate::{Memory, TargetError, TransferError};

impl Target {
    /// Copies memory of this process into the target, all of it, as a pull would: large ones on blocking threads, with
    /// stores that go around the caches. Nobody may write the source meanwhile.
    ///
    /// # Errors
    /// [`TargetError`]; [`TargetError::OutOfBounds`] where source and target differ in length. No byte counts as written
    /// then.
    ///
    /// # Cancel safety
    /// A copy under way ends by itself; until then the target is not idle. Its bytes count as never written.
    pub async fn fill(&self, source: &Memory) -> Result<(), TargetError> {
        let (len, wanted) = (self.len(), source.len());
        for device in [source.device(), self.device()] {
            if device != Device::Cpu {
                return Err(TargetError::Device { device });
            }
        }
        let bounds = TargetError::OutOfBounds {
            start: 0,
            end: wanted,
            len,
        };
        if wanted != len {
            return Err(bounds);
        }
        let record = Record::contiguous(0, 0, len);
        let (plan, rows) = Plan::new(&[record], len, len, SHAPE).map_err(|_| bounds)?;
        self.run(plan, rows, source).await
    }

    /// Copies records of memory of this process into the target, as a pull would. Nobody may write their source meanwhile.
    ///
    /// # Errors
    /// As for a pull: [`TransferError`]; no byte counts as written then.
    ///
    /// # Cancel safety
    /// A copy under way ends by itself; until then the target is not idle. Its bytes count as never written.
    pub async fn copy(&self, records: &[Record], source: &Memory) -> Result<(), TransferError> {
        for device in [source.device(), self.device()] {
            if device != Device::Cpu {
                return Err(TargetError::Device { device }.into());
            }
        }
        let (plan, rows) = Plan::new(records, source.len(), self.len(), SHAPE)?;
        Ok(self.run(plan, rows, source).await?)
    }

    async fn run(&self, plan: Plan, rows: Written, source: &Memory) -> Result<(), TargetError> {
        if self.inner.is_shared_with(source) {
            return Err(TargetError::Overlap);
        }
        let claim = self.claim(rows)?;
        let mover = OutOfMemory { source: source.clone() };
        let filled = copy::run(plan, mover, claim).await;
        filled.map_err(|_| TargetError::Abandoned)?.commit();
        Ok(())
    }

    /// Claims all bytes of the target for a writer of this process that is no transport, such as a reader of a file.
    ///
    /// # Errors
    /// As for a pull: [`TargetError::Busy`], [`TargetError::Written`]; [`TargetError::Device`] where it is not in host
    /// memory.
    pub fn begin(&self) -> Result<Filling, TargetError> {
        let device = self.device();
        if device != Device::Cpu {
            return Err(TargetError::Device { device });
        }
        let all = 0..self.len();
        let rows: Written = std::iter::once(all).filter(|all| !all.is_empty()).collect();
        let claim = self.claim(rows)?;
        Ok(Filling {
            claim,
            len: self.len() as usize,
        })
    }
}

/// The bytes of a [`Target`] while somebody writes them. Dropped without [`Filling::commit`], they count as never
/// written.
pub struct Filling {
    claim: Claim,
    len: usize,
}

// SAFETY: the bytes are reached through `&mut self` alone, and have no thread affinity (contract of `Target`).
unsafe impl Send for Filling {}

impl Filling {
    /// All bytes of the target, in whatever state.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: initialised host memory by the contract of `Target`, which the claim keeps, and reserves for this value.
        unsafe { slice::from_raw_parts_mut(self.claim.base().as_ptr(), self.len) }
    }

    /// Every byte is exact.
    pub fn commit(self) {
        self.claim.commit();
    }
}

impl std::fmt::Debug for Filling {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Filling({} bytes)", self.len)
    }
}

/// Copies out of memory of this process.
struct OutOfMemory {
    source: Memory,
}

impl Mover for OutOfMemory {
    const CHOOSES: bool = true;

    unsafe fn copy(&self, records: &[Record], dst: NonNull<u8>, streaming: bool) -> Result<(), MoveError> {
        // SAFETY: the caller proved that the records lie inside both. They do not overlap: `run` has seen to that where others
        // have the target's memory as well; else it is shown as memory to nobody, or who lent it promised that nobody
        // reads it now.
        unsafe { copy_records(records, self.source.as_ptr(), dst, streaming) };
        Ok(())
    }

    fn verify(&self) -> Result<(), MoveError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use stagewire_core::ByteCount;

    use super::*;
    use crate::{Arena, Borrowed};

    #[tokio::test]
    async fn all_of_the_source_comes_or_nothing() {
        for len in [0_usize, 1, 5000, 9 << 20] {
            let bytes: Vec<u8> = (0..len).map(|at| (at * 7 + at / 4096) as u8).collect();
            let source = Memory::from(Borrowed::from(bytes.clone()));
            let target = Target::allocate(len as u64).expect("memory");
            target.fill(&source).await.expect("of the same length");
            assert!(target.as_slice().expect("filled") == bytes, "{len} bytes came changed");
            if len > 0 {
                let again = target.fill(&source).await;
                assert!(matches!(again, Err(TargetError::Written { .. })), "{again:?}");
            }
            let longer = Target::allocate(len as u64 + 1).expect("memory");
            let refused = longer.fill(&source).await;
            assert!(matches!(refused, Err(TargetError::OutOfBounds { .. })), "{refused:?}");
            assert!(longer.as_slice().is_err(), "bytes of a refused copy were shown");
        }
    }

    #[tokio::test]
    async fn an_open_extent_is_not_filled_from_itself() {
        let arena = Arena::new(ByteCount(1 << 20));
        let (extent, writer) = arena.allocate(100).expect("room").open();
        let target = Target::from(writer);
        let part = Memory::from(extent.slice(90, 10).expect("inside"));
        let refused = target.copy(&[Record::contiguous(0, 0, 10)], &part).await;
        assert!(
            matches!(refused, Err(TransferError::Target(TargetError::Overlap))),
            "{refused:?}"
        );
        let other = Memory::from(arena.allocate(100).expect("room").freeze());
        target.fill(&other).await.expect("other memory");
    }

    #[tokio::test]
    async fn records_are_gathered_and_scattered() {
        let source = Memory::from(Borrowed::from((0..100).collect::<Vec<u8>>()));
        let strided = |src_pitch, dst_pitch| Record {
            src_offset: 10,
            dst_offset: 1,
            width: 2,
            rows: 3,
            src_pitch,
            dst_pitch,
        };
        let gathered = Target::allocate(10).expect("memory");
        gathered.copy(&[strided(20, 2)], &source).await.expect("inside");
        assert_eq!(gathered.slice(1..7).expect("copied"), [10, 11, 30, 31, 50, 51]);
        let scattered = Target::allocate(20).expect("memory");
        scattered.copy(&[strided(2, 8)], &source).await.expect("inside");
        assert_eq!(scattered.slice(9..11).expect("copied"), [12, 13]);
        assert!(scattered.slice(8..11).is_err(), "the gap counts as written");
        let outside = gathered.copy(&[strided(60, 2)], &source).await;
        assert!(
            matches!(outside, Err(TransferError::Record { index: 0, .. })),
            "{outside:?}"
        );
    }

    #[test]
    fn what_is_not_committed_counts_as_never_written() {
        let target = Target::allocate(100).expect("memory");
        let mut first = target.begin().expect("free");
        first.bytes_mut().fill(1);
        assert!(matches!(target.begin(), Err(TargetError::Busy { .. })));
        drop(first);
        assert!(target.as_slice().is_err(), "bytes of a writer that gave up were shown");
        let mut second = target.begin().expect("free again");
        second.bytes_mut().fill(2);
        second.commit();
        assert_eq!(target.as_slice().expect("filled"), [2; 100]);
        let none = Target::allocate(0).expect("nothing");
        none.begin().expect("free").commit();
        assert!(none.as_slice().expect("empty").is_empty());
    }
}
