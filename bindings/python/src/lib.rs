//! The Python face of Stagewire: the extension module `stagewire._native`, which `python/stagewire` wraps.
//!
//! *What it is.* Tensors in and out by DLPack and the buffer protocol without a copy (`tensor`, `dlpack`, `buffer`), one
//! runtime for the process (`runtime`) and what goes on in it meanwhile (`pending`), errors as exceptions (`error`), memory
//! given back under the GIL by a thread of its own (`reaper`).
//!
//! *Guarantees.* The GIL is released while bytes move and while anything is waited for; signal handlers run meanwhile.
//! No thread of the runtime ever waits for the GIL, so a stage that holds it does not stop grants from being renewed.

mod arena;
mod buffer;
mod conformance;
mod connector;
mod consumer;
mod dlpack;
mod engine;
mod error;
mod foreign;
mod handle;
mod kv;
mod payload;
mod pending;
mod placed;
mod reaper;
mod runs;
mod runtime;
mod segments;
mod store;
mod tensor;
mod worker;

use pyo3::prelude::*;

/// The extension module.
#[pymodule]
mod _native {
    use pyo3::prelude::*;
    use stagewire_core::ByteCount;

    #[pymodule_export]
    use super::conformance::{run_conformance, run_store_conformance};
    #[pymodule_export]
    use super::connector::{Connector, Publication, Registered};
    #[pymodule_export]
    use super::consumer::Consumer;
    #[pymodule_export]
    use super::engine::{EnginePin, EngineRegion, EngineTransport};
    #[pymodule_export]
    use super::handle::Handle;
    #[pymodule_export]
    use super::kv::{KvEngine, KvPair, KvPlan, KvReceiver, KvReceiverRoom, KvSender, KvSenderRoom, kv_handshake};
    #[pymodule_export]
    use super::pending::Pending;
    #[pymodule_export]
    use super::placed::{describe_payload, parse_lease, payload_place, payload_runs, place_otherwise, place_payload};
    #[pymodule_export]
    use super::reaper::end_reaping;
    #[pymodule_export]
    use super::runs::{run_digest, run_gather, run_rows, run_scatter};
    #[pymodule_export]
    use super::segments::Segments;
    #[pymodule_export]
    use super::store::{HostStore, run_keeper};
    #[pymodule_export]
    use super::tensor::Tensor;
    #[pymodule_export]
    use super::worker::{Task, Worker};

    /// A number of bytes from text such as `256MiB`.
    #[pyfunction]
    fn parse_bytes(py: Python<'_>, text: &str) -> PyResult<u64> {
        let parsed = text.parse::<ByteCount>();
        parsed
            .map(|bytes| bytes.0)
            .map_err(|error| super::error::invalid(py, "argument.bytes", error.to_string()))
    }

    /// Writes what the crates log to stderr: warnings, or what `RUST_LOG` asks for, such as `stagewire=debug`.
    /// Does nothing the second time.
    #[pyfunction]
    fn log_to_stderr() {
        let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "warn".into());
        let logger = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(std::io::stderr)
            .with_ansi(false);
        // Somebody has set up another: then it is theirs.
        let _ = logger.try_init();
    }

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        let end = module.getattr("end_reaping")?;
        module.py().import("atexit")?.call_method1("register", (end,))?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
