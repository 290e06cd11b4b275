//! `Connector` and `Publication`: payloads of this process, for others.
#![expect(unsafe_code, reason = "shows memory of the arena to Python")]

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use stagewire_connector::{Carrier, ConnectorOptions, ConsumeOptions, Mode, PublishSpec};
use stagewire_core::{ByteCount, DType, ErrorClass, Failure, Lease, Peer, StageName, TensorSpec};
use stagewire_transfer::{NetworkOptions, Secret};

use crate::arena::Allocations;
use crate::consumer::{self, Consumer};
use crate::error::{invalid, raise_from};
use crate::handle::Handle;
use crate::payload::{self, Description, Entries};
use crate::pending::Pending;
use crate::runtime::{runtime, wait};
use crate::tensor::{Memory, Tensor};

/// Mode, address of the consumer where that is known, and seconds that a store may take.
type Way<'a> = (&'a str, Option<&'a [u8]>, f64);

/// Where it listens, what others are told, and the token.
pub(crate) type Reached = (String, Option<String>, Option<String>);

/// Reads addresses from Python: one without a port takes any that is free.
pub(crate) fn network_options(py: Python<'_>, (bind, advertise, token): Reached) -> PyResult<NetworkOptions> {
    let no_address = |text: &str| {
        let message = format!("{text:?} is no address of a network interface, such as 10.0.0.5");
        invalid(py, "connector.network", message)
    };
    let with_port = bind.parse::<SocketAddr>();
    let with_port = with_port.or_else(|_| bind.parse::<IpAddr>().map(|ip| SocketAddr::new(ip, 0)));
    let advertise = advertise.map(|text| text.parse::<IpAddr>().map_err(|_| no_address(&text)));
    Ok(NetworkOptions {
        bind: with_port.map_err(|_| no_address(&bind))?,
        advertise: advertise.transpose()?,
        token: token.map(Secret::new),
        ..NetworkOptions::default()
    })
}

/// Publishes payloads of this process and consumes those of others.
#[pyclass(module = "stagewire._native", frozen)]
pub(crate) struct Connector {
    inner: Arc<stagewire_connector::Connector>,
    allocations: Allocations,
}

impl Connector {
    pub(crate) fn inner(&self) -> &stagewire_connector::Connector {
        &self.inner
    }

    /// The memory of one tensor, as part of the arena where it is.
    pub(crate) fn lend(&self, py: Python<'_>, name: &str, tensor: &Tensor) -> PyResult<stagewire_transfer::Memory> {
        payload::lend(py, name, tensor, Some(&self.allocations))
    }
}

#[pymethods]
impl Connector {
    #[new]
    #[pyo3(signature = (run_dir, role, *, arena_bytes, transports=None, network=None))]
    fn new(
        py: Python<'_>,
        run_dir: std::path::PathBuf,
        role: &str,
        arena_bytes: u64,
        transports: Option<Vec<String>>,
        network: Option<Reached>,
    ) -> PyResult<Self> {
        let role = StageName::new(role).map_err(|error| invalid(py, "stage.name", error.to_string()))?;
        let mut options = ConnectorOptions {
            arena_limit: ByteCount(arena_bytes),
            ..ConnectorOptions::new(run_dir, role)
        };
        if let Some(network) = network {
            options.network = network_options(py, network)?;
        }
        if let Some(names) = transports {
            let named = names.iter().map(|name| name.parse::<Carrier>());
            options.transports = named
                .collect::<Result<_, _>>()
                .map_err(|error| raise_from(py, &error))?;
        }
        let inner =
            wait(py, stagewire_connector::Connector::start(options))?.map_err(|error| raise_from(py, &error))?;
        Ok(Self {
            inner,
            allocations: Allocations::default(),
        })
    }

    /// A tensor in the arena, with whatever was there before. Publishing it, or a part, copies nothing.
    fn allocate(&self, py: Python<'_>, dtype: &str, shape: Vec<u64>) -> PyResult<Tensor> {
        // The arena of a process that forked belongs to that process.
        runtime(py)?;
        let spec = (dtype.parse::<DType>())
            .and_then(|dtype| TensorSpec::new(dtype, shape))
            .map_err(|error| raise_from(py, &error))?;
        if spec.nbytes().0 == 0 {
            return Ok(Tensor::new(spec, None, Memory::nothing(), false));
        }
        let extent = self.inner.host().arena().allocate(spec.nbytes().0);
        let extent = extent.map_err(|error| raise_from(py, &error))?;
        // Where that fails, each publication registers it, and says why it cannot.
        let (pointer, owner) = self.allocations.add(extent, |memory| self.inner.register(memory).ok());
        // SAFETY: an allocation keeps its part of the arena in place.
        let memory = unsafe { Memory::new(pointer, owner) };
        Ok(Tensor::new(spec, None, memory, false))
    }

    /// Registers a tensor's memory once, for as long as the result is kept.
    fn register(&self, py: Python<'_>, tensor: &Tensor) -> PyResult<Registered> {
        runtime(py)?;
        let memory = self.lend(py, "tensor", tensor)?;
        let registered = self.inner.register(memory).map_err(|error| raise_from(py, &error))?;
        Ok(Registered {
            inner: Mutex::new(Some(registered)),
        })
    }

    /// Publishes a bundle; with `open`, its chunks become visible one by one.
    #[pyo3(
        signature = (request, kind, entries, metadata, chunking, lease, way, *, open=false, verify=false, deadline=None)
    )]
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
        way: Way<'_>,
        open: bool,
        verify: bool,
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
        let (mode, consumer, store_within) = way;
        let spec = PublishSpec {
            mode: mode.parse::<Mode>().map_err(|error| raise_from(py, &error))?,
            consumer: consumer.map(|address| read_address(py, address)).transpose()?,
            store_within: seconds(py, Some(store_within))?.unwrap_or_default(),
            digests: verify,
            ..payload::spec(request, manifest, lease, seconds(py, deadline)?)
        };
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
            inner: Arc::new(published),
        })
    }

    /// How others say that this process is the consumer.
    #[getter]
    fn address<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let peer = postcard::to_stdvec(self.inner.peer()).expect("a peer has nothing that postcard cannot encode");
        PyBytes::new(py, &peer)
    }

    /// Whether the connector with this `address` lives, as far as that can be known here.
    fn is_alive(&self, py: Python<'_>, address: &[u8]) -> PyResult<bool> {
        let (runtime, peer) = (runtime(py)?, read_address(py, address)?);
        // Asks the kernel, and may open a socket.
        Ok(py.detach(|| {
            let _entered = runtime.enter();
            self.inner.is_alive(&peer)
        }))
    }

    /// Is over when that connector is no more.
    fn lost(&self, py: Python<'_>, address: &[u8]) -> PyResult<Pending> {
        let (connector, peer) = (Arc::clone(&self.inner), read_address(py, address)?);
        Pending::spawn(py, async move { connector.lost(&peer).await }, |py, ()| Ok(py.None()))
    }

    /// `arrivals` says that somebody asks for `Consumer.arrived`.
    #[pyo3(signature = (handle, destinations=None, *, private=false, deadline=None, arrivals=false))]
    fn consume(
        &self,
        py: Python<'_>,
        handle: &Handle,
        destinations: Option<Vec<PyRef<'_, Tensor>>>,
        private: bool,
        deadline: Option<f64>,
        arrivals: bool,
    ) -> PyResult<Consumer> {
        let destinations = destinations
            .map(|tensors| consumer::destinations(py, handle.inner(), &tensors))
            .transpose()?;
        let (on_chunk, arrivals) = arrivals.then(consumer::arrivals).unzip();
        let options = ConsumeOptions {
            destinations,
            private,
            deadline: seconds(py, deadline)?,
            stop: None,
            on_chunk,
        };
        let consumer = self
            .inner
            .consume(handle.inner().clone(), options)
            .map_err(|error| raise_from(py, &error))?;
        Ok(match arrivals {
            Some(arrivals) => Consumer::telling(consumer, arrivals),
            None => Consumer::new(consumer),
        })
    }

    /// Ends a payload, wherever it is.
    fn release(&self, py: Python<'_>, handle: &Handle) -> PyResult<()> {
        if self.release_own(py, handle)? {
            return Ok(());
        }
        wait(py, self.inner.release_handle(handle.inner()))?.map_err(|error| raise_from(py, &error))
    }

    /// Ends a payload of this process; false where it holds no such payload.
    fn release_own(&self, py: Python<'_>, handle: &Handle) -> PyResult<bool> {
        runtime(py)?;
        let payload = handle.inner().payload;
        let held = self.inner.live().contains(&payload);
        self.inner.release(payload);
        Ok(held)
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

/// Numbers of a connector by name.
pub(crate) fn stats<'py>(py: Python<'py>, connector: &stagewire_connector::Connector) -> PyResult<Bound<'py, PyDict>> {
    let stats = connector.stats();
    let host = &stats.host;
    let named = [
        ("live_payloads", stats.live_payloads),
        ("live_bytes", stats.live_bytes),
        ("published", stats.published),
        ("released", stats.released),
        ("moved", stats.moved),
        ("consumed", stats.consumed),
        ("expired", stats.expired),
        ("failed", stats.failed),
        ("claims_refused", stats.claims_refused),
        ("unreserved", stats.unreserved),
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
    for way in &stats.modes {
        dict.set_item(format!("published_{}_{}", way.mode, way.reason.name()), way.count)?;
    }
    Ok(dict)
}

/// Reads what [`Connector::address`] gave.
fn read_address(py: Python<'_>, address: &[u8]) -> PyResult<Peer> {
    let wrong = |why: &dyn std::fmt::Display| {
        let message = format!("these {} bytes are no address of a connector: {why}", address.len());
        invalid(py, "connector.address", message)
    };
    match postcard::take_from_bytes(address) {
        Ok((peer, [])) => Ok(peer),
        Ok((_, rest)) => Err(wrong(&format_args!("the last {} do not belong to it", rest.len()))),
        Err(error) => Err(wrong(&error)),
    }
}

/// A number of seconds from Python, for a deadline.
pub(crate) fn seconds(py: Python<'_>, given: Option<f64>) -> PyResult<Option<Duration>> {
    let Some(given) = given else { return Ok(None) };
    let within = Duration::try_from_secs_f64(given)
        .ok()
        .filter(|within| *within <= LONGEST);
    within.map(Some).ok_or_else(|| {
        let message = format!(
            "{given:?} s is no deadline: it must be 0 to {:?}",
            LONGEST.as_secs_f64()
        );
        invalid(py, "argument.seconds", message)
    })
}

/// Longest deadline: some thirty years.
const LONGEST: Duration = Duration::from_secs(1_000_000_000);

/// Memory that is registered once.
#[pyclass(module = "stagewire._native", frozen)]
pub(crate) struct Registered {
    /// Taken when it is released.
    inner: Mutex<Option<stagewire_connector::Registered>>,
}

#[pymethods]
impl Registered {
    #[getter]
    fn released(&self) -> bool {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// Whether no payload of it lives, and nobody reads one.
    #[getter]
    fn unused(&self) -> bool {
        let registered = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        registered
            .as_ref()
            .is_none_or(stagewire_connector::Registered::is_unused)
    }

    /// From now on each publication registers the memory itself. What is published stays.
    fn release(&self) {
        let registered = self.inner.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(registered);
    }
}

/// A published payload, as its producer sees it.
#[pyclass(module = "stagewire._native", frozen)]
pub(crate) struct Publication {
    inner: Arc<stagewire_connector::Publication>,
}

#[pymethods]
impl Publication {
    #[getter]
    fn handle(&self) -> Handle {
        Handle::new(self.inner.handle().clone())
    }

    fn ready(&self, py: Python<'_>, index: u32) -> PyResult<()> {
        py.detach(|| self.inner.ready(index))
            .map_err(|error| raise_from(py, &error))
    }

    fn fail(&self, error_class: &str, reason: &str, message: String) {
        let class = ErrorClass::from_name(error_class).unwrap_or(ErrorClass::Internal);
        self.inner.fail(Failure::new(class, reason, message));
    }

    /// Fails it, where chunks are missing: nobody shows them any more.
    fn abandon(&self) {
        self.inner.fail(Failure::new(
            ErrorClass::Internal,
            "payload.abandoned",
            "the producer dropped the publication before every chunk was ready",
        ));
    }

    /// `p2p` or `store`, and why: what is true now, for it may have fallen back to the store.
    #[getter]
    fn mode(&self) -> (String, &'static str) {
        (self.inner.mode().to_string(), self.inner.mode_reason().name())
    }

    /// Whether the payload is where its mode says, or will never be.
    #[getter]
    fn settled(&self) -> bool {
        self.inner.outcome().is_some()
    }

    /// Waits until it is; false where it is not within `timeout` seconds. Raises what went wrong.
    #[pyo3(signature = (timeout=None))]
    fn wait_settled(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let publication = Arc::clone(&self.inner);
        let within = seconds(py, timeout)?;
        let settled = wait(py, async move {
            match within {
                None => Some(publication.settled().await),
                Some(within) => tokio::time::timeout(within, publication.settled()).await.ok(),
            }
        })?;
        settled.map_or(Ok(false), |outcome| {
            outcome.map(|_| true).map_err(|error| raise_from(py, &*error))
        })
    }

    /// The same, without waiting.
    fn settling(&self, py: Python<'_>) -> PyResult<Pending> {
        let publication = Arc::clone(&self.inner);
        Pending::spawn(py, async move { publication.settled().await }, |py, outcome| {
            outcome.map(|_| py.None()).map_err(|error| raise_from(py, &*error))
        })
    }

    /// Gives up what is not settled; false where it is.
    fn cancel(&self) -> bool {
        self.inner.cancel()
    }

    #[getter]
    fn sealed(&self) -> bool {
        self.inner.is_sealed()
    }

    /// Waits until the payload has ended; false where it has not within `timeout` seconds.
    #[pyo3(signature = (timeout=None))]
    fn wait_released(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let publication = Arc::clone(&self.inner);
        let within = seconds(py, timeout)?;
        wait(py, async move {
            match within {
                None => publication.released().await,
                Some(within) => return tokio::time::timeout(within, publication.released()).await.is_ok(),
            }
            true
        })
    }

    /// Waits until the payload has ended and nobody reads its memory any more; false where that is not so in time.
    #[pyo3(signature = (timeout=None))]
    fn wait_unread(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let publication = Arc::clone(&self.inner);
        let within = seconds(py, timeout)?;
        wait(py, async move {
            match within {
                None => publication.unread().await,
                Some(within) => return tokio::time::timeout(within, publication.unread()).await.is_ok(),
            }
            true
        })
    }

    /// The same, without a thread.
    fn unread(&self, py: Python<'_>) -> PyResult<Pending> {
        let publication = Arc::clone(&self.inner);
        Pending::spawn(py, async move { publication.unread().await }, |py, ()| Ok(py.None()))
    }

    /// Waits until the payload has ended, without a thread.
    fn released(&self, py: Python<'_>) -> PyResult<Pending> {
        let publication = Arc::clone(&self.inner);
        Pending::spawn(py, async move { publication.released().await }, |py, ()| Ok(py.None()))
    }
}
