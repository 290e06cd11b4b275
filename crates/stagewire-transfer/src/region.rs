use std::fmt;
use std::ptr;
use std::sync::Arc;

use rustix::mm::{MsyncFlags, msync};
use rustix::param::page_size;
use stagewire_core::{Device, RegionRef};

use crate::table::{Reader, RegionKey, Registration, Table};
use crate::{Memory, RegisterError, RegisterProblem};

/// Registered memory, which it owns. Dropping it releases it.
pub struct Region {
    reference: RegionRef,
    table: Arc<Table>,
}

impl Region {
    /// Registers with a host's table. Whether the transport takes memory of this device is the caller's to check.
    pub(crate) fn register(table: &Arc<Table>, registration: Registration) -> Result<Self, RegisterError> {
        let transport = registration.kind.name();
        if let Some(problem) = Self::problem(&registration.memory, registration.device) {
            return Err(RegisterError::new(transport, problem, registration.memory));
        }
        match table.register(registration) {
            Ok(reference) => Ok(Self {
                reference,
                table: table.clone(),
            }),
            Err((problem, memory)) => Err(RegisterError::new(transport, problem, memory)),
        }
    }

    /// What stands against registering this memory, with whatever transport.
    pub(crate) fn problem(memory: &Memory, device: Device) -> Option<RegisterProblem> {
        match device {
            _ if memory.is_empty() => Some(RegisterProblem::Empty),
            Device::Cpu => unmapped(memory),
            _ => None,
        }
    }

    /// This memory, or a part of it, once more, with a generation, a capability and pins of its own, at no registration.
    /// This region stays until the last of its grants has gone. `None` where it was released, the host has shut down,
    /// `memory` is not inside, or the transport is none of `shm`, `cma` and `tcp`.
    pub fn grant(self: &Arc<Self>, memory: Memory) -> Option<Self> {
        let reference = self.table.grant(self.key(), memory, Box::new(Arc::clone(self)))?;
        Some(Self {
            reference,
            table: self.table.clone(),
        })
    }

    fn key(&self) -> RegionKey {
        RegionKey {
            region: self.reference.region,
            generation: self.reference.generation,
        }
    }

    /// What a reader needs to pin it. Holds the capability: hand it only to who may read.
    pub fn reference(&self) -> RegionRef {
        self.reference.clone()
    }

    /// The owner goes on writing bytes of it that it has announced to nobody yet, until [`Region::seal`]. Call it before
    /// the reference is handed out. An [`Extent`](crate::Extent) is open as long as it has a writer, without this.
    ///
    /// It costs transports with digests a copy, and keeps them from finding fault with bytes that change while they are
    /// sent. A reader that asks for bytes before they are announced to it gets them as they are at that moment.
    pub fn open(&self) {
        self.table.set_open(self.key(), true);
    }

    /// Its bytes do not change any more.
    pub fn seal(&self) {
        self.table.set_open(self.key(), false);
    }

    /// Appends its bytes, which it keeps in place meanwhile as a reader would. `false` where it was released, its bytes may
    /// still change, or this process cannot read them.
    pub fn append_to(&self, bytes: &mut Vec<u8>) -> bool {
        let hold = self.table.hold(self.key());
        hold.is_some_and(|hold| hold.memory().append_to(bytes))
    }

    /// As [`Region::idle`], for longer than the region is kept.
    pub fn once_idle(&self) -> impl Future<Output = ()> + Send + use<> {
        let (table, key) = (self.table.clone(), self.key());
        async move { table.idle(key).await }
    }

    /// Takes no new pins from now on; the memory goes when the last pin ends.
    pub fn release(&self) {
        self.table.release(self.key());
    }

    /// Who holds pins.
    pub fn readers(&self) -> Vec<Reader> {
        self.table.readers(self.key())
    }

    /// Whether nobody holds a pin.
    pub fn is_idle(&self) -> bool {
        self.table.is_idle(self.key())
    }

    /// Resolves when nobody holds a pin.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn idle(&self) {
        self.table.idle(self.key()).await;
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        self.release();
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Region").field(&self.reference).finish()
    }
}

/// Finds memory of this process with pages that are not mapped: a transfer would fail, or end the process. It tells
/// nothing of what the caller unmaps later.
fn unmapped(memory: &Memory) -> Option<RegisterProblem> {
    if matches!(memory, Memory::Arena(_)) {
        return None;
    }
    let (address, len) = (memory.as_ptr().addr().get(), memory.len());
    let start = address & !(page_size() - 1);
    let end = usize::try_from(len).ok().and_then(|len| address.checked_add(len));
    let mapped = end.is_some_and(|end| {
        // SAFETY: nothing is dereferenced, and an asynchronous msync does nothing but look whether the pages are mapped.
        let looked = unsafe { msync(ptr::without_provenance_mut(start), end - start, MsyncFlags::ASYNC) };
        looked != Err(rustix::io::Errno::NOMEM)
    });
    let address = address as u64;
    (!mapped).then_some(RegisterProblem::Unmapped { address, len })
}

#[cfg(test)]
mod tests {
    use std::ptr::NonNull;

    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

    use super::*;
    use crate::Borrowed;

    #[test]
    fn memory_with_a_hole_is_found_out() {
        let (page, flags) = (page_size(), MapFlags::PRIVATE);
        // SAFETY: fresh pages at an address that the kernel chooses.
        let pages = unsafe { mmap_anonymous(ptr::null_mut(), 3 * page, ProtFlags::READ, flags) };
        let pages = NonNull::new(pages.expect("mapped").cast::<u8>()).expect("not null");
        let memory = |offset, len| {
            // SAFETY: never read.
            let memory = unsafe { Borrowed::new(pages.add(offset), len, Arc::new(())) };
            unmapped(&memory.into())
        };
        assert_eq!(memory(1, 3 * page - 1), None);
        // SAFETY: mapped above, and nobody uses it.
        unsafe { munmap(pages.add(page).as_ptr().cast(), page) }.expect("unmapped");
        assert_eq!(memory(0, page), None);
        assert!(matches!(
            memory(page - 1, 2),
            Some(RegisterProblem::Unmapped { len: 2, .. })
        ));
        assert!(memory(0, 3 * page).is_some());
        assert!(memory(0, usize::MAX).is_some(), "longer than the address space");
        for offset in [0, 2 * page] {
            // SAFETY: mapped above, and nobody uses it.
            unsafe { munmap(pages.add(offset).as_ptr().cast(), page) }.expect("unmapped");
        }
    }
}
