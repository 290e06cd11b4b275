//! Parts of tensors, packed: what a payload's chunk looks like inside an object of a store.
#![expect(unsafe_code, reason = "reads and writes the memory of Python's tensors")]

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use stagewire_core::Record;
use xxhash_rust::xxh3::Xxh3;

use crate::error::invalid;
use crate::tensor::Tensor;

/// Rows of bytes inside a tensor: first byte, bytes of a row, rows, bytes from row to row.
pub(crate) type Run = (u64, u64, u64, u64);

/// Bytes `start..start + len` of the packed rows of `run`, as copies out of the packed form into the tensor: the rest of
/// a row, whole rows, the beginning of a row. `None` where the run has fewer bytes.
pub(crate) fn records(run: Run, start: u64, len: u64) -> Option<Vec<Record>> {
    let (offset, width, rows, pitch) = run;
    let (offset, width, rows, pitch) = if rows > 1 && pitch == width {
        (offset, width.checked_mul(rows)?, 1, width.checked_mul(rows)?)
    } else {
        (offset, width, rows, pitch)
    };
    if start.checked_add(len)? > width.checked_mul(rows)? {
        return None;
    }
    // No offset below is larger than this one.
    offset
        .checked_add(rows.saturating_sub(1).checked_mul(pitch)?)?
        .checked_add(width)?;
    let mut records = Vec::new();
    let (mut at, end) = (start, start + len);
    while at < end {
        let (row, inside) = (at / width, at % width);
        let whole = (end - at) / width;
        let (width, rows) = if inside > 0 || whole == 0 {
            ((width - inside).min(end - at), 1)
        } else {
            (width, whole)
        };
        records.push(Record {
            src_offset: at - start,
            dst_offset: offset + row * pitch + inside,
            width,
            rows,
            src_pitch: width,
            dst_pitch: pitch,
        });
        at += width * rows;
    }
    Some(records)
}

/// Bytes of a run: the tensor, the run in it, the first of its packed bytes, how many.
#[derive(FromPyObject)]
pub(crate) struct Part<'py>(PyRef<'py, Tensor>, Run, u64, u64);

impl Part<'_> {
    pub(crate) fn tensor(&self) -> &Tensor {
        &self.0
    }

    pub(crate) fn len(&self) -> u64 {
        self.3
    }

    /// Where it lies: inside the tensor, or it is refused.
    pub(crate) fn records(&self, py: Python<'_>) -> PyResult<Vec<Record>> {
        let Self(tensor, run, start, len) = self;
        let nbytes = tensor.spec().nbytes().0;
        let records = records(*run, *start, *len).filter(|records| {
            (records.iter()).all(|record| record.check(*len, nbytes).is_ok()) && tensor.is_contiguous()
        });
        records.ok_or_else(|| {
            let message =
                format!("bytes {start} to {start}+{len} of the run {run:?} do not lie inside {nbytes} bytes in a row");
            invalid(py, "argument.memory", message)
        })
    }

    fn places(&self, py: Python<'_>) -> PyResult<Places> {
        Ok(Places {
            base: self.tensor().memory().pointer().as_ptr(),
            records: self.records(py)?,
        })
    }

    /// Refuses one that must not be written to.
    pub(crate) fn check_writable(&self, py: Python<'_>) -> PyResult<()> {
        if self.tensor().is_read_only() {
            return Err(invalid(py, "argument.memory", "the destination is read-only"));
        }
        Ok(())
    }
}

/// A tensor and the places of a part in it. Checked: every place lies inside the tensor.
struct Places {
    base: *mut u8,
    records: Vec<Record>,
}

// SAFETY: an address; the caller keeps the tensor, and so its memory, while another thread uses this.
unsafe impl Send for Places {}

impl Places {
    /// Address and length of each row, in order.
    fn rows(&self) -> impl Iterator<Item = (*mut u8, usize)> {
        self.records.iter().flat_map(move |record| {
            let width = usize::try_from(record.width).expect("inside memory");
            record.row_offsets().map(move |(_, offset)| {
                // SAFETY: the offset lies inside the tensor.
                (
                    unsafe { self.base.add(usize::try_from(offset).expect("inside memory")) },
                    width,
                )
            })
        })
    }
}

/// xxh3-128 of a part's bytes, packed; 16 bytes, little-endian.
#[pyfunction]
pub(crate) fn run_digest<'py>(py: Python<'py>, part: Part<'_>) -> PyResult<Bound<'py, PyBytes>> {
    let places = part.places(py)?;
    let digest = py.detach(move || {
        let places = places;
        let mut digest = Xxh3::new();
        for (row, width) in places.rows() {
            // SAFETY: the row lies inside the tensor, which the caller keeps; a concurrent writer is the caller's defect,
            // and shows in the digest.
            digest.update(unsafe { std::slice::from_raw_parts(row, width) });
        }
        digest.digest128()
    });
    Ok(PyBytes::new(py, &digest.to_le_bytes()))
}

/// Packs a part into `staging`, from byte `at` on.
#[pyfunction]
pub(crate) fn run_gather(py: Python<'_>, part: Part<'_>, staging: PyRef<'_, Tensor>, at: u64) -> PyResult<()> {
    let packed = packed(staging, at, &part);
    packed.check_writable(py)?;
    copy(py, &part, &packed, |row, packed, width| {
        // SAFETY: both lie inside their tensors, which the caller keeps; staging memory is never a tensor's own.
        unsafe { std::ptr::copy(row, packed, width) }
    })
}

/// Unpacks a part from `staging`, which has it from byte `at` on.
#[pyfunction]
pub(crate) fn run_scatter(py: Python<'_>, part: Part<'_>, staging: PyRef<'_, Tensor>, at: u64) -> PyResult<()> {
    part.check_writable(py)?;
    let packed = packed(staging, at, &part);
    copy(py, &part, &packed, |row, packed, width| {
        // SAFETY: as when it is packed.
        unsafe { std::ptr::copy(packed, row, width) }
    })
}

/// Where a part is packed.
fn packed<'py>(staging: PyRef<'py, Tensor>, at: u64, part: &Part<'_>) -> Part<'py> {
    let len = part.len();
    Part(staging, (at, len, 1, len), 0, len)
}

/// Calls `each` with the address of a row, its address where it is packed, and its length.
fn copy(
    py: Python<'_>,
    part: &Part<'_>,
    packed: &Part<'_>,
    each: impl Fn(*mut u8, *mut u8, usize) + Send,
) -> PyResult<()> {
    let (places, packed) = (part.places(py)?, packed.places(py)?);
    py.detach(move || {
        let (places, packed) = (places, packed);
        let Some((mut packed, _)) = packed.rows().next() else {
            return;
        };
        for (row, width) in places.rows() {
            each(row, packed, width);
            // SAFETY: the packed bytes of all rows lie inside the staging memory.
            packed = unsafe { packed.add(width) };
        }
    });
    Ok(())
}

/// (offset, length) of each row of a part.
#[pyfunction]
pub(crate) fn run_rows(py: Python<'_>, part: Part<'_>) -> PyResult<Vec<(u64, u64)>> {
    let records = part.records(py)?;
    let rows = |record: &Record| {
        let width = record.width;
        record
            .row_offsets()
            .map(move |(_, offset)| (offset, width))
            .collect::<Vec<_>>()
    };
    Ok(records.iter().flat_map(rows).collect())
}
