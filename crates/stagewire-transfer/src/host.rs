//! This process on this host.

mod connection;
mod listen;
mod serve;

use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rustix::fd::OwnedFd;
use stagewire_core::{ByteCount, Incarnation, Peer, ProcessRef, TransportAddress};
use tokio::sync::watch;
use tokio::task::JoinHandle;

pub(crate) use connection::Connection;
pub use listen::{SocketFile, listen_unix, sweep};
pub(crate) use serve::stopped;

use crate::budget::DEFAULT_LIMIT;
use crate::cma::{self, Cma};
use crate::link::{Link, Links, Route};
use crate::network::Hooks;
use crate::process::{host_id, this_process};
use crate::shm::Shm;
use crate::table::Table;
use crate::transport::Meter;
use crate::wire::{self, Address, Kind};
use crate::{Arena, CmaUnavailable, ConnectError, ConnectOptions, StartError, Transport};

/// How a [`Host`] starts.
#[derive(Debug, Clone)]
pub struct HostOptions {
    /// Directory for data sockets; made with mode 0700 where it is missing.
    pub dir: PathBuf,
    /// This life of this process. Its first 16 hexadecimal digits name the socket.
    pub incarnation: Incarnation,
    /// Bound of the arena.
    pub arena_limit: ByteCount,
}

/// This process on this host: its arena, its registered regions, and the socket where peers pin them.
///
/// Dropping it without [`Host::shutdown`] does the same, without waiting.
pub struct Host {
    shared: Arc<Shared>,
    links: Arc<Links>,
    socket: listen::SocketFile,
    address: Address,
    stop: watch::Sender<bool>,
    accepting: Mutex<Option<JoinHandle<()>>>,
    cma: OnceLock<Result<(), CmaUnavailable>>,
}

/// What the host and its tasks use together.
pub(crate) struct Shared {
    pub(crate) incarnation: Incarnation,
    pub(crate) process: ProcessRef,
    pub(crate) arena: Arena,
    pub(crate) table: Arc<Table>,
    pub(crate) counters: Arc<Counters>,
    /// Where transports take part.
    pub(crate) hooks: Hooks,
    /// A random word that peers read to try out cma.
    pub(crate) canary: Box<u64>,
}

/// Counts that change outside the region table and the arena.
/// One meter for each transport besides.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) mapped_bytes: AtomicU64,
    pub(crate) connections: AtomicU64,
    pub(crate) copied_bytes: AtomicU64,
    meters: [Meter; Kind::COUNT],
    /// Bytes in flight with one peer; 0 for the default.
    in_flight_limit: AtomicU64,
}

impl Counters {
    pub(crate) fn meter(&self, kind: Kind) -> &Meter {
        &self.meters[kind as usize]
    }

    /// Bytes that transfers with one peer may have in flight.
    pub(crate) fn in_flight_limit(&self) -> ByteCount {
        match self.in_flight_limit.load(Ordering::Relaxed) {
            0 => DEFAULT_LIMIT,
            limit => ByteCount(limit),
        }
    }
}

/// What a host holds now and has done so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HostStats {
    /// Registered regions, those included that were released and wait for their last pin.
    pub regions: u64,
    /// Registrations so far.
    pub registrations: u64,
    /// Pins granted to peers so far.
    pub pins_served: u64,
    /// Pins that peers hold.
    pub pins_held: u64,
    /// Segments of the arena.
    pub segments: u64,
    /// Bytes of address space of these segments; physical memory is taken as bytes are used.
    pub segment_bytes: u64,
    /// Bytes of the arena in extents.
    pub allocated_bytes: u64,
    /// Bytes of address space of peers' segments that are mapped here.
    pub mapped_bytes: u64,
    /// Connections: those that peers made to this host, and those that it made to peers.
    pub connections: u64,
    /// Bytes that pulls of this host copied so far.
    pub copied_bytes: u64,
}

impl Host {
    /// Opens the data socket and serves it on the current tokio runtime.
    ///
    /// # Errors
    /// [`StartError`].
    ///
    /// # Cancel safety
    /// Nothing is left behind by a dropped future.
    pub async fn start(options: HostOptions) -> Result<Arc<Self>, StartError> {
        let HostOptions {
            dir,
            incarnation,
            arena_limit,
        } = options;
        let digits = incarnation.0.simple().to_string();
        let path = dir.join(format!("{}.data", &digits[..16]));
        let process = this_process().map_err(|error| StartError::Io {
            what: "read the start time of this process from",
            path: "/proc/self/stat".into(),
            error,
        })?;
        let (listener, socket) = listen::data_socket(&path)?;
        let name = socket.path().to_str().ok_or_else(|| StartError::Insecure {
            path: path.clone(),
            problem: "its path is not UTF-8".to_owned(),
        })?;
        let address = Address {
            host: host_id(),
            socket: name.to_owned(),
        };
        let counters = Arc::new(Counters::default());
        let shared = Arc::new(Shared {
            incarnation,
            process,
            arena: Arena::new(arena_limit),
            table: Arc::default(),
            counters: counters.clone(),
            hooks: Hooks::default(),
            canary: Box::new(rand::random()),
        });
        let stop = watch::Sender::new(false);
        let links = Links::new(process, counters, stop.subscribe());
        let accepting = serve::accept(listener, shared.clone(), stop.subscribe()).map_err(|error| StartError::Io {
            what: "wait on",
            path,
            error,
        })?;
        Ok(Arc::new(Self {
            shared,
            links,
            socket,
            address,
            stop,
            accepting: Mutex::new(Some(accepting)),
            cma: OnceLock::new(),
        }))
    }

    /// Which life of this process.
    pub fn incarnation(&self) -> Incarnation {
        self.shared.incarnation
    }

    /// This process.
    pub fn process(&self) -> ProcessRef {
        self.shared.process
    }

    /// Shared memory of this process, which peers can map.
    pub fn arena(&self) -> &Arena {
        &self.shared.arena
    }

    /// Peers map this host's arena, or copy out of it.
    pub fn shm(self: &Arc<Self>) -> Arc<dyn Transport> {
        Arc::new(Shm::new(self.clone()))
    }

    /// Peers copy out of any memory of this process.
    ///
    /// # Errors
    /// [`CmaUnavailable`] where the kernel forbids it; tried once.
    pub fn cma(self: &Arc<Self>) -> Result<Arc<dyn Transport>, CmaUnavailable> {
        self.cma.get_or_init(|| cma::probe_self(&self.shared.canary)).clone()?;
        Ok(Arc::new(Cma::new(self.clone())))
    }

    /// Sets how many bytes of pulls and pushes with one peer may be in flight, for connections that are made from now on;
    /// 256 MiB without this. More wait, each within its deadline, in the order they came; one above the limit goes alone.
    pub fn limit_in_flight(&self, limit: ByteCount) {
        let limit = limit.0.max(1);
        self.shared.counters.in_flight_limit.store(limit, Ordering::Relaxed);
    }

    /// Whether a peer is a process of this host, as far as its addresses say. One without any is taken for one.
    pub fn is_host_of(&self, peer: &Peer) -> bool {
        wire::host_of(peer).is_none_or(|host| host == self.address.host)
    }

    /// What it holds now and did so far.
    pub fn stats(&self) -> HostStats {
        let (arena, table) = (self.shared.arena.stats(), self.shared.table.stats());
        let Counters {
            mapped_bytes,
            connections,
            copied_bytes,
            ..
        } = &*self.shared.counters;
        HostStats {
            regions: table.regions,
            registrations: table.registrations,
            pins_served: table.pins_served,
            pins_held: table.pins_held,
            segments: arena.segments,
            segment_bytes: arena.segment_bytes,
            allocated_bytes: arena.allocated_bytes,
            mapped_bytes: mapped_bytes.load(Ordering::Relaxed),
            connections: connections.load(Ordering::Relaxed),
            copied_bytes: copied_bytes.load(Ordering::Relaxed),
        }
    }

    /// Removes the socket, registers nothing more, and ends the connections: peers see them closed, and get no new pin.
    /// What they have pinned stays in place until they let go, be it after this returned.
    ///
    /// # Cancel safety
    /// A dropped future has begun the shutdown; it goes on by itself.
    pub async fn shutdown(&self) {
        self.stop();
        let accepting = self.accepting.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(accepting) = accepting {
            // It ends by itself; an error would be its panic, which was reported where it happened.
            let _ = accepting.await;
        }
    }

    /// Begins to shut down, as far as that needs no waiting: the socket is gone and nothing more is registered when this
    /// returns. What peers have pinned stays until [`Host::shutdown`] or the last use of this host.
    pub fn stop(&self) {
        self.socket.remove();
        self.shared.table.close();
        self.links.close();
        self.stop.send_replace(true);
    }

    /// Turns true when the host stops.
    pub(crate) fn stopping(&self) -> watch::Receiver<bool> {
        self.stop.subscribe()
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// The address of this host as one of its transports.
    pub(crate) fn address(&self, kind: Kind) -> TransportAddress {
        TransportAddress {
            transport: kind.name().to_owned(),
            address: wire::encode_versioned(&self.address),
        }
    }

    /// The connection to a peer on this host, made if there is none.
    pub(crate) async fn link(
        &self,
        kind: Kind,
        peer: &Peer,
        options: &ConnectOptions,
    ) -> Result<Arc<Link>, ConnectError> {
        let (transport, incarnation) = (kind.name(), peer.incarnation);
        let address: Address = wire::address_of(kind, peer)?;
        if address.host != self.address.host {
            return Err(ConnectError::OtherHost {
                peer: incarnation,
                transport,
            });
        }
        let route = Route::Unix {
            path: &address.socket,
            host: &self.address.host,
        };
        self.links.connect(incarnation, route, options.deadline).await
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.stop();
    }
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Host")
            .field("incarnation", &self.shared.incarnation)
            .field("socket", &self.address.socket)
            .field("stats", &self.stats())
            .finish()
    }
}

/// A listening socket, not yet watched by a runtime.
type Listener = OwnedFd;
