//! `HostStore`: a store in the shared memory of this process, for connectors of mode `store`.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use stagewire_connector::{ConnectorOptions, StartError, StoreService};
use stagewire_core::{ByteCount, StageName};
use stagewire_store::{Store, TokenGate};

use crate::connector::stats;
use crate::error::raise_from;
use crate::runtime::wait;

/// Keeps payloads apart from the processes that made them.
#[pyclass(module = "stagewire._native", frozen)]
pub(crate) struct HostStore {
    connector: Arc<stagewire_connector::Connector>,
    service: Arc<StoreService>,
}

#[pymethods]
impl HostStore {
    #[new]
    fn new(py: Python<'_>, run_dir: std::path::PathBuf, capacity: u64) -> PyResult<Self> {
        let role = StageName::new("store").expect("the name is allowed");
        let options = ConnectorOptions {
            arena_limit: stagewire_store::HostStore::arena_limit(ByteCount(capacity)),
            ..ConnectorOptions::new(run_dir, role)
        };
        let started = wait(py, async {
            let connector = stagewire_connector::Connector::start(options).await?;
            let gate = Arc::new(TokenGate::open());
            let store = stagewire_store::HostStore::new(connector.host(), ByteCount(capacity), gate);
            let service = StoreService::serve(&connector, store);
            Ok::<_, StartError>((connector, service))
        })?;
        let (connector, service) = started.map_err(|error| raise_from(py, &error))?;
        Ok(Self { connector, service })
    }

    /// (bytes used, most bytes).
    fn usage(&self) -> (u64, u64) {
        let usage = self.service.store().usage();
        (usage.used().0, usage.limit.0)
    }

    fn live(&self) -> Vec<String> {
        self.connector.live().iter().map(ToString::to_string).collect()
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        stats(py, &self.connector)
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        wait(py, self.connector.close())
    }
}
