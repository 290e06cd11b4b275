//! Plans as rows of fixed size, for NumPy to read where they are.

use pyo3::prelude::*;
use pyo3::types::PyByteArray;
use stagewire_kv::{Descriptor, Plan};

use crate::error::raise_from;

/// `component, src_layer, dst_layer, kv` of 4 bytes each, `src_off, dst_off, nbytes` of 8.
pub(super) fn descriptors<'py>(py: Python<'py>, plan: &Plan) -> PyResult<Bound<'py, PyByteArray>> {
    let all = py
        .detach(|| plan.descriptors())
        .map_err(|error| raise_from(py, &error))?;
    table(py, &all, |row: &Descriptor| {
        let first = [row.component, row.src_layer, row.dst_layer, row.kv];
        (first, [row.src_off, row.dst_off, row.nbytes])
    })
}

/// As [`descriptors`], then `src_off, dst_off, width, rows, src_pitch, dst_pitch`.
pub(super) fn records<'py>(py: Python<'py>, plan: &Plan) -> PyResult<Bound<'py, PyByteArray>> {
    let all = py.detach(|| plan.records()).map_err(|error| raise_from(py, &error))?;
    table(py, &all, |row| {
        let record = row.record;
        let first = [row.component, row.src_layer, row.dst_layer, row.kv];
        let fields = [
            record.src_offset,
            record.dst_offset,
            record.width,
            record.rows,
            record.src_pitch,
            record.dst_pitch,
        ];
        (first, fields)
    })
}

/// Rows of four narrow fields and `N` wide ones, in the order of bytes of this machine.
fn table<'py, T, const N: usize>(
    py: Python<'py>,
    rows: &[T],
    fields: impl Fn(&T) -> ([u32; 4], [u64; N]),
) -> PyResult<Bound<'py, PyByteArray>> {
    let size = 16 + 8 * N;
    PyByteArray::new_with(py, rows.len() * size, |bytes| {
        for (out, row) in bytes.chunks_exact_mut(size).zip(rows) {
            let (first, second) = fields(row);
            let (narrow, wide) = out.split_at_mut(16);
            for (place, field) in narrow.chunks_exact_mut(4).zip(first) {
                place.copy_from_slice(&field.to_ne_bytes());
            }
            for (place, field) in wide.chunks_exact_mut(8).zip(second) {
                place.copy_from_slice(&field.to_ne_bytes());
            }
        }
        Ok(())
    })
}
