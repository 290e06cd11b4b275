//! `shm`: peers map this host's arena, or copy out of it.

use std::ptr::NonNull;
use std::sync::Arc;

use async_trait::async_trait;
use stagewire_core::{Device, Peer, Record, RegionRef, TransportAddress};

use crate::copy::{MoveError, Mover, Shape, copy_records};
use crate::link::{Grip, Link};
use crate::mapping::Keep;
use crate::pull::pull;
use crate::table::Registration;
use crate::wire::{Kind, Place};
use crate::{
    Abilities, ConnectError, ConnectOptions, Host, Mapping, Memory, Pinned, Region, RegisterError, RegisterOptions,
    RegisterProblem, Remote, Target, TransferError, TransferOptions, TransferStats, Transport,
};

const KIND: Kind = Kind::Shm;

/// From so many bytes, two threads copy. Measured: at 1 MiB one wins.
pub(crate) const SHAPE: Shape = Shape {
    large_from: 4 << 20,
    max_rows: u64::MAX,
};

#[derive(Debug)]
pub(crate) struct Shm {
    host: Arc<Host>,
}

impl Shm {
    pub(crate) fn new(host: Arc<Host>) -> Self {
        Self { host }
    }
}

#[async_trait]
impl Transport for Shm {
    fn name(&self) -> &'static str {
        KIND.name()
    }

    fn abilities(&self) -> Abilities {
        Abilities {
            map: true,
            pull: true,
            push: false,
            strided: true,
            checked: true,
            device: false,
        }
    }

    fn address(&self) -> TransportAddress {
        self.host.address(KIND)
    }

    fn register(&self, memory: Memory, options: RegisterOptions) -> Result<Region, RegisterError> {
        let problem = match &memory {
            Memory::Arena(extent) if self.host.arena().owns(extent) => None,
            _ => Some(RegisterProblem::NotFromArena),
        };
        register(&self.host, KIND, memory, &options, problem)
    }

    async fn connect(&self, peer: &Peer, options: ConnectOptions) -> Result<Arc<dyn Remote>, ConnectError> {
        let link = self.host.link(KIND, peer, &options).await?;
        Ok(Arc::new(ShmRemote { link }))
    }

    fn stats(&self) -> TransferStats {
        self.host.shared().counters.meter(KIND).stats()
    }
}

/// Registers with the host's table, unless something stands against it.
pub(crate) fn register(
    host: &Host,
    kind: Kind,
    memory: Memory,
    options: &RegisterOptions,
    problem: Option<RegisterProblem>,
) -> Result<Region, RegisterError> {
    let device = match options.device {
        Device::Cpu => memory.device(),
        device => device,
    };
    let problem = match device {
        Device::Cpu if memory.is_empty() => Some(RegisterProblem::Empty),
        Device::Cpu => problem,
        device => Some(RegisterProblem::Device { device }),
    };
    if let Some(problem) = problem {
        return Err(RegisterError::new(kind.name(), problem, memory));
    }
    let registration = Registration {
        kind,
        memory,
        device,
        guard: None,
    };
    Region::register(&host.shared().table, registration)
}

#[derive(Debug)]
struct ShmRemote {
    link: Arc<Link>,
}

#[async_trait]
impl Remote for ShmRemote {
    async fn pin(&self, region: &RegionRef, options: TransferOptions) -> Result<Box<dyn Pinned>, TransferError> {
        let grip = self.link.pin(KIND, region, &options).await?;
        Ok(Box::new(ShmPinned { grip: Arc::new(grip) }))
    }

    fn is_alive(&self) -> bool {
        self.link.is_alive()
    }

    async fn closed(&self) -> String {
        self.link.closed().await
    }
}

#[derive(Debug)]
struct ShmPinned {
    grip: Arc<Grip>,
}

impl ShmPinned {
    /// The first byte of the region, mapped for as long as the grip lives.
    fn base(&self) -> Result<NonNull<u8>, TransferError> {
        let (Some(segment), Place::Segment { offset, .. }) = (self.grip.segment(), self.grip.place()) else {
            unreachable!("a shm pin has a segment, or it was not granted");
        };
        let base = segment.base().map_err(|error| TransferError::Io {
            peer: self.grip.link().peer(),
            region: self.grip.region(),
            what: "map the segment",
            error,
        })?;
        // SAFETY: the link checked that offset and length lie inside the segment, whose size it proved.
        Ok(unsafe { base.add(offset as usize) })
    }
}

#[async_trait]
impl Pinned for ShmPinned {
    fn len(&self) -> u64 {
        self.grip.len()
    }

    async fn pull(&self, records: &[Record], dst: &Target, options: TransferOptions) -> Result<(), TransferError> {
        let mover = OutOfMapping {
            src: self.base()?,
            grip: self.grip.clone(),
        };
        pull(&self.grip, records, dst, &options, SHAPE, mover).await
    }

    async fn map(&self) -> Result<Mapping, TransferError> {
        if !self.grip.link().is_alive() {
            return Err(self.grip.link().peer_lost());
        }
        let (base, len) = (self.base()?, self.grip.len() as usize);
        // SAFETY: the grip keeps the segment mapped and the region pinned.
        Ok(unsafe { Mapping::new(base, len, self.grip.clone()) })
    }
}

impl Keep for Grip {}

/// Copies out of a mapped segment, which the grip keeps.
struct OutOfMapping {
    src: NonNull<u8>,
    grip: Arc<Grip>,
}

// SAFETY: read-only shared memory without thread affinity.
unsafe impl Send for OutOfMapping {}
// SAFETY: as above.
unsafe impl Sync for OutOfMapping {}

impl Mover for OutOfMapping {
    const CHOOSES: bool = true;

    unsafe fn copy(&self, records: &[Record], dst: NonNull<u8>, streaming: bool) -> Result<(), MoveError> {
        // SAFETY: the caller proved that the records lie inside both. They do not overlap: nobody writes to a region that
        // others may read, so no target is made of it.
        unsafe { copy_records(records, self.src, dst, streaming) };
        Ok(())
    }

    fn verify(&self) -> Result<(), MoveError> {
        self.grip.still_held().map_err(|_| MoveError::Lost)
    }
}
