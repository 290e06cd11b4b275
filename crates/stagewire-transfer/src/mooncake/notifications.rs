use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use super::handshake::Notification;

/// Notifications that wait at most, and their bytes. Peers send them unasked, so they must not pile up.
const MAX_WAITING: usize = 4096;
const MAX_BYTES: usize = 16 << 20;

/// Notifications that peers sent and nobody took yet, in the order of their arrival.
#[derive(Debug, Default)]
pub(crate) struct Notifications {
    waiting: Mutex<Waiting>,
    arrived: Notify,
}

#[derive(Debug, Default)]
struct Waiting {
    queue: VecDeque<Notification>,
    bytes: usize,
}

impl Notifications {
    /// Adds one, unless too many wait.
    pub(crate) fn push(&self, notification: Notification) -> bool {
        let mut waiting = self.lock();
        let bytes = waiting.bytes + size(&notification);
        if waiting.queue.len() == MAX_WAITING || bytes > MAX_BYTES {
            return false;
        }
        waiting.bytes = bytes;
        waiting.queue.push_back(notification);
        drop(waiting);
        self.arrived.notify_one();
        true
    }

    /// Takes all that wait.
    pub(crate) fn take(&self) -> Vec<Notification> {
        let mut waiting = self.lock();
        waiting.bytes = 0;
        std::mem::take(&mut waiting.queue).into()
    }

    /// Takes the next one.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub(crate) async fn next(&self) -> Notification {
        loop {
            if let Some(notification) = self.pop() {
                return notification;
            }
            self.arrived.notified().await;
        }
    }

    fn pop(&self) -> Option<Notification> {
        let mut waiting = self.lock();
        let notification = waiting.queue.pop_front()?;
        waiting.bytes -= size(&notification);
        if !waiting.queue.is_empty() {
            // For whoever else waits.
            self.arrived.notify_one();
        }
        Some(notification)
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn size(notification: &Notification) -> usize {
    notification.name.len() + notification.message.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notification(message: String) -> Notification {
        let name = "peer".to_owned();
        Notification { name, message }
    }

    #[tokio::test]
    async fn they_come_in_order_and_do_not_pile_up() {
        let notifications = Notifications::default();
        for index in 0..MAX_WAITING {
            assert!(notifications.push(notification(index.to_string())));
        }
        assert!(
            !notifications.push(notification(String::new())),
            "one too many was taken"
        );
        assert_eq!(notifications.next().await.message, "0");
        assert_eq!(notifications.take().len(), MAX_WAITING - 1);
        let large = notification("x".repeat(MAX_BYTES / 2));
        assert!(notifications.push(large.clone()));
        assert!(!notifications.push(large.clone()), "too many bytes were taken");
        notifications.take();
        assert!(notifications.push(large));
    }
}
