//! One rank of a decode engine.

mod leases;
mod pack;
mod pull;
mod room;
mod source;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::future::join_all;
use stagewire_kv::{Engine, Pair, handshake};
use stagewire_transfer::{Target, Transport};
use tokio::sync::watch;
use uuid::Uuid;

use super::cache::{self, Buffers};
use super::chunk;
use super::incoming::{Incoming, Needs};
use super::protocol::ReceiverId;
use super::sender::within;
use super::{CacheMemory, Heartbeat, KvError, RoomId, SenderHandle};
use crate::Connector;
use crate::connector::Shared;

pub use room::{Received, ReceiverRoom};

use leases::Leases;
use room::Running;
use source::Source;

/// How a [`Receiver`] is.
#[derive(Debug, Clone, Default)]
pub struct ReceiverOptions {
    /// How it notices that a sender is silent.
    pub heartbeat: Heartbeat,
    /// What moves the bytes; `None` takes the connector's transport that the sender has registered its cache with, else
    /// `tcp`.
    pub transport: Option<Arc<dyn Transport>>,
}

/// What a receiver is to get.
#[derive(Debug, Clone)]
pub struct RoomSpec {
    /// Its number and life, the same at prefill.
    pub room: RoomId,
    /// All of prefill's ranks that open this room. Those that this rank needs nothing of may be left out where all ranks of
    /// prefill are needed by some rank of decode.
    pub senders: Vec<SenderHandle>,
    /// Tokens of the prompt, without the one that prefill samples.
    pub seq_len: u64,
    /// For each component the page of each logical page of the sequence, -1 where none is needed.
    pub pages: BTreeMap<String, Vec<i64>>,
    /// Tokens of each component that are here already, whole pages. Those of a window only where its pages were kept.
    pub prefix: BTreeMap<String, u64>,
    /// Needed tokens only, not the rest of their pages.
    pub exact_window: bool,
    /// Longest time until it has succeeded.
    pub deadline: Duration,
}

impl RoomSpec {
    /// Whole pages, no prefix, within a minute.
    pub fn new(room: impl Into<RoomId>, senders: impl Into<Vec<SenderHandle>>, seq_len: u64) -> Self {
        Self {
            room: room.into(),
            senders: senders.into(),
            seq_len,
            pages: BTreeMap::new(),
            prefix: BTreeMap::new(),
            exact_window: false,
            deadline: Duration::from_secs(60),
        }
    }

    /// With the page table of one component.
    #[must_use]
    pub fn pages(mut self, component: &str, pages: impl Into<Vec<i64>>) -> Self {
        self.pages.insert(component.to_owned(), pages.into());
        self
    }

    /// With the tokens of one component that are here already.
    #[must_use]
    pub fn prefix(mut self, component: &str, tokens: u64) -> Self {
        self.prefix.insert(component.to_owned(), tokens);
        self
    }

    /// With another deadline.
    #[must_use]
    pub fn within(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }
}

/// One rank of a decode engine, which pulls pages of prefill's caches into its own. Dropping it, or closing its
/// connector, fails its rooms.
#[derive(Debug)]
pub struct Receiver {
    inner: Arc<Inner>,
}

/// What a receiver and its rooms have in common.
#[derive(Debug)]
struct Inner {
    me: Arc<Me>,
    engine: Engine,
    targets: Vec<Arc<Target>>,
    buffers: Buffers,
    leases: Arc<Leases>,
    /// By process and number of the sender there.
    sources: Mutex<BTreeMap<SourceKey, Arc<Source>>>,
    /// By the engine's bytes.
    pairs: Mutex<BTreeMap<Vec<u8>, Arc<Pair>>>,
    attempts: AtomicU64,
    /// Rooms whose senders do not know yet how they ended.
    running: watch::Sender<usize>,
    closed: watch::Sender<bool>,
    shared: Arc<Shared>,
}

/// Who a receiver is to its senders.
#[derive(Debug)]
struct Me {
    id: ReceiverId,
    rank: u32,
    engine: Vec<u8>,
    heartbeat: Heartbeat,
    transports: Vec<Arc<dyn Transport>>,
}

type SourceKey = (uuid::Uuid, u64);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Receiver {
    /// Takes the cache of one rank. Its targets become [`Target::rewritable`]: pages are written again and again, and their
    /// owner reads them, where no room has them.
    ///
    /// # Errors
    /// [`KvError`].
    pub fn new(
        connector: &Connector,
        engine: Engine,
        rank: u32,
        cache: CacheMemory<Target>,
        options: ReceiverOptions,
    ) -> Result<Self, KvError> {
        let shared = Arc::clone(connector.shared());
        if shared.is_closed() {
            return Err(KvError::Closed);
        }
        let (lens, targets, places) = cache::parts(cache);
        let rank = within(&engine, rank);
        let buffers = Buffers::new(&engine, rank, &lens, &places)?;
        let transports = match options.transport {
            Some(transport) => vec![transport],
            None => shared.transports().cloned().collect(),
        };
        let me = Me {
            id: Uuid::new_v4(),
            rank,
            engine: engine.to_bytes(),
            heartbeat: options.heartbeat,
            transports,
        };
        let inner = Inner {
            me: Arc::new(me),
            engine,
            targets: targets
                .into_iter()
                .map(|target| Arc::new(target.rewritable()))
                .collect(),
            buffers,
            leases: Arc::default(),
            sources: Mutex::default(),
            pairs: Mutex::default(),
            attempts: AtomicU64::new(0),
            running: watch::Sender::new(0),
            closed: watch::Sender::new(false),
            shared,
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The rank, without the offset of data-parallel replicas.
    pub fn rank(&self) -> u32 {
        self.inner.me.rank
    }

    /// The engine it is a rank of.
    pub fn engine(&self) -> &Engine {
        &self.inner.engine
    }

    /// Prefill's ranks that this one needs bytes of.
    ///
    /// # Errors
    /// [`KvError::Incompatible`].
    pub fn writers(&self, sender: &SenderHandle) -> Result<Vec<u32>, KvError> {
        Ok(self.inner.pair(sender)?.writers(self.rank()))
    }

    /// Opens a room, and begins to pull as soon as prefill announces something.
    ///
    /// # Errors
    /// [`KvError`]: the connector is closed, the engines do not fit, a sender that is needed is missing, a page is still
    /// another room's. What is wrong with the page tables fails the room.
    pub fn room(&self, spec: RoomSpec) -> Result<ReceiverRoom, KvError> {
        let inner = &self.inner;
        if inner.shared.is_closed() {
            return Err(KvError::Closed);
        }
        let room = spec.room.number;
        let first = spec.senders.first().ok_or(KvError::Writers {
            room,
            rank: inner.me.rank,
            needed: Vec::new(),
            given: Vec::new(),
        })?;
        let pair = inner.pair(first)?;
        inner.check(&spec, &pair)?;
        let needed = pair.writers(inner.me.rank);
        let lease = Leases::lease(&inner.leases, &inner.engine, &inner.buffers, &spec)?;
        let by_rank = spec.senders.iter().map(|handle| (handle.rank, handle));
        let sources = by_rank.filter(|(rank, _)| needed.contains(rank) || inner.tells(&pair, *rank));
        let sources: BTreeMap<u32, Arc<Source>> = sources.map(|(rank, handle)| (rank, inner.source(handle))).collect();
        let writers = needed.iter().map(|&rank| (rank, inner.needs(&pair, rank, &spec)));
        let prefill = Arc::new(pair.prefill().clone());
        let incoming = Incoming::new(room, spec.seq_len, prefill, writers.collect());
        let attempt = inner.attempts.fetch_add(1, Ordering::Relaxed);
        let running = Running::new(Arc::clone(inner), pair, spec, attempt, sources, incoming);
        Ok(running.start(lease))
    }

    /// Rooms that have pages.
    pub fn live_rooms(&self) -> usize {
        self.inner.leases.rooms()
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.inner.closed.send_replace(true);
        let sources = std::mem::take(&mut *lock(&self.inner.sources));
        let mut running = self.inner.running.subscribe();
        let limit = self.inner.me.heartbeat.limit();
        self.inner.shared.runtime().spawn(async move {
            // The rooms say first why they end.
            let _ = tokio::time::timeout(limit, running.wait_for(|rooms| *rooms == 0)).await;
            join_all(sources.values().map(|source| source.end())).await;
        });
    }
}

impl Inner {
    fn pair(&self, handle: &SenderHandle) -> Result<Arc<Pair>, KvError> {
        if let Some(pair) = lock(&self.pairs).get(&handle.engine) {
            return Ok(Arc::clone(pair));
        }
        let pair = Arc::new(handshake(&handle.engine()?, &self.engine)?);
        lock(&self.pairs).insert(handle.engine.clone(), Arc::clone(&pair));
        Ok(pair)
    }

    /// What does not depend on page tables.
    fn check(&self, spec: &RoomSpec, pair: &Pair) -> Result<(), KvError> {
        let room = spec.room.number;
        let given: BTreeSet<u32> = spec.senders.iter().map(|handle| handle.rank).collect();
        let engine = spec.senders.first().map(|handle| &handle.engine);
        if given.len() != spec.senders.len() || spec.senders.iter().any(|handle| Some(&handle.engine) != engine) {
            return Err(KvError::Handles { room });
        }
        let (rank, needed) = (self.me.rank, pair.writers(self.me.rank));
        if needed.iter().any(|writer| !given.contains(writer)) {
            let given = given.into_iter().collect();
            return Err(KvError::Writers {
                room,
                rank,
                needed,
                given,
            });
        }
        let components = &self.engine.geometry().components;
        let is_known = |name: &&String| components.iter().any(|component| component.name == **name);
        if let Some(name) = spec.pages.keys().chain(spec.prefix.keys()).find(|name| !is_known(name)) {
            let known: Vec<&str> = components.iter().map(|component| component.name.as_str()).collect();
            return Err(KvError::Component {
                room,
                component: name.clone(),
                known: known.join(", "),
            });
        }
        Ok(())
    }

    /// Whether it falls to this rank to tell a sender whom no rank needs which engine the room is for.
    fn tells(&self, pair: &Pair, rank: u32) -> bool {
        let geometry = self.engine.geometry();
        let ranks = geometry.tp_size * geometry.pp_size;
        rank % ranks == self.me.rank && pair.routes().iter().all(|route| route.0 != rank)
    }

    fn needs(&self, pair: &Pair, rank: u32, spec: &RoomSpec) -> Needs {
        let mut needs = Needs::default();
        for (index, component) in (0..).zip(&self.engine.geometry().components) {
            if pair.slice(&component.name, rank, self.me.rank).is_none() {
                continue;
            }
            if chunk::goes_last(component) {
                needs.at_last.insert(index);
            } else {
                let prefix = spec.prefix.get(&component.name).copied().unwrap_or(0);
                needs.chunked.insert(index, prefix);
            }
        }
        needs
    }

    /// The connection to a sender, made where there is none that works.
    fn source(&self, handle: &SenderHandle) -> Arc<Source> {
        let key = (handle.peer.incarnation.0, handle.sender);
        let mut sources = lock(&self.sources);
        sources.retain(|_, source| source.is_of_use());
        let source = sources
            .entry(key)
            .or_insert_with(|| Source::start(&self.shared, &self.me, handle.clone()));
        Arc::clone(source)
    }
}
