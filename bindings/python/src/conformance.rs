//! The conformance suite of the transports, for those that exist only in Python.

use async_trait::async_trait;
use pyo3::prelude::*;
use stagewire_transfer::conformance::{Backend, Side, Violation, run};

use crate::engine::EngineTransport;
use crate::runtime::wait;

/// Sides made by a Python function.
struct Made {
    make: Py<PyAny>,
}

#[async_trait]
impl Backend for Made {
    async fn side(&self) -> Result<Side, Violation> {
        let make = Python::attach(|py| self.make.clone_ref(py));
        let made = tokio::task::spawn_blocking(move || {
            Python::attach(|py| {
                let side = make.bind(py).call0()?;
                let side = side.cast::<EngineTransport>()?.get().side();
                Ok::<_, PyErr>(side)
            })
        });
        let side = made.await.map_err(|error| Violation(error.to_string()))?;
        side.map_err(|error| Violation(format!("a side cannot be made: {error}")))
    }
}

/// Runs all checks, each with two sides that `make` makes. Gives, of each, the name, and what is wrong or `None`.
#[pyfunction]
pub(crate) fn run_conformance(py: Python<'_>, make: Py<PyAny>) -> PyResult<Vec<(&'static str, Option<String>)>> {
    let backend = Made { make };
    let outcomes = wait(py, run(&backend))?;
    let outcome = outcomes
        .into_iter()
        .map(|outcome| (outcome.check, outcome.result.err().map(|violation| violation.0)));
    Ok(outcome.collect())
}
