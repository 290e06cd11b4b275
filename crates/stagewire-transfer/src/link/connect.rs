use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use stagewire_core::{Incarnation, ProcessRef};
use tokio::sync::{SetOnce, watch};

use super::{Link, lock, unix};
use crate::ConnectError;
use crate::budget::Budget;
use crate::host::Counters;
use crate::network::{Dial, Lanes};
use crate::process::ProcessWatch;
use crate::wire::Channel;

/// The connections of this host over one kind of socket, one per peer.
pub(crate) struct Links {
    process: ProcessRef,
    counters: Arc<Counters>,
    stop: watch::Receiver<bool>,
    /// A lock of its own for each peer, so that two who need the same peer make one connection, and a slow peer keeps
    /// nobody from another.
    links: Mutex<HashMap<Incarnation, Arc<Place>>>,
}

type Place = tokio::sync::Mutex<Option<Arc<Link>>>;

/// Where a peer listens.
pub(crate) enum Route<'a> {
    Unix { path: &'a str, host: &'a str },
    Tcp(&'a Dial),
}

/// A connection, greeted on both sides.
pub(crate) struct Opened {
    pub(crate) channel: Channel,
    pub(crate) process: ProcessRef,
    /// Where it is a process of this host.
    pub(crate) watch: Option<ProcessWatch>,
    pub(crate) canary: (u64, u64),
    /// How to open lanes of this session, over TCP.
    pub(crate) lanes: Option<Lanes>,
}

impl Links {
    pub(crate) fn new(process: ProcessRef, counters: Arc<Counters>, stop: watch::Receiver<bool>) -> Arc<Self> {
        Arc::new(Self {
            process,
            counters,
            stop,
            links: Mutex::default(),
        })
    }

    /// The connection to a peer: the one there is, if it still stands, else a new one.
    pub(crate) async fn connect(
        self: &Arc<Self>,
        peer: Incarnation,
        route: Route<'_>,
        deadline: Duration,
    ) -> Result<Arc<Link>, ConnectError> {
        let place = lock(&self.links).entry(peer).or_default().clone();
        let connected = tokio::time::timeout(deadline, async {
            let mut link = place.lock().await;
            if let Some(link) = link.as_ref().filter(|link| link.is_alive()) {
                return Ok(link.clone());
            }
            let opened = match route {
                Route::Unix { path, host } => unix::open(peer, path, host, self.process).await,
                Route::Tcp(dial) => dial.open(peer, self.process).await,
            };
            let made = self.start(peer, opened?);
            *link = Some(made.clone());
            Ok(made)
        });
        let after = deadline;
        let connected = connected.await.unwrap_or(Err(ConnectError::Deadline { peer, after }));
        if connected.is_err() {
            self.forget(peer);
        }
        connected
    }

    /// Lets go of all connections. Those with pins stay until the pins end.
    pub(crate) fn close(&self) {
        let links = std::mem::take(&mut *lock(&self.links));
        drop(links);
    }

    /// Forgets a peer without a living connection.
    fn forget(&self, peer: Incarnation) {
        let mut links = lock(&self.links);
        let dead = links.get(&peer).is_some_and(|place| {
            let link = place.try_lock();
            link.is_ok_and(|link| link.as_ref().is_none_or(|link| !link.is_alive()))
        });
        if dead {
            let place = links.remove(&peer);
            drop(links);
            drop(place);
        }
    }

    fn start(self: &Arc<Self>, peer: Incarnation, opened: Opened) -> Arc<Link> {
        let Opened {
            channel,
            process,
            watch,
            canary,
            lanes,
        } = opened;
        self.counters.connections.fetch_add(1, Ordering::Relaxed);
        let link = Arc::new(Link {
            peer,
            process,
            watch,
            canary,
            channel,
            lanes,
            counters: self.counters.clone(),
            budget: Budget::new(self.counters.in_flight_limit(), self.counters.clone()),
            owner: std::process::id(),
            next_request: AtomicU64::new(0),
            pending: Mutex::default(),
            segments: Mutex::default(),
            lost: SetOnce::new(),
        });
        let (running, links) = (link.clone().run(self.stop.clone()), Arc::downgrade(self));
        tokio::spawn(async move {
            running.await;
            if let Some(links) = links.upgrade() {
                links.forget(peer);
            }
        });
        link
    }
}
