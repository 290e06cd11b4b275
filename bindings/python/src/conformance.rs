//! The conformance suites of transports and stores, for those that exist only in Python.

use std::sync::Arc;

use async_trait::async_trait;
use pyo3::prelude::*;
use stagewire_core::ByteCount;
use stagewire_transfer::conformance::{Backend, Outcome, Side, Violation, run};

use crate::engine::EngineTransport;
use crate::foreign::ForeignStore;
use crate::runtime::wait;

/// What the suite lets be in flight, so that it is soon full.
const IN_FLIGHT: ByteCount = ByteCount(4 << 20);

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
                let side = side.cast::<EngineTransport>()?.get().side(IN_FLIGHT);
                Ok::<_, PyErr>(side)
            })
        });
        let side = made.await.map_err(|error| Violation(error.to_string()))?;
        side.map_err(|error| Violation(format!("a side cannot be made: {error}")))
    }

    fn in_flight_limit(&self) -> Option<ByteCount> {
        Some(IN_FLIGHT)
    }
}

/// Runs all checks, each with two sides that `make` makes. Gives, of each, the name, what is wrong or `None`, and why it
/// does not apply or `None`.
#[pyfunction]
pub(crate) fn run_conformance(py: Python<'_>, make: Py<PyAny>) -> PyResult<Vec<Found>> {
    let backend = Made { make };
    let outcomes = wait(py, run(&backend))?;
    let found = |outcome: Outcome| {
        let problem = outcome.result.err().map(|violation| violation.0);
        (outcome.check, problem, outcome.skipped)
    };
    Ok(outcomes.into_iter().map(found).collect())
}

/// As [`run_conformance`], of the suite of the stores. All checks use this one store.
#[pyfunction]
pub(crate) fn run_store_conformance(py: Python<'_>, store: Py<PyAny>) -> PyResult<Vec<Found>> {
    let store = Arc::new(store);
    let outcomes = stagewire_store::conformance::outcomes(|_| {
        let store = ForeignStore::new(Arc::clone(&store));
        async move { store }
    });
    let outcomes = wait(py, outcomes)?;
    let found = outcomes.into_iter();
    Ok(found.map(|found| (found.check, found.problem, found.skipped)).collect())
}

type Found = (&'static str, Option<String>, Option<&'static str>);
