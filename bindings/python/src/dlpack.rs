//! DLPack, the exchange of tensors by capsule: all of it that touches foreign memory.
//!
//! The structs are those of `dlpack.h` 1.1. Only what lies in host memory is taken, of any strides.
#![expect(unsafe_code, reason = "the exchange is a C interface")]

use std::any::Any;
use std::ffi::{CStr, c_void};
use std::ptr::NonNull;
use std::sync::Arc;

use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};
use stagewire_core::{DType, TensorSpec};

use crate::error::{invalid, raise_from, unsupported};
use crate::reaper::Lent;
use crate::tensor::{Memory, Tensor};

const CPU: i32 = 1;
const CUDA_HOST: i32 = 3;
const READ_ONLY: u64 = 1;
const VERSIONED: &CStr = c"dltensor_versioned";
const VERSIONED_USED: &CStr = c"used_dltensor_versioned";
const LEGACY: &CStr = c"dltensor";
const LEGACY_USED: &CStr = c"used_dltensor";

#[repr(C)]
#[derive(Clone, Copy)]
struct Version {
    major: u32,
    minor: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Device {
    kind: i32,
    id: i32,
}

#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device: Device,
    ndim: i32,
    dtype: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct Managed {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

#[repr(C)]
struct ManagedVersioned {
    version: Version,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
    flags: u64,
    tensor: DlTensor,
}

const TYPES: [(DType, u8, u8); 16] = [
    (DType::I8, 0, 8),
    (DType::I16, 0, 16),
    (DType::I32, 0, 32),
    (DType::I64, 0, 64),
    (DType::U8, 1, 8),
    (DType::U16, 1, 16),
    (DType::U32, 1, 32),
    (DType::U64, 1, 64),
    (DType::F16, 2, 16),
    (DType::F32, 2, 32),
    (DType::F64, 2, 64),
    (DType::BF16, 4, 16),
    (DType::C64, 5, 64),
    (DType::Bool, 6, 8),
    (DType::F8E4M3, 10, 8),
    (DType::F8E5M2, 12, 8),
];

/// Owns what a capsule held: its deleter runs when this is dropped.
enum Taken {
    Legacy(NonNull<Managed>),
    Versioned(NonNull<ManagedVersioned>),
}

// SAFETY: the struct is only read, and its deleter called once. The protocol lets any thread do that with the GIL
// held, which `Lent` sees to.
unsafe impl Send for Taken {}

impl Taken {
    /// Takes over what the capsule owns and renames it, as the protocol has it, so that nobody else does.
    fn from_capsule(capsule: &Bound<'_, PyCapsule>) -> PyResult<Self> {
        let object = capsule.as_ptr();
        for (name, used, versioned) in [(VERSIONED, VERSIONED_USED, true), (LEGACY, LEGACY_USED, false)] {
            // SAFETY: `object` is a capsule and the GIL is held.
            if unsafe { ffi::PyCapsule_IsValid(object, name.as_ptr()) } == 0 {
                continue;
            }
            // SAFETY: as above; the name is the capsule's own.
            let pointer = unsafe { ffi::PyCapsule_GetPointer(object, name.as_ptr()) };
            // SAFETY: as above; the new name lives for ever.
            unsafe { ffi::PyCapsule_SetName(object, used.as_ptr()) };
            if let Some(pointer) = NonNull::new(pointer) {
                return Ok(if versioned {
                    Self::Versioned(pointer.cast())
                } else {
                    Self::Legacy(pointer.cast())
                });
            }
        }
        Err(PyBufferError::new_err(
            "__dlpack__ returned a capsule that is not a tensor, or one used already",
        ))
    }

    fn tensor(&self) -> &DlTensor {
        match self {
            // SAFETY: the pointer came from a capsule of this type and lives until the deleter is called.
            Self::Legacy(managed) => unsafe { &(*managed.as_ptr()).tensor },
            // SAFETY: as above.
            Self::Versioned(managed) => unsafe { &(*managed.as_ptr()).tensor },
        }
    }

    /// Major version and whether writing is forbidden.
    fn header(&self) -> (u32, bool) {
        match self {
            Self::Legacy(_) => (1, false),
            // SAFETY: the version is first in every version of the struct. The flags are read only where it is ours.
            Self::Versioned(managed) => match unsafe { (*managed.as_ptr()).version.major } {
                // SAFETY: a struct of version 1 has flags there.
                1 => (1, unsafe { (*managed.as_ptr()).flags } & READ_ONLY != 0),
                major => (major, false),
            },
        }
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        match self {
            Self::Legacy(managed) => {
                // SAFETY: we own it; the deleter is called this once.
                unsafe {
                    if let Some(delete) = (*managed.as_ptr()).deleter {
                        delete(managed.as_ptr());
                    }
                }
            }
            Self::Versioned(managed) => {
                // SAFETY: as above.
                unsafe {
                    if let Some(delete) = (*managed.as_ptr()).deleter {
                        delete(managed.as_ptr());
                    }
                }
            }
        }
    }
}

/// Takes a tensor of another library, without a copy.
pub(crate) fn import(object: &Bound<'_, PyAny>) -> PyResult<Tensor> {
    let py = object.py();
    check_device(object)?;
    let options = PyDict::new(py);
    options.set_item("max_version", (1, 1))?;
    let capsule = match object.call_method("__dlpack__", (), Some(&options)) {
        // Exporters from before DLPack 1.0 know no such argument.
        Err(error) if error.is_instance_of::<PyTypeError>(py) => object.call_method0("__dlpack__")?,
        answer => answer?,
    };
    let taken = Taken::from_capsule(capsule.cast::<PyCapsule>()?)?;
    let (major, read_only) = taken.header();
    if major != 1 {
        return Err(unsupported(
            py,
            "tensor.dlpack",
            format!("the tensor speaks DLPack {major}, this package reads version 1: update one of them"),
        ));
    }
    let tensor = taken.tensor();
    let dtype = tensor.dtype;
    let Some((dtype, ..)) = (TYPES.iter()).find(|row| (row.1, row.2, 1) == (dtype.code, dtype.bits, dtype.lanes))
    else {
        let DataType { code, bits, lanes } = dtype;
        return Err(unsupported(
            py,
            "tensor.dtype",
            format!("DLPack type (code {code}, {bits} bits, {lanes} lanes) has no Stagewire dtype"),
        ));
    };
    let rank = usize::try_from(tensor.ndim).map_err(|_| PyBufferError::new_err("negative number of dimensions"))?;
    // SAFETY: a DLPack tensor has `ndim` extents at `shape`.
    let extents = unsafe { extents(tensor.shape, rank) };
    let shape: Option<Vec<u64>> = extents.iter().map(|extent| u64::try_from(*extent).ok()).collect();
    let Some(shape) = shape else {
        return Err(invalid(
            py,
            "tensor.shape",
            format!("the tensor has a negative extent: {extents:?}"),
        ));
    };
    let spec = TensorSpec::new(*dtype, shape).map_err(|error| raise_from(py, &error))?;
    let strides = if tensor.strides.is_null() {
        contiguous_strides(spec.shape())
    } else {
        // SAFETY: as for the shape.
        unsafe { self::extents(tensor.strides, rank) }.to_vec()
    };
    let pointer = NonNull::new(tensor.data.cast::<u8>()).map(|data| {
        // SAFETY: the data begins `byte_offset` bytes behind `data`, inside the exporter's memory.
        unsafe { data.add(usize::try_from(tensor.byte_offset).unwrap_or(0)) }
    });
    let pointer = match pointer {
        Some(pointer) => pointer,
        None if spec.nbytes().0 == 0 => NonNull::dangling(),
        None => return Err(PyBufferError::new_err("the tensor has no memory")),
    };
    let owner: Arc<dyn Any + Send + Sync> = Arc::new(std::sync::Mutex::new(Lent::new(taken)));
    // SAFETY: the exporter keeps the memory in place until the deleter is called, when the owner is dropped.
    let memory = unsafe { Memory::new(pointer, owner) };
    Ok(Tensor::new(spec, Some(strides), memory, read_only))
}

fn check_device(object: &Bound<'_, PyAny>) -> PyResult<()> {
    let (kind, id): (i32, i32) = object.call_method0("__dlpack_device__")?.extract()?;
    if kind == CPU || kind == CUDA_HOST {
        return Ok(());
    }
    Err(unsupported(
        object.py(),
        "tensor.device",
        format!("it is in the memory of device {id} of DLPack type {kind}; copy it to the host first: .cpu()"),
    ))
}

/// # Safety
/// `pointer` must point to `rank` numbers, unless that is 0.
unsafe fn extents<'a>(pointer: *const i64, rank: usize) -> &'a [i64] {
    if rank == 0 || pointer.is_null() {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(pointer, rank) }
}

/// Strides of a row-major tensor, in elements.
pub(crate) fn contiguous_strides(shape: &[u64]) -> Vec<i64> {
    let mut stride = 1_i64;
    let mut strides: Vec<i64> = (shape.iter().rev())
        .map(|extent| {
            let this = stride;
            stride = stride.saturating_mul(i64::try_from((*extent).max(1)).unwrap_or(i64::MAX));
            this
        })
        .collect();
    strides.reverse();
    strides
}

/// What an exported capsule points to, and all that it needs.
struct Exported<T> {
    managed: T,
    shape: Vec<i64>,
    strides: Vec<i64>,
    _memory: Memory,
}

/// Gives a tensor to another library, without a copy. The memory stays until that library lets go.
///
/// `major` is the highest version that the other side reads: 0 is the struct without version and flags.
pub(crate) fn export(py: Python<'_>, tensor: &Tensor, major: u32) -> PyResult<Py<PyAny>> {
    if major == 0 && tensor.is_read_only() {
        return Err(PyBufferError::new_err(
            "the tensor is read-only, and a consumer from before DLPack 1.0 cannot be told: update it, or copy",
        ));
    }
    let row = TYPES.iter().find(|row| row.0 == tensor.spec().dtype());
    let Some((_, code, bits)) = row else {
        return Err(PyBufferError::new_err("the dtype has no DLPack type"));
    };
    let shape = (tensor.spec().shape().iter())
        .map(|extent| i64::try_from(*extent).unwrap_or(i64::MAX))
        .collect();
    let dl = DlTensor {
        data: tensor.memory().pointer().as_ptr().cast(),
        device: Device { kind: CPU, id: 0 },
        ndim: i32::try_from(tensor.spec().shape().len()).unwrap_or(i32::MAX),
        dtype: DataType {
            code: *code,
            bits: *bits,
            lanes: 1,
        },
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        byte_offset: 0,
    };
    let (strides, memory) = (tensor.strides(), tensor.memory().clone());
    if major == 0 {
        let managed = Managed {
            tensor: dl,
            context: std::ptr::null_mut(),
            deleter: Some(delete::<Managed>),
        };
        capsule(py, LEGACY, managed, shape, strides, memory, |managed| {
            &mut managed.tensor
        })
    } else {
        let managed = ManagedVersioned {
            version: Version { major: 1, minor: 1 },
            context: std::ptr::null_mut(),
            deleter: Some(delete::<ManagedVersioned>),
            flags: if tensor.is_read_only() { READ_ONLY } else { 0 },
            tensor: dl,
        };
        capsule(py, VERSIONED, managed, shape, strides, memory, |managed| {
            &mut managed.tensor
        })
    }
}

/// The two layouts, for the deleter to find what it was made with.
trait Layout: Sized {
    fn context(&mut self) -> &mut *mut c_void;
}

impl Layout for Managed {
    fn context(&mut self) -> &mut *mut c_void {
        &mut self.context
    }
}

impl Layout for ManagedVersioned {
    fn context(&mut self) -> &mut *mut c_void {
        &mut self.context
    }
}

fn capsule<T: Layout>(
    py: Python<'_>,
    name: &'static CStr,
    managed: T,
    shape: Vec<i64>,
    strides: Vec<i64>,
    memory: Memory,
    tensor: impl Fn(&mut T) -> &mut DlTensor,
) -> PyResult<Py<PyAny>> {
    let exported = Box::into_raw(Box::new(Exported {
        managed,
        shape,
        strides,
        _memory: memory,
    }));
    // SAFETY: the box was just made and nobody else knows it.
    let parts = unsafe { &mut *exported };
    let dl = tensor(&mut parts.managed);
    dl.shape = parts.shape.as_mut_ptr();
    dl.strides = parts.strides.as_mut_ptr();
    *parts.managed.context() = exported.cast();
    let pointer: *mut T = &raw mut parts.managed;
    // SAFETY: the GIL is held; pointer and name live as long as the capsule or its taker needs them.
    let capsule = unsafe { ffi::PyCapsule_New(pointer.cast(), name.as_ptr(), Some(drop_unused)) };
    if capsule.is_null() {
        // SAFETY: the capsule that would have owned the box does not exist.
        drop(unsafe { Box::from_raw(exported) });
        return Err(PyErr::fetch(py));
    }
    // SAFETY: a new reference that nobody else owns.
    Ok(unsafe { Bound::from_owned_ptr(py, capsule) }.unbind())
}

/// The deleter of an exported tensor. Needs no GIL.
unsafe extern "C" fn delete<T: Layout>(managed: *mut T) {
    // SAFETY: whoever took the capsule calls this once, with the pointer that we put there; the context is the box.
    drop(unsafe { Box::from_raw((*(*managed).context()).cast::<Exported<T>>()) });
}

/// Destructor of a capsule: frees the tensor that nobody took.
unsafe extern "C" fn drop_unused(object: *mut ffi::PyObject) {
    // SAFETY: Python calls this with the dying capsule and the GIL held; the pointer is ours as long as the name is.
    unsafe {
        if ffi::PyCapsule_IsValid(object, VERSIONED.as_ptr()) == 1 {
            delete(ffi::PyCapsule_GetPointer(object, VERSIONED.as_ptr()).cast::<ManagedVersioned>());
        } else if ffi::PyCapsule_IsValid(object, LEGACY.as_ptr()) == 1 {
            delete(ffi::PyCapsule_GetPointer(object, LEGACY.as_ptr()).cast::<Managed>());
        }
    }
}
