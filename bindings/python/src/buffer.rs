//! The buffer protocol: `bytes`, `array.array`, `memoryview`, ctypes arrays and the like as tensors, without a copy.
#![expect(unsafe_code, reason = "a buffer says how long its memory stays")]

use std::ptr::NonNull;
use std::sync::Arc;

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::PyMemoryView;
use stagewire_core::{DType, TensorSpec};

use crate::error::{raise_from, unsupported};
use crate::reaper::Lent;
use crate::tensor::{Memory, Tensor};

/// Takes the memory of an object with the buffer protocol.
pub(crate) fn import(object: &Bound<'_, PyAny>) -> PyResult<Tensor> {
    let py = object.py();
    let view = PyMemoryView::from(object)?.into_any();
    let format: String = view.getattr("format")?.extract()?;
    let size: usize = view.getattr("itemsize")?.extract()?;
    let Some(dtype) = dtype(&format, size) else {
        let message = format!("the buffer's format {format:?} ({size} bytes) has no Stagewire dtype");
        return Err(unsupported(py, "tensor.dtype", message));
    };
    let shape: Vec<u64> = view.getattr("shape")?.extract()?;
    let scalar = shape.is_empty();
    let spec = TensorSpec::new(dtype, shape).map_err(|error| raise_from(py, &error))?;
    // A buffer without dimensions has no strides to read.
    let view = if scalar {
        view.call_method1("cast", ("B",))?
    } else {
        view
    };
    let buffer = PyUntypedBuffer::get(&view)?;
    if buffer.suboffsets().is_some() {
        return Err(PyBufferError::new_err(
            "the buffer is one of pointers to rows: copy it first",
        ));
    }
    let strides = (!scalar).then(|| elements(buffer.strides(), size)).transpose()?;
    let pointer = NonNull::new(buffer.buf_ptr().cast::<u8>()).unwrap_or(NonNull::dangling());
    let read_only = buffer.readonly();
    let owner = Arc::new(Lent::new(buffer));
    // SAFETY: an exported buffer stays in place until it is released, when the owner is dropped.
    let memory = unsafe { Memory::new(pointer, owner) };
    Ok(Tensor::new(spec, strides, memory, read_only))
}

/// Strides in elements.
fn elements(strides: &[isize], size: usize) -> PyResult<Vec<i64>> {
    let size = size as isize;
    let whole = strides
        .iter()
        .map(|stride| (stride % size == 0).then_some((stride / size) as i64));
    whole.collect::<Option<_>>().ok_or_else(|| {
        PyBufferError::new_err(format!(
            "strides of {strides:?} bytes are not whole elements of {size} bytes"
        ))
    })
}

/// The element type of a format of Python's `struct` module; that of NumPy for complex numbers.
fn dtype(format: &str, size: usize) -> Option<DType> {
    let native = cfg!(target_endian = "little");
    let kind = match format.chars().next()? {
        '@' | '=' => &format[1..],
        '<' if native || size == 1 => &format[1..],
        '>' | '!' if !native || size == 1 => &format[1..],
        _ => format,
    };
    Some(match (kind, size) {
        ("?", 1) => DType::Bool,
        ("b", 1) => DType::I8,
        ("B" | "c", 1) => DType::U8,
        ("h" | "i" | "l" | "q" | "n", 2) => DType::I16,
        ("h" | "i" | "l" | "q" | "n", 4) => DType::I32,
        ("h" | "i" | "l" | "q" | "n", 8) => DType::I64,
        ("H" | "I" | "L" | "Q" | "N", 2) => DType::U16,
        ("H" | "I" | "L" | "Q" | "N", 4) => DType::U32,
        ("H" | "I" | "L" | "Q" | "N", 8) => DType::U64,
        ("e", 2) => DType::F16,
        ("f", 4) => DType::F32,
        ("d", 8) => DType::F64,
        ("Zf" | "F", 8) => DType::C64,
        _ => return None,
    })
}
