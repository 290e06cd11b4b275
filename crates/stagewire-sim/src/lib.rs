//! A cluster simulator over the very scheduler that serves.
//!
//! *What it is.* Discrete events over [`stagewire_sched::Sched`]: jobs that come as a model or a trace says, workers that
//! take the time that was measured, bytes that share links fairly, a store that gets full, workers that die and machines
//! that are taken away. [`Experiment::parse`] reads what is simulated, [`simulate`] says what becomes of it, [`fewest`]
//! finds how many workers a stage needs. The integration tests of the crate are the fault harness of the orchestrator.
//!
//! *Guarantees.* A seed decides everything, and times are integer nanoseconds: the same experiment gives the same events,
//! which [`Report::event_hash`] sums up.
//!
//! *What it is not.* No I/O and no clock: what it reads and writes is text. It knows nothing of a GPU but how long a stage
//! takes there, and nothing of a network but bytes per second.
//!
//! ```
//! use stagewire_sim::{Experiment, Layout, simulate};
//!
//! let text = r#"
//!     workload = "wan-dfx"
//!     arrivals = { jobs = 100, rate-per-s = 0.2 }
//!     stage = [
//!         { name = "encode", workers = 1 },
//!         { name = "denoise", workers = 6 },
//!         { name = "decode", workers = 1 },
//!     ]
//! "#;
//! let experiment = Experiment::parse(text, |file| Err(format!("there is no {file}")))?;
//! let report = simulate(&experiment, Layout::Disaggregated)?;
//! assert_eq!(report.succeeded, 100);
//! assert!(report.latency_s.p50 > 1.45 + 20.35 + 2.4, "no job is faster than its stages");
//! # Ok::<(), stagewire_sim::SimError>(())
//! ```

mod agenda;
mod arrivals;
mod cluster;
mod experiment;
mod links;
mod plan;
mod random;
mod record;
mod report;
mod service;

pub use agenda::{Agenda, Appointment};
pub use experiment::{
    Arrival, Arrivals, Checkpoints, Class, Deaths, Experiment, Layout, Network, SimError, Spot, Stage,
};
pub use plan::{Trial, fewest};
pub use random::Random;
pub use record::JobRecord;
pub use report::{ClassReport, Percentiles, Report, StageReport, simulate};
pub use service::{WORKLOADS, Workload};
