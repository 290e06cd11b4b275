//! Mooncake's Transfer Engine over TCP, its wire protocol spoken natively.
//!
//! *What it is.* Both roles of `P2PHANDSHAKE` over TCP, with version 2 of the data protocol: unmodified Mooncake peers read
//! and write memory of this process that was [exposed](Mooncake::expose), and this process reads and writes theirs
//! ([`Mooncake::open`]). The first version acknowledges nothing and is refused.
//!
//! *What it is not.* Not RDMA, NVLink or any other path of the engine, and not its metadata servers.
//!
//! # Security
//!
//! The protocol has no authentication and no encryption: use it in networks where you trust everybody. Nothing listens
//! before [`Mooncake::start`]; then one address does, `127.0.0.1` unless another is named, and peers reach only regions that
//! were exposed, read-only unless registered as [`Memory::Writable`](crate::Memory::Writable). The addresses told to peers
//! are drawn at random and end with the registration, so that a late request cannot reach memory that came after.

mod addresses;
pub(crate) mod data;
mod engine;
mod error;
pub(crate) mod handshake;
mod lender;
mod notifications;
mod options;
mod segment;
mod transport;

use std::collections::HashMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use stagewire_core::Incarnation;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;

pub use engine::{
    Engine, EngineBatch, EngineError, EngineMemory, EngineOperation, EngineOptions, EngineSlice, EngineStatus,
    EngineTransport, Rebuild,
};
pub use error::MooncakeError;
pub use handshake::Notification;
pub use options::MooncakeOptions;
pub use segment::{Segment, SegmentBuffer};

use addresses::{Addresses, Lent, Unlent};
use data::Pool;
use handshake::{Answerer, Descriptor};
use lender::Lender;
use notifications::Notifications;

use crate::host::stopped;
use crate::table::RegionKey;
use crate::wire::Kind;
use crate::{ConnectOptions, Network, Region};

/// This process as a peer of Mooncake.
///
/// Dropping it without [`Mooncake::shutdown`] does the same, without waiting. It ends with its host, too.
pub struct Mooncake {
    network: Arc<Network>,
    shared: Arc<Shared>,
    connections: usize,
    /// The data connections to our own peers.
    pools: Mutex<HashMap<Incarnation, Weak<Pool>>>,
    segments: Mutex<HashMap<String, Arc<Segment>>>,
    stop: Arc<watch::Sender<bool>>,
    serving: Mutex<Vec<JoinHandle<()>>>,
}

/// What the ports use.
struct Shared {
    /// Without the exposed memory, which changes.
    descriptor: Descriptor,
    /// Regions that the descriptor has room for.
    room: usize,
    addresses: Arc<Addresses>,
    notifications: Notifications,
}

impl Mooncake {
    /// Opens handshake port and data port, and serves them on the current tokio runtime. Our own peers pin regions through
    /// `network` and move the bytes through the data port. A host does this once in its life.
    ///
    /// # Errors
    /// [`MooncakeError::Advertise`], [`MooncakeError::Bind`], [`MooncakeError::Started`].
    ///
    /// # Cancel safety
    /// Nothing is left behind by a dropped future.
    pub async fn start(network: Arc<Network>, options: MooncakeOptions) -> Result<Arc<Self>, MooncakeError> {
        let bind = async |address: SocketAddr| {
            let bound = async {
                let listener = TcpListener::bind(address).await?;
                let address = listener.local_addr()?;
                std::io::Result::Ok((listener, address))
            };
            bound.await.map_err(|error| MooncakeError::Bind { address, error })
        };
        if options.bind.ip().is_unspecified() && options.advertise.is_none() {
            return Err(MooncakeError::Advertise { address: options.bind });
        }
        let (handshake, handshake_address) = bind(options.bind).await?;
        let (data, data_address) = bind(SocketAddr::new(options.bind.ip(), 0)).await?;
        let ip = options.advertise.unwrap_or(handshake_address.ip());
        let descriptor = Descriptor {
            name: SocketAddr::new(ip, handshake_address.port()).to_string(),
            data_host: Some(ip.to_string()),
            data_port: data_address.port(),
            buffers: Vec::new(),
        };
        let shared = Arc::new(Shared {
            room: descriptor.room(),
            descriptor,
            addresses: Arc::default(),
            notifications: Notifications::default(),
        });
        let stop = watch::Sender::new(false);
        let lender = Lender::new(shared.addresses.clone(), stop.subscribe());
        if !network.set_placer(Kind::Mooncake, Arc::new(lender)) {
            return Err(MooncakeError::Started);
        }
        let stop = Arc::new(stop);
        let (mut host_stops, stop_too) = (network.host().stopping(), stop.clone());
        let answering = handshake::serve(handshake, shared.clone(), stop.subscribe());
        let serving = vec![
            tokio::spawn(async move {
                tokio::select! {
                    () = answering => {}
                    () = stopped(&mut host_stops) => drop(stop_too.send_replace(true)),
                }
            }),
            tokio::spawn(data::serve(data, shared.addresses.clone(), stop.subscribe())),
        ];
        Ok(Arc::new(Self {
            network,
            shared,
            connections: options.connections,
            pools: Mutex::default(),
            segments: Mutex::default(),
            stop,
            serving: Mutex::new(serving),
        }))
    }

    /// What Mooncake peers call this process: `host:port` of its handshake port.
    pub fn name(&self) -> &str {
        &self.shared.descriptor.name
    }

    /// Lets any Mooncake peer read a region, and write it where it was registered as
    /// [`Memory::Writable`](crate::Memory::Writable). The descriptor of this process lists it.
    ///
    /// It ends when the region is released, or the answer dropped. While a request uses the region, it holds a pin.
    ///
    /// # Errors
    /// [`MooncakeError::NotExposable`] where the region was released or belongs to another transport,
    /// [`MooncakeError::Full`] where the descriptor has no room for it.
    pub fn expose(&self, region: &Region) -> Result<Exposed, MooncakeError> {
        let reference = region.reference();
        let key = RegionKey {
            region: reference.region,
            generation: reference.generation,
        };
        let table = self.network.host().shared().table.clone();
        if reference.transport != Kind::Mooncake.name() || !table.is_registered(key) {
            return Err(MooncakeError::NotExposable);
        }
        let Shared { addresses, room, .. } = &*self.shared;
        let len = reference.len;
        let lent = addresses.expose(table, key, reference.capability, len, *room);
        let lent = lent.map_err(|problem| match problem {
            Unlent::Full => MooncakeError::Full { exposed: *room },
            Unlent::Nowhere => MooncakeError::NotExposable,
        })?;
        Ok(Exposed { lent, len })
    }

    /// Reaches a peer by its name, `host:port` of its handshake port. A name that was opened before, and whose data port
    /// has not failed since, is not asked again.
    ///
    /// # Errors
    /// [`MooncakeError`].
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn open(&self, name: &str, options: ConnectOptions) -> Result<Arc<Segment>, MooncakeError> {
        if let Some(known) = self.segments().get(name).filter(|segment| segment.lost().is_none()) {
            return Ok(known.clone());
        }
        let counters = &self.network.host().shared().counters;
        let segment = Arc::new(Segment::open(name, self.connections, counters, &options).await?);
        let mut segments = self.segments();
        // A peer that came back mostly has another name: nobody asks for the old one again.
        segments.retain(|_, segment| segment.lost().is_none());
        segments.insert(name.to_owned(), segment.clone());
        Ok(segment)
    }

    /// Takes the notifications that peers sent, in the order of their arrival. At most 4096 or 16 MiB wait; a peer that
    /// sends more is told that it failed.
    pub fn notifications(&self) -> Vec<Notification> {
        self.shared.notifications.take()
    }

    /// Waits for the next notification, and takes it.
    ///
    /// # Cancel safety
    /// No notification is lost.
    pub async fn notification(&self) -> Notification {
        self.shared.notifications.next().await
    }

    /// Closes both ports and all connections.
    ///
    /// # Cancel safety
    /// A dropped future has begun the shutdown; it goes on by itself.
    pub async fn shutdown(&self) {
        self.stop.send_replace(true);
        let serving = std::mem::take(&mut *lock(&self.serving));
        for task in serving {
            // It ends by itself; an error would be its panic, which was reported where it happened.
            let _ = task.await;
        }
        self.segments().clear();
    }

    fn segments(&self) -> MutexGuard<'_, HashMap<String, Arc<Segment>>> {
        lock(&self.segments)
    }
}

impl Drop for Mooncake {
    fn drop(&mut self) {
        self.stop.send_replace(true);
    }
}

impl fmt::Debug for Mooncake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mooncake")
            .field("name", &self.name())
            .finish_non_exhaustive()
    }
}

impl Answerer for Shared {
    fn descriptor(&self) -> Vec<u8> {
        let mut descriptor = self.descriptor.clone();
        descriptor.buffers = self.addresses.exposed(&descriptor.name);
        descriptor.to_json()
    }

    fn notified(&self, notification: Notification) -> bool {
        self.notifications.push(notification)
    }
}

/// A region that any Mooncake peer may use. Dropped, its address means nothing any more.
pub struct Exposed {
    lent: Lent,
    len: u64,
}

impl Exposed {
    /// Where peers find it. No address of this process: it only stands for the region.
    pub fn buffer(&self) -> SegmentBuffer {
        SegmentBuffer {
            address: self.lent.base(),
            len: self.len,
        }
    }
}

impl fmt::Debug for Exposed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Exposed").field(&self.buffer()).finish()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
