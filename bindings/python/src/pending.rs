//! `Pending`: something that goes on in the runtime while Python does something else.
//!
//! A thread waits for it, or an event loop watches its descriptor: no thread of the runtime ever waits for the GIL.

use std::future::Future;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use rustix::event::{EventfdFlags, eventfd};
use stagewire_core::{ErrorClass, Failure};
use tokio::sync::watch;
use tokio::task::AbortHandle;

use crate::connector::seconds;
use crate::error::raise;
use crate::runtime::{runtime, wait};

/// Turns what came out into a Python object.
type Finish = Box<dyn FnOnce(Python<'_>) -> PyResult<Py<PyAny>> + Send>;

/// What came out; `None` where it was cancelled, or taken already.
type Outcome = Arc<Mutex<Option<Finish>>>;

/// Something under way.
#[pyclass(module = "stagewire._native", frozen)]
pub(crate) struct Pending {
    outcome: Outcome,
    over: watch::Receiver<bool>,
    event: Arc<OwnedFd>,
    task: AbortHandle,
}

/// Tells everybody that it is over, also where the future was dropped.
struct End {
    over: watch::Sender<bool>,
    event: Arc<OwnedFd>,
}

impl Drop for End {
    fn drop(&mut self) {
        self.over.send_replace(true);
        // Cannot fail: the counter is far from full.
        let _ = rustix::io::write(&*self.event, &1_u64.to_ne_bytes());
    }
}

impl Pending {
    /// Starts `future` in the runtime; `finish` makes the Python object when it is asked for.
    pub(crate) fn spawn<T: Send + 'static>(
        py: Python<'_>,
        future: impl Future<Output = T> + Send + 'static,
        finish: impl FnOnce(Python<'_>, T) -> PyResult<Py<PyAny>> + Send + 'static,
    ) -> PyResult<Self> {
        let runtime = runtime(py)?;
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| PyRuntimeError::new_err(format!("no descriptor for a pending operation: {error}")))?;
        let event = Arc::new(event);
        let (sender, over) = watch::channel(false);
        let outcome = Outcome::default();
        let end = End {
            over: sender,
            event: Arc::clone(&event),
        };
        let result = Arc::clone(&outcome);
        let task = runtime.spawn(async move {
            let end = end;
            let value = future.await;
            let finish: Finish = Box::new(move |py| finish(py, value));
            *result.lock().unwrap_or_else(PoisonError::into_inner) = Some(finish);
            drop(end);
        });
        Ok(Self {
            outcome,
            over,
            event,
            task: task.abort_handle(),
        })
    }
}

#[pymethods]
impl Pending {
    /// Descriptor that is readable once it is over.
    fn fileno(&self) -> i32 {
        self.event.as_raw_fd()
    }

    fn done(&self) -> bool {
        *self.over.borrow()
    }

    /// Waits until it is over; false where it is not within `timeout` seconds.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let within = seconds(py, timeout)?;
        let mut over = self.over.clone();
        wait(py, async move {
            let ended = over.wait_for(|over| *over);
            match within {
                Some(within) => tokio::time::timeout(within, ended).await.is_ok(),
                None => ended.await.is_ok(),
            }
        })
    }

    /// What came out, once it is over; raises what it failed with.
    fn take(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let finish = self.outcome.lock().unwrap_or_else(PoisonError::into_inner).take();
        match finish {
            Some(finish) => finish(py),
            None if self.done() => {
                let message = "it was cancelled before it was done";
                Err(raise(
                    py,
                    &Failure::new(ErrorClass::Cancelled, "operation.cancelled", message),
                ))
            }
            None => Err(PyRuntimeError::new_err("it is not over")),
        }
    }

    /// Ends it; nothing happens where it is over.
    fn cancel(&self) {
        self.task.abort();
    }
}
