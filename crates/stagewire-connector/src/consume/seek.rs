//! Finding a payload again whose holder does not have it any more: in the store that serves the run directory now.

use std::time::Duration;

use stagewire_core::{Peer, TransferMode};
use tokio::time::Instant;

use super::{ConsumeError, Consumer};
use crate::wire::Refusal;

/// How long a payload that a store had is looked for, while that store may be starting anew: short of the second within
/// which consumers learn of what is lost.
const ANEW_WITHIN: Duration = Duration::from_millis(900);
/// Pause between two looks.
const PAUSE: Duration = Duration::from_millis(20);
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

impl Consumer {
    /// Looks for the payload after its holder was lost, or said that it does not have it. Returns whether another holder
    /// has it, which is then asked.
    pub(super) async fn seek(&mut self, error: &ConsumeError) -> bool {
        let told = match (self.whereabouts.refusal.take(), error) {
            (Some(Refusal::Moved(store)), _) => Some(store),
            // That it ended there while it was being read does not say that it is nowhere else.
            (Some(Refusal::Unknown), _) | (None, ConsumeError::PeerLost { .. } | ConsumeError::Gone { .. }) => None,
            _ => return false,
        };
        // A store may come back; a producer does not.
        let patient = told.is_some() || self.is_stored();
        let begin = Instant::now();
        let mut asked = vec![self.whereabouts.holder.incarnation];
        loop {
            for store in told.iter().cloned().chain(self.shared.stores_of_run_dir()) {
                if asked.contains(&store.incarnation) {
                    continue;
                }
                match tokio::time::timeout(ANSWER_WITHIN, self.has_it(&store)).await {
                    Ok(Some(true)) => return true,
                    Ok(Some(false)) => asked.push(store.incarnation),
                    // It may still be starting.
                    Ok(None) | Err(_) => {}
                }
            }
            if !patient || begin.elapsed() >= ANEW_WITHIN {
                return false;
            }
            tokio::time::sleep(PAUSE).await;
        }
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
        let mut watching = link.watch(self.handle.payload, self.handle.capability, true);
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
        self.access = None;
        self.flight = None;
        Some(true)
    }
}
