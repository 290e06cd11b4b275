//! `EngineTransport`: tensors between hosts, moved by the transfer engine of Mooncake's wheel.
#![expect(
    unsafe_code,
    reason = "memory is named by address, and kept by the Python object that owns it"
)]

mod memory;
mod wheel;

use std::net::AddrParseError;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use serde::Serialize;
use serde::de::DeserializeOwned;
use stagewire_core::{ByteCount, Classify, Incarnation, Peer, Record, RegionRef};
use stagewire_transfer::conformance::Side;
use stagewire_transfer::{
    Borrowed, ConnectOptions, EngineOptions, Host, HostOptions, Network, NetworkOptions, Pinned, Rebuild, Region,
    RegisterOptions, Secret, TransferOptions, Transport,
};
use uuid::Uuid;

use crate::connector::seconds;
use crate::error::{invalid, raise, raise_from};
use crate::reaper::Lent;
use crate::runtime::{runtime, wait};
use memory::Span;
use wheel::WheelEngine;

/// One copy: source offset, destination offset, width, rows, source pitch, destination pitch.
type Row = (u64, u64, u64, u64, u64, u64);

/// This process, as peers with an engine of their own reach it.
#[pyclass(module = "stagewire._native", frozen)]
pub(crate) struct EngineTransport {
    network: Arc<Network>,
    transport: Arc<dyn Transport>,
    peer: Peer,
}

#[pymethods]
impl EngineTransport {
    /// `engine` is initialised, and named `segment` by its peers; `rebuild` makes another, and its name.
    #[new]
    #[pyo3(signature = (engine, segment, *, registers_local, rebuild, run_dir, bind, advertise, token))]
    #[expect(clippy::too_many_arguments, reason = "one for each thing that can be chosen")]
    fn new(
        py: Python<'_>,
        engine: Bound<'_, PyAny>,
        segment: String,
        registers_local: bool,
        rebuild: Option<Py<PyAny>>,
        run_dir: PathBuf,
        bind: &str,
        advertise: Option<&str>,
        token: Option<String>,
    ) -> PyResult<Self> {
        let network = NetworkOptions {
            bind: parse(py, bind)?,
            advertise: advertise.map(|address| parse(py, address)).transpose()?,
            token: token.map(Secret::new),
            ..NetworkOptions::default()
        };
        let engine = Arc::new(WheelEngine::new(engine, segment, registers_local));
        let mut options = EngineOptions::default();
        options.rebuild = rebuild.map(|make| -> Rebuild {
            let make = Lent::new(make);
            Box::new(move || wheel::rebuild(make.get(), registers_local))
        });
        let started = wait(py, async move {
            let incarnation = Incarnation(Uuid::new_v4());
            let host = Host::start(HostOptions {
                dir: run_dir,
                incarnation,
                arena_limit: ByteCount(0),
            })
            .await?;
            let network = Network::start(host, network).await?;
            let transport = stagewire_transfer::EngineTransport::new(&network, engine, options)?;
            Ok::<_, stagewire_transfer::StartError>((network, transport))
        })?;
        let (network, transport) = started.map_err(|error| raise_from(py, &error))?;
        let host = network.host();
        let peer = Peer {
            incarnation: host.incarnation(),
            process: host.process(),
            socket: String::new(),
            transports: vec![transport.address()],
        };
        Ok(Self {
            network,
            transport,
            peer,
        })
    }

    /// How others reach this process.
    #[getter]
    fn address<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &encode(&self.peer))
    }

    /// Lets peers read memory, and write it where it is `writable`.
    #[pyo3(signature = (memory, *, writable))]
    fn register(&self, py: Python<'_>, memory: Span, writable: bool) -> PyResult<EngineRegion> {
        let runtime = runtime(py)?;
        // SAFETY: the Python layer took address and length from the object that it gave as owner.
        let memory = unsafe { memory.memory(py, writable)? };
        let registered = py.detach(|| {
            let _entered = runtime.enter();
            self.transport.register(memory, RegisterOptions::default())
        });
        let inner = registered.map_err(|error| raise_from(py, &error))?;
        Ok(EngineRegion { inner })
    }

    /// Holds a region of a peer in place.
    fn pin(&self, py: Python<'_>, peer: &[u8], reference: &[u8], deadline: Option<f64>) -> PyResult<EnginePin> {
        let peer: Peer = decode(py, peer, "the address of a peer")?;
        let region: RegionRef = decode(py, reference, "the reference of a region")?;
        let deadline = seconds(py, deadline)?;
        let pinned = wait(py, async {
            let mut connect = ConnectOptions::default();
            connect.deadline = deadline.unwrap_or(connect.deadline);
            let remote = self
                .transport
                .connect(&peer, connect)
                .await
                .map_err(|error| error.to_failure())?;
            let pinned = remote.pin(&region, TransferOptions { deadline }).await;
            pinned.map_err(|error| error.to_failure())
        })?;
        let inner = pinned.map_err(|failure| raise(py, &failure))?;
        Ok(EnginePin {
            nbytes: inner.len(),
            inner: Mutex::new(Some(Arc::from(inner))),
        })
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (transfer, host) = (self.transport.stats(), self.network.host().stats());
        let named = [
            ("pulls", transfer.pulls),
            ("pushes", transfer.pushes),
            ("pulled_bytes", transfer.pulled_bytes),
            ("pushed_bytes", transfer.pushed_bytes),
            ("failed", transfer.failed),
            ("waiting", transfer.waiting),
            ("in_flight_bytes", transfer.in_flight_bytes),
            ("regions", host.regions),
            ("registrations", host.registrations),
            ("pins_held", host.pins_held),
            ("connections", host.connections),
        ];
        let dict = PyDict::new(py);
        for (name, value) in named {
            dict.set_item(name, value)?;
        }
        Ok(dict)
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        wait(py, async {
            self.network.shutdown().await;
            self.network.host().shutdown().await;
        })
    }
}

impl EngineTransport {
    /// This process as a side of the conformance suite, which lets so much be in flight.
    pub(crate) fn side(&self, in_flight: ByteCount) -> Side {
        self.network.host().limit_in_flight(in_flight);
        let (host, keep) = (self.network.host().clone(), self.network.clone());
        Side {
            transport: self.transport.clone(),
            peer: self.peer.clone(),
            memory: Arc::new(|bytes| Borrowed::from(bytes.to_vec()).into()),
            regions: Arc::new(move || host.stats().regions),
            keep,
        }
    }
}

/// Memory of this process that peers may reach. Dropped, it is released.
#[pyclass(module = "stagewire._native", frozen)]
pub(crate) struct EngineRegion {
    inner: Region,
}

#[pymethods]
impl EngineRegion {
    /// What a peer needs to pin it. Whoever has it may read, or write, the memory.
    #[getter]
    fn reference<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &encode(&self.inner.reference()))
    }

    #[getter]
    fn is_idle(&self) -> bool {
        self.inner.is_idle()
    }

    /// Takes no new pins, and waits until those there are have ended; false where they have not within `timeout` seconds.
    #[pyo3(signature = (timeout=None))]
    fn release(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let within = seconds(py, timeout)?;
        self.inner.release();
        wait(py, async {
            match within {
                None => self.inner.idle().await,
                Some(within) => return tokio::time::timeout(within, self.inner.idle()).await.is_ok(),
            }
            true
        })
    }
}

/// A region of a peer, held in place until this is closed or gone.
#[pyclass(module = "stagewire._native", frozen)]
pub(crate) struct EnginePin {
    nbytes: u64,
    inner: Mutex<Option<Arc<dyn Pinned>>>,
}

impl EnginePin {
    fn get(&self, py: Python<'_>) -> PyResult<Arc<dyn Pinned>> {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let closed = || invalid(py, "pin.closed", "the pin was closed; pin the region again");
        inner.clone().ok_or_else(closed)
    }
}

#[pymethods]
impl EnginePin {
    #[getter]
    fn nbytes(&self) -> u64 {
        self.nbytes
    }

    /// Lets go of the region, however long this object is still referred to.
    fn close(&self) {
        let pinned = self.inner.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(pinned);
    }

    /// Copies records of the region into memory of this process.
    fn read(&self, py: Python<'_>, into: Span, records: Vec<Row>, deadline: Option<f64>) -> PyResult<()> {
        let deadline = seconds(py, deadline)?;
        // SAFETY: the Python layer took address and length from the object that it gave as owner, and asks its caller to
        // leave it alone meanwhile.
        let target = unsafe { into.target(py)? };
        let pinned = self.get(py)?;
        let pulled = wait(
            py,
            pinned.pull(&read_records(records), &target, TransferOptions { deadline }),
        )?;
        pulled.map_err(|error| raise_from(py, &error))
    }

    /// Copies records of memory of this process into the region.
    fn write(&self, py: Python<'_>, source: Span, records: Vec<Row>, deadline: Option<f64>) -> PyResult<()> {
        let deadline = seconds(py, deadline)?;
        // SAFETY: as above.
        let source = unsafe { source.memory(py, false)? };
        let pinned = self.get(py)?;
        let pushed = wait(
            py,
            pinned.push(&read_records(records), &source, TransferOptions { deadline }),
        )?;
        pushed.map_err(|error| raise_from(py, &error))
    }
}

fn read_records(rows: Vec<Row>) -> Vec<Record> {
    let record = |(src_offset, dst_offset, width, rows, src_pitch, dst_pitch)| Record {
        src_offset,
        dst_offset,
        width,
        rows,
        src_pitch,
        dst_pitch,
    };
    rows.into_iter().map(record).collect()
}

fn parse<T: FromStr<Err = AddrParseError>>(py: Python<'_>, text: &str) -> PyResult<T> {
    text.parse()
        .map_err(|error| invalid(py, "argument.address", format!("{text:?} is no address: {error}")))
}

fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    postcard::to_stdvec(value).expect("there is nothing in it that postcard cannot encode")
}

fn decode<T: DeserializeOwned>(py: Python<'_>, bytes: &[u8], what: &str) -> PyResult<T> {
    postcard::from_bytes(bytes)
        .map_err(|error| invalid(py, "argument.reference", format!("this is not {what}: {error}")))
}
