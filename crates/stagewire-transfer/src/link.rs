//! The reader's side of control connections: one per peer and kind of socket, shared by its transports.

mod answer;
mod ask;
mod connect;
pub(crate) mod greeting;
mod grip;
mod segment;
mod unix;

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use stagewire_core::{Incarnation, ProcessRef};
use tokio::sync::{SetOnce, oneshot, watch};

pub(crate) use ask::AskError;
pub(crate) use connect::{Links, Opened, Route};
pub(crate) use grip::Grip;
pub(crate) use segment::PeerSegment;

use crate::budget::Budget;
use crate::host::{Counters, stopped};
use crate::network::Lanes;
use crate::process::ProcessWatch;
use crate::transport::Meter;
use crate::wire::{self, Channel, Kind, Received, Refusal, Request};
use crate::{TransferError, TransferOptions};

/// How long a closed connection is watched for the death behind it, so that the error names it.
const DEATH_AFTER_CLOSE: Duration = Duration::from_millis(50);

/// A connection to a peer.
pub(crate) struct Link {
    peer: Incarnation,
    process: ProcessRef,
    /// Where it is a process of this host.
    watch: Option<ProcessWatch>,
    /// Address and value of a word in the peer's memory; zeros over TCP.
    canary: (u64, u64),
    channel: Channel,
    /// How to open data connections to the peer, over TCP.
    lanes: Option<Lanes>,
    counters: Arc<Counters>,
    budget: Budget,
    /// The process that made the connection; a fork of it must not speak on it.
    owner: u32,
    next_request: AtomicU64,
    pending: Mutex<Pending>,
    segments: Mutex<HashMap<u64, Arc<PeerSegment>>>,
    /// Why it is over, once it is.
    lost: SetOnce<String>,
}

/// Requests without an answer.
#[derive(Default)]
struct Pending {
    closed: bool,
    waiting: HashMap<u64, Waiting>,
}

enum Waiting {
    Pin(oneshot::Sender<Result<Grip, Refusal>>),
    Confirm(oneshot::Sender<Result<(), Refusal>>),
    Ask(oneshot::Sender<Result<Vec<u8>, Refusal>>),
}

impl Link {
    pub(crate) fn peer(&self) -> Incarnation {
        self.peer
    }

    pub(crate) fn process(&self) -> ProcessRef {
        self.process
    }

    pub(crate) fn canary(&self) -> (u64, u64) {
        self.canary
    }

    /// How to open data connections to the peer; `None` on a Unix socket.
    pub(crate) fn lanes(&self) -> Option<&Lanes> {
        self.lanes.as_ref()
    }

    /// What transfers with this peer may have in flight.
    pub(crate) fn budget(&self) -> &Budget {
        &self.budget
    }

    pub(crate) fn counters(&self) -> &Counters {
        &self.counters
    }

    pub(crate) fn meter(&self, kind: Kind) -> &Meter {
        self.counters.meter(kind)
    }

    /// Whether the peer lives and the connection stands.
    pub(crate) fn is_alive(&self) -> bool {
        self.is_open() && self.watch.as_ref().is_none_or(ProcessWatch::is_alive)
    }

    /// Whether the connection stands.
    pub(crate) fn is_open(&self) -> bool {
        !self.lost.initialized()
    }

    /// Whether the peer's process is known to have ended.
    pub(crate) fn is_dead(&self) -> bool {
        self.watch.as_ref().is_some_and(|watch| !watch.is_alive())
    }

    /// Resolves when the connection is over, with the reason.
    pub(crate) async fn closed(&self) -> String {
        self.lost.wait().await.clone()
    }

    /// The error for whatever was going on when the peer was lost.
    pub(crate) fn peer_lost(&self) -> TransferError {
        let how = self.lost.get().cloned();
        TransferError::PeerLost {
            peer: self.peer,
            pid: self.process().pid,
            how: how.unwrap_or_else(|| "its process died".to_owned()),
        }
    }

    /// Runs one operation on a region of the peer, as long as the peer lives and the deadline allows.
    pub(crate) async fn bounded<T>(
        &self,
        what: &'static str,
        region: u64,
        options: &TransferOptions,
        operation: impl Future<Output = Result<T, TransferError>>,
    ) -> Result<T, TransferError> {
        let mut operation = std::pin::pin!(operation);
        // A short copy is done at once: then there is nothing to watch, and no timer to set.
        if let Poll::Ready(outcome) = futures::poll!(operation.as_mut()) {
            return outcome;
        }
        let unless_lost = async {
            tokio::select! {
                biased;
                outcome = operation => outcome,
                _ = self.closed() => Err(self.peer_lost()),
            }
        };
        let Some(after) = options.deadline else {
            return unless_lost.await;
        };
        match tokio::time::timeout(after, unless_lost).await {
            Ok(outcome) => outcome,
            Err(_) if !self.is_alive() => Err(self.peer_lost()),
            Err(_) => Err(TransferError::Deadline {
                peer: self.peer,
                pid: self.process().pid,
                region,
                what,
                after,
            }),
        }
    }

    /// Enters a request into the books; its answer may come any time after.
    fn expect(&self, waiting: Waiting) -> Result<u64, TransferError> {
        let mut pending = lock(&self.pending);
        if pending.closed {
            drop(pending);
            return Err(self.peer_lost());
        }
        let request = self.next_request.fetch_add(1, Ordering::Relaxed);
        pending.waiting.insert(request, waiting);
        Ok(request)
    }

    async fn send(&self, request: &Request) -> Result<(), TransferError> {
        if self.channel.send(&wire::encode(request), None).await.is_err() {
            // The task that reads the channel finds out why.
            self.closed().await;
            return Err(self.peer_lost());
        }
        Ok(())
    }

    /// Reads answers until the peer or this host ends the connection.
    async fn run(self: Arc<Self>, mut stop: watch::Receiver<bool>) {
        let mut buffer = vec![0; self.channel.max_frame()];
        let how = loop {
            let done = tokio::select! {
                received = self.channel.receive(&mut buffer) => match received {
                    Ok(Received::Frame(len, descriptor)) => self.answered(&buffer[..len], descriptor),
                    Ok(Received::End) => {
                        let died = tokio::time::timeout(DEATH_AFTER_CLOSE, self.died()).await;
                        let closed = "it closed the connection";
                        break died.map_or(closed, |()| "its process died").to_owned();
                    }
                    Err(error) => Err(error.to_string()),
                },
                () = self.died() => break "its process died".to_owned(),
                flushed = self.channel.flush() => flushed.map_err(|error| error.to_string()),
                () = stopped(&mut stop) => break "this host was shut down".to_owned(),
            };
            if let Err(problem) = done {
                tracing::warn!(peer = %self.peer, %problem, "a data connection is given up");
                break problem;
            }
        };
        self.end(how);
    }

    /// Resolves when the peer's process is known to have ended.
    async fn died(&self) {
        match &self.watch {
            Some(watch) => watch.died().await,
            None => std::future::pending().await,
        }
    }

    fn end(&self, how: String) {
        // The first reason stands.
        let _ = self.lost.set(how);
        let waiting = {
            let mut pending = lock(&self.pending);
            pending.closed = true;
            std::mem::take(&mut pending.waiting)
        };
        drop(waiting);
        // Mappings in use keep their segment.
        let segments = std::mem::take(&mut *lock(&self.segments));
        drop(segments);
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.counters.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link")
            .field("peer", &self.peer)
            .field("process", &self.process())
            .field("lost", &self.lost.get())
            .finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
