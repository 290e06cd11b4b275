mod plan;
mod strike;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use stagewire_core::{Peer, Record, RegionRef};

pub use plan::{FaultPlan, Mishap};

use super::Operation;
use super::far::Far;
use crate::{
    ConnectError, ConnectOptions, Mapping, Memory, Pinned, Region, RegisterError, RegisterOptions, Remote, Target,
    TransferError, TransferOptions, Transport,
};

/// A transport whose operations go wrong as a [`FaultPlan`] says: pins, pulls, pushes and mappings.
///
/// Operations are counted in the order in which they were called, each kind for itself, over all peers. Registering and
/// connecting pass through.
#[derive(Debug)]
pub struct Fault {
    inner: Arc<dyn Transport>,
    fate: Arc<Fate>,
}

/// Decides what becomes of the next operation.
#[derive(Debug)]
struct Fate {
    transport: &'static str,
    plan: FaultPlan,
    pins: AtomicU64,
    pulls: AtomicU64,
    pushes: AtomicU64,
    maps: AtomicU64,
    mishaps: AtomicU64,
}

impl Fate {
    fn next(&self, operation: Operation) -> Option<&Mishap> {
        let count = match operation {
            Operation::Pin => &self.pins,
            Operation::Pull => &self.pulls,
            Operation::Push => &self.pushes,
            Operation::Map => &self.maps,
            Operation::Register | Operation::Connect => return None,
        };
        let nth = count.fetch_add(1, Ordering::Relaxed) + 1;
        let mishap = self.plan.mishap(operation, nth)?;
        self.mishaps.fetch_add(1, Ordering::Relaxed);
        tracing::debug!(%operation, nth, ?mishap, "an operation goes wrong as planned");
        Some(mishap)
    }
}

impl Fault {
    /// Makes a transport fail as planned.
    pub fn new(inner: Arc<dyn Transport>, plan: FaultPlan) -> Self {
        let fate = Arc::new(Fate {
            transport: inner.name(),
            plan,
            pins: AtomicU64::new(0),
            pulls: AtomicU64::new(0),
            pushes: AtomicU64::new(0),
            maps: AtomicU64::new(0),
            mishaps: AtomicU64::new(0),
        });
        Self { inner, fate }
    }

    /// Operations that went wrong so far.
    pub fn mishaps(&self) -> u64 {
        self.fate.mishaps.load(Ordering::Relaxed)
    }
}

#[async_trait]
impl Transport for Fault {
    as_below!();

    fn register(&self, memory: Memory, options: RegisterOptions) -> Result<Region, RegisterError> {
        self.inner.register(memory, options)
    }

    async fn connect(&self, peer: &Peer, options: ConnectOptions) -> Result<Arc<dyn Remote>, ConnectError> {
        let remote = self.inner.connect(peer, options).await?;
        Ok(Arc::new(FaultyRemote {
            far: Far::new(remote, peer),
            fate: self.fate.clone(),
        }))
    }
}

#[derive(Debug)]
struct FaultyRemote {
    far: Far,
    fate: Arc<Fate>,
}

#[async_trait]
impl Remote for FaultyRemote {
    async fn pin(&self, region: &RegionRef, options: TransferOptions) -> Result<Box<dyn Pinned>, TransferError> {
        let inner = match self.fate.next(Operation::Pin) {
            None => self.far.remote().pin(region, options).await?,
            Some(mishap) => strike::pin(mishap, &self.far, region, options).await?,
        };
        Ok(Box::new(FaultyPinned {
            inner,
            region: region.region,
            far: self.far.clone(),
            fate: self.fate.clone(),
        }))
    }

    fn is_alive(&self) -> bool {
        self.far.remote().is_alive()
    }

    async fn closed(&self) -> String {
        self.far.remote().closed().await
    }
}

#[derive(Debug)]
struct FaultyPinned {
    inner: Box<dyn Pinned>,
    region: u64,
    far: Far,
    fate: Arc<Fate>,
}

#[async_trait]
impl Pinned for FaultyPinned {
    fn len(&self) -> u64 {
        self.inner.len()
    }

    async fn pull(&self, records: &[Record], dst: &Target, options: TransferOptions) -> Result<(), TransferError> {
        match self.fate.next(Operation::Pull) {
            None => self.inner.pull(records, dst, options).await,
            Some(mishap) => strike::pull(mishap, self, records, dst, options).await,
        }
    }

    async fn push(&self, records: &[Record], src: &Memory, options: TransferOptions) -> Result<(), TransferError> {
        match self.fate.next(Operation::Push) {
            None => self.inner.push(records, src, options).await,
            Some(mishap) => strike::push(mishap, self, records, src, options).await,
        }
    }

    async fn map(&self) -> Result<Mapping, TransferError> {
        match self.fate.next(Operation::Map) {
            None => self.inner.map().await,
            Some(mishap) => strike::map(mishap, self).await,
        }
    }
}
