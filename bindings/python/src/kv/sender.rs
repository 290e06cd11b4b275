//! `KvSender`: one rank of a prefill engine.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use stagewire_connector::kv::{CacheMemory, ChunkSpec, RoomId, Sender, SenderOptions, SenderRoom};

use super::held::Held;
use super::{KvEngine, Tables, room};
use crate::connector::Connector;
use crate::error::{raise, raise_from};
use crate::pending::Pending;
use crate::runtime::runtime;
use crate::tensor::Tensor;

/// One rank of a prefill engine, whose cache decode may read.
#[pyclass(module = "stagewire._native", frozen)]
pub(crate) struct KvSender {
    inner: Held<Sender>,
    handle: Vec<u8>,
}

#[pymethods]
impl KvSender {
    /// `buffers` are those of the rank, in the order of [`stagewire_kv::Engine::buffers`], each with a name for messages.
    #[new]
    fn new(
        py: Python<'_>,
        connector: &Connector,
        engine: &KvEngine,
        rank: u32,
        buffers: Vec<(String, PyRef<'_, Tensor>)>,
        heartbeat: (f64, u32),
        cut_off: f64,
    ) -> PyResult<Self> {
        let runtime = runtime(py)?;
        let memory = buffers.iter().map(|(name, tensor)| connector.lend(py, name, tensor));
        let cache = CacheMemory::one_each(memory.collect::<PyResult<Vec<_>>>()?);
        let options = SenderOptions {
            heartbeat: room::heartbeat(py, heartbeat)?,
            cut_off: room::duration(py, cut_off)?,
            ..SenderOptions::default()
        };
        let engine = engine.0.clone();
        // May register a lot of memory.
        let made = py.detach(|| {
            let _entered = runtime.enter();
            Sender::new(connector.inner(), engine, rank, cache, options)
        });
        let sender = made.map_err(|error| raise_from(py, &error))?;
        Ok(Self {
            handle: sender.handle().to_bytes(),
            inner: Held::new("sender", sender),
        })
    }

    /// What decode needs to read from it.
    #[getter]
    fn handle<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.handle)
    }

    fn room(&self, py: Python<'_>, room: u64, life: u64, seq_len: u64, deadline: f64) -> PyResult<KvSenderRoom> {
        let (sender, deadline) = (self.inner.get(py)?, room::duration(py, deadline)?);
        let opened = sender.room(RoomId::of_life(room, life), seq_len, deadline);
        let opened = opened.map_err(|error| raise_from(py, &error))?;
        Ok(KvSenderRoom(Arc::new(opened)))
    }

    /// Rooms that are open or still read, and receivers that are known.
    fn live(&self, py: Python<'_>) -> PyResult<(usize, usize)> {
        let sender = self.inner.get(py)?;
        Ok((sender.live_rooms(), sender.receivers()))
    }

    /// Fails its rooms, and lets nobody read any more.
    fn close(&self, py: Python<'_>) {
        self.inner.close(py);
    }
}

/// A room at prefill.
#[pyclass(module = "stagewire._native", frozen)]
pub(crate) struct KvSenderRoom(Arc<SenderRoom>);

#[pymethods]
impl KvSenderRoom {
    fn send(
        &self,
        py: Python<'_>,
        tokens: (u64, u64),
        pages: Tables,
        last: bool,
        aux: Option<Vec<u8>>,
    ) -> PyResult<()> {
        let chunk = ChunkSpec {
            tokens: tokens.0..tokens.1,
            pages,
            last,
            aux,
        };
        let sent = py.detach(|| self.0.send(chunk));
        sent.map_err(|error| raise_from(py, &error))
    }

    #[getter]
    fn phase(&self) -> &'static str {
        room::name(&self.0.phase())
    }

    #[getter]
    fn failure(&self, py: Python<'_>) -> Option<PyErr> {
        room::failure(py, &self.0.phase())
    }

    /// Waits until every reader has everything, or raises why not.
    fn finished(&self, py: Python<'_>) -> PyResult<Pending> {
        let room = Arc::clone(&self.0);
        let finished = async move { room.finished().await };
        Pending::spawn(py, finished, |py, outcome| match outcome {
            Ok(()) => Ok(py.None()),
            Err(failure) => Err(raise(py, &failure)),
        })
    }

    fn abort(&self, error_class: &str, reason: &str, message: String) {
        self.0.abort(room::aborted(error_class, reason, message));
    }

    /// Waits until the pages may be used again.
    fn released(&self, py: Python<'_>) -> PyResult<Pending> {
        let room = Arc::clone(&self.0);
        Pending::spawn(py, async move { room.released().await }, |py, ()| Ok(py.None()))
    }

    #[getter]
    fn is_released(&self) -> bool {
        self.0.is_released()
    }
}
