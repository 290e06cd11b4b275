//! Leaving so that nobody misses anything: what this worker still holds goes to the store first.

use std::sync::atomic::Ordering;
use std::time::Duration;

use stagewire_core::{Handle, PayloadId, Token};
use tokio::time::Instant;

use super::task::describe;
use super::{Inner, Worker, lock};
use crate::PutError;

/// How long the store may take to make room for one payload.
const ROOM: Duration = Duration::from_secs(10);
/// Pause before the store is asked again for what it has not taken.
const PAUSE: Duration = Duration::from_millis(100);
/// How long the server may take to answer what was said last.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// What is known of the way out.
#[derive(Debug, Default)]
pub(super) struct Drain {
    /// The server wants it, and says when what runs must have ended, if at all.
    ordered: Option<Option<Instant>>,
    /// Counts the times that a server has said it knows. The store takes payloads from then on; the one of a server that
    /// is back only after it has said so, too.
    heard: u64,
    /// The server that said so last is still there.
    known: bool,
}

/// A payload that the server may need.
#[derive(Debug, Clone)]
pub(super) struct Made {
    pub(super) token: Token,
    pub(super) handle: Handle,
    /// The store has it, and a server was told: the one that had said so many times that it knows of the drain.
    pub(super) told: Option<u64>,
}

impl Worker {
    /// Leaves in order: takes no more offers, has the store take the payloads that are still needed from here, and closes
    /// once the server has heard of each. That takes `within` at most, or, where the server wants this worker to leave,
    /// until so long after the time that the server has set; until nothing is needed from here where it has set none. Without a server
    /// there is nothing to wait for.
    ///
    /// # Cancel safety
    /// A dropped future leaves the worker attached; call [`Worker::close`] then.
    pub async fn leave(&self, within: Duration) {
        self.drain();
        let inner = &self.inner;
        let until = match lock(&inner.drain).ordered {
            None => Some(Instant::now() + within),
            Some(until) => until.map(|until| until.max(Instant::now()) + within),
        };
        let emptied = inner.put_away();
        match until {
            None => emptied.await,
            // What is left is told below.
            Some(until) => _ = tokio::time::timeout_at(until, emptied).await,
        }
        let payloads = inner.connector.live().len();
        if payloads > 0 {
            tracing::warn!(
                payloads,
                "left with payloads that may be needed; they must be produced again"
            );
        }
        // An attempt that has yielded would count as lost if this process ended before that was heard.
        _ = tokio::time::timeout(LAST_WORDS, inner.answered()).await;
        self.close().await;
    }
}

impl Inner {
    /// The server drains this worker, or knows that it leaves.
    pub(super) fn hear_drain(&self, within: Option<Duration>) {
        let until = within.and_then(|within| Instant::now().checked_add(within));
        let mut drain = lock(&self.drain);
        if drain.ordered.is_some() || !self.draining.swap(true, Ordering::AcqRel) {
            drain.ordered = Some(until);
        }
        drain.heard += 1;
        drain.known = true;
        drop(drain);
        self.note_freed();
    }

    /// There is another server, which does not know of the drain.
    pub(super) fn say_drain(&self) {
        if self.is_draining() {
            let until = lock(&self.drain).ordered.flatten();
            let within = until.map(|until| until.saturating_duration_since(Instant::now()));
            self.tell(|session| session.drain(within));
        }
    }

    /// The server is away.
    pub(super) fn forget_server(&self) {
        lock(&self.drain).known = false;
    }

    /// Has the store take one payload after the other. Returns once the server has released all, or there is none.
    async fn put_away(&self) {
        let mut freed = self.freed.subscribe();
        loop {
            freed.mark_unchanged();
            let empty = lock(&self.made).is_empty() && self.connector.live().is_empty();
            if empty || self.alone.load(Ordering::Acquire) {
                return;
            }
            let all_told = self.put_each().await;
            tokio::select! {
                // The sender is in `self`.
                _ = freed.changed() => {}
                () = tokio::time::sleep(PAUSE), if !all_told => {}
            }
        }
    }

    /// Returns once the server has answered how attempts have ended, or there is none.
    async fn answered(&self) {
        let mut freed = self.freed.subscribe();
        let waits = || {
            let session = lock(&self.session);
            session.as_ref().is_some_and(|session| !session.is_answered())
        };
        while waits() && !self.alone.load(Ordering::Acquire) {
            // The sender is in `self`.
            _ = freed.changed().await;
        }
    }

    /// Asks the store once for each payload that the server does not know there. Returns whether there is none left.
    async fn put_each(&self) -> bool {
        let payloads: Vec<PayloadId> = lock(&self.made).keys().copied().collect();
        let mut all_told = true;
        for payload in payloads {
            let (heard, known) = {
                let drain = lock(&self.drain);
                (drain.heard, drain.known)
            };
            // Released, in the meantime, or already said to this server.
            let made = lock(&self.made).get(&payload).cloned();
            let Some(made) = made.filter(|made| made.told != Some(heard)) else {
                continue;
            };
            if !known {
                return false;
            }
            match self.connector.store(&made.handle, Some(made.token), ROOM).await {
                Ok(stored) => {
                    if let Some(made) = lock(&self.made).get_mut(&payload) {
                        made.told = Some(heard);
                    }
                    self.tell(|session| session.moved(made.token, describe(&stored)));
                }
                Err(PutError::NotHeld { .. }) => _ = lock(&self.made).remove(&payload),
                Err(error) => {
                    tracing::debug!(%payload, %error, "the store has not taken a payload of a worker that leaves; again soon");
                    all_told = false;
                }
            }
        }
        all_told
    }
}
