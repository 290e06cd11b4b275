//! One error for each operation.

mod adopt;
mod arena;
mod cma;
mod connect;
mod nixl;
mod register;
mod start;
mod target;
mod transfer;

pub use adopt::AdoptError;
pub use arena::ArenaError;
pub use cma::CmaUnavailable;
pub use connect::ConnectError;
pub use nixl::NixlUnavailable;
pub use register::{RegisterError, RegisterProblem};
pub use start::StartError;
pub use target::TargetError;
pub use transfer::TransferError;
