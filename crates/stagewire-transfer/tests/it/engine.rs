//! `mooncake-engine` over an engine that copies inside this process. What the wheel's own does, the tests of the Python
//! package try.
#![expect(unsafe_code, reason = "an engine moves bytes between addresses")]

use std::collections::HashMap;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use stagewire_core::{ByteCount, Classify, Device, ErrorClass, Peer, Record};
use stagewire_transfer::conformance::{Backend, Side, Violation, assert_conforms};
use stagewire_transfer::{
    Borrowed, ConnectOptions, Engine, EngineBatch, EngineError, EngineMemory, EngineOperation, EngineOptions,
    EngineSlice, EngineStatus, EngineTransport, Host, Network, NetworkOptions, Region, RegisterOptions, StartError,
    Target, TransferOptions, Transport, Writable,
};

use crate::support;

const IN_FLIGHT: ByteCount = ByteCount(4 << 20);

/// Copies when it is asked how far it is, at the second look.
#[derive(Debug, Default)]
struct Local {
    state: Mutex<State>,
    /// While it is, nothing is copied.
    is_held_up: AtomicBool,
    /// While it does, nothing is copied, and every batch ends so.
    fails: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    registered: HashMap<u64, u64>,
    pending: HashMap<u64, (EngineOperation, Vec<EngineSlice>, bool)>,
    next: u64,
}

impl Local {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under the lock")
    }
}

impl Engine for Local {
    fn segment(&self) -> String {
        "local".to_owned()
    }

    fn registers_local(&self) -> bool {
        true
    }

    fn register(&self, memory: EngineMemory) -> Result<(), EngineError> {
        let refused = |problem: &str| EngineError {
            call: "register",
            problem: problem.to_owned(),
        };
        if memory.device != Device::Cpu {
            return Err(refused("it has no such device"));
        }
        match self.lock().registered.insert(memory.address, memory.len) {
            None => Ok(()),
            Some(_) => Err(refused("registered twice")),
        }
    }

    fn unregister(&self, address: u64) -> Result<(), EngineError> {
        self.lock().registered.remove(&address).expect("it was registered");
        Ok(())
    }

    fn submit(
        &self,
        segment: &str,
        operation: EngineOperation,
        slices: &[EngineSlice],
    ) -> Result<EngineBatch, EngineError> {
        assert_eq!(segment, "local");
        let mut state = self.lock();
        state.next += 1;
        let number = state.next;
        state.pending.insert(number, (operation, slices.to_vec(), false));
        Ok(EngineBatch(NonZeroU64::new(number).expect("counted from 1")))
    }

    fn status(&self, batch: EngineBatch) -> EngineStatus {
        let mut state = self.lock();
        let (operation, slices, looked) = state.pending.get_mut(&batch.0.get()).expect("it is not over");
        if !std::mem::replace(looked, true) || self.is_held_up.load(Ordering::Relaxed) {
            return EngineStatus::Pending;
        }
        if self.fails.load(Ordering::Relaxed) {
            state.pending.remove(&batch.0.get());
            return EngineStatus::Failed { slice: 0 };
        }
        for EngineSlice { local, remote, len } in slices.iter().copied() {
            let (from, to) = match operation {
                EngineOperation::Read => (remote, local),
                EngineOperation::Write => (local, remote),
            };
            let from = std::ptr::with_exposed_provenance::<u8>(from as usize);
            let to = std::ptr::with_exposed_provenance_mut::<u8>(to as usize);
            // SAFETY: the transport keeps both in place until this batch is over, and nobody else writes there.
            unsafe { std::ptr::copy_nonoverlapping(from, to, len as usize) };
        }
        state.pending.remove(&batch.0.get());
        EngineStatus::Done
    }
}

struct InProcess(PathBuf);

async fn network(dir: &Path) -> (Arc<Host>, Arc<Network>) {
    let host = support::start(dir).await;
    host.limit_in_flight(IN_FLIGHT);
    let network = Network::start(host.clone(), NetworkOptions::default()).await;
    (host, network.expect("it listens"))
}

#[async_trait]
impl Backend for InProcess {
    async fn side(&self) -> Result<Side, Violation> {
        let (host, network) = network(&self.0).await;
        let transport = EngineTransport::new(&network, Arc::new(Local::default()), EngineOptions::default());
        let transport = transport.map_err(|error| Violation(error.to_string()))?;
        Ok(Side {
            peer: Peer {
                incarnation: host.incarnation(),
                process: host.process(),
                socket: String::new(),
                transports: vec![transport.address()],
            },
            transport,
            memory: Arc::new(|bytes| Borrowed::from(bytes.to_vec()).into()),
            regions: Arc::new(move || host.stats().regions),
            keep: network,
        })
    }

    fn in_flight_limit(&self) -> Option<ByteCount> {
        Some(IN_FLIGHT)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transport_over_any_engine_conforms() {
    let (_parent, dir) = support::run_dir();
    assert_conforms(&InProcess(dir)).await;
}

#[tokio::test]
async fn a_network_has_one_such_transport() {
    let (_parent, dir) = support::run_dir();
    let (_host, network) = network(&dir).await;
    let engine = || Arc::new(Local::default());
    let _first = EngineTransport::new(&network, engine(), EngineOptions::default()).expect("the first");
    let refused = EngineTransport::new(&network, engine(), EngineOptions::default()).expect_err("the second");
    assert!(matches!(refused, StartError::AlreadyRunning { .. }));
    assert_eq!(
        (refused.class(), refused.reason()),
        (ErrorClass::Conflict, "network.already_running")
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_of_a_push_given_up_count_as_in_flight_until_the_engine_is_done() {
    const LEN: u64 = 1 << 20;
    let (_parent, dir) = support::run_dir();
    let owner = InProcess(dir.clone()).side().await.expect("started");
    let (_host, network) = network(&dir).await;
    let engine = Arc::new(Local::default());
    let pusher = EngineTransport::new(&network, engine.clone(), EngineOptions::default()).expect("the first");
    let memory = Writable::allocate(LEN).expect("memory");
    let region = owner.transport.register(memory.into(), RegisterOptions::default());
    let region = region.expect("registered");
    let remote = pusher.connect(&owner.peer, ConnectOptions::default()).await;
    let remote = remote.expect("connected");
    let pinned = remote.pin(&region.reference(), TransferOptions::default()).await;
    let pinned = pinned.expect("pinned");

    engine.is_held_up.store(true, Ordering::Relaxed);
    let (source, records) = (
        Borrowed::from(vec![7; LEN as usize]).into(),
        [Record::contiguous(0, 0, LEN)],
    );
    let deadline = Some(Duration::from_millis(200));
    let pushed = pinned.push(&records, &source, TransferOptions { deadline }).await;
    let error = pushed.expect_err("the engine does nothing");
    assert_eq!(error.reason(), "transfer.in_doubt", "{error}");
    assert_eq!(pusher.stats().in_flight_bytes, LEN);
    engine.is_held_up.store(false, Ordering::Relaxed);
    support::until("the bytes have landed", || pusher.stats().in_flight_bytes == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_push_that_fails_at_the_engine_is_in_doubt_and_keeps_the_region_for_a_while() {
    const LEN: u64 = 4096;
    let (_parent, dir) = support::run_dir();
    let owner = InProcess(dir.clone()).side().await.expect("started");
    let (_host, network) = network(&dir).await;
    let engine = Arc::new(Local::default());
    let pusher = EngineTransport::new(&network, engine.clone(), EngineOptions::default()).expect("the first");
    let region = || {
        let memory = Writable::allocate(LEN).expect("memory");
        let region = owner.transport.register(memory.into(), RegisterOptions::default());
        region.expect("registered")
    };
    let (pulled, pushed, other) = (region(), region(), region());
    let remote = pusher.connect(&owner.peer, ConnectOptions::default()).await;
    let remote = remote.expect("connected");
    let pin = async |region: &Region| {
        let pinned = remote.pin(&region.reference(), TransferOptions::default()).await;
        pinned.expect("pinned")
    };
    let records = [Record::contiguous(0, 0, LEN)];

    engine.fails.store(true, Ordering::Relaxed);
    let pinned = pin(&pulled).await;
    let target = Target::allocate(LEN).expect("memory");
    let error = pinned.pull(&records, &target, TransferOptions::default()).await;
    assert_eq!(error.expect_err("the engine fails").reason(), "transfer.backend");
    drop(pinned);
    support::until("nothing can land in what was read", || pulled.is_idle()).await;

    let pinned = pin(&pushed).await;
    let source = Borrowed::from(vec![7; LEN as usize]).into();
    let failed = pinned.push(&records, &source, TransferOptions::default()).await;
    let (error, failed_at) = (failed.expect_err("the engine fails"), Instant::now());
    assert_eq!(error.reason(), "transfer.in_doubt", "{error}");
    drop(pinned);
    // Had the pin been let go, the owner would know by the time it grants another.
    drop(pin(&other).await);
    support::until("the owner has seen the end of the other pin", || other.is_idle()).await;
    assert!(!pushed.is_idle(), "bytes may still land");
    tokio::time::timeout(Duration::from_secs(30), pushed.idle())
        .await
        .expect("it is not kept for ever");
    assert!(
        failed_at.elapsed() >= Duration::from_secs(9),
        "{:?}",
        failed_at.elapsed()
    );
}
