//! What Python publishes, in the crates' words.
#![expect(unsafe_code, reason = "lends the memory of Python's tensors")]

use pyo3::prelude::*;
use stagewire_connector::{Owner, PublishSpec};
use stagewire_core::{Chunking, Entry, EntryValue, Manifest, SchemaError};
use stagewire_transfer::{Borrowed, Memory};

use crate::arena::Allocations;
use crate::error::{invalid, raise_from};
use crate::tensor::Tensor;

/// What stands under a name.
#[derive(FromPyObject)]
pub(crate) enum Value<'py> {
    One(PyRef<'py, Tensor>),
    Many(Vec<PyRef<'py, Tensor>>),
}

/// A bundle as `stagewire._bundle.Imported` makes it.
pub(crate) type Entries<'py> = Vec<(String, Option<Value<'py>>)>;

/// How a bundle is described and cut.
pub(crate) struct Description<'a> {
    pub(crate) kind: &'a str,
    /// JSON.
    pub(crate) metadata: &'a str,
    /// Dimension and count.
    pub(crate) chunking: Option<(u32, u32)>,
}

/// The entries of a bundle and the memory of its tensors, where it is `ours` as part of the arena.
pub(crate) fn lend_all(
    py: Python<'_>,
    entries: Entries<'_>,
    ours: Option<&Allocations>,
) -> PyResult<(Vec<Entry>, Vec<Memory>)> {
    let mut memory = Vec::new();
    let mut described = Vec::with_capacity(entries.len());
    for (name, value) in entries {
        let value = match value {
            None => EntryValue::None,
            Some(Value::One(tensor)) => {
                memory.push(lend(py, &name, &tensor, ours)?);
                EntryValue::Tensor(tensor.spec().clone())
            }
            Some(Value::Many(tensors)) => {
                for tensor in &tensors {
                    memory.push(lend(py, &name, tensor, ours)?);
                }
                EntryValue::List(tensors.iter().map(|tensor| tensor.spec().clone()).collect())
            }
        };
        described.push(Entry { name, value });
    }
    Ok((described, memory))
}

/// The manifest of a bundle.
pub(crate) fn manifest(py: Python<'_>, entries: Vec<Entry>, how: &Description<'_>) -> PyResult<Manifest> {
    let made = (|| -> Result<_, SchemaError> {
        let manifest = Manifest::new(how.kind.parse()?, entries)?.with_metadata_text(how.metadata)?;
        match how.chunking {
            None => Ok(manifest),
            Some((dim, count)) => manifest.with_chunking(Chunking::new(dim, count)?),
        }
    })();
    made.map_err(|error| raise_from(py, &error))
}

/// The usual specification, with another deadline where one is given.
pub(crate) fn spec(
    request: String,
    manifest: Manifest,
    owner: impl Into<Owner>,
    deadline: Option<std::time::Duration>,
) -> PublishSpec {
    let usual = PublishSpec::new(request, manifest, owner);
    PublishSpec {
        deadline: deadline.or(usual.deadline),
        ..usual
    }
}

/// The memory of one tensor.
pub(crate) fn lend(py: Python<'_>, name: &str, tensor: &Tensor, ours: Option<&Allocations>) -> PyResult<Memory> {
    if !tensor.is_contiguous() {
        let message = format!(
            "tensor {name:?} is not contiguous (strides {:?} in elements)",
            tensor.strides()
        );
        return Err(invalid(py, "tensor.not_contiguous", message));
    }
    let len = usize::try_from(tensor.spec().nbytes().0)?;
    let memory = tensor.memory();
    if let Some(extent) = ours.and_then(|ours| ours.find(memory.pointer(), len)) {
        return Ok(extent.into());
    }
    // SAFETY: a contiguous tensor has that many readable bytes at its address for as long as the owner lives. That
    // nobody writes to them until release is what `publish` asks of its caller.
    Ok(unsafe { Borrowed::new(memory.pointer(), len, memory.owner()) }.into())
}
