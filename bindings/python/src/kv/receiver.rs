//! `KvReceiver`: one rank of a decode engine.
#![expect(unsafe_code, reason = "lends the memory of Python's tensors")]

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use stagewire_connector::kv::{CacheMemory, Receiver, ReceiverOptions, ReceiverRoom, RoomId, RoomSpec, SenderHandle};
use stagewire_transfer::Target;

use super::held::Held;
use super::{KvEngine, Tables, room};
use crate::connector::Connector;
use crate::error::{invalid, raise, raise_from};
use crate::pending::Pending;
use crate::runtime::runtime;
use crate::tensor::Tensor;

/// One rank of a decode engine, which reads pages of prefill's caches into its own.
#[pyclass(module = "stagewire._native", frozen)]
pub(crate) struct KvReceiver(Held<Receiver>);

#[pymethods]
impl KvReceiver {
    /// `buffers` are those of the rank, in the order of [`stagewire_kv::Engine::buffers`], each with a name for messages.
    #[new]
    fn new(
        py: Python<'_>,
        connector: &Connector,
        engine: &KvEngine,
        rank: u32,
        buffers: Vec<(String, PyRef<'_, Tensor>)>,
        heartbeat: (f64, u32),
    ) -> PyResult<Self> {
        let runtime = runtime(py)?;
        let targets = buffers.iter().map(|(name, tensor)| target(py, name, tensor));
        let cache = CacheMemory::one_each(targets.collect::<PyResult<Vec<_>>>()?);
        let options = ReceiverOptions {
            heartbeat: room::heartbeat(py, heartbeat)?,
            ..ReceiverOptions::default()
        };
        let engine = engine.0.clone();
        let made = py.detach(|| {
            let _entered = runtime.enter();
            Receiver::new(connector.inner(), engine, rank, cache, options)
        });
        let receiver = made.map_err(|error| raise_from(py, &error))?;
        Ok(Self(Held::new("receiver", receiver)))
    }

    #[expect(clippy::too_many_arguments, reason = "the arguments of the Python call")]
    fn room(
        &self,
        py: Python<'_>,
        room: u64,
        life: u64,
        senders: Vec<Vec<u8>>,
        seq_len: u64,
        pages: Tables,
        prefix: BTreeMap<String, u64>,
        exact_window: bool,
        deadline: f64,
    ) -> PyResult<KvReceiverRoom> {
        let receiver = self.0.get(py)?;
        let senders = senders.iter().map(|bytes| handle(py, bytes));
        let senders = senders.collect::<PyResult<Vec<_>>>()?;
        let spec = RoomSpec {
            pages,
            prefix,
            exact_window,
            deadline: room::duration(py, deadline)?,
            ..RoomSpec::new(RoomId::of_life(room, life), senders, seq_len)
        };
        let opened = py.detach(|| receiver.room(spec));
        let opened = opened.map_err(|error| raise_from(py, &error))?;
        Ok(KvReceiverRoom(Arc::new(opened)))
    }

    /// Prefill's ranks that this one needs bytes of, where this is the handle of any of them.
    fn writers(&self, py: Python<'_>, sender: &[u8]) -> PyResult<Vec<u32>> {
        let writers = self.0.get(py)?.writers(&handle(py, sender)?);
        writers.map_err(|error| raise_from(py, &error))
    }

    /// Rooms that have pages.
    fn live(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.0.get(py)?.live_rooms())
    }

    /// Fails its rooms.
    fn close(&self, py: Python<'_>) {
        self.0.close(py);
    }
}

/// A room at decode.
#[pyclass(module = "stagewire._native", frozen)]
pub(crate) struct KvReceiverRoom(Arc<ReceiverRoom>);

#[pymethods]
impl KvReceiverRoom {
    #[getter]
    fn phase(&self) -> &'static str {
        room::name(&self.0.phase())
    }

    #[getter]
    fn failure(&self, py: Python<'_>) -> Option<PyErr> {
        room::failure(py, &self.0.phase())
    }

    /// Bytes that have come.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.nbytes()
    }

    /// What went along, once everything is here.
    #[getter]
    fn aux<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        let finished = pin!(self.0.finished());
        match finished.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Ok(received)) => received.aux.map(|aux| PyBytes::new(py, &aux)),
            _ => None,
        }
    }

    /// Waits until everything is here, or raises why not.
    fn finished(&self, py: Python<'_>) -> PyResult<Pending> {
        let room = Arc::clone(&self.0);
        let finished = async move { room.finished().await };
        Pending::spawn(py, finished, |py, outcome| match outcome {
            Ok(_) => Ok(py.None()),
            Err(failure) => Err(raise(py, &failure)),
        })
    }

    fn abort(&self, error_class: &str, reason: &str, message: String) {
        self.0.abort(room::aborted(error_class, reason, message));
    }

    /// Waits until nothing writes to the pages any more.
    fn released(&self, py: Python<'_>) -> PyResult<Pending> {
        let room = Arc::clone(&self.0);
        Pending::spawn(py, async move { room.released().await }, |py, ()| Ok(py.None()))
    }

    #[getter]
    fn is_released(&self) -> bool {
        self.0.is_released()
    }
}

fn handle(py: Python<'_>, bytes: &[u8]) -> PyResult<SenderHandle> {
    SenderHandle::from_bytes(bytes).map_err(|error| raise_from(py, &error))
}

/// A tensor's memory, to be written.
fn target(py: Python<'_>, name: &str, tensor: &Tensor) -> PyResult<Target> {
    let wrong = |what: &str| Err(invalid(py, "kv.buffers", format!("the buffer of {name} is {what}")));
    if tensor.is_read_only() {
        return wrong("read-only");
    }
    if !tensor.is_contiguous() {
        return wrong("not contiguous");
    }
    let len = usize::try_from(tensor.spec().nbytes().0)?;
    let memory = tensor.memory();
    // SAFETY: a writable, contiguous tensor of that many bytes, kept in place by its owner. That nobody touches pages
    // which a room has is what `stagewire.kv.Receiver` asks of its caller.
    Ok(unsafe { Target::new(memory.pointer(), len, memory.owner()) })
}
