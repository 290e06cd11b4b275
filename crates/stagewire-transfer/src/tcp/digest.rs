use std::hash::Hasher;
use std::ptr::NonNull;

use twox_hash::XxHash3_64;

/// The digest of a payload in parts.
pub(crate) enum Digest {
    /// Nobody wants it.
    Off,
    /// No part yet.
    Empty,
    /// All of it came as one part.
    Whole(u64),
    Parts(Box<XxHash3_64>),
}

impl Digest {
    pub(crate) fn new(on: bool) -> Self {
        if on { Self::Empty } else { Self::Off }
    }

    /// Adds the next part of a payload of `total` bytes.
    ///
    /// # Safety
    /// The bytes must be readable, and nobody may write to them meanwhile.
    pub(crate) unsafe fn add(&mut self, at: NonNull<u8>, len: usize, total: usize) {
        if matches!(self, Self::Off) {
            return;
        }
        // SAFETY: the caller's contract.
        let bytes = unsafe { std::slice::from_raw_parts(at.as_ptr(), len) };
        match self {
            Self::Parts(hasher) => hasher.write(bytes),
            _ if len == total => *self = Self::Whole(XxHash3_64::oneshot(bytes)),
            _ => {
                let mut hasher = Box::new(XxHash3_64::new());
                hasher.write(bytes);
                *self = Self::Parts(hasher);
            }
        }
    }

    pub(crate) fn finish(&self) -> u64 {
        match self {
            Self::Off => 0,
            Self::Empty => XxHash3_64::oneshot(&[]),
            Self::Whole(digest) => *digest,
            Self::Parts(hasher) => hasher.finish(),
        }
    }
}
