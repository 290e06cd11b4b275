mod options;
mod shared;

use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use stagewire_core::{Capability, Handle, Incarnation, Lease, PayloadId, Peer, Token, TransferMode};
use stagewire_transfer::{Host, HostOptions, Memory, Network, RegisterError, RegisterOptions, listen_unix};
use tokio::sync::{OnceCell, watch};
use tokio::time::Instant;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

pub use options::{ConnectorOptions, ConnectorStats};
pub(crate) use shared::{Moving, Shared};

use crate::carriers::Carriers;
use crate::link::Links;
use crate::live::{Gone, Live, Table};
use crate::mode::{self, ModeCounters, NoWay};
use crate::pages::{Offer, Pages};
use crate::publish::settle::{Plan, Settling};
use crate::put::{self, Put};
use crate::registered::{Registered, Registry};
use crate::release;
use crate::serve::{self, Holder};
use crate::store_file::StoreFile;
use crate::wire::Me;
use crate::{
    ConsumeError, ConsumeOptions, Consumer, Mode, ModeReason, Owner, Publication, PublishError, PublishSpec, PutError,
    PutPlace, ReleaseError, StartError,
};

/// How long closing waits until stores know what they are not to keep.
const PART_WITHIN: Duration = Duration::from_secs(2);

/// Publishes payloads of this process and consumes those of others.
pub struct Connector {
    shared: Arc<Shared>,
}

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connector")
            .field("role", &self.shared.role)
            .field("incarnation", &self.shared.peer.incarnation)
            .finish_non_exhaustive()
    }
}

impl Connector {
    /// Starts the transports and listens on the payload socket.
    ///
    /// Runs on the current tokio runtime, which must live as long as the connector.
    ///
    /// # Errors
    /// [`StartError`]; nothing is left behind then.
    pub async fn start(options: ConnectorOptions) -> Result<Arc<Self>, StartError> {
        let peers = options.run_dir.join("peers");
        let incarnation = Incarnation(Uuid::new_v4());
        let host = Host::start(HostOptions {
            dir: peers.clone(),
            incarnation,
            arena_limit: options.arena_limit,
        })
        .await
        .map_err(StartError::Host)?;
        let network = match Network::start(Arc::clone(&host), options.network.clone()).await {
            Ok(network) => network,
            Err(error) => {
                host.shutdown().await;
                return Err(StartError::Network(error));
            }
        };
        let carriers = match Carriers::start(&options.transports, &host, &network, &options.network).await {
            Ok(carriers) => carriers.throttled(options.throttle),
            Err(error) => {
                host.shutdown().await;
                return Err(error);
            }
        };
        let name = format!("{}.ctl", &incarnation.0.simple().to_string()[..16]);
        let (listener, socket) = match listen_unix(&peers.join(name)) {
            Ok(listening) => listening,
            Err(error) => {
                host.shutdown().await;
                return Err(StartError::Socket(error));
            }
        };
        let peer = Peer {
            incarnation,
            process: host.process(),
            socket: socket.path().to_string_lossy().into_owned(),
            transports: carriers.addresses(),
        };
        let uid = rustix::process::geteuid().as_raw();
        let me = Me {
            incarnation,
            process: peer.process,
            uid,
        };
        let holder = Arc::new(Holder {
            me,
            table: Arc::new(Table::default()),
            puts: OnceLock::new(),
            kv: Arc::default(),
        });
        let accept = tokio::spawn(serve::serve(listener, Arc::clone(&holder))).abort_handle();
        let links = Links::new(me, Arc::clone(&network));
        // Without a token any user of this host could connect, and put into a store, which the Unix socket does not let it.
        if options.network.token.is_some() {
            // Not held by the network, which what the holder serves may hold.
            let served = Arc::downgrade(&holder);
            network.serve_streams(move |stream| {
                let holder = served.upgrade();
                async move {
                    if let Some(holder) = holder {
                        serve::serve_stream(stream, holder).await;
                    }
                }
            });
        }
        let shared = Arc::new(Shared {
            role: options.role,
            store_file: StoreFile::of(options.run_dir),
            serves: Mutex::default(),
            peer,
            socket,
            host,
            carriers,
            network,
            holder,
            links,
            store: watch::Sender::new(options.store),
            runtime: tokio::runtime::Handle::current(),
            accept,
            closed: watch::Sender::new(false),
            shut: OnceCell::new(),
            consumers: Arc::default(),
            staged: Arc::default(),
            modes: ModeCounters::default(),
            registered: Registry::default(),
            moving: TaskTracker::new(),
            parting: TaskTracker::new(),
        });
        Ok(Arc::new(Self { shared }))
    }

    /// How others reach this process.
    pub fn peer(&self) -> &Peer {
        &self.shared.peer
    }

    /// This process's arena, and the transports of one host.
    pub fn host(&self) -> &Arc<Host> {
        &self.shared.host
    }

    /// This process as other hosts reach it.
    pub fn network(&self) -> &Arc<Network> {
        &self.shared.network
    }

    /// Whether a peer lives, for all that the kernel says: of other hosts it knows nothing, and says that it does.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub fn is_alive(&self, peer: &Peer) -> bool {
        self.shared.is_alive(peer)
    }

    /// Waits until a peer is no more: its process has died, or its connector has closed. Of another host, until nothing
    /// answers where it was, or it was out of reach for 15 s.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn lost(&self, peer: &Peer) {
        self.shared.lost(peer).await;
    }

    /// Says who keeps payloads of mode `store` from now on.
    pub fn set_store(&self, store: Option<Peer>) {
        self.shared.store.send_replace(store);
    }

    /// Follows who keeps payloads of mode `store`.
    pub(crate) fn stores(&self) -> watch::Receiver<Option<Peer>> {
        self.shared.store.subscribe()
    }

    /// Publishes a payload that is complete: every chunk is visible at once.
    ///
    /// `tensors` are in the order of [`Manifest::tensors`](stagewire_core::Manifest::tensors); their bytes must not
    /// change until the payload is released. Memory from [`Host::arena`] can be mapped by consumers; other memory
    /// is offered as [`ConnectorOptions::transports`] says.
    ///
    /// # Errors
    /// [`PublishError`]; nothing is held then.
    pub fn publish(&self, spec: PublishSpec, tensors: Vec<Memory>) -> Result<Publication, PublishError> {
        self.begin(spec, tensors, true)
    }

    /// Publishes a payload whose chunks become visible one by one, by [`Publication::ready`]. The bytes of a chunk
    /// may be written until then.
    ///
    /// # Errors
    /// [`PublishError`]; nothing is held then.
    pub fn open(&self, spec: PublishSpec, tensors: Vec<Memory>) -> Result<Publication, PublishError> {
        self.begin(spec, tensors, false)
    }

    fn begin(&self, spec: PublishSpec, tensors: Vec<Memory>, complete: bool) -> Result<Publication, PublishError> {
        let shared = &self.shared;
        if shared.is_closed() {
            return Err(PublishError::Closed { request: spec.request });
        }
        let (mode, reason) = self.decide(&spec)?;
        let offer = Offer {
            arena: shared.host.arena(),
            carriers: &shared.carriers,
            registered: &shared.registered,
            copied: &shared.staged,
        };
        let (pages, regions) = Pages::register(&offer, &spec.request, &spec.manifest, spec.digests, tensors)?;
        let handle = Handle {
            payload: PayloadId(Uuid::now_v7()),
            request: spec.request,
            stage: shared.role.clone(),
            manifest: spec.manifest,
            mode,
            holder: shared.peer.clone(),
            capability: Capability::from_random(rand::random()),
            regions,
        };
        let request = handle.request.clone();
        let live = Live::new(handle, spec.owner, Arc::new(pages));
        let settling = Settling::new(mode, reason);
        let publication = shared.hold_while(live, spec.deadline, Arc::clone(&settling));
        let publication = publication.expect("the id of the payload is new");
        shared.modes.add(mode, reason);
        let plan = match (mode, spec.mode, spec.consumer) {
            (TransferMode::Store, ..) => Plan::Store,
            (TransferMode::P2p, Mode::Auto, Some(consumer)) => Plan::StoreWithout(consumer),
            _ => Plan::Stay,
        };
        if complete {
            publication.seal();
        }
        settling.begin(shared, publication.live(), plan, spec.store_within);
        if shared.is_closed() {
            // It closed meanwhile, and may not have seen this payload.
            self.release(publication.handle().payload);
            return Err(PublishError::Closed { request });
        }
        Ok(publication)
    }

    /// Registers memory once, for as long as the result is kept: publications of these bytes, or of a part of them, then register nothing.
    ///
    /// # Errors
    /// [`RegisterError`]: it is empty, unmapped, or memory that no transport of this connector takes where it is.
    pub fn register(&self, memory: Memory) -> Result<Registered, RegisterError> {
        let shared = &self.shared;
        let transport = shared.carrier_of(&memory);
        let region = transport.register(memory.clone(), RegisterOptions::default())?;
        Ok(shared.registered.keep(memory, region))
    }

    fn decide(&self, spec: &PublishSpec) -> Result<(TransferMode, ModeReason), PublishError> {
        let request = || spec.request.clone();
        if let Owner::Lease(lease @ Lease::Ttl(Duration::ZERO)) = spec.owner {
            let why = "has ended before it begins; give it more time";
            let request = request();
            return Err(PublishError::Lease { request, lease, why });
        }
        let alive = spec.consumer.as_ref().map(|consumer| self.shared.is_alive(consumer));
        let store = spec.mode != Mode::P2p && self.shared.has_store();
        mode::decide(spec.mode, spec.owner, alive, store).map_err(|no_way| match no_way {
            NoWay::NoStore => PublishError::NoStore { request: request() },
            NoWay::StoresOnly => PublishError::Lease {
                request: request(),
                lease: Lease::Cached,
                why: "is kept by stores only; publish it to a store",
            },
        })
    }

    /// Moves a payload of this process into the store, which gets the bytes of a small one with the request and pulls every
    /// chunk of others. The store becomes the holder, and the payload is released here. Returns the store's handle. `token`
    /// is the right of the attempt that produced it.
    ///
    /// `wait` bounds how long the store waits for chunks that are missing and for room, and how long reaching it takes, for
    /// which there is a second at least. Its answer may come 5 s later.
    ///
    /// # Errors
    /// [`PutError`]; the payload is still here then, unless it has ended. A store that may have taken it is told to end it.
    ///
    /// # Cancel safety
    /// The payload is here or in the store: one that was taking it when the future was dropped is told to end it, unless the
    /// payload has moved there already, where a repeated call finds it.
    pub async fn store(&self, handle: &Handle, token: Option<Token>, wait: Duration) -> Result<Handle, PutError> {
        let table = self.shared.table();
        let Some(live) = table.get(handle.payload) else {
            return match table.gone(handle.payload) {
                Some(Gone::Moved(store)) => Ok(put::moved(handle, &store)),
                _ => Err(PutError::NotHeld {
                    at: PutPlace::new(handle, None),
                }),
            };
        };
        let put = Put {
            token,
            wait,
            reserved: None,
            over: None,
        };
        let _moving = Moving::new(&self.shared, &live);
        put::put(&self.shared, &live, put).await
    }

    /// Reads a payload that this or another process holds. Starts nothing until [`Consumer::next`] is called.
    ///
    /// # Errors
    /// [`ConsumeError::DestinationCount`], [`ConsumeError::DestinationSize`], [`ConsumeError::NoTransport`].
    pub fn consume(&self, handle: Handle, options: ConsumeOptions) -> Result<Consumer, ConsumeError> {
        Consumer::new(Arc::clone(&self.shared), handle, options)
    }

    /// Ends a payload wherever it is held: here, at its producer, or in the store.
    ///
    /// # Errors
    /// [`ReleaseError`]. A payload that has ended already is none.
    ///
    /// # Cancel safety
    /// It may have been released though the future was dropped.
    pub async fn release_handle(&self, handle: &Handle) -> Result<(), ReleaseError> {
        release::release(&self.shared, handle, None).await
    }

    /// Releases a payload that this process holds; nothing happens where it holds none of this id. Its memory goes
    /// when the last pin ends.
    pub fn release(&self, payload: PayloadId) {
        self.shared.table().release(payload, Gone::Released);
    }

    /// The payloads that this process holds.
    pub fn live(&self) -> Vec<PayloadId> {
        self.shared.table().ids()
    }

    /// Numbers.
    pub fn stats(&self) -> ConnectorStats {
        let shared = &self.shared;
        let table = shared.table();
        let (live_payloads, live_bytes) = table.size();
        ConnectorStats {
            live_payloads,
            live_bytes,
            published: table.published.load(Ordering::Relaxed),
            released: table.released.load(Ordering::Relaxed),
            consumed: table.consumed.load(Ordering::Relaxed),
            moved: table.moved.load(Ordering::Relaxed),
            expired: table.expired.load(Ordering::Relaxed),
            failed: table.failed.load(Ordering::Relaxed),
            claims_refused: table.claims_refused.load(Ordering::Relaxed),
            consumers: shared.consumers.load(Ordering::Relaxed),
            modes: shared.modes.counts(),
            unreserved: shared.modes.unreserved(),
            links: shared.links.open(),
            staged_bytes: shared.staged.load(Ordering::Relaxed),
            host: shared.host.stats(),
        }
    }

    /// Releases every payload, ends every connection and removes the sockets. Calling it again does nothing.
    ///
    /// Stores that may have taken a payload which was given up are told first, for at most 2 s.
    ///
    /// Views that consumers of this process still hold stay valid.
    ///
    /// # Cancel safety
    /// A repeated call goes on where the dropped future has stopped.
    pub async fn close(&self) {
        let shared = &self.shared;
        let by = Instant::now() + PART_WITHIN;
        shared.parted(by).await;
        shared.end();
        let shut = shared.shut.get_or_init(async || {
            // What was on its way into a store ends now.
            shared.moved(by).await;
            shared.parted(by).await;
            shared.links.close();
            shared.network.shutdown().await;
            shared.host.shutdown().await;
        });
        shut.await;
    }

    pub(crate) const fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }
}

impl Drop for Connector {
    fn drop(&mut self) {
        if self.shared.end() {
            // Dropping the network ends it.
            let host = Arc::clone(&self.shared.host);
            self.shared.runtime.spawn(async move { host.shutdown().await });
        }
    }
}

#[cfg(test)]
mod tests;
