use loom::sync::atomic::{AtomicUsize, Ordering};

/// Tokio's `Notify` with places where loom may change threads: before anything is looked at, before anybody is told.
#[derive(Debug, Default)]
pub(crate) struct Notify {
    inner: tokio::sync::Notify,
    turns: AtomicUsize,
}

impl Notify {
    pub(crate) fn notified(&self) -> tokio::sync::futures::Notified<'_> {
        self.turns.fetch_add(1, Ordering::Relaxed);
        self.inner.notified()
    }

    pub(crate) fn notify_waiters(&self) {
        self.turns.fetch_add(1, Ordering::Relaxed);
        self.inner.notify_waiters();
    }
}
