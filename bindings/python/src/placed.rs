//! Handles of payloads whose bytes are where only Python can get them.

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use rand::random;
use stagewire_core::{
    Capability, Chunking, Handle as CoreHandle, Incarnation, Lease, PayloadId, Peer, ProcessRef, RegionRef, StageName,
    TransferMode, TransportAddress,
};

use crate::error::{invalid, raise_from};
use crate::handle::Handle;
use crate::payload::{self, Description, Entries};
use crate::runs::Run;

/// The handle of a payload that is in no place yet; see [`place_payload`].
#[pyfunction]
#[expect(
    clippy::too_many_arguments,
    reason = "one for each thing that a payload says of itself"
)]
pub(crate) fn describe_payload(
    py: Python<'_>,
    payload_id: &str,
    request: String,
    stage: &str,
    kind: &str,
    entries: Entries<'_>,
    metadata: &str,
    chunking: Option<(u32, u32)>,
) -> PyResult<Handle> {
    let payload: PayloadId = payload_id
        .parse()
        .map_err(|_| invalid(py, "payload.id", format!("{payload_id:?} is no payload id")))?;
    let stage = StageName::new(stage).map_err(|error| invalid(py, "stage.name", error.to_string()))?;
    let how = Description {
        kind,
        metadata,
        chunking,
    };
    let (entries, _) = payload::lend_all(py, entries, None)?;
    let manifest = payload::manifest(py, entries, &how)?;
    let holder = Peer {
        incarnation: Incarnation(payload.0),
        // No process of any host: nothing of ours serves these bytes.
        process: ProcessRef { pid: 0, started: 0 },
        socket: String::new(),
        transports: Vec::new(),
    };
    Ok(Handle::new(CoreHandle {
        payload,
        request,
        stage,
        manifest,
        mode: TransferMode::Store,
        holder,
        capability: Capability::from_random(random()),
        regions: Vec::new(),
    }))
}

/// The same handle, of a payload that `transport` finds with `address`.
#[pyfunction]
pub(crate) fn place_payload(handle: &Handle, transport: &str, address: Vec<u8>) -> Handle {
    let mut handle = handle.inner().clone();
    let region = |(index, len)| RegionRef {
        transport: transport.to_owned(),
        region: index,
        generation: 0,
        capability: handle.capability,
        len,
    };
    let lengths = handle.manifest.tensors().map(|tensor| tensor.nbytes().0);
    handle.regions = (0..).zip(lengths).map(region).collect();
    handle.holder.transports = vec![TransportAddress {
        transport: transport.to_owned(),
        address,
    }];
    Handle::new(handle)
}

/// The same handle, which says where else its payload may be one day: `transport` finds it there with `address`.
#[pyfunction]
pub(crate) fn place_otherwise(handle: &Handle, transport: &str, address: Vec<u8>) -> Handle {
    let mut handle = handle.inner().clone();
    handle.holder.transports.push(TransportAddress {
        transport: transport.to_owned(),
        address,
    });
    Handle::new(handle)
}

/// What [`place_payload`], or [`place_otherwise`], was given for `transport`; `None` where the payload is somewhere else.
#[pyfunction]
pub(crate) fn payload_place<'py>(py: Python<'py>, handle: &Handle, transport: &str) -> Option<Bound<'py, PyBytes>> {
    let places = &handle.inner().holder.transports;
    let place = places.iter().find(|place| place.transport == transport)?;
    Some(PyBytes::new(py, &place.address))
}

/// The name of a lease, and its seconds where it has some.
#[pyfunction]
pub(crate) fn parse_lease(py: Python<'_>, text: &str) -> PyResult<(&'static str, Option<f64>)> {
    match text.parse::<Lease>().map_err(|error| raise_from(py, &error))? {
        Lease::DeleteOnConsume => Ok(("delete_on_consume", None)),
        Lease::Ttl(ttl) => Ok(("ttl", Some(ttl.as_secs_f64()))),
        Lease::Pinned => Ok(("pinned", None)),
        Lease::Cached => Ok(("cached", None)),
        other => Err(invalid(
            py,
            "payload.lease",
            format!("Mooncake Store has no lease {other}"),
        )),
    }
}

/// Where each tensor's part of chunk `index` lies in it.
#[pyfunction]
pub(crate) fn payload_runs(py: Python<'_>, handle: &Handle, index: u32) -> PyResult<Vec<Run>> {
    let manifest = &handle.inner().manifest;
    let Some(chunking) = manifest.chunking() else {
        let whole = manifest.tensors().map(|tensor| {
            let len = tensor.nbytes().0;
            (0, len, 1, len)
        });
        return Ok(whole.collect());
    };
    let run = |slice: stagewire_core::ChunkSlice| (slice.run.offset, slice.run.width, slice.run.rows, slice.run.pitch);
    let slices = manifest
        .tensors()
        .map(|tensor| Chunking::slice(&chunking, tensor, index).map(run));
    slices.collect::<Result<_, _>>().map_err(|error| raise_from(py, &error))
}
