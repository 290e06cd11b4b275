use stagewire_core::{Classify, Device, ErrorClass};

use crate::Memory;

/// Why memory was not registered. The memory comes back with [`RegisterError::into_memory`].
#[derive(Debug, thiserror::Error)]
#[error("cannot register {} bytes with {transport}: {problem}", memory.len())]
pub struct RegisterError {
    transport: &'static str,
    problem: RegisterProblem,
    memory: Memory,
}

/// What stands against a registration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the fields are the values that the message shows")]
pub enum RegisterProblem {
    #[error("a region of 0 bytes cannot be pinned; describe it with `empty_region`")]
    Empty,
    #[error("the memory is not from this host's arena; copy it into an extent or use cma")]
    NotFromArena,
    #[error("it moves host memory only, this is on {device}; copy it to the host first")]
    Device { device: Device },
    #[error(
        "it shares bytes with region {region}, and one of the two may be written by peers; release that region first"
    )]
    Overlap { region: u64 },
    #[error("not all of the {len} bytes at {address:#x} are mapped in this process")]
    Unmapped { address: u64, len: u64 },
    #[error("{device} cannot be used: {problem}")]
    NoDevice { device: Device, problem: String },
    #[error(
        "a peer may still write these bytes, by what it knows of a region that was released; wait until it has forgotten \
         that, or use other memory"
    )]
    Quarantined,
    #[error("{problem}")]
    Backend { problem: String },
    #[error("this host was shut down")]
    ShutDown,
}

impl RegisterError {
    pub(crate) fn new(transport: &'static str, problem: RegisterProblem, memory: Memory) -> Self {
        Self {
            transport,
            problem,
            memory,
        }
    }

    /// What stands against it.
    pub fn problem(&self) -> &RegisterProblem {
        &self.problem
    }

    /// The memory that was to be registered.
    pub fn into_memory(self) -> Memory {
        self.memory
    }
}

impl Classify for RegisterError {
    fn class(&self) -> ErrorClass {
        match self.problem {
            RegisterProblem::Empty | RegisterProblem::Unmapped { .. } => ErrorClass::Invalid,
            RegisterProblem::Overlap { .. } | RegisterProblem::Quarantined => ErrorClass::Conflict,
            RegisterProblem::NotFromArena | RegisterProblem::Device { .. } | RegisterProblem::NoDevice { .. } => {
                ErrorClass::Unsupported
            }
            RegisterProblem::Backend { .. } | RegisterProblem::ShutDown => ErrorClass::Unavailable,
        }
    }

    fn reason(&self) -> &'static str {
        match self.problem {
            RegisterProblem::Empty => "register.empty",
            RegisterProblem::NotFromArena => "register.not_from_arena",
            RegisterProblem::Device { .. } | RegisterProblem::NoDevice { .. } => "register.device",
            RegisterProblem::Overlap { .. } => "register.overlap",
            RegisterProblem::Unmapped { .. } => "register.unmapped",
            RegisterProblem::Quarantined => "register.quarantined",
            RegisterProblem::Backend { .. } => "register.backend",
            RegisterProblem::ShutDown => "register.shut_down",
        }
    }
}
