//! Moves registered memory between processes.

#![expect(
    unsafe_code,
    reason = "maps shared memory, copies raw memory and reads other processes"
)]

mod arena;
mod error;
mod host;
mod mapping;
mod memory;
mod region;
mod target;
mod transport;

pub use arena::{Arena, ArenaStats, Extent, ExtentMut, ExtentWriter};
pub use error::{
    ArenaError, CmaUnavailable, ConnectError, RegisterError, RegisterProblem, StartError, TargetError, TransferError,
};
pub use host::{Host, HostOptions, HostStats, sweep};
pub use mapping::Mapping;
pub use memory::{Borrowed, Memory};
pub use region::Region;
pub use target::Target;
pub use transport::{
    Abilities, ConnectOptions, Pinned, RegisterOptions, Remote, TransferOptions, Transport, empty_region,
};
