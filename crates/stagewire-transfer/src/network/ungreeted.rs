use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;
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
        let number = {
            let mut waiting = self.lock();
            waiting.next += 1;
            waiting.next
        };
        let greeting = greet(Candidate {
            ungreeted: self.clone(),
            number,
        });
        // Held back until the handle is in its place, so that a quick greeting finds it there. Spawned without the lock:
        // where the runtime ends, the task is dropped at once, and its candidate takes the lock.
        let (begin, may_begin) = oneshot::channel();
        let task = tokio::spawn(async move {
            if may_begin.await.is_ok() {
                greeting.await;
            }
        });
        let mut waiting = self.lock();
        if waiting.tasks.len() >= MAX_UNGREETED
            && let Some((_, oldest)) = waiting.tasks.pop_first()
        {
            oldest.abort();
        }
        waiting.tasks.insert(number, task.abort_handle());
        drop(waiting);
        if begin.send(()).is_err() {
            // The runtime ends.
            self.lock().tasks.remove(&number);
        }
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

    #[test]
    fn a_runtime_that_ends_is_not_waited_for() {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .build()
            .expect("a runtime");
        let handle = runtime.handle().clone();
        runtime.shutdown_background();
        let (report, reports) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let _inside = handle.enter();
            let ungreeted = Arc::new(Ungreeted::default());
            ungreeted.admit(|candidate| async move { drop(candidate) });
            // The runtime drops the task at once, or a moment later.
            while !ungreeted.lock().tasks.is_empty() {
                std::thread::yield_now();
            }
            report.send(()).expect("waited for");
        });
        let gone = reports.recv_timeout(std::time::Duration::from_secs(10));
        assert_eq!(gone, Ok(()), "the task is there for ever");
    }

    struct Report(usize, tokio::sync::mpsc::UnboundedSender<usize>);

    impl Drop for Report {
        fn drop(&mut self) {
            let _ = self.1.send(self.0);
        }
    }
}
