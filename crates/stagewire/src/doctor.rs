//! What this host can do, and why not: one file for each probe.
//!
//! A probe looks at one thing of this machine and says in one or more [`Check`]s what it found; nothing is concluded
//! from what is not there to be read. Those that read `/proc`, `/sys` and `/dev` do so below a [`Root`], so that tests
//! can show them another machine.

mod check;
mod clock;
mod congestion;
mod container;
mod cores;
mod dev_shm;
mod gpu;
mod huge_pages;
mod interfaces;
mod kernel;
mod limits;
mod memory;
mod nixl;
mod pair;
mod python;
mod rdma;
mod report;
mod root;
mod run;
mod run_dir;
mod status_file;
mod transports;
mod wrap;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use stagewire_api::RunDir;

pub(crate) use pair::{PeerArgs, peer};
pub(crate) use report::Report;

use self::check::Check;
use self::root::Root;
use self::run::{Probe, probe};
use crate::python::Python;

/// What the probes look at.
#[derive(Debug)]
pub(crate) struct Setting {
    root: Root,
    python: Python,
    /// A virtual environment with the peers' wheels alone, as the benchmarks have one.
    peers: Option<PathBuf>,
    run_dir: RunDir,
}

impl Setting {
    /// This machine.
    pub(crate) fn here(python: Python, peers: Option<PathBuf>, run_dir: RunDir) -> Self {
        Self {
            root: Root::host(),
            python,
            peers,
            run_dir,
        }
    }
}

/// Asks every probe, all at once, none for longer than `limit`.
pub(crate) async fn examine(setting: Setting, limit: Duration) -> Report {
    let setting = Arc::new(setting);
    let files = |names, look: fn(&Root) -> Vec<Check>| {
        let setting = setting.clone();
        run::files(names, move || look(&setting.root))
    };
    let (place, tried) = (setting.clone(), setting.clone());
    let probes: Vec<Probe> = vec![
        files(&["kernel"], kernel::look),
        files(&["cores"], cores::look),
        files(&["memory"], memory::look),
        files(&["clock"], clock::look),
        files(&["container"], container::look),
        probe(pair::NAMES, async move { pair::try_out(&tried.root).await }),
        run::files(&["run-dir"], move || run_dir::look(&place.run_dir)),
        files(&["huge-pages", "shm-huge-pages", "hugetlb"], huge_pages::look),
        files(&["dev-shm"], dev_shm::look),
        files(&["interfaces"], interfaces::look),
        files(&["congestion"], congestion::look),
        files(&["rdma"], rdma::look),
        files(&["gpu"], gpu::look),
        probe(&["python"], python::stagewire(setting.clone())),
        probe(&["mooncake-engine"], python::mooncake_engine(setting.clone())),
        probe(&["nixl"], nixl::try_out(setting.clone())),
        files(&["open-files", "memlock"], limits::look),
    ];
    Report::new(run::all(probes, limit).await)
}
