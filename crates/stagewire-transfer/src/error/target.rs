use stagewire_core::{Classify, Device, ErrorClass};

/// Why bytes of a [`Target`](crate::Target) can be neither written nor shown now.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum TargetError {
    #[error("bytes {start} to {end} are outside the {len} bytes of the target")]
    OutOfBounds { start: u64, end: u64, len: u64 },
    #[error("a pull in flight writes bytes {start} to {end} of the target")]
    Busy { start: u64, end: u64 },
    #[error("bytes {start} to {end} of the target were already pulled; reset it before it is used again")]
    Written { start: u64, end: u64 },
    #[error("not all of bytes {start} to {end} of the target were pulled yet")]
    Unwritten { start: u64, end: u64 },
    #[error("the memory is on {device}: copy it to the host to look at its bytes")]
    Device { device: Device },
    #[error("the source is memory of the target itself")]
    Overlap,
    #[error("cannot allocate {len} bytes of private memory")]
    Memory { len: u64 },
    #[error("the runtime shut down before the copy had ended")]
    Abandoned,
}

impl Classify for TargetError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::OutOfBounds { .. } | Self::Overlap => ErrorClass::Invalid,
            Self::Busy { .. } | Self::Written { .. } | Self::Unwritten { .. } => ErrorClass::Conflict,
            Self::Device { .. } => ErrorClass::Unsupported,
            Self::Memory { .. } => ErrorClass::Exhausted,
            Self::Abandoned => ErrorClass::Cancelled,
        }
    }

    fn reason(&self) -> &'static str {
        match self {
            Self::OutOfBounds { .. } => "target.bounds",
            Self::Busy { .. } => "target.busy",
            Self::Written { .. } => "target.written",
            Self::Unwritten { .. } => "target.unwritten",
            Self::Device { .. } => "target.device",
            Self::Overlap => "target.overlap",
            Self::Memory { .. } => "target.memory",
            Self::Abandoned => "target.abandoned",
        }
    }
}
