use std::sync::Arc;

use tokio::sync::watch;

use super::Asked;
use crate::live::Shown;
use crate::wire::{Refusal, Request};

/// What the holder has said of a payload so far.
#[derive(Debug, Clone, Default)]
pub(crate) struct Heard {
    /// Anything at all.
    pub(crate) spoken: bool,
    pub(crate) shown: Shown,
    /// All bytes of the payload, tensor after tensor, where they were sent along.
    pub(crate) bytes: Option<Arc<Vec<u8>>>,
    pub(crate) refused: Option<Refusal>,
    /// It knows that the consumer has every byte.
    pub(crate) finished: bool,
}

/// Follows a payload at its holder. Dropping it tells the holder that the consumer has left.
#[derive(Debug)]
pub(crate) struct Watching {
    asked: Asked,
    heard: watch::Receiver<Heard>,
}

impl Watching {
    pub(super) const fn new(asked: Asked, heard: watch::Receiver<Heard>) -> Self {
        Self { asked, heard }
    }

    /// What was heard last.
    pub(crate) fn heard(&mut self) -> Heard {
        self.heard.borrow_and_update().clone()
    }

    /// Whether the holder has said by now that a chunk is complete.
    pub(crate) fn has(&self, index: u32) -> bool {
        self.heard.borrow().shown.complete.has(index)
    }

    /// For others that follow the same payload.
    pub(crate) fn subscribe(&self) -> watch::Receiver<Heard> {
        self.heard.clone()
    }

    /// Whether the connection has ended, which is at once where the holder dies.
    pub(crate) fn is_over(&self) -> bool {
        self.heard.has_changed().is_err()
    }

    /// Waits until there is more to hear, or the connection has ended.
    pub(crate) async fn changed(&mut self) {
        let _ = self.heard.changed().await;
    }

    /// Waits for the first word of the holder, or the end of the connection.
    pub(crate) async fn first_word(&self) {
        let _ = self.heard.clone().wait_for(|heard| heard.spoken).await;
    }

    /// The same of one that is about to say it.
    pub(crate) async fn first_word_soon(&self) {
        self.asked.link.attended(self.first_word()).await;
    }

    /// Tells the holder that the consumer has every byte, and waits until it knows, refuses, or is gone.
    pub(crate) async fn finish(&mut self) {
        self.asked.leaves = false;
        self.asked.link.send(&Request::Finish { id: self.asked.id });
        let told = self.heard.wait_for(|heard| heard.finished || heard.refused.is_some());
        let _ = self.asked.link.attended(told).await;
    }
}
