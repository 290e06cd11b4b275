//! `Handle`: what travels in a queue in place of a payload.

use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};
use stagewire_core::{EntryValue, TensorSpec};

use crate::error::raise_from;

/// Names a published payload, says what it is, and is the right to read it.
#[pyclass(module = "stagewire._native", frozen)]
pub(crate) struct Handle {
    inner: stagewire_core::Handle,
}

impl Handle {
    pub(crate) fn new(inner: stagewire_core::Handle) -> Self {
        Self { inner }
    }

    pub(crate) fn inner(&self) -> &stagewire_core::Handle {
        &self.inner
    }
}

#[pymethods]
impl Handle {
    #[staticmethod]
    fn from_bytes(py: Python<'_>, data: &[u8]) -> PyResult<Self> {
        let inner = stagewire_core::Handle::from_bytes(data).map_err(|error| raise_from(py, &error))?;
        Ok(Self { inner })
    }

    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.inner.to_bytes())
    }

    #[getter]
    fn payload_id(&self) -> String {
        self.inner.payload.to_string()
    }

    #[getter]
    fn request_id(&self) -> &str {
        &self.inner.request
    }

    #[getter]
    fn stage(&self) -> &str {
        self.inner.stage.as_str()
    }

    #[getter]
    fn kind(&self) -> String {
        self.inner.manifest.kind().to_string()
    }

    #[getter]
    fn mode(&self) -> String {
        self.inner.mode.to_string()
    }

    #[getter]
    fn metadata(&self) -> &str {
        self.inner.manifest.metadata()
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.inner.manifest.nbytes().0
    }

    #[getter]
    fn num_chunks(&self) -> u32 {
        self.inner.manifest.chunks()
    }

    #[getter]
    fn chunk_dim(&self) -> Option<u32> {
        self.inner.manifest.chunking().map(|chunking| chunking.dim())
    }

    #[getter]
    fn entries<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let entries = PyList::empty(py);
        for entry in self.inner.manifest.entries() {
            let value = match &entry.value {
                EntryValue::None => py.None().into_bound(py),
                EntryValue::Tensor(spec) => describe(py, spec)?.into_any(),
                EntryValue::List(specs) => {
                    let specs: Vec<_> = specs.iter().map(|spec| describe(py, spec)).collect::<PyResult<_>>()?;
                    PyList::new(py, specs)?.into_any()
                }
            };
            entries.append((entry.name.as_str(), value))?;
        }
        Ok(entries)
    }

    /// (start, length) along the chunk dimension, for each tensor in the order of the entries.
    fn chunk_slices(&self, py: Python<'_>, index: u32) -> PyResult<Vec<(u64, u64)>> {
        let manifest = &self.inner.manifest;
        let Some(chunking) = manifest.chunking() else {
            return Ok(Vec::new());
        };
        (manifest.tensors())
            .map(|spec| chunking.slice(spec, index).map(|slice| (slice.start, slice.len)))
            .collect::<Result<_, _>>()
            .map_err(|error| raise_from(py, &error))
    }

    fn __repr__(&self) -> String {
        let handle = &self.inner;
        format!(
            "Handle(payload_id={:?}, request_id={:?}, stage={:?}, kind={:?}, mode={:?}, nbytes={}, num_chunks={})",
            handle.payload.to_string(),
            handle.request,
            handle.stage.as_str(),
            handle.manifest.kind().to_string(),
            handle.mode.to_string(),
            handle.manifest.nbytes().0,
            handle.manifest.chunks(),
        )
    }
}

/// A tensor's (dtype, shape).
fn describe<'py>(py: Python<'py>, spec: &TensorSpec) -> PyResult<Bound<'py, PyTuple>> {
    let shape = PyTuple::new(py, spec.shape())?;
    (spec.dtype().name(), shape)
        .into_bound_py_any(py)?
        .cast_into::<PyTuple>()
        .map_err(Into::into)
}
