//! Where questions about caches arrive: the senders of this process.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::protocol::{self, Answer, Ask, Body, ReceiverId};
use super::sender::Inner;

/// The senders of this process.
#[derive(Debug, Default)]
pub(crate) struct Desk {
    senders: Mutex<BTreeMap<u64, Weak<Inner>>>,
    next: AtomicU64,
}

impl Desk {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Weak<Inner>>> {
        self.senders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn next_id(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn enter(&self, id: u64, sender: &Arc<Inner>) {
        self.lock().insert(id, Arc::downgrade(sender));
    }

    pub(super) fn leave(&self, id: u64) {
        self.lock().remove(&id);
    }

    fn find(&self, ask: &Ask) -> Option<Arc<Inner>> {
        let sender = self.lock().get(&ask.sender)?.upgrade()?;
        (sender.right() == ask.right).then_some(sender)
    }
}

/// One connection over which receivers ask. Its end tells their senders.
#[derive(Debug)]
pub(crate) struct Visit {
    desk: Arc<Desk>,
    id: u64,
    met: Mutex<BTreeSet<(u64, ReceiverId)>>,
}

impl Visit {
    pub(crate) fn new(desk: Arc<Desk>) -> Self {
        Self {
            id: desk.next_id(),
            desk,
            met: Mutex::default(),
        }
    }

    /// Answers a question; a room's when there is something to tell.
    ///
    /// # Errors
    /// What was asked is no question.
    pub(crate) async fn answer(&self, question: &[u8]) -> Result<Vec<u8>, postcard::Error> {
        let ask: Ask = protocol::decode(question)?;
        let answer = match self.desk.find(&ask) {
            Some(sender) => {
                self.meets(&ask);
                sender.answer(ask.receiver, self.id, ask.body).await
            }
            None => Answer::Gone,
        };
        Ok(protocol::encode(&answer))
    }

    /// Remembers who asks whom here, until it says goodbye.
    fn meets(&self, ask: &Ask) {
        let mut met = self.met.lock().unwrap_or_else(PoisonError::into_inner);
        let pair = (ask.sender, ask.receiver);
        match ask.body {
            Body::Bye => met.remove(&pair),
            _ => met.insert(pair),
        };
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        let met = std::mem::take(self.met.get_mut().unwrap_or_else(PoisonError::into_inner));
        for (sender, receiver) in met {
            let sender = self.desk.lock().get(&sender).and_then(Weak::upgrade);
            if let Some(sender) = sender {
                sender.hangs_up(receiver, self.id);
            }
        }
    }
}
