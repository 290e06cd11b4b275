//! The decorators over real transports; what they do in detail is tested inside the crate, with the clock paused.

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use stagewire_core::{ByteCount, Classify, Record};
use stagewire_transfer::conformance::{Backend, Side, Violation, assert_conforms};
use stagewire_transfer::decorate::{Fault, FaultPlan, Mishap, Operation, Recorder, Throttle, ThrottleOptions};
use stagewire_transfer::{ConnectOptions, RegisterOptions, Target, TransferOptions, Transport};

use crate::{oracle, support};

/// Bytes that sides allow in flight with one peer.
const IN_FLIGHT: ByteCount = ByteCount(32 << 20);

struct Decorated {
    dir: PathBuf,
    plan: FaultPlan,
}

#[async_trait]
impl Backend for Decorated {
    fn in_flight_limit(&self) -> Option<ByteCount> {
        Some(IN_FLIGHT)
    }

    async fn side(&self) -> Result<Side, Violation> {
        let host = support::start(&self.dir).await;
        host.limit_in_flight(IN_FLIGHT);
        let throttled = Arc::new(Throttle::new(host.shm(), ThrottleOptions::default()));
        let faulty = Arc::new(Fault::new(throttled, self.plan.clone()));
        let (for_memory, for_regions) = (host.clone(), host.clone());
        Ok(Side {
            transport: Arc::new(Recorder::new(faulty)),
            peer: support::peer(&host),
            memory: Arc::new(move |bytes| support::memory(&for_memory, "shm", bytes)),
            regions: Arc::new(move || for_regions.stats().regions),
            keep: host,
        })
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn decorators_that_do_nothing_conform() {
    let (_parent, dir) = support::run_dir();
    let plan = FaultPlan::new();
    assert_conforms(&Decorated { dir, plan }).await;
}

#[test]
#[should_panic(expected = "other bytes at")]
fn the_oracle_notices_one_changed_bit() {
    let (_parent, dir) = support::run_dir();
    let runtime = support::runtime();
    let always = NonZeroU64::MIN;
    let plan = FaultPlan::new().seeded(1, always, vec![Mishap::Corrupt { byte: 5 }]);
    oracle::agrees(&runtime, &Decorated { dir, plan }, oracle::CASES);
}

/// Large enough that the copies go to other threads.
const LEN: u64 = 9 << 20;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn real_transports_go_wrong_as_planned() {
    let (_parent, dir) = support::run_dir();
    let mut transports = vec!["shm"];
    transports.extend(support::cma_works(&dir).await.then_some("cma"));
    for name in transports {
        let (owner, reader) = (support::start(&dir).await, support::start(&dir).await);
        let bytes = support::bulk(LEN as usize);
        let memory = support::memory(&owner, name, &bytes);
        let owner_side = support::transport(&owner, name);
        let region = owner_side
            .register(memory, RegisterOptions::default())
            .expect("registered");
        let plan = FaultPlan::new()
            .at(Operation::Pull, 1, Mishap::Cut { after: LEN - 1 })
            .at(Operation::Pull, 2, Mishap::Corrupt { byte: LEN - 1 })
            .at(Operation::Pull, 3, Mishap::Duplicate);
        let faulty = Fault::new(support::transport(&reader, name), plan);
        let peer = support::peer(&owner);
        let remote = faulty.connect(&peer, ConnectOptions::default()).await;
        let reference = region.reference();
        let pinned = remote
            .expect("connected")
            .pin(&reference, TransferOptions::default())
            .await;
        let pinned = pinned.expect("pinned");

        let mut target = Target::allocate(LEN).expect("memory");
        let whole = [Record::contiguous(0, 0, LEN)];
        let options = TransferOptions::default();
        let cut = pinned.pull(&whole, &target, options.clone()).await.expect_err("cut");
        assert_eq!(cut.reason(), "transfer.io", "{name}: {cut}");
        support::until("the claim of the cut pull ends", || target.is_idle()).await;
        assert!(target.slice(0..1).is_err(), "{name}: a byte of a cut pull shows");

        pinned
            .pull(&whole, &target, options.clone())
            .await
            .expect("it says that all is well");
        let found = target.as_slice().expect("pulled");
        let changed: Vec<usize> = (0..bytes.len()).filter(|at| found[*at] != bytes[*at]).collect();
        assert_eq!(changed, [bytes.len() - 1], "{name}");

        target.reset().expect("idle");
        pinned.pull(&whole, &target, options).await.expect("pulled twice");
        assert_eq!(target.as_slice().expect("pulled"), bytes, "{name}");
        drop(pinned);
        region.idle().await;
    }
}
