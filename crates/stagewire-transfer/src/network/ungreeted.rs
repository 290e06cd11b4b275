use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::task::AbortHandle;

/// Connections that have not said who they are yet, at most; with one more, the oldest is cut off. So connections that
/// say nothing keep nobody out for longer than it takes to greet.
const MAX_UNGREETED: usize = 128;

/// The tasks of connections that have not said who they are yet.
#[derive(Default)]
pub(super) struct Ungreeted {
    waiting: Mutex<Waiting>,
}

#[derive(Default)]
struct Waiting {
    tasks: BTreeMap<u64, AbortHandle>,
    next: u64,
}

/// One of them; let in or cut off, it no longer counts.
pub(super) struct Candidate {
    ungreeted: Arc<Ungreeted>,
    number: u64,
}

impl Ungreeted {
    /// Runs the greeting of one more connection.
    pub(super) fn admit<F>(self: &Arc<Self>, greet: impl FnOnce(Candidate) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let mut waiting = self.lock();
        if waiting.tasks.len() >= MAX_UNGREETED
            && let Some((_, oldest)) = waiting.tasks.pop_first()
        {
            oldest.abort();
        }
        let number = waiting.next;
        waiting.next += 1;
        let candidate = Candidate {
            ungreeted: self.clone(),
            number,
        };
        // The lock is held until the handle is in its place, so that a quick greeting finds it there.
        let task = tokio::spawn(greet(candidate));
        waiting.tasks.insert(number, task.abort_handle());
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Candidate {
    /// It said who it is. False where it was cut off meanwhile.
    pub(super) fn greeted(&self) -> bool {
        self.ungreeted.lock().tasks.remove(&self.number).is_some()
    }
}

impl Drop for Candidate {
    fn drop(&mut self) {
        self.greeted();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_oldest_gives_way() {
        let ungreeted = Arc::new(Ungreeted::default());
        let (report, mut reports) = tokio::sync::mpsc::unbounded_channel();
        for number in 0..MAX_UNGREETED + 2 {
            let report = report.clone();
            ungreeted.admit(|candidate| async move {
                // Tells when it is dropped, unfinished.
                let _report = Report(number, report);
                let _candidate = candidate;
                std::future::pending::<()>().await;
            });
            tokio::task::yield_now().await;
        }
        assert_eq!(reports.recv().await, Some(0));
        assert_eq!(reports.recv().await, Some(1));
        assert_eq!(ungreeted.lock().tasks.len(), MAX_UNGREETED);
    }

    struct Report(usize, tokio::sync::mpsc::UnboundedSender<usize>);

    impl Drop for Report {
        fn drop(&mut self) {
            let _ = self.1.send(self.0);
        }
    }
}
