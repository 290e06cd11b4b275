use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use stagewire_core::{ErrorClass, Failure};

use crate::error::raise;

/// A sender or a receiver, taken when it is closed.
pub(super) struct Held<T> {
    what: &'static str,
    inner: Mutex<Option<Arc<T>>>,
}

impl<T: Send + Sync> Held<T> {
    pub(super) fn new(what: &'static str, inner: T) -> Self {
        Self {
            what,
            inner: Mutex::new(Some(Arc::new(inner))),
        }
    }

    /// Raises where it was closed.
    pub(super) fn get(&self, py: Python<'_>) -> PyResult<Arc<T>> {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.clone().ok_or_else(|| {
            let message = format!("this {} is closed: make a new one", self.what);
            raise(py, &Failure::new(ErrorClass::Cancelled, "kv.closed", message))
        })
    }

    pub(super) fn close(&self, py: Python<'_>) {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(inner));
    }
}
