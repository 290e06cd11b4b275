//! Work that becomes a task only once there is something to do.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Wake, Waker};

use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::runtime::Handle as Runtime;
use tokio::task::AbortHandle;
use tokio::task::coop::unconstrained;

/// What was woken, to go on with.
type Woken = Vec<(Arc<Begun>, BoxFuture<'static, ()>)>;

thread_local! {
    /// What is woken while [`here`] runs.
    static WOKEN: RefCell<Option<Woken>> = const { RefCell::new(None) };
}

/// Has what is woken meanwhile go on as far as it can on this thread, after that, and not as tasks.
pub(crate) fn here(wake: impl FnOnce()) {
    let outer = WOKEN.replace(Some(Vec::new()));
    wake();
    for (begun, future) in WOKEN.replace(outer).unwrap_or_default() {
        begun.poll(future);
    }
}

/// A future that is polled by who begins it, and becomes a task when it is woken: by the thread that has what it waits for,
/// which goes on with it. To spawn it at once would wake another thread for nothing.
pub(crate) struct Begun {
    runtime: Runtime,
    state: Mutex<State>,
}

enum State {
    /// By a thread that is not the runtime's. Whether it was woken meanwhile.
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
        begun.poll(Box::pin(future));
        let over = matches!(*begun.lock(), State::Over);
        (!over).then_some(begun)
    }

    /// On this thread, which has no turns to give.
    fn poll(self: &Arc<Self>, mut future: BoxFuture<'static, ()>) {
        let waker = Waker::from(Arc::clone(self));
        let entered = self.runtime.enter();
        let polled = unconstrained(future.as_mut()).poll_unpin(&mut Context::from_waker(&waker));
        drop(entered);
        let mut state = self.lock();
        let ended = match &*state {
            State::Polled { woken } if polled.is_pending() => {
                *state = if *woken {
                    self.run(future)
                } else {
                    State::Waiting(future)
                };
                return;
            }
            // It was over, or was ended meanwhile.
            _ => std::mem::replace(&mut *state, State::Over),
        };
        drop(state);
        drop((ended, future));
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
            State::Waiting(future) => {
                *state = State::Polled { woken: false };
                let here = WOKEN.with_borrow_mut(|woken| match woken {
                    Some(woken) => {
                        woken.push((Arc::clone(&self), future));
                        None
                    }
                    None => Some(future),
                });
                if let Some(future) = here {
                    *state = self.run(future);
                }
            }
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

    #[tokio::test]
    async fn what_is_woken_here_goes_on_here_and_what_waits_again_becomes_a_task() {
        let runtime = Runtime::current();
        let (done, later) = (Arc::new(Mutex::new(Vec::new())), Arc::new(tokio::sync::Notify::new()));
        let mut goes = Vec::new();
        let mut begun = Vec::new();
        for index in 0..3 {
            let (go, gone) = oneshot::channel();
            let (done, later) = (Arc::clone(&done), Arc::clone(&later));
            begun.push(Begun::new(&runtime, async move {
                gone.await.expect("sent");
                if index == 1 {
                    later.notified().await;
                }
                done.lock().expect("no panic").push(index);
            }));
            goes.push(go);
        }
        here(|| {
            for go in goes {
                go.send(()).expect("it waits");
            }
            assert!(done.lock().expect("no panic").is_empty(), "after that, not within");
        });
        // Nothing has given way to the runtime since.
        assert_eq!(*done.lock().expect("no panic"), [0, 2]);
        assert!(begun.iter().flatten().filter(|begun| begun.is_over()).count() == 2);
        later.notify_one();
        while done.lock().expect("no panic").len() < 3 {
            tokio::task::yield_now().await;
        }
        assert_eq!(done.lock().expect("no panic")[2], 1);
        // Ended while it goes on here: it is dropped.
        let (go, gone) = oneshot::channel::<()>();
        let (told, dropped) = oneshot::channel();
        let itself: Arc<Mutex<Option<Arc<Begun>>>> = Arc::default();
        let guard = Dropped(Some(told));
        let ends = Arc::clone(&itself);
        let begun = Begun::new(&runtime, async move {
            let _guard = guard;
            let _ = gone.await;
            let begun = ends.lock().expect("no panic").take();
            begun.expect("it is there").abort();
            std::future::pending::<()>().await;
        });
        *itself.lock().expect("no panic") = begun;
        here(|| drop(go));
        let dropped = tokio::time::timeout(Duration::from_secs(20), dropped).await;
        dropped.expect("it ends").expect("told");
    }
}
