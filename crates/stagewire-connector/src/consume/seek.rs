//! Finding a payload again whose holder does not have it any more: in the store that serves the run directory now.

use std::sync::Arc;
use std::time::Duration;

use stagewire_core::{Peer, TransferMode};
use tokio::time::Instant;

use super::advance::gone;
use super::{ConsumeError, Consumer};
use crate::store_file::{ANEW_WITHIN, PAUSE};
use crate::wire::Refusal;

/// Longest wait for an answer of a store.
const ANSWER_WITHIN: Duration = Duration::from_millis(500);

/// Who holds the payload, and where else it may be.
#[derive(Debug)]
pub(super) struct Whereabouts {
    pub(super) holder: Peer,
    /// What the holder said when it sent the consumer away.
    pub(super) refusal: Option<Refusal>,
}

impl Whereabouts {
    pub(super) const fn new(holder: Peer) -> Self {
        Self { holder, refusal: None }
    }
}

/// What came of looking for a payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sought {
    /// Another holder has it, which is asked from now on.
    Found,
    /// It was in a store that has died, and the one in its place does not have it.
    Nowhere,
    /// Nobody knows.
    Unknown,
}

impl Consumer {
    /// Looks for the payload after its holder was lost, or said that it does not have it.
    pub(super) async fn seek(&mut self, error: &ConsumeError) -> Sought {
        let refusal = self.whereabouts.refusal.take();
        let told = match (&refusal, error) {
            (Some(Refusal::Moved(store)), _) => Some(store.clone()),
            // That it ended there while it was being read does not say that it is nowhere else.
            (Some(Refusal::Unknown), _) | (None, ConsumeError::PeerLost { .. } | ConsumeError::Gone { .. }) => None,
            _ => return Sought::Unknown,
        };
        // A store may come back; a producer does not.
        let patient = told.is_some() || self.is_stored();
        let died = told.is_none() && self.is_stored() && matches!(error, ConsumeError::PeerLost { .. });
        let begin = Instant::now();
        let holder = self.whereabouts.holder.incarnation;
        // Those that need not be asked, and those of them that do not have it.
        let mut asked = vec![holder];
        let mut without: Vec<_> = refusal.map(|_| holder).into_iter().collect();
        loop {
            let mut last = None;
            for store in told
                .iter()
                .cloned()
                .map(Arc::new)
                .chain(self.shared.stores_of_run_dir())
            {
                last = Some(store.incarnation);
                if asked.contains(&store.incarnation) {
                    continue;
                }
                match tokio::time::timeout(ANSWER_WITHIN, self.has_it(&store)).await {
                    Ok(Some(true)) => return Sought::Found,
                    Ok(Some(false)) => {
                        asked.push(store.incarnation);
                        without.push(store.incarnation);
                    }
                    // It may still be starting.
                    Ok(None) | Err(_) => {}
                }
            }
            // A store is where others find it only once it has everything of the one before.
            let succeeded = told.is_none() && last.is_some_and(|last| without.contains(&last));
            if succeeded || !patient || begin.elapsed() >= ANEW_WITHIN {
                return if succeeded && died {
                    Sought::Nowhere
                } else {
                    Sought::Unknown
                };
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Of a payload that ended while it was read: its holder knows how.
    pub(super) async fn with_reason(&mut self, error: ConsumeError) -> ConsumeError {
        if !matches!(error, ConsumeError::Gone { .. }) || self.whereabouts.refusal.is_some() {
            return error;
        }
        self.watching = None;
        let asked = async {
            let mut watching = self.watch().await.ok()?;
            watching.first_word().await;
            watching.heard().refused
        };
        let Ok(Some(refusal)) = tokio::time::timeout(ANSWER_WITHIN, asked).await else {
            return error;
        };
        if matches!(refusal, Refusal::Denied | Refusal::Claimed | Refusal::Failed(_)) {
            // It is there, for others.
            return error;
        }
        let error = gone(self.place(), &refusal);
        self.whereabouts.refusal = Some(refusal);
        error
    }

    /// Whether the payload is one that a store has, or had.
    pub(super) fn is_stored(&self) -> bool {
        self.handle.mode == TransferMode::Store || self.is_elsewhere()
    }

    /// Whether its holder is not the one that the handle names.
    pub(super) fn is_elsewhere(&self) -> bool {
        self.whereabouts.holder.incarnation != self.handle.holder.incarnation
    }

    /// Asks a store for the payload, and stays with it where it has it; `None` where the store does not answer.
    async fn has_it(&mut self, store: &Peer) -> Option<bool> {
        let link = self.shared.links().to(store).await.ok()?;
        let mut watching = link.watch(&self.handle, true, false);
        watching.first_word().await;
        let heard = watching.heard();
        if !heard.spoken {
            return None;
        }
        if matches!(heard.refused, Some(Refusal::Unknown | Refusal::Denied)) {
            return Some(false);
        }
        tracing::debug!(payload = %self.handle.payload, pid = store.process.pid, "a payload was found in the store");
        self.whereabouts = Whereabouts::new(store.clone());
        self.watching = Some(watching);
        self.leave().await;
        Some(true)
    }
}
