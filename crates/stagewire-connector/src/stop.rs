use stagewire_core::Failure;
use tokio::sync::watch;

/// Tells work to stop, once and for a reason. Clones are the same stop.
#[derive(Debug, Clone)]
pub struct Stop {
    reason: watch::Sender<Option<Failure>>,
}

impl Default for Stop {
    fn default() -> Self {
        Self::new()
    }
}

impl Stop {
    /// A stop that nobody has asked for yet.
    pub fn new() -> Self {
        Self {
            reason: watch::Sender::new(None),
        }
    }

    /// Asks to stop. The first reason stays.
    pub fn stop(&self, reason: Failure) {
        self.reason.send_if_modified(|current| {
            let first = current.is_none();
            if first {
                *current = Some(reason);
            }
            first
        });
    }

    /// Why to stop; `None` while there is no need to.
    pub fn reason(&self) -> Option<Failure> {
        self.reason.borrow().clone()
    }

    /// Whether somebody has asked to stop.
    pub fn is_stopped(&self) -> bool {
        self.reason.borrow().is_some()
    }

    /// Waits until somebody asks to stop.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn stopped(&self) -> Failure {
        let mut receiver = self.reason.subscribe();
        loop {
            if let Some(reason) = receiver.borrow_and_update().clone() {
                return reason;
            }
            if receiver.changed().await.is_err() {
                // Unreachable: `self` holds the sender.
                std::future::pending::<()>().await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use stagewire_core::ErrorClass;

    use super::*;

    #[tokio::test]
    async fn the_first_reason_stays_and_reaches_everybody() {
        let stop = Stop::new();
        assert!(!stop.is_stopped());
        let other = stop.clone();
        let waiter = tokio::spawn(async move { other.stopped().await });
        stop.stop(Failure::new(ErrorClass::Cancelled, "job.cancelled", "first"));
        stop.stop(Failure::new(ErrorClass::Cancelled, "job.cancelled", "second"));
        assert_eq!(waiter.await.expect("it ends").message, "first");
        assert_eq!(stop.reason().expect("stopped").message, "first");
    }
}
