use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;

use stagewire_core::Device;

use crate::TargetError;
use crate::buffer::Buffer;

/// Memory that peers may write with [`Pinned::push`](crate::Pinned::push).
///
/// Clones are the same memory. Its bytes show only once nobody else holds it: no region, no pin, no transfer.
#[derive(Clone)]
pub struct Writable {
    inner: Arc<Inner>,
}

struct Inner {
    ptr: NonNull<u8>,
    len: usize,
    device: Device,
    _keep: Keep,
}

enum Keep {
    Owner(#[expect(dead_code, reason = "held, never looked at")] Arc<dyn Any + Send + Sync>),
    Private(#[expect(dead_code, reason = "held, never looked at")] Buffer),
}

// SAFETY: the bytes have no thread affinity (contract of `new`; a buffer is plain memory). Peers' writes go through raw
// pointers, and a reference is made only for the one holder that is left.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Writable {
    /// Private memory, filled with zeros.
    ///
    /// # Errors
    /// [`TargetError::Memory`] where the system gives none.
    pub fn allocate(len: u64) -> Result<Self, TargetError> {
        let refused = TargetError::Memory { len };
        let size = usize::try_from(len).map_err(|_| refused.clone())?;
        let buffer = Buffer::take(len).ok_or(refused)?;
        let ptr = buffer.as_ptr();
        // SAFETY: the buffer has at least `size` bytes and nobody else has it. It may hold what was there before, which
        // no peer may see.
        unsafe { ptr.write_bytes(0, size) };
        Ok(Self::from_parts(ptr, size, Device::Cpu, Keep::Private(buffer)))
    }

    /// Memory of the caller, which stays valid for as long as `owner` is not dropped.
    ///
    /// # Safety
    /// Until `owner` is dropped, the bytes must be initialised, readable and writable at this address from any thread,
    /// and nobody else may read or write them before [`Writable::bytes`] shows them.
    pub unsafe fn new(ptr: NonNull<u8>, len: usize, owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self::from_parts(ptr, len, Device::Cpu, Keep::Owner(owner))
    }

    /// Memory of a device, which only a transport with [`Abilities::device`](crate::Abilities::device) takes.
    ///
    /// # Safety
    /// As [`Writable::new`], where readable and writable mean: by the device's driver.
    pub unsafe fn on_device(
        device: Device,
        address: NonNull<u8>,
        len: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Self::from_parts(address, len, device, Keep::Owner(owner))
    }

    fn from_parts(ptr: NonNull<u8>, len: usize, device: Device, keep: Keep) -> Self {
        Self {
            inner: Arc::new(Inner {
                ptr,
                len,
                device,
                _keep: keep,
            }),
        }
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.inner.len
    }

    /// Whether there is no byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The first byte. Peers write there as long as it is registered.
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.inner.ptr
    }

    /// Where it is.
    pub fn device(&self) -> Device {
        self.inner.device
    }

    /// The bytes, once nobody else holds this memory: its region was released, and all pins ended. `None` before, and
    /// for memory of a device.
    pub fn bytes(&mut self) -> Option<&[u8]> {
        let inner = Arc::get_mut(&mut self.inner)?;
        if inner.device != Device::Cpu {
            return None;
        }
        // SAFETY: initialised and in bounds; whoever could write it holds a clone, and there is none. A new one needs
        // this value, which is borrowed.
        Some(unsafe { slice::from_raw_parts(inner.ptr.as_ptr(), inner.len) })
    }
}

impl fmt::Debug for Writable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Writable({} bytes)", self.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_show_only_to_the_last_holder() {
        let mut memory = Writable::allocate(10).expect("memory");
        let other = memory.clone();
        assert_eq!(memory.bytes(), None);
        drop(other);
        assert_eq!(memory.bytes(), Some(&[0; 10][..]));
    }
}
