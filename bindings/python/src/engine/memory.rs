//! Memory by address, as the Python layer names it.

use std::ptr::NonNull;
use std::sync::Arc;

use pyo3::prelude::*;
use stagewire_core::Device;
use stagewire_transfer::{Borrowed, Memory, Target, Writable};

use crate::error::invalid;
use crate::reaper::Lent;

/// Address, bytes, index of the CUDA device where it is on one, whether it is read-only, and the object that owns it.
#[derive(FromPyObject)]
pub(super) struct Span(usize, usize, Option<u32>, bool, Py<PyAny>);

/// Keeps memory in place; given back under the GIL.
type Owner = Arc<Lent<Py<PyAny>>>;

impl Span {
    fn parts(self, py: Python<'_>) -> PyResult<(NonNull<u8>, usize, Device, Owner)> {
        let Self(address, len, cuda, _, owner) = self;
        let pointer = match NonNull::new(std::ptr::with_exposed_provenance_mut(address)) {
            Some(pointer) => pointer,
            None if len == 0 => NonNull::dangling(),
            None => return Err(invalid(py, "argument.memory", format!("{len} bytes at address 0"))),
        };
        Ok((
            pointer,
            len,
            cuda.map_or(Device::Cpu, Device::Cuda),
            Arc::new(Lent::new(owner)),
        ))
    }

    fn writable(&self, py: Python<'_>) -> PyResult<()> {
        if self.3 {
            return Err(invalid(py, "argument.memory", "the memory is read-only"));
        }
        Ok(())
    }

    /// Memory to register, or to push from.
    ///
    /// # Safety
    /// As long as the owner lives, the bytes must stay at the address. What peers may read is not written any more, and
    /// what they may write is touched by nobody else until its region has ended.
    pub(super) unsafe fn memory(self, py: Python<'_>, writable: bool) -> PyResult<Memory> {
        if writable {
            self.writable(py)?;
        }
        let (pointer, len, device, owner) = self.parts(py)?;
        // SAFETY: the caller's contract.
        Ok(unsafe {
            if writable {
                Writable::on_device(device, pointer, len, owner).into()
            } else {
                Borrowed::on_device(device, pointer, len, owner).into()
            }
        })
    }

    /// Memory to pull into.
    ///
    /// # Safety
    /// As long as the owner lives, the bytes must stay at the address, touched by nobody else while a pull is in flight.
    pub(super) unsafe fn target(self, py: Python<'_>) -> PyResult<Target> {
        self.writable(py)?;
        let (pointer, len, device, owner) = self.parts(py)?;
        // SAFETY: the caller's contract.
        Ok(unsafe { Target::on_device(device, pointer, len, owner) })
    }
}
