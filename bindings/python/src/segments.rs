//! `Segments`: memory of Mooncake's engines, read over their own wire instead of by an engine of this process.
#![expect(unsafe_code, reason = "lends the memory of Python's tensors as destinations")]

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use pyo3::prelude::*;
use stagewire_core::{ByteCount, Classify, Incarnation};
use stagewire_transfer::{
    ConnectOptions, Host, HostOptions, Mooncake, MooncakeOptions, Network, NetworkOptions, SegmentBuffer, Target,
    TransferOptions,
};
use tokio::time::Instant;
use uuid::Uuid;

use crate::connector::seconds;
use crate::error::{invalid, raise};
use crate::runs::{Run, inside};
use crate::runtime::wait;
use crate::tensor::Tensor;

/// One read: name of the segment, address there, then the destination: tensor, run, first byte of the run, bytes.
type Job<'py> = (String, u64, PyRef<'py, Tensor>, Run, u64, u64);

/// Reads segments by their names.
#[pyclass(module = "stagewire._native", frozen)]
pub(crate) struct Segments {
    network: Arc<Network>,
    mooncake: Arc<Mooncake>,
}

#[pymethods]
impl Segments {
    #[new]
    fn new(py: Python<'_>, run_dir: PathBuf) -> PyResult<Self> {
        let started = wait(py, async {
            let host = Host::start(HostOptions {
                dir: run_dir,
                incarnation: Incarnation(Uuid::new_v4()),
                arena_limit: ByteCount(0),
            });
            let host = host.await.map_err(|error| error.to_failure())?;
            let network = Network::start(host, NetworkOptions::default());
            let network = network.await.map_err(|error| error.to_failure())?;
            let mooncake = Mooncake::start(network.clone(), MooncakeOptions::default());
            let mooncake = mooncake.await.map_err(|error| error.to_failure())?;
            Ok((network, mooncake))
        })?;
        let (network, mooncake) = started.map_err(|failure| raise(py, &failure))?;
        Ok(Self { network, mooncake })
    }

    /// Reads all of them within `deadline` seconds, or raises. Nothing is written after that.
    fn pull(&self, py: Python<'_>, jobs: Vec<Job<'_>>, deadline: f64) -> PyResult<()> {
        let within = seconds(py, Some(deadline))?.unwrap_or_default();
        let pulls = jobs.iter().map(|(segment, address, tensor, run, start, len)| {
            if tensor.is_read_only() {
                return Err(invalid(py, "argument.memory", "the destination is read-only"));
            }
            let records = inside(py, tensor, *run, *start, *len)?;
            let nbytes = usize::try_from(tensor.spec().nbytes().0)?;
            let memory = tensor.memory();
            // SAFETY: a writable, contiguous tensor of that many bytes, kept in place by its owner. That nobody touches
            // them while they are pulled is what the store asks of its caller.
            let target = unsafe { Target::new(memory.pointer(), nbytes, memory.owner()) };
            let source = SegmentBuffer {
                address: *address,
                len: *len,
            };
            Ok((segment.clone(), source, records, target))
        });
        let pulls = pulls.collect::<PyResult<Vec<_>>>()?;
        let pulled = wait(py, async {
            let end = Instant::now() + within;
            for (name, source, records, target) in &pulls {
                let connect = ConnectOptions { deadline: left(end) };
                let segment = self.mooncake.open(name, connect).await?;
                let deadline = Some(left(end));
                segment
                    .pull(*source, records, target, TransferOptions { deadline })
                    .await?;
            }
            Ok::<_, stagewire_transfer::MooncakeError>(())
        })?;
        pulled.map_err(|error| raise(py, &error.to_failure()))
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        wait(py, async {
            self.mooncake.shutdown().await;
            self.network.shutdown().await;
            self.network.host().shutdown().await;
        })
    }
}

fn left(end: Instant) -> Duration {
    end.saturating_duration_since(Instant::now())
}
