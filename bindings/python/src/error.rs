//! Errors of the crates as exceptions of `stagewire.errors`.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use stagewire_core::{Classify, ErrorClass, Failure};

static FROM_FAILURE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// The exception for a failure.
pub(crate) fn raise(py: Python<'_>, failure: &Failure) -> PyErr {
    let made = (|| {
        let make = FROM_FAILURE.get_or_try_init(py, || {
            py.import("stagewire.errors")?
                .getattr("from_failure")
                .map(Bound::unbind)
        })?;
        let Failure {
            class,
            reason,
            message,
            details,
        } = failure;
        make.bind(py).call1((class.name(), reason, message, details.clone()))
    })();
    match made {
        Ok(exception) => PyErr::from_value(exception),
        Err(error) => error,
    }
}

/// The exception for an error of the crates.
pub(crate) fn raise_from(py: Python<'_>, error: &impl Classify) -> PyErr {
    raise(py, &error.to_failure())
}

/// The exception for wrong input.
pub(crate) fn invalid(py: Python<'_>, reason: &str, message: impl Into<String>) -> PyErr {
    raise(py, &Failure::new(ErrorClass::Invalid, reason, message))
}

/// The exception for what this package cannot do.
pub(crate) fn unsupported(py: Python<'_>, reason: &str, message: impl Into<String>) -> PyErr {
    raise(py, &Failure::new(ErrorClass::Unsupported, reason, message))
}
