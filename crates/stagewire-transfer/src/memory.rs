mod digest;
mod writable;

use std::any::Any;
use std::fmt;
use std::mem;
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;

use stagewire_core::Device;

pub use digest::digest;
pub use writable::Writable;

use crate::Extent;

/// Memory to register, or to push from.
#[derive(Debug, Clone)]
pub enum Memory {
    /// From this host's arena: others can map it.
    Arena(Extent),
    /// From anywhere else in this process.
    Borrowed(Borrowed),
    /// Peers may also write it.
    Writable(Writable),
}

impl Memory {
    /// Bytes.
    pub fn len(&self) -> u64 {
        match self {
            Self::Arena(extent) => extent.len(),
            Self::Borrowed(borrowed) => borrowed.len() as u64,
            Self::Writable(writable) => writable.len() as u64,
        }
    }

    /// Whether there is no byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The first byte; an address of the device where [`Memory::device`] names one.
    pub fn as_ptr(&self) -> NonNull<u8> {
        match self {
            Self::Arena(extent) => extent.as_ptr(),
            Self::Borrowed(borrowed) => borrowed.as_ptr(),
            Self::Writable(writable) => writable.as_ptr(),
        }
    }

    /// Where it is.
    pub fn device(&self) -> Device {
        match self {
            Self::Arena(_) => Device::Cpu,
            Self::Borrowed(borrowed) => borrowed.device,
            Self::Writable(writable) => writable.device(),
        }
    }

    /// Whether its bytes may be written while it is registered, as far as it knows itself.
    pub(crate) fn may_change(&self) -> bool {
        match self {
            Self::Arena(extent) => extent.is_open(),
            Self::Borrowed(_) => false,
            Self::Writable(_) => true,
        }
    }

    /// Whether all of `part` is in it, and of the same kind.
    pub(crate) fn contains(&self, part: &Self) -> bool {
        let inside = || {
            let offset = part.as_ptr().addr().get().checked_sub(self.as_ptr().addr().get())?;
            (offset as u64).checked_add(part.len())
        };
        mem::discriminant(self) == mem::discriminant(part)
            && self.device() == part.device()
            && inside().is_some_and(|end| end <= self.len())
    }

    /// Appends its bytes, which must be announced: nobody may write them any more. `false` where it is memory of a device.
    pub(crate) fn append_to(&self, bytes: &mut Vec<u8>) -> bool {
        if self.device() != Device::Cpu || self.may_change() {
            return false;
        }
        let (ptr, len) = (self.as_ptr().as_ptr(), self.len() as usize);
        // SAFETY: the memory is initialised and kept by `self`; whoever lent it promised that announced bytes are not
        // written any more.
        bytes.extend_from_slice(unsafe { slice::from_raw_parts(ptr, len) });
        true
    }

    /// Whether peers may write it.
    pub fn is_writable(&self) -> bool {
        matches!(self, Self::Writable(_))
    }
}

impl From<Extent> for Memory {
    fn from(extent: Extent) -> Self {
        Self::Arena(extent)
    }
}

impl From<Borrowed> for Memory {
    fn from(borrowed: Borrowed) -> Self {
        Self::Borrowed(borrowed)
    }
}

impl From<Writable> for Memory {
    fn from(writable: Writable) -> Self {
        Self::Writable(writable)
    }
}

/// Memory of this process that somebody else owns: a torch tensor, a `Vec`.
#[derive(Clone)]
pub struct Borrowed {
    ptr: NonNull<u8>,
    len: usize,
    device: Device,
    _owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the constructor's contract makes the bytes readable from any thread for as long as the owner lives, and the
// owner is Send and Sync.
unsafe impl Send for Borrowed {}
// SAFETY: as above; this type only reads.
unsafe impl Sync for Borrowed {}

impl Borrowed {
    /// Borrows `len` bytes at `ptr`, which stay valid for as long as `owner` is not dropped.
    ///
    /// The owner is dropped on any thread, after the last pin ended.
    ///
    /// # Safety
    /// Until `owner` is dropped, the bytes must stay readable at this address, from any thread. A byte must not be
    /// written any more once it was announced to a reader (whole payload: from registration; chunk: from `ready`).
    pub unsafe fn new(ptr: NonNull<u8>, len: usize, owner: Arc<dyn Any + Send + Sync>) -> Self {
        let device = Device::Cpu;
        Self {
            ptr,
            len,
            device,
            _owner: owner,
        }
    }

    /// Borrows memory of a device, which only a transport with [`Abilities::device`](crate::Abilities::device) takes.
    ///
    /// # Safety
    /// As [`Borrowed::new`], where readable means: by the device's driver.
    pub unsafe fn on_device(
        device: Device,
        address: NonNull<u8>,
        len: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Self {
            ptr: address,
            len,
            device,
            _owner: owner,
        }
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The first byte; an address of the device where [`Borrowed::device`] names one.
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    /// Where it is.
    pub fn device(&self) -> Device {
        self.device
    }
}

impl From<Vec<u8>> for Borrowed {
    fn from(bytes: Vec<u8>) -> Self {
        Arc::new(bytes).into()
    }
}

impl From<Arc<Vec<u8>>> for Borrowed {
    fn from(owner: Arc<Vec<u8>>) -> Self {
        let ptr = NonNull::from(owner.as_slice()).cast();
        let len = owner.len();
        // SAFETY: this reference keeps the Vec, and as long as it is there, nobody else can change it.
        unsafe { Self::new(ptr, len, owner) }
    }
}

impl fmt::Debug for Borrowed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Borrowed({} bytes)", self.len)
    }
}
