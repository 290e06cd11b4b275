//! `tcp`: peers on any host. The owner itself sends the bytes, in frames, from where they are.
//!
//! A reader pins regions over its control connection, as with every transport. Bytes go over *lanes*, data connections
//! of the same session: the reader asks for rows of a pinned region, the owner checks them against the region and sends
//! them, gathered from where they are; the reader has the kernel put them where they belong. All of it runs on the
//! caller's task: when a pull's future is dropped, or runs out of time, nothing writes to its destination any more.

mod ask;
mod digest;
pub(crate) mod frame;
pub(crate) mod line;
mod options;
mod pace;
mod parts;
mod pool;
mod pull;
mod push;
mod receive;
pub(crate) mod rows;
mod send;
mod serve;
#[cfg(test)]
mod tests;
pub(crate) mod vectors;

use std::error::Error;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use stagewire_core::{Peer, Record, RegionRef, TransportAddress};
use tokio::time::timeout;

pub use options::TcpOptions;
pub(crate) use pool::LanePool;
pub(crate) use serve::{Server, Service};

use crate::batch::record_after;
use crate::copy::Shape;
use crate::link::{Grip, Link};
use crate::network::Lanes;
use crate::pull::no_map;
use crate::shm::register;
use crate::wire::Kind;
use crate::{
    Abilities, ConnectError, ConnectOptions, Mapping, Memory, Network, Pinned, Region, RegisterError, RegisterOptions,
    Remote, Target, TransferError, TransferOptions, TransferStats, Transport,
};
use frame::Refusal;
use receive::ReceiveError;

const KIND: Kind = Kind::Tcp;

/// Nothing is cut for threads: one lane takes all.
const SHAPE: Shape = Shape {
    large_from: u64::MAX,
    max_rows: u64::MAX,
};

/// A lane that breaks off usually does so because the peer died, which shows on the control connection a moment later.
const LOSS_SHOWS_WITHIN: Duration = Duration::from_millis(300);

#[derive(Debug)]
pub(crate) struct Tcp {
    network: Arc<Network>,
    service: Arc<Service>,
}

impl Tcp {
    pub(crate) fn new(network: Arc<Network>, service: Arc<Service>) -> Self {
        Self { network, service }
    }
}

#[async_trait]
impl Transport for Tcp {
    fn name(&self) -> &'static str {
        KIND.name()
    }

    fn abilities(&self) -> Abilities {
        Abilities {
            map: false,
            pull: true,
            push: true,
            strided: true,
            checked: true,
            device: false,
        }
    }

    fn address(&self) -> TransportAddress {
        self.network.address(KIND, &[])
    }

    fn register(&self, memory: Memory, options: RegisterOptions) -> Result<Region, RegisterError> {
        register(self.network.host(), KIND, memory, &options, None)
    }

    async fn connect(&self, peer: &Peer, options: ConnectOptions) -> Result<Arc<dyn Remote>, ConnectError> {
        let (link, _) = self.network.link(KIND, peer, &options).await?;
        let service = self.service.clone();
        Ok(Arc::new(TcpRemote { link, service }))
    }

    fn stats(&self) -> TransferStats {
        self.network.host().shared().counters.meter(KIND).stats()
    }
}

#[derive(Debug)]
struct TcpRemote {
    link: Arc<Link>,
    service: Arc<Service>,
}

#[async_trait]
impl Remote for TcpRemote {
    async fn pin(&self, region: &RegionRef, options: TransferOptions) -> Result<Box<dyn Pinned>, TransferError> {
        let grip = Arc::new(self.link.pin(KIND, region, &options).await?);
        let service = self.service.clone();
        Ok(Box::new(TcpPinned { grip, service }))
    }

    fn is_alive(&self) -> bool {
        self.link.is_alive()
    }

    async fn closed(&self) -> String {
        self.link.closed().await
    }
}

#[derive(Debug)]
struct TcpPinned {
    grip: Arc<Grip>,
    service: Arc<Service>,
}

#[async_trait]
impl Pinned for TcpPinned {
    fn len(&self) -> u64 {
        self.grip.len()
    }

    async fn pull(&self, records: &[Record], dst: &Target, options: TransferOptions) -> Result<(), TransferError> {
        self.pull_records(records, dst, &options).await
    }

    /// All or nothing: the owner keeps the bytes apart until all have arrived, and puts them in place only when this
    /// side then still asks for it.
    async fn push(&self, records: &[Record], src: &Memory, options: TransferOptions) -> Result<(), TransferError> {
        self.push_records(records, src, &options).await
    }

    async fn map(&self) -> Result<Mapping, TransferError> {
        Err(no_map(KIND.name()))
    }
}

/// Why a transfer over lanes failed.
#[derive(Debug)]
enum LaneFault {
    Open(ConnectError),
    Ended(ReceiveError),
}

impl TcpPinned {
    fn lanes(&self) -> &Lanes {
        let lanes = self.grip.link().lanes();
        lanes.expect("a link over TCP has lanes")
    }

    /// The error that a fault means, after a moment in which the death of the peer may show.
    async fn fault(&self, what: &'static str, records: &[Record], fault: LaneFault) -> TransferError {
        let link = self.grip.link();
        let (peer, pid, region) = (link.peer(), link.process().pid, self.grip.region());
        let backend = |problem: String| TransferError::Backend {
            transport: KIND.name(),
            peer,
            region,
            what,
            record: None,
            problem,
        };
        let ended = match fault {
            LaneFault::Open(_) | LaneFault::Ended(ReceiveError::Io(_))
                if timeout(LOSS_SHOWS_WITHIN, link.closed()).await.is_ok() =>
            {
                return link.peer_lost();
            }
            LaneFault::Open(ConnectError::Full { peer, what, held, most }) => {
                return TransferError::Full { peer, what, held, most };
            }
            LaneFault::Open(error) => {
                let cause = error.source().map_or_else(String::new, |cause| format!(": {cause}"));
                return backend(format!("no data connection: {error}{cause}"));
            }
            LaneFault::Ended(ended) => ended,
        };
        match ended {
            ReceiveError::Refused(Refusal::NotHeld) => TransferError::Released { peer, region },
            ReceiveError::Refused(Refusal::ReadOnly) => TransferError::ReadOnly { peer, region },
            ReceiveError::Refused(Refusal::Corrupt { at }) => TransferError::Corrupt {
                peer,
                region,
                record: record_after(records, at),
            },
            ReceiveError::Refused(Refusal::TooSlow { after }) => TransferError::TooSlow { peer, region, after },
            ReceiveError::Refused(Refusal::Memory) => backend("the owner has no memory to receive it".to_owned()),
            ReceiveError::Refused(Refusal::Bounds) => {
                backend("the owner says that the records leave the region".to_owned())
            }
            ReceiveError::Corrupt { at, expected, found } => TransferError::Digest {
                peer,
                region,
                record: record_after(records, at),
                expected,
                found,
            },
            ReceiveError::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof => backend(format!(
                "the owner (pid {pid}) closed the data connection before the end"
            )),
            ReceiveError::Io(error) => TransferError::Io {
                peer,
                region,
                what,
                error,
            },
            error @ (ReceiveError::Malformed(_) | ReceiveError::Unexpected { .. }) => backend(error.to_string()),
        }
    }
}
