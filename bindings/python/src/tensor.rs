//! `Tensor`: the native view of a tensor's memory, whoever owns it.
#![expect(
    unsafe_code,
    reason = "foreign memory is read through pointers; DLPack says how long it lives"
)]

use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;

use pyo3::exceptions::{PyBufferError, PyMemoryError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};
use stagewire_core::{DType, TensorSpec};

use crate::error::{invalid, raise_from};
use crate::{buffer, dlpack};

/// An address, and what keeps the memory there.
#[derive(Clone)]
pub(crate) struct Memory {
    pointer: NonNull<u8>,
    owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the pointer is an address; access to what lies there is the affair of the unsafe code that uses it.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// # Safety
    /// As long as `owner` lives, the memory of the tensor that this is made for must stay at `pointer`.
    pub(crate) unsafe fn new(pointer: NonNull<u8>, owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self { pointer, owner }
    }

    /// That of a tensor without elements.
    pub(crate) fn nothing() -> Self {
        Self {
            pointer: NonNull::dangling(),
            owner: Arc::new(()),
        }
    }

    pub(crate) fn pointer(&self) -> NonNull<u8> {
        self.pointer
    }

    pub(crate) fn owner(&self) -> Arc<dyn Any + Send + Sync> {
        Arc::clone(&self.owner)
    }
}

/// A tensor in host memory: dtype, shape, strides, and the memory itself, which it keeps alive.
#[pyclass(module = "stagewire._native", frozen)]
pub(crate) struct Tensor {
    spec: TensorSpec,
    /// In elements; `None` is row-major.
    strides: Option<Vec<i64>>,
    memory: Memory,
    read_only: bool,
}

impl Tensor {
    pub(crate) fn new(spec: TensorSpec, strides: Option<Vec<i64>>, memory: Memory, read_only: bool) -> Self {
        Self {
            spec,
            strides,
            memory,
            read_only,
        }
    }

    pub(crate) fn spec(&self) -> &TensorSpec {
        &self.spec
    }

    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }

    pub(crate) fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Whether the elements lie in row-major order without gaps. Extents of 1 may have any stride.
    pub(crate) fn is_contiguous(&self) -> bool {
        let Some(strides) = &self.strides else { return true };
        let shape = self.spec.shape();
        let expected = dlpack::contiguous_strides(shape);
        shape.contains(&0)
            || (shape.iter().zip(strides).zip(expected)).all(|((extent, stride), due)| *extent == 1 || *stride == due)
    }

    /// Replaces the bytes of a contiguous tensor that nobody else uses.
    pub(crate) fn overwrite(&self, py: Python<'_>, bytes: &[u8]) -> PyResult<()> {
        if !self.is_contiguous() || self.read_only || self.spec.nbytes().0 != bytes.len() as u64 {
            let message = format!("{} bytes cannot replace those of {}", bytes.len(), self.__repr__());
            return Err(invalid(py, "tensor.shape", message));
        }
        // SAFETY: a contiguous tensor has that many bytes at its address, and the owner keeps them there, writable; they
        // are no part of `bytes`, which Rust owns.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.memory.pointer.as_ptr(), bytes.len()) };
        Ok(())
    }

    pub(crate) fn strides(&self) -> Vec<i64> {
        (self.strides.clone()).unwrap_or_else(|| dlpack::contiguous_strides(self.spec.shape()))
    }
}

#[pymethods]
impl Tensor {
    #[staticmethod]
    fn from_dlpack(tensor: &Bound<'_, PyAny>) -> PyResult<Self> {
        dlpack::import(tensor)
    }

    #[staticmethod]
    fn from_buffer(memory: &Bound<'_, PyAny>) -> PyResult<Self> {
        buffer::import(memory)
    }

    /// The same bytes as elements of another type and shape.
    fn view(&self, py: Python<'_>, dtype: &str, shape: Vec<u64>) -> PyResult<Self> {
        let spec = (dtype.parse::<DType>())
            .and_then(|dtype| TensorSpec::new(dtype, shape))
            .map_err(|error| raise_from(py, &error))?;
        let (found, expected) = (self.spec.nbytes(), spec.nbytes());
        if !self.is_contiguous() || found != expected {
            let message = format!(
                "{found} of shape {:?} are not the {expected} of {spec:?}",
                self.spec.shape()
            );
            return Err(invalid(py, "tensor.shape", message));
        }
        Ok(Self::new(spec, None, self.memory.clone(), self.read_only))
    }

    /// A copy in memory of its own, in row-major order.
    fn copy(&self, py: Python<'_>) -> PyResult<Self> {
        if self.spec.nbytes().0 == 0 {
            return Ok(Self::new(self.spec.clone(), None, Memory::nothing(), false));
        }
        let mut bytes = Vec::new();
        let reserved = bytes.try_reserve_exact(usize::try_from(self.spec.nbytes().0)?);
        reserved.map_err(|error| PyMemoryError::new_err(error.to_string()))?;
        let size = usize::try_from(self.spec.dtype().size())?;
        let strides = self.strides();
        py.detach(|| {
            // SAFETY: shape and strides say where the elements of this tensor are, and the owner keeps them there.
            unsafe {
                gather(
                    self.memory.pointer.as_ptr(),
                    self.spec.shape(),
                    &strides,
                    size,
                    &mut bytes,
                );
            }
        });
        let pointer = NonNull::from(bytes.as_mut_slice()).cast();
        // SAFETY: a vector that nobody changes keeps its bytes in place.
        let memory = unsafe { Memory::new(pointer, Arc::new(bytes)) };
        Ok(Self::new(self.spec.clone(), None, memory, false))
    }

    #[getter]
    fn dtype(&self) -> &'static str {
        self.spec.dtype().name()
    }

    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.spec.shape())
    }

    #[getter(strides)]
    fn py_strides<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.strides())
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.spec.nbytes().0
    }

    #[getter]
    fn contiguous(&self) -> bool {
        self.is_contiguous()
    }

    #[getter]
    fn read_only(&self) -> bool {
        self.read_only
    }

    #[getter]
    fn data_ptr(&self) -> usize {
        self.memory.pointer.as_ptr() as usize
    }

    fn tobytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        if !self.is_contiguous() {
            return Err(PyBufferError::new_err("the tensor is not contiguous"));
        }
        let len = usize::try_from(self.spec.nbytes().0)?;
        // SAFETY: a contiguous tensor has that many bytes at its address, and the owner keeps them there.
        let bytes = unsafe { std::slice::from_raw_parts(self.memory.pointer.as_ptr(), len) };
        Ok(PyBytes::new(py, bytes))
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        (1, 0)
    }

    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__(
        &self,
        py: Python<'_>,
        stream: Option<&Bound<'_, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Py<PyAny>> {
        if stream.is_some() {
            return Err(PyBufferError::new_err("host memory has no stream"));
        }
        if dl_device.is_some_and(|device| device.0 != 1) {
            return Err(PyBufferError::new_err(
                "the tensor is in host memory; move it after taking it",
            ));
        }
        if copy == Some(true) {
            return Err(PyBufferError::new_err(
                "the tensor is shared, never copied; copy it after taking it",
            ));
        }
        dlpack::export(py, self, max_version.map_or(0, |version| version.0))
    }

    fn __repr__(&self) -> String {
        let shape = self.spec.shape();
        format!("stagewire.Tensor(dtype={}, shape={shape:?})", self.spec.dtype())
    }
}

/// Appends the elements at `pointer` in row-major order.
///
/// # Safety
/// At every index within `shape` there must be `size` readable bytes.
unsafe fn gather(pointer: *const u8, shape: &[u64], strides: &[i64], size: usize, out: &mut Vec<u8>) {
    let (Some((extent, inner)), Some((stride, steps))) = (shape.split_first(), strides.split_first()) else {
        // SAFETY: the caller's promise.
        out.extend_from_slice(unsafe { std::slice::from_raw_parts(pointer, size) });
        return;
    };
    if inner.is_empty() && *stride == 1 {
        // SAFETY: the caller's promise; the elements of this row have no gaps.
        out.extend_from_slice(unsafe { std::slice::from_raw_parts(pointer, *extent as usize * size) });
        return;
    }
    for index in 0..*extent as isize {
        // SAFETY: the index is within the shape.
        unsafe {
            gather(
                pointer.offset(index * *stride as isize * size as isize),
                inner,
                steps,
                size,
                out,
            );
        };
    }
}
