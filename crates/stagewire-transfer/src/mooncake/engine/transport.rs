use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use stagewire_core::{Device, Incarnation, Peer, RegionRef, TransportAddress};

use super::janitor::Janitor;
use super::lane::Lane;
use super::pinned::{EnginePinned, Hold};
use super::placer::EnginePlacer;
use super::registration::Member;
use super::slot::Slot;
use super::{Engine, EngineMemory, EngineOptions};
use crate::link::Link;
use crate::table::Registration;
use crate::wire::Kind;
use crate::{
    Abilities, ConnectError, ConnectOptions, Memory, Network, Pinned, Region, RegisterError, RegisterOptions,
    RegisterProblem, Remote, StartError, TransferError, TransferOptions, TransferStats, Transport,
};

pub(super) const KIND: Kind = Kind::Engine;

/// Moves bytes with somebody else's [`Engine`].
///
/// A push that ran out of time may still be written, until its slices are over at the engine; the memory on both sides
/// stays in place until then, and [`TransferError::InDoubt`] says so, as it does where the engine gave up on one: then the
/// memory stays for another 10 s. A pull that ran out of time writes, if at all, only
/// into its own target, which stays busy until then.
pub struct EngineTransport {
    network: Arc<Network>,
    serving: Arc<Member>,
    segment: String,
    slot: Arc<Slot>,
    janitor: Janitor,
    lanes: Mutex<HashMap<Incarnation, Arc<Lane<Hold>>>>,
}

impl EngineTransport {
    /// Registers memory with `engine`, and begins transfers with it. May wait for it.
    ///
    /// # Errors
    /// [`StartError::AlreadyRunning`] where the network has such a transport; [`StartError::Thread`].
    pub fn new(
        network: &Arc<Network>,
        engine: Arc<dyn Engine>,
        options: EngineOptions,
    ) -> Result<Arc<Self>, StartError> {
        let janitor = Janitor::start().map_err(|error| StartError::Thread { error })?;
        if !network.set_placer(KIND, Arc::new(EnginePlacer)) {
            return Err(StartError::AlreadyRunning { transport: KIND.name() });
        }
        let segment = engine.segment();
        let serving = Member::new(engine);
        Ok(Arc::new(Self {
            network: network.clone(),
            slot: Arc::new(Slot::new(serving.clone(), options.rebuild)),
            serving,
            segment,
            janitor,
            lanes: Mutex::default(),
        }))
    }

    /// The way to a peer: at most one for each, so that what is under way there is bounded.
    fn lane(&self, link: &Arc<Link>, segment: String) -> Arc<Lane<Hold>> {
        let mut lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        lanes.retain(|_, lane| lane.is_alive());
        if let Some(lane) = lanes.get(&link.peer()).filter(|lane| lane.segment() == segment) {
            return lane.clone();
        }
        let peer = link.clone();
        let lane = Lane::new(self.slot.clone(), segment, Box::new(move || peer.is_alive()));
        let lane = Arc::new(lane);
        lanes.insert(link.peer(), lane.clone());
        lane
    }
}

#[async_trait]
impl Transport for EngineTransport {
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
            device: true,
        }
    }

    fn address(&self) -> TransportAddress {
        self.network.address(KIND, self.segment.as_bytes())
    }

    fn register(&self, memory: Memory, options: RegisterOptions) -> Result<Region, RegisterError> {
        let refused = |problem, memory| RegisterError::new(KIND.name(), problem, memory);
        if memory.is_empty() {
            return Err(refused(RegisterProblem::Empty, memory));
        }
        let device = match options.device {
            Device::Cpu => memory.device(),
            device => device,
        };
        let registered = self.serving.register(EngineMemory {
            address: memory.as_ptr().addr().get() as u64,
            len: memory.len(),
            device,
        });
        let registration = match registered {
            Ok(registration) => registration,
            Err(error) => {
                let problem = error.to_string();
                let problem = match device {
                    Device::Cpu => RegisterProblem::Backend { problem },
                    device => RegisterProblem::NoDevice { device, problem },
                };
                return Err(refused(problem, memory));
            }
        };
        let guard = self.janitor.keep(memory.clone(), registration);
        let registration = Registration {
            kind: KIND,
            memory,
            device,
            guard: Some(Box::new(guard)),
        };
        Region::register(&self.network.host().shared().table, registration)
    }

    async fn connect(&self, peer: &Peer, options: ConnectOptions) -> Result<Arc<dyn Remote>, ConnectError> {
        let (link, segment) = self.network.link(KIND, peer, &options).await?;
        let segment = String::from_utf8(segment).map_err(|error| ConnectError::Address {
            peer: peer.incarnation,
            transport: KIND.name(),
            problem: error.to_string(),
        })?;
        let lane = self.lane(&link, segment);
        Ok(Arc::new(EngineRemote { link, lane }))
    }

    fn stats(&self) -> TransferStats {
        self.network.host().shared().counters.meter(KIND).stats()
    }
}

impl fmt::Debug for EngineTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineTransport")
            .field("segment", &self.segment)
            .field("slot", &self.slot)
            .finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct EngineRemote {
    link: Arc<Link>,
    lane: Arc<Lane<Hold>>,
}

#[async_trait]
impl Remote for EngineRemote {
    async fn pin(&self, region: &RegionRef, options: TransferOptions) -> Result<Box<dyn Pinned>, TransferError> {
        let grip = self.link.pin(KIND, region, &options).await?;
        Ok(Box::new(EnginePinned::new(Arc::new(grip), self.lane.clone())?))
    }

    fn is_alive(&self) -> bool {
        self.link.is_alive()
    }

    async fn closed(&self) -> String {
        self.link.closed().await
    }
}
