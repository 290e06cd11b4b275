use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use stagewire_core::ByteCount;
use stagewire_transfer::conformance::{Backend, Side, Violation, assert_conforms};

use crate::{oracle, support};

/// Bytes that sides allow in flight with one peer.
const IN_FLIGHT: ByteCount = ByteCount(32 << 20);

pub(crate) struct OneHost {
    pub(crate) dir: PathBuf,
    pub(crate) transport: &'static str,
}

#[async_trait]
impl Backend for OneHost {
    fn in_flight_limit(&self) -> Option<ByteCount> {
        Some(IN_FLIGHT)
    }

    async fn side(&self) -> Result<Side, Violation> {
        let host = support::start(&self.dir).await;
        host.limit_in_flight(IN_FLIGHT);
        let (transport, name) = (support::transport(&host, self.transport), self.transport);
        let (for_memory, for_regions) = (host.clone(), host.clone());
        Ok(Side {
            transport,
            peer: support::peer(&host),
            memory: Arc::new(move |bytes| support::memory(&for_memory, name, bytes)),
            regions: Arc::new(move || for_regions.stats().regions),
            keep: host,
        })
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shm_conforms() {
    let (_parent, dir) = support::run_dir();
    let transport = "shm";
    let backend = OneHost { dir, transport };
    assert_conforms(&backend).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cma_conforms() {
    let (_parent, dir) = support::run_dir();
    if !support::cma_works(&dir).await {
        return;
    }
    let transport = "cma";
    let backend = OneHost { dir, transport };
    assert_conforms(&backend).await;
}

#[test]
fn shm_moves_what_the_oracle_says() {
    let (_parent, dir) = support::run_dir();
    let transport = "shm";
    oracle::agrees(&support::runtime(), &OneHost { dir, transport }, oracle::CASES);
}

#[test]
fn cma_moves_what_the_oracle_says() {
    let (_parent, dir) = support::run_dir();
    let runtime = support::runtime();
    if runtime.block_on(support::cma_works(&dir)) {
        let transport = "cma";
        oracle::agrees(&runtime, &OneHost { dir, transport }, oracle::CASES);
    }
}
