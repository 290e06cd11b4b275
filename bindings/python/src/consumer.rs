//! `Consumer`: a payload of another process, chunk by chunk.
#![expect(
    unsafe_code,
    reason = "shows the memory of views to Python, and lends Python's memory as destinations"
)]

use std::sync::Arc;

use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use stagewire_connector::{Chunk, ChunkView, ConsumeError, Fetched, OnChunk, ViewMemory};
use stagewire_core::{Classify, ErrorClass, Failure, Handle, TensorSpec};
use stagewire_transfer::Target;
use tokio::sync::{Mutex, OwnedMutexGuard, mpsc};

use crate::error::{invalid, raise, raise_from};
use crate::pending::Pending;
use crate::runtime::wait;
use crate::tensor::{Memory, Tensor};
use crate::worker::stopped;

/// `None` once it is closed.
type Shared = Mutex<Option<stagewire_connector::Consumer>>;

/// Reads one payload, once. One thread at a time.
#[pyclass(module = "stagewire._native", frozen)]
pub(crate) struct Consumer {
    inner: Arc<Shared>,
    /// Chunks as they come, for who wants to be told; no thread of the runtime waits for the GIL.
    arrivals: Option<Arc<Mutex<Arrivals>>>,
}

type Arrivals = mpsc::UnboundedReceiver<(u32, Vec<ChunkView>)>;

/// Passes chunks on as they come.
pub(crate) fn arrivals() -> (OnChunk, Arrivals) {
    let (sender, arrivals) = mpsc::unbounded_channel();
    let on_chunk = OnChunk::new(move |index, views| {
        // Who closes the consumer does not want to know any more.
        let _ = sender.send((index, views.to_vec()));
    });
    (on_chunk, arrivals)
}

async fn arrived(arrivals: Option<Arc<Mutex<Arrivals>>>) -> Option<(u32, Vec<ChunkView>)> {
    arrivals?.lock().await.recv().await
}

impl Consumer {
    pub(crate) fn new(consumer: stagewire_connector::Consumer) -> Self {
        Self {
            inner: Arc::new(Mutex::new(Some(consumer))),
            arrivals: None,
        }
    }

    /// One whose chunks are told as they come.
    pub(crate) fn telling(consumer: stagewire_connector::Consumer, arrivals: Arrivals) -> Self {
        Self {
            arrivals: Some(Arc::new(Mutex::new(arrivals))),
            ..Self::new(consumer)
        }
    }

    /// The consumer, which is there. Never blocks: a thread that waited here with the GIL would stop the one that holds
    /// the lock.
    fn lock(&self, py: Python<'_>) -> PyResult<OwnedMutexGuard<Option<stagewire_connector::Consumer>>> {
        let Ok(guard) = Arc::clone(&self.inner).try_lock_owned() else {
            let message = "another thread is reading this payload through the same iterator: call consume again";
            return Err(raise(py, &Failure::new(ErrorClass::Conflict, "consume.busy", message)));
        };
        if guard.is_none() {
            let message = "this reader is closed: call consume again";
            return Err(raise(
                py,
                &Failure::new(ErrorClass::Conflict, "consume.closed", message),
            ));
        }
        Ok(guard)
    }
}

async fn next(consumer: &mut Option<stagewire_connector::Consumer>) -> Result<Option<Chunk>, ConsumeError> {
    consumer.as_mut().expect("it was there when it was locked").next().await
}

async fn fetch(consumer: &mut Option<stagewire_connector::Consumer>) -> Result<Fetched, ConsumeError> {
    consumer
        .as_mut()
        .expect("it was there when it was locked")
        .fetch_all()
        .await
}

async fn close(consumer: Option<stagewire_connector::Consumer>) {
    if let Some(consumer) = consumer {
        consumer.close().await;
    }
}

/// A reader that was told to stop raises `Cancelled`, whatever the reason's own class.
fn raise_consume(py: Python<'_>, error: &ConsumeError) -> PyErr {
    match error {
        ConsumeError::Stopped { .. } => raise(py, &stopped(error.to_failure())),
        _ => raise_from(py, error),
    }
}

#[pymethods]
impl Consumer {
    /// Views of the next chunk's tensors, once it is complete; `None` after the last one, when the holder knows that
    /// everything was read.
    fn next(&self, py: Python<'_>) -> PyResult<Option<Vec<Tensor>>> {
        let mut consumer = self.lock(py)?;
        let chunk = wait(py, next(&mut consumer))?.map_err(|error| raise_consume(py, &error))?;
        chunk.map(|chunk| show_all(py, chunk.tensors)).transpose()
    }

    /// The same, without waiting.
    fn start_next(&self, py: Python<'_>) -> PyResult<Pending> {
        let mut consumer = self.lock(py)?;
        Pending::spawn(py, async move { next(&mut consumer).await }, |py, chunk| {
            let chunk = chunk.map_err(|error| raise_consume(py, &error))?;
            let tensors = chunk.map(|chunk| show_all(py, chunk.tensors)).transpose()?;
            tensors.into_py_any(py)
        })
    }

    /// Index and views of the next chunk that came, in whatever order, once `next` was called; `None` after the last one,
    /// and where nobody tells.
    fn arrived(&self, py: Python<'_>) -> PyResult<Option<(u32, Vec<Tensor>)>> {
        let arrived = wait(py, arrived(self.arrivals.clone()))?;
        arrived
            .map(|(index, views)| Ok((index, show_all(py, views)?)))
            .transpose()
    }

    /// The same, without waiting.
    fn start_arrived(&self, py: Python<'_>) -> PyResult<Pending> {
        Pending::spawn(py, arrived(self.arrivals.clone()), |py, arrived| {
            let shown = arrived.map(|(index, views)| PyResult::Ok((index, show_all(py, views)?)));
            shown.transpose()?.into_py_any(py)
        })
    }

    /// Views of all tensors, once every chunk is complete and the holder knows that everything was read.
    fn fetch(&self, py: Python<'_>) -> PyResult<Vec<Tensor>> {
        let mut consumer = self.lock(py)?;
        let fetched = wait(py, fetch(&mut consumer))?.map_err(|error| raise_consume(py, &error))?;
        show_all(py, fetched.tensors)
    }

    /// The same, without waiting.
    fn start_fetch(&self, py: Python<'_>) -> PyResult<Pending> {
        let mut consumer = self.lock(py)?;
        Pending::spawn(py, async move { fetch(&mut consumer).await }, |py, fetched| {
            let fetched = fetched.map_err(|error| raise_consume(py, &error))?;
            show_all(py, fetched.tensors)?.into_py_any(py)
        })
    }

    /// Gives it up. Nothing writes into the destinations any more when this returns, unless another thread reads; then
    /// that ends first.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        match Arc::clone(&self.inner).try_lock_owned() {
            Ok(mut guard) => {
                let consumer = guard.take();
                drop(guard);
                wait(py, close(consumer))
            }
            Err(_) => {
                let inner = Arc::clone(&self.inner);
                crate::runtime::runtime(py)?.spawn(async move { close(inner.lock().await.take()).await });
                Ok(())
            }
        }
    }

    /// The same, without waiting; what is under way ends first.
    fn start_close(&self, py: Python<'_>) -> PyResult<Pending> {
        let inner = Arc::clone(&self.inner);
        let close = async move { close(inner.lock().await.take()).await };
        Pending::spawn(py, close, |py, ()| Ok(py.None()))
    }
}

fn show_all(py: Python<'_>, views: Vec<ChunkView>) -> PyResult<Vec<Tensor>> {
    views.into_iter().map(|view| show(py, view)).collect()
}

/// A view as a tensor for Python.
fn show(py: Python<'_>, view: ChunkView) -> PyResult<Tensor> {
    let spec = TensorSpec::new(view.tensor().dtype(), view.shape()).map_err(|error| raise_from(py, &error))?;
    let strides = view
        .strides()
        .into_iter()
        .map(|stride| i64::try_from(stride).unwrap_or(i64::MAX))
        .collect();
    let read_only = matches!(view.memory(), ViewMemory::Mapped(_));
    let pointer = view.as_ptr();
    // SAFETY: the view keeps its memory in place. Mapped memory is shown as read-only; private memory is written by no
    // pull any more once its chunk was handed out.
    let memory = unsafe { Memory::new(pointer, Arc::new(view)) };
    Ok(Tensor::new(spec, Some(strides), memory, read_only))
}

/// Python's tensors as destinations of a payload, one for each of its tensors.
pub(crate) fn destinations(
    py: Python<'_>,
    handle: &Handle,
    tensors: &[PyRef<'_, Tensor>],
) -> PyResult<Vec<Arc<Target>>> {
    let specs: Vec<_> = handle.manifest.tensors().collect();
    if specs.len() != tensors.len() {
        let message = format!(
            "the payload has {} tensors, {} destinations were given",
            specs.len(),
            tensors.len()
        );
        return Err(invalid(py, "consume.destination", message));
    }
    let checked = specs.iter().zip(tensors).enumerate().map(|(index, (spec, tensor))| {
        let wrong = |what: &str| {
            Err(invalid(
                py,
                "consume.destination",
                format!("destination {index} {what}"),
            ))
        };
        if tensor.is_read_only() {
            return wrong("is read-only");
        }
        if !tensor.is_contiguous() {
            return wrong("is not contiguous");
        }
        if tensor.spec() != *spec {
            return wrong(&format!("is {:?}, the payload has {spec:?}", tensor.spec()));
        }
        let len = usize::try_from(spec.nbytes().0)?;
        let memory = tensor.memory();
        // SAFETY: a writable, contiguous tensor of that many bytes, kept in place by its owner. That nobody touches them
        // while they are pulled is what `consume` asks of its caller.
        Ok(Arc::new(unsafe { Target::new(memory.pointer(), len, memory.owner()) }))
    });
    checked.collect()
}
