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
use crate::error::raise;
use crate::pending::Pending;
use crate::runs::Part;
use crate::runtime::wait;

/// One read: name of the segment, address there, destination.
type Job<'py> = (String, u64, Part<'py>);

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

    /// Reads all of them within `deadline` seconds, or fails. Nothing is written once it is over, also where it was
    /// cancelled.
    fn pull(&self, py: Python<'_>, jobs: Vec<Job<'_>>, deadline: f64) -> PyResult<Pending> {
        let within = seconds(py, Some(deadline))?.unwrap_or_default();
        let pulls = jobs.into_iter().map(|(segment, address, part)| {
            part.check_writable(py)?;
            let (records, len) = (part.records(py)?, part.len());
            let nbytes = usize::try_from(part.tensor().spec().nbytes().0)?;
            let memory = part.tensor().memory();
            // SAFETY: a writable, contiguous tensor of that many bytes, kept in place by its owner. That nobody touches
            // them while they are pulled is what the store asks of its caller.
            let target = unsafe { Target::new(memory.pointer(), nbytes, memory.owner()) };
            Ok((segment, SegmentBuffer { address, len }, records, target))
        });
        let pulls = pulls.collect::<PyResult<Vec<_>>>()?;
        let mooncake = Arc::clone(&self.mooncake);
        let pulled = async move {
            let end = Instant::now() + within;
            for (name, source, records, target) in &pulls {
                let connect = ConnectOptions { deadline: left(end) };
                let segment = mooncake.open(name, connect).await?;
                let deadline = Some(left(end));
                segment
                    .pull(*source, records, target, TransferOptions { deadline })
                    .await?;
            }
            Ok::<_, stagewire_transfer::MooncakeError>(())
        };
        Pending::spawn(py, pulled, |py, pulled| {
            pulled
                .map(|()| py.None())
                .map_err(|error| raise(py, &error.to_failure()))
        })
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
