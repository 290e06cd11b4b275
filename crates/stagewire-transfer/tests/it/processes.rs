//! What every transport keeps while its two ends are processes of their own, one of which may stop or die.

pub(crate) mod child;
mod faults;
mod records;
mod releases;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use stagewire_core::RegionRef;
use stagewire_transfer::conformance::{Backend, Side};
use stagewire_transfer::{ConnectOptions, Pinned, Region, RegisterOptions, Remote, TransferOptions};

use crate::child::Offer;
use crate::conformance::OneHost;
use crate::mooncake_transport::Mooncakes;
use crate::nixl::{self, TwoAgents};
use crate::support::{bulk, cma_works, run_dir};
use crate::tcp::OverTcp;

/// Makes a test for each transport named out of a function.
macro_rules! for_each_transport {
    ($($test:ident: $($transport:ident)*;)*) => {$(
        mod $test {$(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $transport() {
                if let Some(end) = $crate::processes::End::start(stringify!($transport)).await {
                    super::$test(end).await;
                }
            }
        )*}
    )*};
}
use for_each_transport;

/// The end of a transport that a test has itself.
struct End {
    name: &'static str,
    side: Side,
    dir: PathBuf,
    _parent: tempfile::TempDir,
}

impl End {
    /// `None` where this machine has not what the transport needs, which is then said.
    async fn start(name: &'static str) -> Option<Self> {
        let (parent, dir) = run_dir();
        let works = match name {
            "cma" => cma_works(&dir).await,
            "nixl" => nixl::is_here(),
            _ => true,
        };
        if !works {
            return None;
        }
        Some(Self {
            name,
            side: side(name, &dir).await,
            dir,
            _parent: parent,
        })
    }

    /// Registers [`seeded`] bytes, and tells how others reach them.
    fn offer(&self, seed: usize, len: usize) -> (Region, Offer) {
        let memory = (self.side.memory)(&seeded(seed, len));
        let region = self.side.transport.register(memory, RegisterOptions::default());
        let region = region.expect("registered");
        let offer = (self.side.peer.clone(), region.reference());
        (region, offer)
    }

    async fn connect(&self, peer: &stagewire_core::Peer) -> Arc<dyn Remote> {
        let connected = self.side.transport.connect(peer, ConnectOptions::default()).await;
        connected.expect("connected")
    }

    async fn pin(&self, (peer, region): &Offer) -> Box<dyn Pinned> {
        pin(&*self.connect(peer).await, region).await
    }
}

async fn pin(remote: &dyn Remote, region: &RegionRef) -> Box<dyn Pinned> {
    remote.pin(region, TransferOptions::default()).await.expect("pinned")
}

/// One end of a transport, with its defaults.
async fn side(name: &str, dir: &Path) -> Side {
    let dir = dir.to_owned();
    let made = match name {
        "shm" => OneHost { dir, transport: "shm" }.side().await,
        "cma" => OneHost { dir, transport: "cma" }.side().await,
        "tcp" => OverTcp { dir, digest: true }.side().await,
        "mooncake" => Mooncakes.side().await,
        "nixl" => TwoAgents { dir }.side().await,
        other => panic!("no transport {other}"),
    };
    made.expect("it starts")
}

/// Bytes that differ from offset to offset, and from seed to seed.
fn seeded(seed: usize, len: usize) -> Vec<u8> {
    bulk(seed + len).split_off(seed)
}
