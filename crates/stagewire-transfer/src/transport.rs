mod stats;

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use stagewire_core::{Capability, Device, Peer, Record, RegionRef, TransportAddress};

pub use stats::TransferStats;
pub(crate) use stats::{Attempt, Direction, Meter};

use crate::{ConnectError, Mapping, Memory, Region, RegisterError, Target, TransferError};

/// What a transport can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Abilities {
    /// [`Pinned::map`] shows the peer's memory without a copy.
    pub map: bool,
    /// [`Pinned::pull`] copies from the peer's memory.
    pub pull: bool,
    /// [`Pinned::push`] writes into a peer's memory.
    pub push: bool,
    /// Records with more than one row cost little more than contiguous ones.
    pub strided: bool,
    /// The owner checks generation, capability and bounds before each pin.
    pub checked: bool,
    /// It reaches memory of devices too. Those without take host memory only, and say so.
    pub device: bool,
}

/// How memory is registered.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RegisterOptions {
    /// Where the memory is. [`Memory::device`] says it too; either may name the device.
    pub device: Device,
}

/// How a peer is reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectOptions {
    /// Longest time until the peer has answered.
    pub deadline: Duration,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        Self {
            deadline: Duration::from_secs(5),
        }
    }
}

/// How one operation on a peer's memory runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TransferOptions {
    /// Longest time it may take; `None` waits as long as the peer lives.
    pub deadline: Option<Duration>,
}

impl Default for TransferOptions {
    fn default() -> Self {
        Self {
            deadline: Some(Duration::from_secs(30)),
        }
    }
}

/// One way to move bytes between two processes.
///
/// Memory moves on the request of whoever was handed a reference: register, hand the reference over, connect, pin, then
/// pull or map. Some transports also push, into memory that its owner registered as [`Memory::Writable`].
#[async_trait]
pub trait Transport: Debug + Send + Sync + 'static {
    /// Name: `shm`, `cma`, `tcp`, `mooncake`, `nixl`, `mooncake-engine`.
    fn name(&self) -> &'static str;

    /// What it can do.
    fn abilities(&self) -> Abilities;

    /// How others reach this process over it, for [`Peer::transports`].
    fn address(&self) -> TransportAddress;

    /// Makes memory readable for whoever presents the reference.
    ///
    /// # Errors
    /// [`RegisterError`], which gives the memory back.
    fn register(&self, memory: Memory, options: RegisterOptions) -> Result<Region, RegisterError>;

    /// Reaches a peer. Connections are kept per incarnation and shared; one that ended is made anew.
    ///
    /// # Errors
    /// [`ConnectError`].
    ///
    /// # Cancel safety
    /// Nothing is left behind by a dropped future.
    async fn connect(&self, peer: &Peer, options: ConnectOptions) -> Result<Arc<dyn Remote>, ConnectError>;

    /// What was pulled and pushed so far, and what waits.
    fn stats(&self) -> TransferStats;
}

/// A peer, reached over one transport.
#[async_trait]
pub trait Remote: Debug + Send + Sync + 'static {
    /// Holds a region of the peer in place, so that it can be read.
    ///
    /// # Errors
    /// [`TransferError`].
    ///
    /// # Cancel safety
    /// A dropped future lets go of the pin, also one that the peer grants later.
    async fn pin(&self, region: &RegionRef, options: TransferOptions) -> Result<Box<dyn Pinned>, TransferError>;

    /// Whether the peer lives and the connection stands, as far as known here.
    fn is_alive(&self) -> bool;

    /// Resolves when the peer died or ended the connection, with what happened.
    async fn closed(&self) -> String;
}

/// A region of a peer that stays in place until this value, its mappings and its copies are gone.
#[async_trait]
pub trait Pinned: Debug + Send + Sync + 'static {
    /// Bytes of the region.
    fn len(&self) -> u64;

    /// Never: a region has at least one byte.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies records of the region into `dst` and confirms that the region was in place and its owner alive until
    /// the end. Either all bytes of the batch are exact, or there is an error and none counts as written: records that had
    /// come by then are pulled again with the others.
    ///
    /// # Errors
    /// [`TransferError`]; where one record is the reason, [`TransferError::record`] says which.
    ///
    /// # Cancel safety
    /// A dropped future stops the copy soon; the copy keeps pin and destination alive until then, and the destination
    /// refuses other use of the bytes concerned.
    async fn pull(&self, records: &[Record], dst: &Target, options: TransferOptions) -> Result<(), TransferError>;

    /// Copies records of `src` into the region: their source offsets are in `src`, their destination offsets in the
    /// region. All or nothing where the transport's documentation says so.
    ///
    /// # Errors
    /// [`TransferError::Unsupported`] where [`Abilities::push`] is false, [`TransferError::ReadOnly`] unless the owner
    /// registered [`Memory::Writable`], [`TransferError::InDoubt`] where the bytes may still be written; else
    /// [`TransferError`]. Where one record is the reason, [`TransferError::record`] says which.
    ///
    /// # Cancel safety
    /// A dropped future may have written all, part or nothing; `src` is kept for as long as it may be read.
    async fn push(&self, records: &[Record], src: &Memory, options: TransferOptions) -> Result<(), TransferError> {
        let _ = (records, src, options);
        Err(TransferError::Unsupported {
            transport: "the transport of this pin",
            ability: "push",
            instead: "register the memory here and have the peer pull it",
        })
    }

    /// Shows the region, read-only, without a copy. The mapping keeps the pin.
    ///
    /// # Errors
    /// [`TransferError::Unsupported`] where [`Abilities::map`] is false; else [`TransferError`].
    async fn map(&self) -> Result<Mapping, TransferError>;
}

/// The reference of an empty tensor. There is nothing to register, pin or pull; a handle needs it all the same, because
/// it names one region per tensor.
pub fn empty_region(transport: &str) -> RegionRef {
    RegionRef {
        transport: transport.to_owned(),
        region: u64::MAX,
        generation: 0,
        capability: Capability::from_random([0; 16]),
        len: 0,
    }
}
