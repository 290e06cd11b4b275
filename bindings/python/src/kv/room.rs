//! What the rooms of both sides have in common.

use std::time::Duration;

use pyo3::prelude::*;
use stagewire_connector::kv::{Heartbeat, Phase};
use stagewire_core::{ErrorClass, Failure};

use crate::connector::seconds;
use crate::error::raise;

/// Seconds between signs of life, and how many of them may be missed.
pub(super) fn heartbeat(py: Python<'_>, (interval, misses): (f64, u32)) -> PyResult<Heartbeat> {
    Ok(Heartbeat {
        interval: duration(py, interval)?,
        misses,
    })
}

/// A number of seconds from Python.
pub(super) fn duration(py: Python<'_>, given: f64) -> PyResult<Duration> {
    Ok(seconds(py, Some(given))?.unwrap_or_default())
}

/// The phase by name.
pub(super) fn name(phase: &Phase) -> &'static str {
    match phase {
        Phase::Bootstrapping => "bootstrapping",
        Phase::Waiting => "waiting",
        Phase::Transferring => "transferring",
        Phase::Success => "success",
        Phase::Failed(_) => "failed",
    }
}

/// The exception that a room has failed with, if it has.
pub(super) fn failure(py: Python<'_>, phase: &Phase) -> Option<PyErr> {
    match phase {
        Phase::Failed(failure) => Some(raise(py, failure)),
        _ => None,
    }
}

/// A caller's reason to end a room.
pub(super) fn aborted(error_class: &str, reason: &str, message: String) -> Failure {
    let class = ErrorClass::from_name(error_class).unwrap_or(ErrorClass::Cancelled);
    Failure::new(class, reason, message)
}
