//! A transport from this process to itself, without sockets, so that tests can pause the clock.

use std::fmt;
use std::ptr;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use stagewire_core::{Device, Incarnation, Peer, ProcessRef, Record, RegionRef, TransportAddress};
use tokio::sync::watch;
use uuid::Uuid;

use crate::copy::{Plan, Shape};
use crate::mapping::Keep;
use crate::table::{Pins, RegionKey, Registration, Table};
use crate::wire::{Kind, Refusal};
use crate::{
    Abilities, ConnectError, ConnectOptions, Mapping, Memory, Pinned, Region, RegisterError, RegisterOptions, Remote,
    Target, TransferError, TransferOptions, TransferStats, Transport,
};

const KIND: Kind = Kind::Cma;

pub(super) const PEER: Incarnation = Incarnation(Uuid::from_u128(7));

pub(super) fn peer() -> Peer {
    Peer {
        incarnation: PEER,
        process: ProcessRef { pid: 7, started: 0 },
        socket: String::new(),
        transports: Vec::new(),
    }
}

#[derive(Clone)]
pub(super) struct Loopback {
    table: Arc<Table>,
    lost: watch::Sender<bool>,
}

impl Loopback {
    pub(super) fn new() -> Self {
        let table = Arc::new(Table::default());
        let lost = watch::Sender::new(false);
        Self { table, lost }
    }

    /// The far end is gone.
    pub(super) fn lose(&self) {
        self.lost.send_replace(true);
    }
}

impl fmt::Debug for Loopback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Loopback")
    }
}

#[async_trait]
impl Transport for Loopback {
    fn name(&self) -> &'static str {
        KIND.name()
    }

    fn abilities(&self) -> Abilities {
        Abilities::default()
    }

    fn address(&self) -> TransportAddress {
        unreachable!("nobody asks for it")
    }

    fn register(&self, memory: Memory, _options: RegisterOptions) -> Result<Region, RegisterError> {
        let registration = Registration {
            kind: KIND,
            memory,
            device: Device::Cpu,
            guard: None,
        };
        Region::register(&self.table, registration)
    }

    async fn connect(&self, _peer: &Peer, _options: ConnectOptions) -> Result<Arc<dyn Remote>, ConnectError> {
        Ok(Arc::new(self.clone()))
    }

    fn stats(&self) -> TransferStats {
        TransferStats::default()
    }
}

#[async_trait]
impl Remote for Loopback {
    async fn pin(&self, region: &RegionRef, _options: TransferOptions) -> Result<Box<dyn Pinned>, TransferError> {
        let mut pins = Pins::new(self.table.clone(), 0, None);
        let key = RegionKey {
            region: region.region,
            generation: region.generation,
        };
        let (peer, region_number) = (PEER, region.region);
        let hold = pins
            .pin(KIND, key, &region.capability)
            .map_err(|refusal| match refusal {
                Refusal::Unknown => TransferError::UnknownRegion {
                    peer,
                    region: region_number,
                },
                other => panic!("{other:?}"),
            })?;
        let memory = hold.memory().clone();
        let held = Held(Mutex::new(Some(pins)));
        let held = Arc::new(held);
        Ok(Box::new(LoopbackPinned { memory, held }))
    }

    fn is_alive(&self) -> bool {
        !*self.lost.borrow()
    }

    async fn closed(&self) -> String {
        let mut lost = self.lost.subscribe();
        lost.wait_for(|lost| *lost).await.expect("the sender is part of this");
        "it was lost".to_owned()
    }
}

struct Held(Mutex<Option<Pins>>);

impl Keep for Held {}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(mut pins) = self.0.get_mut().expect("nothing panics with it").take() {
            pins.end();
        }
    }
}

struct LoopbackPinned {
    memory: Memory,
    held: Arc<Held>,
}

impl fmt::Debug for LoopbackPinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LoopbackPinned({:?})", self.memory)
    }
}

const SHAPE: Shape = Shape {
    large_from: u64::MAX,
    max_rows: u64::MAX,
};

/// # Safety
/// The plan was made for these lengths.
unsafe fn run(plan: &Plan, src: *const u8, dst: *mut u8) {
    for piece in plan.pieces() {
        // SAFETY: the caller's contract.
        unsafe {
            ptr::copy(
                src.add(piece.src as usize),
                dst.add(piece.dst as usize),
                piece.len as usize,
            );
        };
    }
}

#[async_trait]
impl Pinned for LoopbackPinned {
    fn len(&self) -> u64 {
        self.memory.len()
    }

    async fn pull(&self, records: &[Record], dst: &Target, _options: TransferOptions) -> Result<(), TransferError> {
        let (plan, rows) = Plan::new(records, self.len(), dst.len(), SHAPE)?;
        let claim = dst.claim(rows)?;
        // SAFETY: made for these lengths; the claim reserves the destination.
        unsafe { run(&plan, self.memory.as_ptr().as_ptr(), claim.base().as_ptr()) };
        claim.commit();
        Ok(())
    }

    async fn push(&self, records: &[Record], src: &Memory, _options: TransferOptions) -> Result<(), TransferError> {
        let (plan, _) = Plan::new(records, src.len(), self.len(), SHAPE)?;
        // SAFETY: made for these lengths; the tests register writable memory.
        unsafe { run(&plan, src.as_ptr().as_ptr(), self.memory.as_ptr().as_ptr()) };
        Ok(())
    }

    async fn map(&self) -> Result<Mapping, TransferError> {
        // SAFETY: the memory is held in the table for as long as the pin.
        Ok(unsafe { Mapping::new(self.memory.as_ptr(), self.len() as usize, self.held.clone()) })
    }
}
