//! One tokio runtime for the whole process, and waiting on it without the GIL.

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use stagewire_core::{ErrorClass, Failure};
use tokio::runtime::{Builder, Runtime};

use crate::error::raise;

/// How long a waiting thread goes without looking for signals: Ctrl-C is noticed within this time.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);

struct Shared {
    runtime: Runtime,
    /// A forked child has this memory but none of the runtime's threads.
    pid: u32,
}

static SHARED: OnceLock<Shared> = OnceLock::new();

/// The runtime of this process.
pub(crate) fn runtime(py: Python<'_>) -> PyResult<&'static Runtime> {
    let pid = std::process::id();
    let shared = SHARED.get_or_init(|| Shared {
        runtime: Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("stagewire")
            .enable_all()
            .build()
            .expect("the process may start two threads"),
        pid,
    });
    if shared.pid == pid {
        return Ok(&shared.runtime);
    }
    let message = format!(
        "Stagewire was used in process {} before it forked this one, {pid}; a forked child has none of its threads: \
         use the \"spawn\" start method, or call Stagewire in the child only",
        shared.pid
    );
    let failure = Failure::new(ErrorClass::Unsupported, "python.forked", message);
    Err(raise(py, &failure))
}

/// Waits for a future with the GIL released. Signal handlers run meanwhile; when one raises, as Ctrl-C does, the
/// future is dropped and the exception passed on.
pub(crate) fn wait<T: Send>(py: Python<'_>, future: impl Future<Output = T> + Send) -> PyResult<T> {
    let runtime = runtime(py)?;
    let mut future = pin!(future);
    let waiting = Arc::new(Waiting {
        thread: thread::current(),
        woken: AtomicBool::new(true),
    });
    let waker = Waker::from(waiting.clone());
    loop {
        let step = py.detach(|| {
            let _inside = runtime.enter();
            let end = Instant::now() + SIGNAL_INTERVAL;
            loop {
                if waiting.woken.swap(false, Ordering::AcqRel)
                    && let Poll::Ready(value) = future.as_mut().poll(&mut Context::from_waker(&waker))
                {
                    return Some(value);
                }
                let left = end.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return None;
                }
                if !waiting.woken.load(Ordering::Acquire) {
                    thread::park_timeout(left);
                }
            }
        });
        if let Some(value) = step {
            return Ok(value);
        }
        py.check_signals()?;
    }
}

/// A thread that waits. It looks for signals by its own clock: a timer of the runtime would wake one of its threads each
/// time, too.
struct Waiting {
    thread: Thread,
    woken: AtomicBool,
}

impl Wake for Waiting {
    fn wake(self: Arc<Self>) {
        self.woken.store(true, Ordering::Release);
        self.thread.unpark();
    }
}
