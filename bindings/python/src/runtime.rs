//! One tokio runtime for the whole process, and waiting on it without the GIL.

use std::future::Future;
use std::pin::pin;
use std::sync::OnceLock;
use std::time::Duration;

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
    loop {
        let step = async { tokio::time::timeout(SIGNAL_INTERVAL, future.as_mut()).await };
        if let Ok(value) = py.detach(|| runtime.block_on(step)) {
            return Ok(value);
        }
        py.check_signals()?;
    }
}
