//! `nixl`, with the library of the wheel `nixl-cu12`. Without it, these tests say so and end.

pub(crate) mod child;
#[expect(unsafe_code, reason = "speaks to CUDA's driver")]
mod device;
mod faults;
mod processes;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use stagewire_core::{Incarnation, Peer};
use stagewire_transfer::conformance::{Backend, Side, Violation, assert_conforms};
use stagewire_transfer::{Host, HostOptions, Network, NetworkOptions, Nixl, NixlLibrary, NixlOptions, Transport};
use uuid::Uuid;

use crate::{oracle, support};

/// Names the library to a child.
pub(crate) const LIBRARY: &str = "STAGEWIRE_NIXL_LIBRARY";

/// A process, or one side of a test, with NIXL.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) host: Arc<Host>,
    pub(crate) nixl: Arc<Nixl>,
}

impl End {
    pub(crate) async fn start(dir: &Path) -> Self {
        Self::start_as(dir, Incarnation(Uuid::new_v4())).await
    }

    pub(crate) async fn start_as(dir: &Path, incarnation: Incarnation) -> Self {
        let options = HostOptions {
            dir: dir.to_owned(),
            incarnation,
            arena_limit: support::ARENA,
        };
        let host = Host::start(options).await.expect("the host starts");
        let network = Network::start(host.clone(), NetworkOptions::default())
            .await
            .expect("the network starts");
        let options = NixlOptions {
            library: library(),
            ..NixlOptions::default()
        };
        let nixl = Nixl::start(&network, options).await.expect("NIXL starts");
        Self { host, nixl }
    }

    pub(crate) fn peer(&self) -> Peer {
        Peer {
            incarnation: self.host.incarnation(),
            process: self.host.process(),
            socket: String::new(),
            transports: vec![self.nixl.address()],
        }
    }
}

/// The library in the environment of the peers' wheels, where there is one.
pub(crate) fn library() -> Option<PathBuf> {
    if let Some(library) = std::env::var_os(LIBRARY) {
        return Some(library.into());
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let peers = std::env::var_os("STAGEWIRE_PEERS").map_or_else(|| root.join(".peers"), PathBuf::from);
    let versions = std::fs::read_dir(peers.join("lib")).ok()?;
    versions.flatten().find_map(|version| {
        let library = version
            .path()
            .join("site-packages/.nixl_cu12.mesonpy.libs/libnixl_capi.so");
        library.exists().then_some(library)
    })
}

/// Whether NIXL is there; says so where not.
pub(crate) fn is_here() -> bool {
    match NixlLibrary::open(library().as_deref()) {
        Ok(_) => true,
        Err(error) => {
            support::without_peers(&error.to_string());
            false
        }
    }
}

pub(crate) struct TwoAgents {
    pub(crate) dir: PathBuf,
}

#[async_trait]
impl Backend for TwoAgents {
    async fn side(&self) -> Result<Side, Violation> {
        let end = Arc::new(End::start(&self.dir).await);
        let (nixl, host) = (end.nixl.clone(), end.host.clone());
        Ok(Side {
            transport: end.nixl.clone(),
            peer: end.peer(),
            // From the arena and from elsewhere.
            memory: Arc::new(move |bytes| {
                let name = if bytes.len() % 2 == 0 { "shm" } else { "cma" };
                support::memory(&host, name, bytes)
            }),
            regions: Arc::new(move || nixl.registrations()),
            keep: end,
        })
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nixl_conforms() {
    if !is_here() {
        return;
    }
    let (_parent, dir) = support::run_dir();
    assert_conforms(&TwoAgents { dir }).await;
}

#[test]
fn nixl_moves_what_the_oracle_says() {
    if is_here() {
        let (_parent, dir) = support::run_dir();
        // Each registers memory with UCX and has the peer load it, which takes some milliseconds.
        oracle::agrees(&support::runtime(), &TwoAgents { dir }, 20);
    }
}
