use std::task::Poll;

use stagewire_core::{DType, Entry, EntryValue, Incarnation, Manifest, PayloadKind, Peer, StageName, TensorSpec};
use stagewire_store::TokenGate;
use stagewire_transfer::Borrowed;

use super::*;
use crate::release::release_elsewhere;
use crate::wire;
use crate::{ConnectorOptions, Publication, PublishSpec, ReleaseError};

/// A producer, a store beside it, and a payload of the producer.
struct World {
    _dir: tempfile::TempDir,
    producer: Arc<Connector>,
    keeper: Arc<Connector>,
    service: Arc<StoreService>,
    publication: Publication,
}

impl World {
    async fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let start = async |role: &str| {
            let options = ConnectorOptions::new(dir.path().join("run"), StageName::new(role).expect("a name"));
            Connector::start(options).await.expect("a connector")
        };
        let (producer, keeper) = (start("denoise").await, start("store").await);
        let store = HostStore::new(keeper.host(), ByteCount(1 << 20), Arc::new(TokenGate::open()));
        let service = StoreService::serve(&keeper, store);
        let spec = PublishSpec::new("r", manifest(4), Lease::Pinned);
        let memory = Borrowed::from(vec![1; 4]).into();
        let publication = producer.publish(spec, vec![memory]).expect("room");
        Self {
            _dir: dir,
            producer,
            keeper,
            service,
            publication,
        }
    }

    async fn put(&self) -> Handle {
        let handle = self.publication.handle();
        let stored = self.producer.store(handle, None, Duration::from_secs(5)).await;
        stored.expect("there is room")
    }

    /// Has the store take it.
    async fn put_for(&self, right: Capability, bytes: PutBytes) -> Result<Taken, Failure> {
        self.put_into(None, right, bytes).await
    }

    /// Has the store take it into room that is kept for it.
    async fn put_into(
        &self,
        reservation: Option<Reservation>,
        right: Capability,
        bytes: PutBytes,
    ) -> Result<Taken, Failure> {
        let first = self.publication.handle();
        let request = PutRequest {
            handle: Handle {
                capability: right,
                ..first.clone()
            },
            capability: first.capability,
            bytes,
            token: None,
            owner: Owner::Lease(Lease::Pinned),
            expires: None,
            wait: Duration::from_secs(20),
            reservation,
        };
        self.service.put(request).await
    }
}

fn sent(len: usize) -> PutBytes {
    PutBytes::Sent(vec![1; len])
}

fn manifest(len: u64) -> Manifest {
    let entry = Entry {
        name: "x".to_owned(),
        value: EntryValue::Tensor(TensorSpec::new(DType::U8, [len]).expect("small")),
    };
    Manifest::new(PayloadKind::Latent, vec![entry]).expect("one name")
}

#[tokio::test]
async fn what_a_store_has_taken_ends_there_too() {
    let world = World::new().await;
    let (shared, keeper) = (world.producer.shared(), &world.keeper);
    let live = Arc::clone(world.publication.live());
    let handle = Handle::clone(live.handle());
    let right = Capability::from_random([7; 16]);
    let store = Arc::new(keeper.peer().clone());
    live.asked().add(right, &store, None);
    // Nobody has it: that is no error.
    release_elsewhere(shared, &live).await.expect("nothing to do");
    assert_eq!(world.producer.live(), [handle.payload], "only stores are asked");

    // It has it, and its answer has not come.
    let moving = live.begin_move(right, Arc::clone(&store));
    world.put_for(right, sent(4)).await.expect("there is room");
    release_elsewhere(shared, &live).await.expect("nothing to do yet");
    assert_eq!(keeper.live(), [handle.payload], "its producer is about to hear of it");
    drop(moving);
    release_elsewhere(shared, &live).await.expect("it is there");
    assert!(keeper.live().is_empty() && !world.service.store().has(handle.payload));

    // What was begun while the payload was here does not end it where it is by then.
    let silent = Peer {
        incarnation: Incarnation(uuid::Uuid::new_v4()),
        socket: format!("{}.before", keeper.peer().socket),
        ..keeper.peer().clone()
    };
    let listener = tokio::net::UnixListener::bind(&silent.socket).expect("a socket");
    live.asked().remove(right);
    live.asked().add(right, &Arc::new(silent), None);
    let mut parting = Box::pin(release_elsewhere(shared, &live));
    assert!(futures::poll!(&mut parting).is_pending(), "nobody answers");
    world.put().await;
    assert_eq!((world.producer.live().len(), keeper.live().len()), (0, 1));
    // It died, and what it had would be in the store in its place.
    drop(listener);
    let _ = parting.await;
    assert_eq!(keeper.live(), [handle.payload], "the only copy was ended");

    let other = |capability: Capability| {
        let handle = Handle {
            capability,
            ..handle.clone()
        };
        let live = Live::new(handle, Owner::Lease(Lease::Pinned), Arc::new(Nothing));
        live.asked().add(right, &store, None);
        live
    };
    let forged = other(Capability::from_random([9; 16]));
    let error = release_elsewhere(shared, &forged).await.expect_err("forged");
    assert!(matches!(error, ReleaseError::Denied { .. }), "{error}");
    assert_eq!(keeper.live(), [handle.payload]);
    release_elsewhere(shared, &other(handle.capability))
        .await
        .expect("it is there");
    assert!(keeper.live().is_empty() && !world.service.store().has(handle.payload));
}

/// Memory of nobody.
#[derive(Debug)]
struct Nothing;

impl Keep for Nothing {}

/// A put whose answer was lost comes again, and finds the payload there. Who has another capability does not.
#[tokio::test]
async fn a_repeated_put_proves_its_right() {
    let world = World::new().await;
    let first = world.publication.handle().clone();
    let stored = world.put().await;

    let right = Capability::from_random([7; 16]);
    let again = |capability: Capability, manifest: Manifest| {
        let request = PutRequest {
            handle: Handle {
                capability: right,
                manifest,
                ..first.clone()
            },
            capability,
            bytes: PutBytes::Consumed,
            token: None,
            owner: Owner::Lease(Lease::Pinned),
            expires: None,
            wait: Duration::ZERO,
            reservation: None,
        };
        world.service.put(request)
    };
    let found = again(first.capability, manifest(4)).await;
    assert_eq!(*found.expect("it is there").handle, stored);
    let forged = Capability::from_random([8; 16]);
    for (capability, manifest) in [
        (forged, manifest(4)),
        (right, manifest(4)),
        (first.capability, manifest(5)),
    ] {
        let refused = again(capability, manifest).await.expect_err("another payload");
        assert_eq!(
            (refused.class, refused.reason.as_str()),
            (ErrorClass::Conflict, "store.exists")
        );
    }
    assert_eq!(world.keeper.live(), [first.payload]);
}

/// What one live store does not have another may, which is only dead for now: none but the one in its place knows.
#[tokio::test]
async fn a_store_speaks_for_the_one_before_it_only() {
    let world = World::new().await;
    let stored = world.put().await;
    let other = |named: &str| {
        let mut handle = stored.clone();
        handle.payload = PayloadId(uuid::Uuid::new_v4());
        handle.holder.incarnation = Incarnation(uuid::Uuid::new_v4());
        handle.holder.socket = named.to_owned();
        handle
    };
    // Dead, of the run directory that the store serves.
    let before = other(&format!("{}.before", stored.holder.socket));
    let released = world.producer.release_handle(&before).await;
    released.expect("the store in its place does not have it");
    for dead in [other("/nowhere/x.ctl"), before.clone()] {
        // Alive, and named, but no store of the run directory.
        world.producer.set_store(Some(world.producer.peer().clone()));
        if dead == before {
            world.keeper.close().await;
        }
        let error = world.producer.release_handle(&dead).await.expect_err("nobody knows");
        assert!(matches!(error, ReleaseError::StoreLost { .. }), "{error}");
    }
}

/// A put whose bytes came along is taken back by its right, and only where no other put relies on it.
#[tokio::test]
async fn a_put_is_undone_unless_another_has_found_it() {
    let world = World::new().await;
    let put_for = |right: u8, bytes| world.put_for(Capability::from_random([right; 16]), bytes);
    let put = |right, len| put_for(right, sent(len));
    let (payload, table) = (world.publication.handle().payload, world.keeper.shared().table());
    let undo = |right: u8| table.undo(payload, Capability::from_random([right; 16]));
    for len in [3, 5] {
        let refused = put(7, len).await.expect_err("other bytes than the manifest says");
        assert_eq!(
            (refused.class, refused.reason.as_str()),
            (ErrorClass::Invalid, "store.bytes")
        );
        assert!(!world.service.store().has(payload), "half of it is there");
    }
    for right in [7, 8] {
        let taken = put(right, 4).await.expect("there is room");
        assert_eq!(taken.undo, Some(Capability::from_random([right; 16])));
    }
    for other in [7, 9, 7] {
        undo(other);
        assert_eq!(world.keeper.live(), [payload], "undone for the put that found it");
    }
    undo(8);
    assert!(world.keeper.live().is_empty() && !world.service.store().has(payload));

    // Who would have the store consume it has given the payload up once it is answered.
    put(7, 4).await.expect("there is room");
    let found = put_for(8, PutBytes::Consumed).await.expect("it is there");
    assert_eq!(found.undo, None);
    put(9, 4).await.expect("it is there");
    for right in [7, 8, 9] {
        undo(right);
    }
    assert_eq!(world.keeper.live(), [payload], "the only copy was taken back");
}

/// Whether the one that is undone was being brought back to memory just then or not.
#[tokio::test]
async fn a_put_that_finds_one_being_undone_is_taken_itself() {
    for fails in [false, true] {
        let world = World::new().await;
        let (shared, store) = (world.keeper.shared(), world.service.store());
        let first = Handle::clone(world.publication.handle());
        let payload = first.payload;
        let object = NewObject::new(payload, [ByteCount(4)]);
        let object = store
            .create(object)
            .await
            .expect("room")
            .seal()
            .await
            .expect("it is whole");
        let (bringing, [before, right]) = (
            Arc::new(Bringing::new(fails)),
            [7, 8].map(|of| Capability::from_random([of; 16])),
        );
        let capability = first.capability;
        let found = Arc::new(here(shared, first, capability, &*object));
        let live = Live::new(
            found,
            Owner::Lease(Lease::Pinned),
            Arc::clone(&bringing) as Arc<dyn Keep>,
        );
        let live = live.put_with(before);
        shared.hold(live, None).expect("nobody else has it").seal();

        let mut putting = Box::pin(world.put_for(right, sent(4)));
        assert!(
            futures::poll!(&mut putting).is_pending(),
            "what is found is being brought back"
        );
        shared.table().undo(payload, before);
        store.remove(payload);
        bringing.go_on.notify_one();
        let taken = putting.await.expect("its bytes came along");
        assert_eq!(taken.undo, Some(right));
        assert_eq!(world.keeper.live(), [payload]);
        let object = store.get(payload).await.expect("it is there");
        assert_eq!(object.part(0), Some([1; 4].as_slice()));
    }
}

/// In a store that takes its time.
#[derive(Debug)]
struct Bringing {
    go_on: tokio::sync::Notify,
    fails: bool,
}

impl Bringing {
    fn new(fails: bool) -> Self {
        let go_on = tokio::sync::Notify::new();
        Self { go_on, fails }
    }
}

#[async_trait]
impl Keep for Bringing {
    fn is_stored(&self) -> bool {
        true
    }

    async fn bring(&self) -> Result<Option<Brought>, Failure> {
        self.go_on.notified().await;
        if self.fails {
            return Err(closed());
        }
        Ok(None)
    }
}

/// Bytes that are pinned are copied, and those of a payload that has ended are not.
#[tokio::test]
async fn what_is_complete_is_copied_or_refused() {
    let world = World::new().await;
    let (payload, right) = (world.publication.handle().payload, Capability::from_random([7; 16]));
    let taken = world.put_for(right, PutBytes::Complete).await.expect("there is room");
    assert_eq!((taken.undo, &taken.handle.holder), (Some(right), world.keeper.peer()));
    let object = world.service.store().get(payload).await.expect("it is there");
    assert_eq!(object.part(0), Some([1; 4].as_slice()));
    drop(object);
    world.keeper.shared().table().undo(payload, right);
    assert!(world.keeper.live().is_empty() && !world.service.store().has(payload));

    world.producer.release(payload);
    let refused = world
        .put_for(right, PutBytes::Complete)
        .await
        .expect_err("it has ended");
    assert_eq!(
        (refused.class, refused.reason.as_str()),
        (ErrorClass::NotFound, "payload.gone")
    );
    assert!(world.keeper.live().is_empty() && !world.service.store().has(payload));
    world.publication.unread().await;
    let stats = world.producer.stats().host;
    assert_eq!((stats.regions, stats.pins_held), (0, 0), "the store holds its memory");
}

/// One that comes again while the one before it is given up has the room that was kept for both.
#[tokio::test]
async fn a_put_that_waits_for_another_to_end_keeps_its_room() {
    let world = World::new().await;
    let store = world.service.store();
    let reserve = async |nbytes| {
        let reserved = store.reserve(ByteCount(nbytes), Duration::ZERO).await;
        reserved.expect("there is room")
    };
    let kept = reserve(4096).await;
    let _rest = reserve((1 << 20) - 4096).await;
    let mut before = NewObject::new(world.publication.handle().payload, [ByteCount(4)]);
    before.reservation = Some(kept.clone());
    let before = store.create(before).await.expect("room is kept");

    let right = Capability::from_random([7; 16]);
    let mut putting = Box::pin(world.put_into(Some(kept.clone()), right, sent(4)));
    assert!(futures::poll!(&mut putting).is_pending(), "another is under way");
    drop(before);
    let taken = putting.await.expect("room is kept");
    assert_eq!(taken.undo, Some(right));
}

/// Whenever its future is dropped: a put that comes again is not taken back with the one before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_put_that_was_given_up_does_not_take_the_next_one_along() {
    let world = World::new().await;
    world.put().await;
    world.keeper.release(world.publication.handle().payload);
    for round in 0..600_u64 {
        // Which go along with the put, and which are copied.
        let len = [4, wire::SENT_ALONG + 1][(round / 4 % 2) as usize];
        let spec = PublishSpec::new(
            "r",
            manifest(len),
            [Lease::Pinned, Lease::DeleteOnConsume][(round % 2) as usize],
        );
        let overlap = round % 4 > 1;
        let publication = world
            .producer
            .publish(spec, vec![Borrowed::from(vec![round as u8; len as usize]).into()]);
        let publication = publication.expect("room");
        let handle = publication.handle().clone();
        let store = || world.producer.store(&handle, None, Duration::from_secs(5));
        let mut given_up = Vec::new();
        for early in 0..3 {
            // From not begun at all to answered already.
            let mut putting = Box::pin(store());
            for _ in 0..(round / 4 + early) % 6 {
                if futures::poll!(&mut putting).is_ready() {
                    break;
                }
                tokio::task::yield_now().await;
            }
            if overlap {
                given_up.push(putting);
            }
        }
        let mut last = Box::pin(store());
        let begun = futures::poll!(&mut last);
        drop(given_up);
        match begun {
            Poll::Ready(stored) => stored,
            Poll::Pending => last.await,
        }
        .expect("there is room");
        assert_eq!(world.producer.live(), [], "it is still here, round {round}");
        // What comes after whatever was still on its way has found the payload in its place.
        let options = ConsumeOptions::within(Duration::from_secs(5));
        let mut consumer = world.producer.consume(handle.clone(), options).expect("a consumer");
        let found = consumer.fetch_all().await.expect("it is in the store");
        assert!(found.tensors[0].to_vec() == vec![round as u8; len as usize]);
        drop((consumer, found));
        world.producer.release_handle(&handle).await.expect("it is there");
        assert!(world.keeper.live().is_empty() && !world.service.store().has(handle.payload));
    }
}
