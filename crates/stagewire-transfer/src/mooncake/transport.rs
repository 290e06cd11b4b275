use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use stagewire_core::{Peer, Record, RegionRef, TransportAddress};
use tokio::time::timeout;

use super::data::{ExchangeError, Job, Local, Operation, Pool, PoolError, Unsettled};
use super::segment::{SHAPE, chain};
use super::{Mooncake, lock};
use crate::link::{Grip, Link};
use crate::pull::{self, no_map, pull_with};
use crate::push::{self, push_with};
use crate::shm;
use crate::wire::{self, Kind, Place};
use crate::{
    Abilities, ConnectError, ConnectOptions, Mapping, Memory, Pinned, Region, RegisterError, RegisterOptions, Remote,
    Target, TransferError, TransferOptions, TransferStats, Transport,
};

const KIND: Kind = Kind::Mooncake;

/// How long a data connection that broke waits for the news that the peer died.
const DEATH_AFTER_BREAK: Duration = Duration::from_millis(200);

/// What our own peers need to know besides how to pin: where the data port is.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct DataPort {
    host: String,
    port: u16,
}

#[async_trait]
impl Transport for Mooncake {
    fn name(&self) -> &'static str {
        KIND.name()
    }

    fn abilities(&self) -> Abilities {
        Abilities {
            map: false,
            pull: true,
            push: true,
            strided: false,
            checked: true,
            device: false,
        }
    }

    fn address(&self) -> TransportAddress {
        let descriptor = &self.shared.descriptor;
        let port = DataPort {
            host: descriptor.data_host.clone().unwrap_or_default(),
            port: descriptor.data_port,
        };
        self.network.address(KIND, &wire::encode(&port))
    }

    fn register(&self, memory: Memory, options: RegisterOptions) -> Result<Region, RegisterError> {
        shm::register(self.network.host(), KIND, memory, &options, None)
    }

    async fn connect(&self, peer: &Peer, options: ConnectOptions) -> Result<Arc<dyn Remote>, ConnectError> {
        let (link, extra) = self.network.link(KIND, peer, &options).await?;
        let port: DataPort = wire::decode(&extra).map_err(|error| ConnectError::Address {
            peer: peer.incarnation,
            transport: KIND.name(),
            problem: format!("its data port: {error}"),
        })?;
        let mut pools = lock(&self.pools);
        pools.retain(|_, pool| pool.strong_count() > 0);
        let known = pools.get(&peer.incarnation).and_then(std::sync::Weak::upgrade);
        let pool = known.unwrap_or_else(|| Arc::new(Pool::new(port.host, port.port, self.connections)));
        pools.insert(peer.incarnation, Arc::downgrade(&pool));
        Ok(Arc::new(MooncakeRemote { link, pool }))
    }

    fn stats(&self) -> TransferStats {
        self.network.host().shared().counters.meter(KIND).stats()
    }
}

#[derive(Debug)]
struct MooncakeRemote {
    link: Arc<Link>,
    pool: Arc<Pool>,
}

#[async_trait]
impl Remote for MooncakeRemote {
    async fn pin(&self, region: &RegionRef, options: TransferOptions) -> Result<Box<dyn Pinned>, TransferError> {
        let grip = Arc::new(self.link.pin(KIND, region, &options).await?);
        let Place::Address(address) = grip.place() else {
            return Err(backend(
                &grip,
                "pin",
                format!("it says that the region is at {:?}", grip.place()),
            ));
        };
        // Offsets in the region are added to it.
        if address.checked_add(grip.len()).is_none() {
            return Err(backend(
                &grip,
                "pin",
                format!("it says that the region is at {address:#x}"),
            ));
        }
        let pool = self.pool.clone();
        Ok(Box::new(MooncakePinned { grip, address, pool }))
    }

    fn is_alive(&self) -> bool {
        self.link.is_alive()
    }

    async fn closed(&self) -> String {
        self.link.closed().await
    }
}

#[derive(Debug)]
struct MooncakePinned {
    grip: Arc<Grip>,
    address: u64,
    pool: Arc<Pool>,
}

#[async_trait]
impl Pinned for MooncakePinned {
    fn len(&self) -> u64 {
        self.grip.len()
    }

    async fn pull(&self, records: &[Record], dst: &Target, options: TransferOptions) -> Result<(), TransferError> {
        pull::host_memory(KIND.name(), dst)?;
        let (grip, unsettled) = (&self.grip, &Unsettled::default());
        pull_with(grip, records, dst, &options, SHAPE, |plan, claim| async move {
            let job = Job {
                operation: Operation::Read,
                remote: self.address,
                local: Local(claim.base()),
                pieces: &plan.pieces(),
            };
            // SAFETY: the plan was made for these lengths; the claim reserves the bytes and outlives the future.
            let ran = unsafe { self.pool.run(&job, unsettled) }.await;
            if let Err(error) = ran {
                return Err(self.failed("pull", error).await);
            }
            // The owner sent the bytes under an address that is this pin's alone.
            grip.still_held()?;
            Ok(claim)
        })
        .await
    }

    /// Not all or nothing: records may be written while others are not.
    async fn push(&self, records: &[Record], src: &Memory, options: TransferOptions) -> Result<(), TransferError> {
        push::host_memory(KIND.name(), src)?;
        let (grip, unsettled) = (&self.grip, &Unsettled::default());
        let pushed = push_with(grip, records, src, &options, SHAPE, |plan, spent| async move {
            let _spent = spent;
            let job = Job {
                operation: Operation::Write,
                remote: self.address,
                local: Local(src.as_ptr()),
                pieces: &plan.pieces(),
            };
            // SAFETY: the plan was made for these lengths; `src` is borrowed until the future is done or dropped.
            match unsafe { self.pool.run(&job, unsettled) }.await {
                Ok(()) => Ok(()),
                Err(error) => Err(self.failed("push", error).await),
            }
        })
        .await;
        pushed.map_err(|error| {
            // What a dead process had as memory is gone with it.
            let is_settled =
                !unsettled.any() || (matches!(error, TransferError::PeerLost { .. }) && grip.link().is_dead());
            if is_settled {
                return error;
            }
            TransferError::InDoubt {
                peer: grip.link().peer(),
                pid: grip.link().process().pid,
                region: grip.region(),
                bytes: records.iter().map(Record::nbytes).sum(),
                how: error.to_string(),
            }
        })
    }

    async fn map(&self) -> Result<Mapping, TransferError> {
        Err(no_map(KIND.name()))
    }
}

impl MooncakePinned {
    async fn failed(&self, what: &'static str, error: PoolError) -> TransferError {
        let link = self.grip.link();
        match error {
            PoolError::Exchange(ExchangeError::Rejected { .. }) if link.is_alive() => TransferError::Released {
                peer: link.peer(),
                region: self.grip.region(),
            },
            error => {
                let dead = timeout(DEATH_AFTER_BREAK, link.closed()).await.is_ok();
                if dead {
                    link.peer_lost()
                } else {
                    backend(&self.grip, what, chain(&error))
                }
            }
        }
    }
}

fn backend(grip: &Grip, what: &'static str, problem: String) -> TransferError {
    TransferError::Backend {
        transport: KIND.name(),
        peer: grip.link().peer(),
        region: grip.region(),
        what,
        record: None,
        problem,
    }
}
