use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use stagewire_core::{ByteCount, Capability, Handle, Incarnation, PayloadId, Peer, StageName, Token, TransferMode};
use stagewire_transfer::{Host, HostOptions, HostStats, Memory, Transport, listen_unix};
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use uuid::Uuid;

use crate::link::Links;
use crate::live::{Gone, Live, Table};
use crate::pages::{Offer, Pages};
use crate::serve::{self, Holder};
use crate::wire::{End, Me};
use crate::{
    ConsumeError, ConsumeOptions, Consumer, Owner, Publication, PublishError, PublishSpec, PutError, StartError,
};

/// How memory outside the arena is offered to consumers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Borrowing {
    /// Consumers read it where it is, by cross-memory attach; where the kernel forbids that, it is copied once into
    /// the arena.
    #[default]
    Auto,
    /// It is always copied once into the arena.
    Never,
}

/// Who a connector is and what it may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectorOptions {
    /// Run directory: its `peers/` holds the sockets. Made where it is missing, mode 0700.
    pub run_dir: PathBuf,
    /// Stage that publishes.
    pub role: StageName,
    /// Most bytes of shared memory.
    pub arena_limit: ByteCount,
    /// How memory outside the arena is offered.
    pub borrow: Borrowing,
    /// Who keeps payloads of mode `store`.
    pub store: Option<Peer>,
}

impl ConnectorOptions {
    /// Options with an arena of 1 GiB, borrowing where it works, and no store.
    pub fn new(run_dir: impl Into<PathBuf>, role: StageName) -> Self {
        Self {
            run_dir: run_dir.into(),
            role,
            arena_limit: ByteCount(1 << 30),
            borrow: Borrowing::default(),
            store: None,
        }
    }
}

/// Numbers of one connector.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ConnectorStats {
    /// Payloads held.
    pub live_payloads: u64,
    /// Their bytes.
    pub live_bytes: u64,
    /// Payloads ever published.
    pub published: u64,
    /// Payloads that were released or consumed.
    pub released: u64,
    /// Payloads that nobody consumed in time.
    pub expired: u64,
    /// Payloads that their producer gave up.
    pub failed: u64,
    /// Consumers that exist.
    pub consumers: u64,
    /// Connections to holders of payloads.
    pub links: u64,
    /// Bytes ever copied into the arena because they could not be read where they were.
    pub staged_bytes: u64,
    /// Numbers of the transports: regions, pins, segments.
    pub host: HostStats,
}

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

/// What a connector and everything that came from it have in common.
pub(crate) struct Shared {
    role: StageName,
    peer: Peer,
    host: Arc<Host>,
    shm: Arc<dyn Transport>,
    cma: Option<Arc<dyn Transport>>,
    borrow: Borrowing,
    holder: Arc<Holder>,
    links: Links,
    store: Mutex<Option<Peer>>,
    runtime: tokio::runtime::Handle,
    accept: AbortHandle,
    closed: watch::Sender<bool>,
    consumers: Arc<AtomicU64>,
    staged: Arc<AtomicU64>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared")
            .field("role", &self.role)
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
        let (listener, socket) = match listen(&peers, incarnation) {
            Ok(listening) => listening,
            Err(error) => {
                host.shutdown().await;
                return Err(error);
            }
        };
        let shm = host.shm();
        let cma = host
            .cma()
            .map_err(|error| tracing::info!(%error, "memory outside the arena is copied into it"))
            .ok();
        let peer = Peer {
            incarnation,
            process: host.process(),
            socket: socket.to_string_lossy().into_owned(),
            transports: std::iter::once(&shm)
                .chain(&cma)
                .map(|transport| transport.address())
                .collect(),
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
        });
        let accept = tokio::spawn(serve::serve(listener, Arc::clone(&holder))).abort_handle();
        let shared = Arc::new(Shared {
            role: options.role,
            peer,
            host,
            shm,
            cma,
            borrow: options.borrow,
            holder,
            links: Links::new(me),
            store: Mutex::new(options.store),
            runtime: tokio::runtime::Handle::current(),
            accept,
            closed: watch::Sender::new(false),
            consumers: Arc::default(),
            staged: Arc::default(),
        });
        Ok(Arc::new(Self { shared }))
    }

    /// How others reach this process.
    pub fn peer(&self) -> &Peer {
        &self.shared.peer
    }

    /// This process's transports and arena.
    pub fn host(&self) -> &Arc<Host> {
        &self.shared.host
    }

    /// Says who keeps payloads of mode `store` from now on.
    pub fn set_store(&self, store: Option<Peer>) {
        *self.shared.store.lock().unwrap_or_else(PoisonError::into_inner) = store;
    }

    /// Publishes a payload that is complete: every chunk is visible at once.
    ///
    /// `tensors` are in the order of [`Manifest::tensors`](stagewire_core::Manifest::tensors); their bytes must not
    /// change until the payload is released. Memory from [`Host::arena`] can be mapped by consumers; other memory
    /// is offered as [`Borrowing`] says.
    ///
    /// # Errors
    /// [`PublishError`]; nothing is held then.
    pub fn publish(&self, spec: PublishSpec, tensors: Vec<Memory>) -> Result<Publication, PublishError> {
        let publication = self.open(spec, tensors)?;
        publication.seal();
        Ok(publication)
    }

    /// Publishes a payload whose chunks become visible one by one, by [`Publication::ready`]. The bytes of a chunk
    /// may be written until then.
    ///
    /// # Errors
    /// [`PublishError`]; nothing is held then.
    pub fn open(&self, spec: PublishSpec, tensors: Vec<Memory>) -> Result<Publication, PublishError> {
        let shared = &self.shared;
        if shared.is_closed() {
            return Err(PublishError::Closed { request: spec.request });
        }
        let offer = Offer {
            arena: shared.host.arena(),
            shm: shared.shm.as_ref(),
            cma: shared.cma.as_deref().filter(|_| shared.borrow == Borrowing::Auto),
            copied: &shared.staged,
        };
        let (pages, regions) = Pages::register(&offer, &spec.request, &spec.manifest, tensors)?;
        let handle = Handle {
            payload: PayloadId(Uuid::now_v7()),
            request: spec.request,
            stage: shared.role.clone(),
            manifest: spec.manifest,
            mode: TransferMode::P2p,
            holder: shared.peer.clone(),
            capability: Capability::from_random(rand::random()),
            regions,
        };
        let request = handle.request.clone();
        let live = Live::new(handle, spec.owner, Arc::new(pages));
        let publication = shared.hold(live, spec.deadline).expect("the id of the payload is new");
        if shared.is_closed() {
            // It closed meanwhile, and may not have seen this payload.
            self.release(publication.handle().payload);
            return Err(PublishError::Closed { request });
        }
        Ok(publication)
    }

    /// Moves a payload of this process into the store: the store pulls every chunk, becomes the holder, and the
    /// payload is released here. Returns the store's handle. `token` is the right of the attempt that produced it.
    ///
    /// `wait` bounds how long the store waits for chunks that are missing and for room.
    ///
    /// # Errors
    /// [`PutError`]; the payload is still here then.
    ///
    /// # Cancel safety
    /// The store may have taken the payload though the future was dropped; a repeated call then finds it there.
    pub async fn store(&self, handle: &Handle, token: Option<Token>, wait: Duration) -> Result<Handle, PutError> {
        crate::put::put(&self.shared, handle, token, wait).await
    }

    /// Reads a payload that this or another process holds. Starts nothing until [`Consumer::next`] is called.
    ///
    /// # Errors
    /// [`ConsumeError::DestinationCount`], [`ConsumeError::DestinationSize`], [`ConsumeError::NoTransport`].
    pub fn consume(&self, handle: Handle, options: ConsumeOptions) -> Result<Consumer, ConsumeError> {
        Consumer::new(Arc::clone(&self.shared), handle, options)
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
            expired: table.expired.load(Ordering::Relaxed),
            failed: table.failed.load(Ordering::Relaxed),
            consumers: shared.consumers.load(Ordering::Relaxed),
            links: shared.links.open(),
            staged_bytes: shared.staged.load(Ordering::Relaxed),
            host: shared.host.stats(),
        }
    }

    /// Releases every payload, ends every connection and removes the sockets. Calling it again does nothing.
    ///
    /// Views that consumers of this process still hold stay valid.
    pub async fn close(&self) {
        if self.shared.end() {
            self.shared.host.shutdown().await;
        }
    }

    pub(crate) const fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }
}

/// Opens the payload socket; gives its full path, which others get to see.
fn listen(peers: &Path, incarnation: Incarnation) -> Result<(UnixListener, PathBuf), StartError> {
    let peers = std::fs::canonicalize(peers).map_err(|source| StartError::RunDir {
        path: peers.to_owned(),
        source,
    })?;
    let socket = peers.join(format!("{}.ctl", &incarnation.0.simple().to_string()[..16]));
    let listener = listen_unix(&socket).map_err(StartError::Socket)?;
    Ok((listener, socket))
}

impl Drop for Connector {
    fn drop(&mut self) {
        if self.shared.end() {
            let host = Arc::clone(&self.shared.host);
            self.shared.runtime.spawn(async move { host.shutdown().await });
        }
    }
}

impl Shared {
    pub(crate) fn table(&self) -> &Arc<Table> {
        &self.holder.table
    }

    pub(crate) const fn links(&self) -> &Links {
        &self.links
    }

    pub(crate) const fn holder(&self) -> &Arc<Holder> {
        &self.holder
    }

    pub(crate) const fn peer(&self) -> &Peer {
        &self.peer
    }

    pub(crate) const fn consumers(&self) -> &Arc<AtomicU64> {
        &self.consumers
    }

    pub(crate) fn is_closed(&self) -> bool {
        *self.closed.borrow()
    }

    /// Waits until the connector closes.
    pub(crate) async fn closed(&self) {
        // The sender is in `self`.
        let _ = self.closed.subscribe().wait_for(|closed| *closed).await;
    }

    pub(crate) fn store(&self) -> Option<Peer> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The transports that this process can read over.
    pub(crate) fn transports(&self) -> impl Iterator<Item = &Arc<dyn Transport>> {
        std::iter::once(&self.shm).chain(&self.cma)
    }

    /// Takes a payload in, and lets it expire; `None` where one of its id is held already.
    pub(crate) fn hold(self: &Arc<Self>, live: Live, deadline: Option<Duration>) -> Option<Publication> {
        let live = self.table().insert(live)?;
        let publication = Publication::new(Arc::clone(self), Arc::clone(&live));
        if let Some(deadline) = deadline {
            let (table, payload) = (Arc::clone(self.table()), live.handle().payload);
            let mut states = live.subscribe();
            drop(live);
            self.runtime.spawn(async move {
                // Ends early where the payload does: its state goes with it.
                let ended = states.wait_for(|state| matches!(state.end, Some(End::Released)));
                if tokio::time::timeout(deadline, ended).await.is_err() && table.release(payload, Gone::Expired) {
                    tracing::warn!(%payload, ?deadline, "nobody consumed a payload in time");
                }
            });
        }
        Some(publication)
    }

    /// Ends everything that needs no waiting. Returns whether it had not ended before.
    fn end(&self) -> bool {
        if self.closed.send_replace(true) {
            return false;
        }
        self.accept.abort();
        for payload in self.table().ids() {
            self.table().release(payload, Gone::Released);
        }
        self.links.close();
        // What is gone already needs no removal.
        let _ = std::fs::remove_file(&self.peer.socket);
        true
    }
}

impl Owner {
    /// The deadline of a payload of this owner where its producer names none.
    pub(crate) const fn usual_deadline(self) -> Option<Duration> {
        match self {
            Self::Orchestrator => None,
            Self::Consumer => Some(PublishSpec::UNCONSUMED),
        }
    }
}
