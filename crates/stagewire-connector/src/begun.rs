//! Work that becomes a task only once there is something to do.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Wake, Waker};

use futures::future::BoxFuture;
use tokio::runtime::Handle as Runtime;
use tokio::task::AbortHandle;

/// A future that is polled by who begins it, and becomes a task when it is woken: by the thread that has what it waits for,
/// which goes on with it. To spawn it at once would wake another thread for nothing.
pub(crate) struct Begun {
    runtime: Runtime,
    state: Mutex<State>,
}

enum State {
    /// For the first time. Whether it was woken meanwhile.
    Polled {
        woken: bool,
    },
    Waiting(BoxFuture<'static, ()>),
    Running(AbortHandle),
    Over,
}

impl Begun {
    /// Begins; `None` where that was all.
    pub(crate) fn new(runtime: &Runtime, future: impl Future<Output = ()> + Send + 'static) -> Option<Arc<Self>> {
        let begun = Arc::new(Self {
            runtime: runtime.clone(),
            state: Mutex::new(State::Polled { woken: false }),
        });
        let waker = Waker::from(Arc::clone(&begun));
        let mut future: BoxFuture<'static, ()> = Box::pin(future);
        let entered = runtime.enter();
        let first = future.as_mut().poll(&mut Context::from_waker(&waker));
        drop(entered);
        if first.is_ready() {
            return None;
        }
        let mut state = begun.lock();
        *state = match *state {
            State::Polled { woken: true } => begun.run(future),
            _ => State::Waiting(future),
        };
        drop(state);
        Some(begun)
    }

    /// Ends it where it waits; dropped, as an aborted task is.
    pub(crate) fn abort(&self) {
        let ended = std::mem::replace(&mut *self.lock(), State::Over);
        if let State::Running(task) = &ended {
            task.abort();
        }
    }

    /// Whether it has ended.
    pub(crate) fn is_over(&self) -> bool {
        match &*self.lock() {
            State::Polled { .. } | State::Waiting(_) => false,
            State::Running(task) => task.is_finished(),
            State::Over => true,
        }
    }

    fn run(&self, future: BoxFuture<'static, ()>) -> State {
        State::Running(self.runtime.spawn(future).abort_handle())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Wake for Begun {
    fn wake(self: Arc<Self>) {
        let mut state = self.lock();
        match std::mem::replace(&mut *state, State::Over) {
            State::Polled { .. } => *state = State::Polled { woken: true },
            State::Waiting(future) => *state = self.run(future),
            other => *state = other,
        }
    }
}

impl std::fmt::Debug for Begun {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Begun")
    }
}

/// Ends what has begun when it is dropped.
#[derive(Debug)]
pub(crate) struct EndsOnDrop(pub(crate) Arc<Begun>);

impl Drop for EndsOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::sync::oneshot;

    use super::*;

    /// Tells when it is dropped.
    struct Dropped(Option<oneshot::Sender<()>>);

    impl Drop for Dropped {
        fn drop(&mut self) {
            let _ = self.0.take().map(|told| told.send(()));
        }
    }

    #[tokio::test]
    async fn it_runs_once_it_is_woken_and_ends_when_it_is_aborted() {
        let runtime = Runtime::current();
        assert!(Begun::new(&runtime, async {}).is_none(), "it was over");
        // Woken while it is polled, later, and by a timer.
        for wake in [0, 1, 2] {
            let (go, gone) = oneshot::channel();
            let (done, over) = oneshot::channel();
            let begun = Begun::new(&runtime, async move {
                match wake {
                    0 => tokio::task::yield_now().await,
                    1 => gone.await.expect("sent"),
                    _ => tokio::time::sleep(Duration::from_millis(1)).await,
                }
                tokio::task::yield_now().await;
                done.send(()).expect("somebody waits");
            });
            assert!(begun.is_some());
            let _ = go.send(());
            let over = tokio::time::timeout(Duration::from_secs(20), over).await;
            over.expect("it is woken").expect("it ends");
        }
        for runs in [false, true] {
            let (go, gone) = oneshot::channel::<()>();
            let (told, dropped) = oneshot::channel();
            let guard = Dropped(Some(told));
            let begun = Begun::new(&runtime, async move {
                let _guard = guard;
                let _ = gone.await;
                std::future::pending::<()>().await;
            });
            if runs {
                let _ = go.send(());
                tokio::task::yield_now().await;
            }
            begun.expect("it waits").abort();
            let dropped = tokio::time::timeout(Duration::from_secs(20), dropped).await;
            dropped.expect("it ends").expect("told");
        }
    }
}
