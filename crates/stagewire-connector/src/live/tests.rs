use std::sync::atomic::{AtomicU64, Ordering};

use stagewire_core::{
    DType, Entry, EntryValue, ErrorClass, Lease, Manifest, PayloadId, PayloadKind, Peer, ProcessRef, StageName,
    TensorSpec, TransferMode,
};
use uuid::Uuid;

use super::*;
use crate::wire::Refusal;

const CONSUMED: Owner = Owner::Lease(Lease::DeleteOnConsume);

/// Counts how often it was dropped.
#[derive(Debug)]
struct Memory(Arc<AtomicU64>);

impl Keep for Memory {}

impl Drop for Memory {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

struct World {
    table: Arc<Table>,
    freed: Arc<AtomicU64>,
}

impl World {
    fn new() -> Self {
        Self {
            table: Arc::default(),
            freed: Arc::default(),
        }
    }

    fn live(&self, owner: Owner) -> Live {
        let spec = TensorSpec::new(DType::U8, [4]).expect("small");
        let entry = Entry {
            name: "x".to_owned(),
            value: EntryValue::Tensor(spec),
        };
        let handle = Handle {
            payload: PayloadId(Uuid::from_u128(1)),
            request: "request".to_owned(),
            stage: StageName::new("denoise").expect("a name"),
            manifest: Manifest::new(PayloadKind::Latent, vec![entry]).expect("one name"),
            mode: TransferMode::P2p,
            holder: Peer {
                incarnation: Incarnation(Uuid::from_u128(2)),
                process: ProcessRef { pid: 1, started: 1 },
                socket: String::new(),
                transports: Vec::new(),
            },
            capability: Capability::from_random([1; 16]),
            regions: Vec::new(),
        };
        Live::new(handle, owner, Arc::new(Memory(Arc::clone(&self.freed))))
    }

    fn hold(&self, owner: Owner) -> Arc<Live> {
        self.table.insert(self.live(owner)).expect("the id is free")
    }

    fn watch(&self) -> Result<Claim, Refusal> {
        self.watch_as([1; 16])
    }

    fn watch_as(&self, capability: [u8; 16]) -> Result<Claim, Refusal> {
        let capability = Capability::from_random(capability);
        let watched = self.table.watch(PayloadId(Uuid::from_u128(1)), capability);
        watched.map_err(|barred| match barred {
            Barred::Refused(refusal) => refusal,
            Barred::Moving(_) => panic!("it moves"),
        })
    }

    fn freed(&self) -> u64 {
        self.freed.load(Ordering::Relaxed)
    }
}

fn failure() -> Failure {
    Failure::new(ErrorClass::Internal, "test.failure", "on purpose")
}

#[test]
fn one_payload_of_an_id_is_held_at_a_time() {
    let world = World::new();
    world.hold(Owner::Orchestrator);
    assert!(world.table.insert(world.live(Owner::Orchestrator)).is_none());
    assert_eq!(
        (world.table.size(), world.freed()),
        ((1, 4), 1),
        "the second one's memory goes"
    );
}

#[test]
fn a_consumers_payload_has_one_consumer_until_that_one_lets_go() {
    let world = World::new();
    world.hold(CONSUMED);
    let first = world.watch().expect("free");
    assert_eq!(world.watch().expect_err("claimed"), Refusal::Claimed);
    drop(first);
    world.watch().expect("free again").finish().expect("nothing against it");
    assert_eq!(world.watch().expect_err("consumed"), Refusal::Consumed);
    assert_eq!((world.table.size(), world.freed()), ((0, 0), 1));
}

#[test]
fn an_orchestrators_payload_survives_its_consumers() {
    let world = World::new();
    let live = world.hold(Owner::Orchestrator);
    let (first, second) = (world.watch().expect("free"), world.watch().expect("free"));
    first.finish().expect("it stays");
    second.finish().expect("it stays");
    assert_eq!(world.freed(), 0);
    assert!(world.table.release(live.handle().payload, Gone::Released));
    assert!(!world.table.release(live.handle().payload, Gone::Released), "twice");
    assert_eq!((world.freed(), live.phase()), (1, PayloadPhase::Released));
}

#[test]
fn a_failure_frees_the_memory_and_is_told_to_who_comes_late() {
    for owner in [Owner::Orchestrator, CONSUMED] {
        let world = World::new();
        let live = world.hold(owner);
        let states = live.subscribe();
        world.table.fail(&live, failure());
        world
            .table
            .fail(&live, Failure::new(ErrorClass::Internal, "test.second", "too late"));
        assert_eq!((world.freed(), world.table.failed.load(Ordering::Relaxed)), (1, 1));
        assert_eq!(states.borrow().end, Some(End::Failed(failure())));
        match world.watch() {
            // Its owner still has to release it.
            Ok(claim) if owner == Owner::Orchestrator => {
                assert_eq!(claim.live().subscribe().borrow().end, Some(End::Failed(failure())));
            }
            Err(refusal) if owner == CONSUMED => assert_eq!(refusal, Refusal::Failed(failure())),
            other => panic!("{owner:?}: {other:?}"),
        }
    }
}

#[test]
fn a_complete_payload_does_not_fail() {
    let world = World::new();
    let live = world.hold(CONSUMED);
    live.seal();
    world.table.fail(&live, failure());
    assert_eq!((world.freed(), live.phase()), (0, PayloadPhase::Sealed));
}

#[test]
fn a_payload_is_released_only_by_who_means_it() {
    let world = World::new();
    let old = world.hold(Owner::Orchestrator);
    world.table.release(old.handle().payload, Gone::Released);
    let new = world.hold(Owner::Orchestrator);
    assert!(
        !world.table.release_this(&old, Gone::Released),
        "the new one has the same id"
    );
    assert!(world.table.release_this(&new, Gone::Released));
}

#[test]
fn a_wrong_capability_opens_nothing() {
    let world = World::new();
    world.hold(CONSUMED);
    assert_eq!(world.watch_as([2; 16]).expect_err("forged"), Refusal::Denied);
    let unknown = world
        .table
        .watch(PayloadId(Uuid::from_u128(9)), Capability::from_random([1; 16]));
    assert!(matches!(unknown, Err(Barred::Refused(Refusal::Unknown))), "{unknown:?}");
    world.watch().expect("a refused consumer claims nothing");
}

#[test]
fn who_moves_a_payload_keeps_consumers_waiting_who_would_end_it() {
    let world = World::new();
    let live = world.hold(CONSUMED);
    let right = Capability::from_random([7; 16]);
    let moving = live.begin_move(right, Arc::new(live.handle().holder.clone()));
    let capability = live.handle().capability;
    let barred = world.table.watch(live.handle().payload, capability);
    assert!(matches!(barred, Err(Barred::Moving(_))), "{barred:?}");
    drop(world.watch_as([7; 16]).expect("the store, which gives up"));
    drop(moving);
    assert_eq!(world.watch_as([7; 16]).expect_err("its right is over"), Refusal::Denied);
    let consumer = world.watch().expect("it stays here");
    drop(consumer);
    // A store whose right is over keeps no consumer out, and takes nothing from it when it goes.
    let moving = live.begin_move(right, Arc::new(live.handle().holder.clone()));
    let late = world.watch_as([7; 16]).expect("the store");
    drop(moving);
    let consumer = world.watch().expect("it stays here");
    drop(late);
    assert_eq!(world.watch().expect_err("claimed"), Refusal::Claimed);
    // A store does not take it from under a consumer.
    let moving = live.begin_move(right, Arc::new(live.handle().holder.clone()));
    assert_eq!(world.watch_as([7; 16]).expect_err("claimed"), Refusal::Claimed);
    drop((consumer, moving));

    let world = World::new();
    let live = world.hold(Owner::Lease(Lease::Pinned));
    let moving = live.begin_move(right, Arc::new(live.handle().holder.clone()));
    let reader = world.watch().expect("any number may read this one");
    let store = world.watch_as([7; 16]).expect("the store");
    store.finish().expect("it is the first");
    drop((reader, moving));
    let store = live.handle().holder.clone();
    assert_eq!(world.watch().expect_err("it is in the store"), Refusal::Moved(store));
    assert_eq!(world.table.moved.load(Ordering::Relaxed), 1);

    // The store may die before it has answered; an orchestrator has the payload moved again then.
    let world = World::new();
    let live = world.hold(Owner::Orchestrator);
    let _moving = live.begin_move(right, Arc::new(live.handle().holder.clone()));
    let store = world.watch_as([7; 16]).expect("the store");
    store.finish().expect("it is the first");
    world.watch_as([7; 16]).expect("the next store");
    assert_eq!(world.table.moved.load(Ordering::Relaxed), 0);
}

#[test]
fn a_payload_is_ended_by_who_has_its_capability() {
    let world = World::new();
    let live = world.hold(Owner::Lease(Lease::Pinned));
    let payload = live.handle().payload;
    let forged = world.table.release_by(payload, Capability::from_random([2; 16]));
    assert_eq!(forged, Err(Refusal::Denied));
    assert_eq!(world.table.release_by(payload, live.handle().capability), Ok(()));
    let again = world.table.release_by(payload, live.handle().capability);
    assert_eq!(again, Err(Refusal::Released));
}

/// Of a store that takes a payload and who gives it up, one is first.
#[test]
fn a_store_that_comes_too_late_is_told_so() {
    let right = Capability::from_random([7; 16]);
    for owner in [CONSUMED, Owner::Orchestrator] {
        let world = World::new();
        let live = world.hold(owner);
        let moving = live.begin_move(right, Arc::new(live.handle().holder.clone()));
        let store = world.watch_as([7; 16]).expect("the store");
        assert!(world.table.release_this(&live, Gone::Released), "it has not moved");
        assert_eq!(store.finish(), Err(Refusal::Released));
        drop(moving);

        // Who asked has gone, and has been told that the payload is still here.
        let live = world.hold(owner);
        let moving = live.begin_move(right, Arc::new(live.handle().holder.clone()));
        let store = world.watch_as([7; 16]).expect("the store");
        drop(moving);
        store.finish().expect_err("nobody waits for it");
        assert!(world.table.has(&live));
    }
    let world = World::new();
    let live = world.hold(CONSUMED);
    let _moving = live.begin_move(right, Arc::new(live.handle().holder.clone()));
    let store = world.watch_as([7; 16]).expect("the store");
    store.finish().expect("it is the first");
    assert!(!world.table.release_this(&live, Gone::Released), "the store was first");
}

/// Notes what was shown of the payload when it was closed.
#[derive(Debug, Default)]
struct Closing {
    states: OnceLock<watch::Receiver<Shown>>,
    shown: Mutex<Vec<Option<End>>>,
}

#[derive(Debug)]
struct Closes(Arc<Closing>);

impl Keep for Closes {
    fn close(&self) {
        let states = self.0.states.get().expect("set by the test");
        lock(&self.0.shown).push(states.borrow().end.clone());
    }
}

/// Who is told of the end asks whether somebody reads: by then nobody can begin to.
#[test]
fn memory_takes_no_readers_before_the_end_of_its_payload_is_shown() {
    let world = World::new();
    for fails in [false, true] {
        let closing = Arc::new(Closing::default());
        let handle = Handle::clone(world.live(CONSUMED).handle());
        let live = Live::new(handle, CONSUMED, Arc::new(Closes(Arc::clone(&closing))));
        let live = world.table.insert(live).expect("the id is free");
        closing.states.set(live.subscribe()).expect("set once");
        if fails {
            world.table.fail(&live, failure());
        } else {
            assert!(world.table.release_this(&live, Gone::Released));
        }
        assert_eq!(*lock(&closing.shown), [None], "fails: {fails}");
        assert!(live.subscribe().borrow().end.is_some());
    }
}
