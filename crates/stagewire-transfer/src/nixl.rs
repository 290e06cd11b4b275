//! `nixl`: peers on any host, over NIXL (NVIDIA's inference transfer library) and UCX, host and device memory.
//!
//! NIXL is loaded at run time, from the wheel or wherever it is installed; nothing of it is needed to build. It moves
//! bytes one-sidedly, and leaves much to its users: it has no deadlines, checks neither generations nor versions, and
//! touches memory as long as somebody asks. So the control connection of [`Network`] pins, checks and confirms, as for
//! every transport, and besides:
//!
//! - Two agents: one serves registered memory, with NIXL's own thread to answer peers; one moves bytes, on a thread of
//!   ours ([`worker`]), because posting blocks.
//! - A transfer that ran out of time may still land. Source, destination and pin stay until NIXL says that it is over.
//! - Memory is deregistered only when its pins have ended and no peer has its metadata any more ([`registry`],
//!   [`reader`]).
//! - Peers with another release of NIXL are refused: between 1.3 and 1.5 a transfer never ends.

mod agent;
mod cuda;
mod heading;
mod library;
mod message;
mod owner;
mod reader;
mod registry;
mod symbols;
mod transfer;
mod version;
mod worker;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use stagewire_core::{Device, Incarnation, Peer, RegionRef, TransportAddress};
use tokio::time::{Instant, timeout, timeout_at};

pub use library::NixlLibrary;
pub use version::NixlVersion;

use crate::link::Link;
use crate::network::Network;
use crate::region::Region;
use crate::table::{RegionKey, Registration};
use crate::wire::{Kind, Place};
use crate::{
    Abilities, ConnectError, ConnectOptions, Memory, NixlUnavailable, Pinned, RegisterError, RegisterOptions,
    RegisterProblem, Remote, TransferError, TransferOptions, TransferStats, Transport,
};
use agent::{Agent, Space, Span};
use heading::Heading;
use owner::Owner;
use reader::NixlPeer;
use registry::{NotRegistered, Registry};
use transfer::{Held, NixlPinned};
use worker::Worker;

const KIND: Kind = Kind::Nixl;

/// How NIXL is found and started.
#[derive(Debug, Clone)]
pub struct NixlOptions {
    /// The file of NIXL's C interface, where it is not to be searched for: see [`NixlLibrary::open`].
    pub library: Option<PathBuf>,
    /// Longest time that loading NIXL and making its agents may take; some hundred milliseconds are usual.
    pub start_limit: Duration,
}

impl Default for NixlOptions {
    fn default() -> Self {
        Self {
            library: None,
            start_limit: Duration::from_secs(30),
        }
    }
}

/// Transfers over NIXL, of host memory and memory of devices.
///
/// UCX chooses how bytes go, by what both hosts have; `UCX_TLS` and the other variables of UCX restrict it.
///
/// # Guarantees
/// - A peer with another minor release of NIXL is refused: between some of them a transfer never ends.
/// - A transfer that ran out of time, or whose future was dropped, keeps source, destination and pin until NIXL says that
///   it is over. Until then, [`Target::is_idle`](crate::Target::is_idle) is false.
/// - Registered memory is given back only when its region is gone and every peer has forgotten it. Peers forget by
///   themselves, within a second after their last pin; memory that a peer may still write is not registered again.
/// - Memory that a peer of this host could write comes back ten seconds after that peer's process ended; its last bytes may
///   still be under way.
/// - A push that fails after it began is in doubt, except where the peer's process is known to have died.
/// - One thread posts and looks after all transfers; it sleeps where there are none.
///
/// # Non-guarantees
/// - Where the control connection of a reader on another host breaks, its memory is given back after a minute. NIXL has
///   no means to cut a peer off; a request that was stuck for longer could still arrive.
/// - UCX opens ports of its own, which know neither token nor capability: who reaches them can read and write this
///   process's memory. Use it in a network that you trust, and keep UCX to it with `UCX_NET_DEVICES`.
/// - Where UCX has nothing but TCP, it ends the *owner's* process when a reader dies in the middle of a pull and cannot be
///   answered (seen with UCX 1.23). Between hosts without RDMA, use `tcp`.
/// - Bytes are not hashed.
///
/// # Limits
/// A batch is cut into requests of at most 1024 stretches and 32 MiB, four of them in flight.
#[derive(Debug)]
pub struct Nixl {
    network: Arc<Network>,
    registry: Arc<Registry>,
    owner: Arc<Owner>,
    worker: Arc<Worker<Held>>,
    version: NixlVersion,
    heading: Heading,
    meetings: AtomicU64,
    peers: Mutex<HashMap<Incarnation, Arc<Met>>>,
}

/// A lock of its own for each peer, so that a slow one keeps nobody from another.
type Met = tokio::sync::Mutex<Option<Arc<NixlPeer>>>;

impl Nixl {
    /// Loads NIXL and makes this process's agents.
    ///
    /// # Errors
    /// [`NixlUnavailable`]; the process is as before and can use other transports.
    ///
    /// # Cancel safety
    /// A dropped future leaves NIXL loaded.
    pub async fn start(network: &Arc<Network>, options: NixlOptions) -> Result<Arc<Self>, NixlUnavailable> {
        let NixlOptions { library, start_limit } = options;
        let incarnation = network.host().incarnation();
        let make = move || {
            let library = NixlLibrary::open(library.as_deref())?;
            let name = agent_name(incarnation);
            let serving = Agent::new(&library, &name, true)?;
            let moving = Agent::new(&library, &format!("{name}-reader"), false)?;
            warm_up(&moving);
            Ok((library, name, serving, moving))
        };
        let made = timeout(start_limit, tokio::task::spawn_blocking(make)).await;
        let late = || NixlUnavailable::Late { after: start_limit };
        let made = made.map_err(|_| late())?;
        let (library, name, serving, moving) = made.map_err(|_| NixlUnavailable::ShutDown)??;
        let version = library.version().clone();
        let failed = |what, problem: String| NixlUnavailable::Agent {
            version: version.to_string(),
            what,
            problem,
        };
        let connection = serving.metadata(None);
        let connection = connection.map_err(|error| failed("tell how it is reached", error.to_string()))?;
        let heading = Heading::of(&connection, &name);
        let heading = heading.ok_or_else(|| {
            let problem = format!("its metadata do not carry its name {name:?}");
            failed("tell how it is reached", problem)
        })?;
        let worker = Worker::start(moving).map_err(|error| failed("get a thread", error.to_string()))?;
        let registry = Arc::new(Registry::new(serving));
        let owner = Owner::new(registry.clone(), name, version.clone(), connection);
        if !network.set_placer(KIND, owner.clone()) {
            return Err(NixlUnavailable::Running);
        }
        Ok(Arc::new(Self {
            network: network.clone(),
            registry,
            owner,
            worker: Arc::new(worker),
            version,
            heading,
            meetings: AtomicU64::new(0),
            peers: Mutex::default(),
        }))
    }

    /// Which NIXL is used.
    pub fn version(&self) -> &NixlVersion {
        &self.version
    }

    /// Registrations with NIXL, those included whose region is gone and that wait for peers to forget their metadata.
    pub fn registrations(&self) -> u64 {
        self.registry.len()
    }

    /// Registrations of peers whose metadata this process has loaded, or is about to.
    pub fn known_registrations(&self) -> u64 {
        let peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        let met = peers.values().filter_map(|met| met.try_lock().ok());
        met.filter_map(|met| Some(met.as_ref()?.known())).sum()
    }

    fn place(&self, peer: Incarnation) -> Arc<Met> {
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        // Others that are gone, and that nobody is about to meet.
        peers.retain(|_, met| {
            let in_use = Arc::strong_count(met) > 1;
            in_use
                || met
                    .try_lock()
                    .is_ok_and(|met| met.as_ref().is_some_and(|met| met.link().is_alive()))
        });
        peers.entry(peer).or_default().clone()
    }

    /// The peer behind a control connection, greeted at most once.
    async fn meet(&self, link: Arc<Link>) -> Result<Arc<NixlPeer>, ConnectError> {
        let place = self.place(link.peer());
        let mut met = place.lock().await;
        if let Some(met) = met.as_ref().filter(|met| Arc::ptr_eq(met.link(), &link)) {
            return Ok(met.clone());
        }
        let meeting = self.meetings.fetch_add(1, Ordering::Relaxed) + 1;
        let process = self.network.host().process();
        let (version, heading) = (&self.version, &self.heading);
        let greeted = NixlPeer::greet(link, self.worker.clone(), meeting, version, heading, process).await?;
        *met = Some(greeted.clone());
        Ok(greeted)
    }
}

impl Drop for Nixl {
    fn drop(&mut self) {
        self.worker.stop();
    }
}

/// What the agent that serves a process is called. Peers hold each other to it: NIXL knows agents by name alone, and one
/// under the name of another would be taken for it.
fn agent_name(incarnation: Incarnation) -> String {
    format!("stagewire-{incarnation}")
}

/// The first registration of an agent takes tens of milliseconds.
fn warm_up(agent: &Agent) {
    let bytes = vec![0_u8; 4096];
    let span = Span {
        space: Space::Host,
        number: 0,
        address: bytes.as_ptr().addr() as u64,
        len: bytes.len() as u64,
    };
    // SAFETY: the bytes outlive the registration, and nothing moves them.
    let registered = unsafe { agent.register(&span) };
    if let Err(error) = registered.and_then(|()| agent.deregister(&span)) {
        tracing::debug!(%error, "NIXL does not register memory");
    }
}

#[async_trait]
impl Transport for Nixl {
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
        self.network.address(KIND, &[])
    }

    fn register(&self, memory: Memory, options: RegisterOptions) -> Result<Region, RegisterError> {
        let device = match options.device {
            Device::Cpu => memory.device(),
            device => device,
        };
        let refused = |problem, memory| RegisterError::new(KIND.name(), problem, memory);
        if let Some(problem) = Region::problem(&memory, device) {
            return Err(refused(problem, memory));
        }
        if let Device::Cuda(ordinal) = device
            && let Err(problem) = cuda::check(ordinal, memory.as_ptr().addr().get() as u64)
        {
            return Err(refused(RegisterProblem::NoDevice { device, problem }, memory));
        }
        let number = match self.registry.register(&memory, transfer::space(device)) {
            Ok(number) => number,
            Err(NotRegistered::Quarantined) => return Err(refused(RegisterProblem::Quarantined, memory)),
            Err(NotRegistered::Nixl(error)) => {
                let problem = error.to_string();
                return Err(refused(RegisterProblem::Backend { problem }, memory));
            }
        };
        let (guard, key) = self.owner.guard(number);
        let registration = Registration {
            kind: KIND,
            memory,
            device,
            guard: Some(Box::new(guard)),
        };
        let region = Region::register(&self.network.host().shared().table, registration)?;
        let RegionRef {
            region: slot,
            generation,
            ..
        } = region.reference();
        let of_region = RegionKey {
            region: slot,
            generation,
        };
        let _ = key.set(of_region);
        self.owner.announce(of_region, number);
        Ok(region)
    }

    async fn connect(&self, peer: &Peer, options: ConnectOptions) -> Result<Arc<dyn Remote>, ConnectError> {
        let end = Instant::now() + options.deadline;
        let (link, _) = self.network.link(KIND, peer, &options).await?;
        let after = options.deadline;
        let late = |_| {
            Err(ConnectError::Deadline {
                peer: peer.incarnation,
                after,
            })
        };
        let peer = timeout_at(end, self.meet(link)).await.unwrap_or_else(late)?;
        Ok(Arc::new(NixlRemote { peer }))
    }

    fn stats(&self) -> TransferStats {
        self.network.host().shared().counters.meter(KIND).stats()
    }
}

#[derive(Debug)]
struct NixlRemote {
    peer: Arc<NixlPeer>,
}

#[async_trait]
impl Remote for NixlRemote {
    async fn pin(&self, region: &RegionRef, options: TransferOptions) -> Result<Box<dyn Pinned>, TransferError> {
        let link = self.peer.link();
        let pinned = async {
            // The pin itself is bounded by the same deadline, from outside.
            let unbounded = TransferOptions { deadline: None };
            let grip = link.pin(KIND, region, &unbounded).await?;
            let wrong = |problem: String| TransferError::Backend {
                transport: KIND.name(),
                peer: link.peer(),
                region: region.region,
                what: "pin",
                record: None,
                problem,
            };
            let place = grip.place();
            let Place::Address(number) = place else {
                return Err(wrong(format!("the peer answers with {place:?} instead of a number")));
            };
            let learnt = self.peer.learn(number).await;
            let (in_use, span) = learnt.map_err(|error| error.of_transfer(region.region, "fetch the metadata"))?;
            if !span.is_of(grip.len()) {
                let problem = format!(
                    "the peer has it as {span:?}, which is no region of {} bytes",
                    grip.len()
                );
                return Err(wrong(problem));
            }
            Ok(NixlPinned::new(grip, self.peer.clone(), in_use, span))
        };
        let pinned = link.bounded("the pin", region.region, &options, pinned).await?;
        Ok(Box::new(pinned))
    }

    fn is_alive(&self) -> bool {
        self.peer.link().is_alive()
    }

    async fn closed(&self) -> String {
        self.peer.link().closed().await
    }
}
