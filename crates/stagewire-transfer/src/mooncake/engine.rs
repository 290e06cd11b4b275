//! `mooncake-engine`: the same trait over a transfer engine of somebody else's, such as the one in Mooncake's wheel, which
//! carries RDMA and NVLink where it has them.
//!
//! The control connection of the [`Network`](crate::Network) pins regions and checks incarnation, generation and
//! capability; the engine moves the bytes, between addresses. Transfers are submitted and looked after by a thread that
//! sleeps in between, never by the engine's synchronous calls, which spin.

mod driver;
#[cfg(test)]
mod fake;
mod flight;
mod janitor;
mod lane;
mod pace;
mod pinned;
mod placer;
mod registration;
mod slot;
mod strikes;
mod transport;

use std::fmt;
use std::num::NonZeroU64;
use std::sync::Arc;

use stagewire_core::Device;

pub use slot::Rebuild;
pub use transport::EngineTransport;

/// A transfer engine: moves bytes between registered memory of two processes, by address, each of which has one.
///
/// All calls come from threads of the transport or of whoever registers memory, never from threads of an async runtime:
/// they may wait, for a lock of an interpreter or for the answer of a peer.
pub trait Engine: fmt::Debug + Send + Sync + 'static {
    /// How engines of other processes name this one, such as `10.0.0.7:16001`.
    fn segment(&self) -> String;

    /// Whether memory of this side must be registered too before it takes part in a transfer. Where that is not so, it is
    /// left out: what is registered, peers can reach.
    fn registers_local(&self) -> bool;

    /// Lets peers read and write memory, which stays in place until it was unregistered. Bytes that are registered are not
    /// registered again.
    ///
    /// # Errors
    /// [`EngineError`], and nothing is registered.
    fn register(&self, memory: EngineMemory) -> Result<(), EngineError>;

    /// Ends the registration of the memory that begins at `address`.
    ///
    /// # Errors
    /// [`EngineError`].
    fn unregister(&self, address: u64) -> Result<(), EngineError>;

    /// Begins to move some slices between this process and the engine named `segment`.
    ///
    /// # Errors
    /// [`EngineError`]: nothing was begun, no byte moves.
    fn submit(
        &self,
        segment: &str,
        operation: EngineOperation,
        slices: &[EngineSlice],
    ) -> Result<EngineBatch, EngineError>;

    /// How far a batch is. Anything but [`EngineStatus::Pending`] says that none of its slices is touched any more; the
    /// batch is then over and not asked about again.
    fn status(&self, batch: EngineBatch) -> EngineStatus;
}

/// Memory that an engine registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineMemory {
    /// Address of the first byte, on the device where there is one.
    pub address: u64,
    /// Bytes, at least one.
    pub len: u64,
    /// Where it is.
    pub device: Device,
}

/// One contiguous piece of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineSlice {
    /// Address in this process.
    pub local: u64,
    /// Address in the peer's.
    pub remote: u64,
    /// Bytes, at least one.
    pub len: u64,
}

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineOperation {
    /// From the peer to here.
    Read,
    /// From here to the peer.
    Write,
}

/// A batch of slices under way, as its engine numbers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EngineBatch(pub NonZeroU64);

/// How far a batch is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineStatus {
    /// At least one slice is not over.
    Pending,
    /// All slices were moved.
    Done,
    /// All slices are over, and at least one was not moved.
    Failed {
        /// The first of them.
        slice: usize,
    },
}

/// Why an engine did not do what a call asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {problem}")]
pub struct EngineError {
    /// The call of the engine.
    pub call: &'static str,
    /// What it returned.
    pub problem: String,
}

/// How a transport uses an engine.
#[derive(Default)]
#[non_exhaustive]
pub struct EngineOptions {
    /// Makes another engine, for transfers that this side begins, when the one in use no longer reaches a peer that lives.
    /// Memory stays registered with the first one, whose name peers know.
    pub rebuild: Option<Rebuild>,
}

impl fmt::Debug for EngineOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineOptions")
            .field("rebuild", &self.rebuild.is_some())
            .finish()
    }
}

/// An engine and what is registered with it.
type Member = Arc<registration::Member>;
