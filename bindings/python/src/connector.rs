//! `Connector` and `Publication`: payloads of this process, for others.
#![expect(unsafe_code, reason = "shows memory of the arena to Python")]

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use stagewire_connector::{Borrowing, ConnectorOptions, ConsumeOptions};
use stagewire_core::{ByteCount, DType, ErrorClass, Failure, Lease, PayloadId, StageName, TensorSpec};

use crate::arena::Allocations;
use crate::consumer::{self, Consumer};
use crate::error::{invalid, raise, raise_from};
use crate::handle::Handle;
use crate::payload::{self, Description, Entries};
use crate::pending::Pending;
use crate::runtime::{runtime, wait};
use crate::tensor::{Memory, Tensor};

/// Publishes payloads of this process and consumes those of others.
#[pyclass(module = "stagewire._native", frozen)]
pub(crate) struct Connector {
    inner: Arc<stagewire_connector::Connector>,
    allocations: Allocations,
}

#[pymethods]
impl Connector {
    #[new]
    #[pyo3(signature = (run_dir, role, *, arena_bytes, borrow=true))]
    fn new(py: Python<'_>, run_dir: std::path::PathBuf, role: &str, arena_bytes: u64, borrow: bool) -> PyResult<Self> {
        let role = StageName::new(role).map_err(|error| invalid(py, "stage.name", error.to_string()))?;
        let options = ConnectorOptions {
            arena_limit: ByteCount(arena_bytes),
            borrow: if borrow { Borrowing::Auto } else { Borrowing::Never },
            ..ConnectorOptions::new(run_dir, role)
        };
        let inner =
            wait(py, stagewire_connector::Connector::start(options))?.map_err(|error| raise_from(py, &error))?;
        Ok(Self {
            inner,
            allocations: Allocations::default(),
        })
    }

    /// A tensor in the arena, with whatever was there before. Publishing it, or a part, copies nothing.
    fn allocate(&self, py: Python<'_>, dtype: &str, shape: Vec<u64>) -> PyResult<Tensor> {
        let spec = (dtype.parse::<DType>())
            .and_then(|dtype| TensorSpec::new(dtype, shape))
            .map_err(|error| raise_from(py, &error))?;
        if spec.nbytes().0 == 0 {
            return Ok(Tensor::new(spec, None, Memory::nothing(), false));
        }
        let extent = self.inner.host().arena().allocate(spec.nbytes().0);
        let (pointer, owner) = (self.allocations).add(extent.map_err(|error| raise_from(py, &error))?);
        // SAFETY: an allocation keeps its part of the arena in place.
        let memory = unsafe { Memory::new(pointer, owner) };
        Ok(Tensor::new(spec, None, memory, false))
    }

    /// Publishes a bundle; with `open`, its chunks become visible one by one.
    #[pyo3(signature = (request, kind, entries, metadata, chunking, lease, *, open=false, deadline=None))]
    #[expect(
        clippy::too_many_arguments,
        reason = "one for each thing that a payload says of itself"
    )]
    fn publish(
        &self,
        py: Python<'_>,
        request: String,
        kind: &str,
        entries: Entries<'_>,
        metadata: &str,
        chunking: Option<(u32, u32)>,
        lease: &str,
        open: bool,
        deadline: Option<f64>,
    ) -> PyResult<Publication> {
        let how = Description {
            kind,
            metadata,
            chunking,
        };
        let (entries, memory) = payload::lend_all(py, entries, Some(&self.allocations))?;
        let manifest = payload::manifest(py, entries, &how)?;
        let lease = lease.parse::<Lease>().map_err(|error| raise_from(py, &error))?;
        let spec = payload::spec(request, manifest, lease, seconds(py, deadline)?);
        let runtime = runtime(py)?;
        // May copy into the arena, where the memory cannot be read from outside.
        let published = py.detach(|| {
            let _entered = runtime.enter();
            if open {
                self.inner.open(spec, memory)
            } else {
                self.inner.publish(spec, memory)
            }
        });
        let published = published.map_err(|error| raise_from(py, &error))?;
        Ok(Publication {
            handle: published.handle().clone(),
            inner: Mutex::new(Some(Arc::new(published))),
        })
    }

    /// Says where the store is; see `HostStore.address`.
    fn set_store(&self, py: Python<'_>, address: &[u8]) -> PyResult<()> {
        self.inner.set_store(Some(crate::store::read_address(py, address)?));
        Ok(())
    }

    /// Moves a payload of this process into the store, which gives the store's handle. Where that fails or is cancelled,
    /// the payload is released.
    fn start_store(&self, py: Python<'_>, handle: &Handle, deadline: f64) -> PyResult<Pending> {
        let within = seconds(py, Some(deadline))?.unwrap_or_default();
        let handle = handle.inner().clone();
        let held = Held {
            connector: Arc::clone(&self.inner),
            payload: Some(handle.payload),
        };
        let put = async move {
            let mut held = held;
            let stored = held.connector.store(&handle, None, within).await;
            held.payload = held.payload.filter(|_| stored.is_err());
            stored
        };
        Pending::spawn(py, put, |py, stored| {
            let stored = stored.map_err(|error| raise_from(py, &error))?;
            Handle::new(stored).into_py_any(py)
        })
    }

    #[pyo3(signature = (handle, destinations=None, *, private=false, deadline=None))]
    fn consume(
        &self,
        py: Python<'_>,
        handle: &Handle,
        destinations: Option<Vec<PyRef<'_, Tensor>>>,
        private: bool,
        deadline: Option<f64>,
    ) -> PyResult<Consumer> {
        let destinations = destinations
            .map(|tensors| consumer::destinations(py, handle.inner(), &tensors))
            .transpose()?;
        let options = ConsumeOptions {
            destinations,
            private,
            deadline: seconds(py, deadline)?,
            stop: None,
        };
        let consumer = self
            .inner
            .consume(handle.inner().clone(), options)
            .map_err(|error| raise_from(py, &error))?;
        Ok(Consumer::new(consumer))
    }

    fn release(&self, py: Python<'_>, payload_id: &str) -> PyResult<()> {
        let payload: PayloadId = payload_id
            .parse()
            .map_err(|_| invalid(py, "payload.id", format!("{payload_id:?} is no payload id")))?;
        self.inner.release(payload);
        Ok(())
    }

    fn live(&self) -> Vec<String> {
        self.inner.live().iter().map(ToString::to_string).collect()
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        stats(py, &self.inner)
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        wait(py, self.inner.close())
    }
}

/// A payload that is released where nobody takes it over.
struct Held {
    connector: Arc<stagewire_connector::Connector>,
    payload: Option<PayloadId>,
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(payload) = self.payload {
            self.connector.release(payload);
        }
    }
}

/// Numbers of a connector by name.
pub(crate) fn stats<'py>(py: Python<'py>, connector: &stagewire_connector::Connector) -> PyResult<Bound<'py, PyDict>> {
    let stats = connector.stats();
    let host = &stats.host;
    let named = [
        ("live_payloads", stats.live_payloads),
        ("live_bytes", stats.live_bytes),
        ("published", stats.published),
        ("released", stats.released),
        ("consumed", stats.consumed),
        ("expired", stats.expired),
        ("failed", stats.failed),
        ("claims_refused", stats.claims_refused),
        ("consumers", stats.consumers),
        ("links", stats.links),
        ("staged_bytes", stats.staged_bytes),
        ("regions", host.regions),
        ("pins_served", host.pins_served),
        ("pins_held", host.pins_held),
        ("segments", host.segments),
        ("segment_bytes", host.segment_bytes),
        ("allocated_bytes", host.allocated_bytes),
        ("mapped_bytes", host.mapped_bytes),
        ("connections", host.connections),
        ("registrations", host.registrations),
        ("copied_bytes", host.copied_bytes),
    ];
    let dict = PyDict::new(py);
    for (name, value) in named {
        dict.set_item(name, value)?;
    }
    Ok(dict)
}

/// A number of seconds from Python, for a deadline.
pub(crate) fn seconds(py: Python<'_>, given: Option<f64>) -> PyResult<Option<Duration>> {
    let Some(given) = given else { return Ok(None) };
    Duration::try_from_secs_f64(given).map(Some).map_err(|_| {
        invalid(
            py,
            "argument.seconds",
            format!("{given} s is no deadline: it must be 0 or more"),
        )
    })
}

/// A published payload, as its producer sees it.
#[pyclass(module = "stagewire._native", frozen)]
pub(crate) struct Publication {
    handle: stagewire_core::Handle,
    /// Taken when it is closed.
    inner: Mutex<Option<Arc<stagewire_connector::Publication>>>,
}

impl Publication {
    fn lock(&self) -> MutexGuard<'_, Option<Arc<stagewire_connector::Publication>>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self, py: Python<'_>) -> PyResult<Arc<stagewire_connector::Publication>> {
        let closed = || {
            let message = format!("request {:?}: the publication is closed", self.handle.request);
            raise(py, &Failure::new(ErrorClass::Conflict, "publish.ended", message))
        };
        self.lock().clone().ok_or_else(closed)
    }
}

#[pymethods]
impl Publication {
    #[getter]
    fn handle(&self) -> Handle {
        Handle::new(self.handle.clone())
    }

    fn ready(&self, py: Python<'_>, index: u32) -> PyResult<()> {
        let publication = self.get(py)?;
        py.detach(|| publication.ready(index))
            .map_err(|error| raise_from(py, &error))
    }

    fn fail(&self, py: Python<'_>, error_class: &str, reason: &str, message: String) -> PyResult<()> {
        let class = ErrorClass::from_name(error_class).unwrap_or(ErrorClass::Internal);
        self.get(py)?.fail(Failure::new(class, reason, message));
        Ok(())
    }

    #[getter]
    fn sealed(&self) -> bool {
        self.lock().as_ref().is_some_and(|publication| publication.is_sealed())
    }

    /// Waits until the payload has ended; false where it has not within `timeout` seconds.
    #[pyo3(signature = (timeout=None))]
    fn wait_released(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let publication = self.get(py)?;
        let within = seconds(py, timeout)?;
        wait(py, async move {
            match within {
                None => publication.released().await,
                Some(within) => return tokio::time::timeout(within, publication.released()).await.is_ok(),
            }
            true
        })
    }

    /// Waits until the payload has ended, without a thread.
    fn released(&self, py: Python<'_>) -> PyResult<Pending> {
        let publication = self.get(py)?;
        Pending::spawn(py, async move { publication.released().await }, |py, ()| Ok(py.None()))
    }

    /// Ends the producer's interest; fails the payload where chunks are missing.
    fn close(&self) {
        let publication = self.lock().take();
        drop(publication);
    }
}
