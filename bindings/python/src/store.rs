//! `HostStore`: a store in the shared memory of this process, for connectors of mode `store`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use stagewire_connector::{ConnectorOptions, StoreService};
use stagewire_core::{ByteCount, StageName};
use stagewire_store::{
    DurableOptions, KeeperCommand, KeeperOptions, Recovery, SpillOptions, Store, StoreOptions, TokenGate,
};

use crate::connector::{Reached, network_options, stats};
use crate::error::{raise_from, unsupported};
use crate::runtime::wait;

/// Keeps payloads apart from the processes that made them.
#[pyclass(module = "stagewire._native", frozen)]
pub(crate) struct HostStore {
    connector: Arc<stagewire_connector::Connector>,
    service: Arc<StoreService>,
    recovery: Recovery,
}

#[pymethods]
impl HostStore {
    /// `spill` is a directory, and bytes of files in it at most; `durable` is where the next process finds what this one
    /// had, and the program that keeps the memory meanwhile.
    #[new]
    #[pyo3(signature = (run_dir, capacity, spill=None, durable=None, *, network=None))]
    fn new(
        py: Python<'_>,
        run_dir: PathBuf,
        capacity: u64,
        spill: Option<(PathBuf, u64)>,
        durable: Option<(PathBuf, Vec<OsString>)>,
        network: Option<Reached>,
    ) -> PyResult<Self> {
        let role = StageName::new("store").expect("the name is allowed");
        let mut options = ConnectorOptions {
            arena_limit: stagewire_store::HostStore::arena_limit(ByteCount(capacity)),
            ..ConnectorOptions::new(run_dir, role)
        };
        if let Some(network) = network {
            options.network = network_options(py, network)?;
        }
        let connector =
            wait(py, stagewire_connector::Connector::start(options))?.map_err(|error| raise_from(py, &error))?;
        let mut options = StoreOptions::new(ByteCount(capacity), Arc::new(TokenGate::open()));
        options.spill = spill.map(|(dir, quota)| SpillOptions {
            dir,
            quota: ByteCount(quota),
        });
        options.durable = durable.and_then(|(dir, command)| {
            let mut command = command.into_iter();
            let keeper = KeeperCommand::new(command.next()?, command);
            Some(DurableOptions { dir, keeper })
        });
        let opened = wait(py, StoreService::open(&connector, options))?;
        let (service, recovery) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                wait(py, connector.close())?;
                return Err(raise_from(py, &error));
            }
        };
        Ok(Self {
            connector,
            service,
            recovery,
        })
    }

    /// What came over from the process before: payloads that are there, and payloads that are lost.
    #[getter]
    fn recovered(&self) -> (usize, u64) {
        (self.recovery.survivors.len(), self.recovery.lost.objects)
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
        let ended = wait(py, async {
            self.connector.close().await;
            self.service.store().close().await
        })?;
        ended.map_err(|error| raise_from(py, &error))
    }
}

/// Becomes the keeper of a store's memory, until the store ends or nobody comes for it.
#[pyfunction]
pub(crate) fn run_keeper(py: Python<'_>) -> PyResult<()> {
    let Some(options) = KeeperOptions::from_env() else {
        let message = "a store starts its keeper by itself; there is nothing to start by hand";
        return Err(unsupported(py, "store.keeper", message));
    };
    py.detach(|| stagewire_store::run_keeper(&options))
        .map_err(|error| raise_from(py, &error))
}
