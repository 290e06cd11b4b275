//! Moves registered memory between processes.

#![expect(
    unsafe_code,
    reason = "maps shared memory, copies raw memory and reads other processes"
)]

mod arena;
mod cma;
#[cfg(feature = "conformance")]
pub mod conformance;
mod copy;
mod error;
mod host;
mod link;
mod mapping;
mod memory;
mod process;
mod readiness;
mod region;
mod shm;
mod table;
mod target;
mod transport;
mod wire;

pub use arena::{Arena, ArenaStats, Extent, ExtentMut, ExtentWriter};
pub use error::{
    ArenaError, CmaUnavailable, ConnectError, RegisterError, RegisterProblem, StartError, TargetError, TransferError,
};
pub use host::{Host, HostOptions, HostStats, listen_unix, sweep};
pub use mapping::Mapping;
pub use memory::{Borrowed, Memory};
pub use process::{ProcessWatch, this_process};
pub use region::Region;
pub use target::Target;
pub use transport::{
    Abilities, ConnectOptions, Pinned, RegisterOptions, Remote, TransferOptions, Transport, empty_region,
};
