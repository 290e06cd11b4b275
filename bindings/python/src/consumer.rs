//! `Consumer`: a payload of another process, chunk by chunk.
#![expect(
    unsafe_code,
    reason = "shows the memory of views to Python, and lends Python's memory as destinations"
)]

use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

use pyo3::prelude::*;
use stagewire_connector::{ChunkView, ConsumeError, ViewMemory};
use stagewire_core::{Classify, ErrorClass, Failure, Handle, TensorSpec};
use stagewire_transfer::Target;

use crate::error::{invalid, raise, raise_from};
use crate::runtime::wait;
use crate::tensor::{Memory, Tensor};
use crate::worker::stopped;

/// Reads one payload, once. One thread at a time.
#[pyclass(module = "stagewire._native", frozen)]
pub(crate) struct Consumer {
    inner: Mutex<Option<stagewire_connector::Consumer>>,
}

impl Consumer {
    pub(crate) fn new(consumer: stagewire_connector::Consumer) -> Self {
        Self {
            inner: Mutex::new(Some(consumer)),
        }
    }

    /// Never blocks: a thread that waited here with the GIL would stop the one that holds the lock.
    fn lock(&self, py: Python<'_>) -> PyResult<MutexGuard<'_, Option<stagewire_connector::Consumer>>> {
        match self.inner.try_lock() {
            Ok(guard) => Ok(guard),
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => {
                let message = "another thread is reading this payload through the same iterator: call consume again";
                Err(raise(py, &Failure::new(ErrorClass::Conflict, "consume.busy", message)))
            }
        }
    }
}

/// A reader that was told to stop raises `Cancelled`, whatever the reason's own class.
fn raise_consume(py: Python<'_>, error: &ConsumeError) -> PyErr {
    match error {
        ConsumeError::Stopped { .. } => raise(py, &stopped(error.to_failure())),
        _ => raise_from(py, error),
    }
}

fn closed(py: Python<'_>) -> PyErr {
    raise(
        py,
        &Failure::new(
            ErrorClass::Conflict,
            "consume.closed",
            "this reader is closed: call consume again",
        ),
    )
}

#[pymethods]
impl Consumer {
    /// Views of the next chunk's tensors, once it is complete; `None` after the last one, when the holder knows that
    /// everything was read.
    fn next(&self, py: Python<'_>) -> PyResult<Option<Vec<Tensor>>> {
        let mut guard = self.lock(py)?;
        let consumer = guard.as_mut().ok_or_else(|| closed(py))?;
        let chunk = wait(py, consumer.next())?.map_err(|error| raise_consume(py, &error))?;
        chunk
            .map(|chunk| chunk.tensors.into_iter().map(|view| show(py, view)).collect())
            .transpose()
    }

    /// Views of all tensors, once every chunk is complete and the holder knows that everything was read.
    fn fetch(&self, py: Python<'_>) -> PyResult<Vec<Tensor>> {
        let mut guard = self.lock(py)?;
        let consumer = guard.as_mut().ok_or_else(|| closed(py))?;
        let fetched = wait(py, consumer.fetch_all())?.map_err(|error| raise_consume(py, &error))?;
        fetched.tensors.into_iter().map(|view| show(py, view)).collect()
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let consumer = self.lock(py)?.take();
        let runtime = crate::runtime::runtime(py)?;
        // Tells the holder, from the runtime.
        py.detach(|| {
            let _entered = runtime.enter();
            drop(consumer);
        });
        Ok(())
    }
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
