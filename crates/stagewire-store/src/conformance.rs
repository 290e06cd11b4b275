//! What every [`Store`] promises, as checks that a backend's tests run.
//!
//! ```ignore
//! #[tokio::test]
//! async fn conforms() {
//!     stagewire_store::conformance::run(|limit| async move { MyStore::start(limit).await }).await;
//! }
//! ```
//!
//! Every check panics with what was broken. A store under test has an open gate; gates are checked apart, by
//! [`tokens_are_checked`].

use std::sync::Arc;
use std::time::{Duration, Instant};

use stagewire_core::{Attempt, ByteCount, Classify, Epoch, ErrorClass, JobId, PayloadId, Token};
use stagewire_transfer::Target;
use uuid::Uuid;

use crate::{NewObject, Object, Retention, Share, Store, StoreError, TokenGate};

/// Bytes of the stores that the checks ask for.
pub const LIMIT: ByteCount = ByteCount(1 << 20);

/// Runs every check but [`tokens_are_checked`], each on a fresh store of [`LIMIT`] bytes.
///
/// # Panics
/// Where the store breaks a promise.
pub async fn run<S, F, Fut>(mut fresh: F)
where
    S: Store,
    F: FnMut(ByteCount) -> Fut,
    Fut: Future<Output = S>,
{
    objects_come_back_exact(&fresh(LIMIT).await).await;
    nobody_reads_what_is_not_sealed(&fresh(LIMIT).await).await;
    put_if_absent_is_truthful(&Arc::new(fresh(LIMIT).await)).await;
    aborted_drafts_leave_nothing(&fresh(LIMIT).await).await;
    deleted_objects_are_gone(&fresh(LIMIT).await).await;
    readers_keep_what_they_read(&fresh(LIMIT).await).await;
    a_full_store_says_what_holds_the_space(&fresh(LIMIT).await).await;
    a_writer_waits_for_room(&Arc::new(fresh(LIMIT).await)).await;
    fetched_bytes_are_exact(&fresh(LIMIT).await).await;
    reserved_room_is_kept(&fresh(LIMIT).await).await;
    cached_objects_make_room_and_held_ones_do_not(&fresh(LIMIT).await).await;
    what_is_read_is_not_evicted(&fresh(LIMIT).await).await;
    deadlines_are_fixed(&fresh(LIMIT).await).await;
    what_is_over_goes_first(&fresh(LIMIT).await).await;
}

fn new_id() -> PayloadId {
    PayloadId(Uuid::new_v4())
}

/// Bytes that differ at every place and between objects.
fn pattern(payload: PayloadId, part: usize, len: u64) -> Vec<u8> {
    let seed = payload.0.as_u128() as u64 ^ part as u64;
    (0..len)
        .map(|at| (seed.wrapping_mul(at + 1) >> 24) as u8 ^ at as u8)
        .collect()
}

async fn put(store: &dyn Store, payload: PayloadId, parts: &[u64]) -> Result<Arc<dyn Object>, StoreError> {
    let object = NewObject::new(payload, parts.iter().copied().map(ByteCount));
    put_object(store, object, parts).await
}

async fn put_kept(store: &dyn Store, retention: Retention, parts: &[u64]) -> Result<PayloadId, StoreError> {
    let payload = new_id();
    let mut object = NewObject::new(payload, parts.iter().copied().map(ByteCount));
    object.retention = retention;
    put_object(store, object, parts).await.map(|_| payload)
}

async fn put_object(store: &dyn Store, object: NewObject, parts: &[u64]) -> Result<Arc<dyn Object>, StoreError> {
    let payload = object.payload;
    let mut draft = store.create(object).await?;
    for (part, len) in parts.iter().enumerate() {
        draft.bytes_mut(part)?.copy_from_slice(&pattern(payload, part, *len));
    }
    draft.seal().await
}

fn check(object: &dyn Object, payload: PayloadId, parts: &[u64]) {
    assert_eq!(object.payload(), payload);
    assert_eq!(object.parts(), parts.len());
    for (part, len) in parts.iter().enumerate() {
        let bytes = object.part(part).expect("the part is there");
        assert!(
            bytes == pattern(payload, part, *len),
            "part {part} of {len} bytes came back changed"
        );
    }
    assert_eq!(object.part(parts.len()), None);
    let regions = object.regions();
    assert!(
        regions.is_empty() || regions.len() == parts.len(),
        "one region per part, or none at all"
    );
}

/// A store may count whole pages of up to this size for each part.
const PAGE: u64 = 4096;

/// Checks that the books show `parts`.
fn holds(store: &dyn Store, parts: &[u64]) {
    let used = store.usage().used().0;
    let least: u64 = parts.iter().sum();
    let most: u64 = parts.iter().map(|len| len.next_multiple_of(PAGE)).sum();
    assert!(
        (least..=most).contains(&used),
        "{used} bytes held for parts of {parts:?}"
    );
}

/// What is written comes back, whatever the sizes; a part of no bytes is a part.
pub async fn objects_come_back_exact(store: &dyn Store) {
    let shapes: [&[u64]; 6] = [&[1], &[4096], &[4097, 3], &[0], &[], &[17, 0, 100_000, 1]];
    let mut ids = Vec::new();
    for parts in shapes {
        let payload = new_id();
        check(
            &*put(store, payload, parts).await.expect("there is room"),
            payload,
            parts,
        );
        ids.push((payload, parts));
    }
    for (payload, parts) in &ids {
        check(&*store.get(*payload).await.expect("it is sealed"), *payload, parts);
    }
    assert_eq!(store.usage().sealed.objects, ids.len() as u64);
    holds(store, &shapes.concat());
}

/// A draft cannot be read; a part that does not exist is an error.
pub async fn nobody_reads_what_is_not_sealed(store: &dyn Store) {
    let payload = new_id();
    let missing = store.get(payload).await.expect_err("nothing is there");
    assert!(matches!(missing, StoreError::NotFound { .. }), "{missing}");
    let mut draft = store
        .create(NewObject::new(payload, [ByteCount(10)]))
        .await
        .expect("there is room");
    let early = store.get(payload).await.expect_err("it is not sealed");
    assert!(matches!(early, StoreError::NotSealed { .. }), "{early}");
    assert_eq!(early.class(), ErrorClass::NotFound);
    assert!(matches!(
        draft.bytes_mut(1),
        Err(StoreError::NoSuchPart { part: 1, parts: 1, .. })
    ));
    assert_eq!(store.usage().drafts.objects, 1);
    draft.seal().await.expect("it is sealed once");
    assert!(store.get(payload).await.is_ok());
    assert_eq!((store.usage().drafts.objects, store.usage().sealed.objects), (0, 1));
}

/// Of many writers of one key one gets it; the others are told, and told whether it is sealed.
pub async fn put_if_absent_is_truthful<S: Store>(store: &Arc<S>) {
    let payload = new_id();
    let writers: Vec<_> = (0..8)
        .map(|_| {
            let store = Arc::clone(store);
            tokio::spawn(async move { store.create(NewObject::new(payload, [ByteCount(100)])).await })
        })
        .collect();
    let mut drafts = Vec::new();
    for writer in writers {
        match writer.await.expect("no panic") {
            Ok(draft) => drafts.push(draft),
            Err(error) => assert!(matches!(error, StoreError::Exists { sealed: false, .. }), "{error}"),
        }
    }
    assert_eq!(drafts.len(), 1, "writers that got the key");
    let draft = drafts.pop().expect("one");
    draft.seal().await.expect("the only writer");
    let late = store
        .create(NewObject::new(payload, [ByteCount(1)]))
        .await
        .expect_err("it is there");
    assert!(matches!(late, StoreError::Exists { sealed: true, .. }), "{late}");
    assert_eq!(late.class(), ErrorClass::Conflict);
    holds(&**store, &[100]);
}

/// A dropped draft frees key and room.
pub async fn aborted_drafts_leave_nothing(store: &dyn Store) {
    let payload = new_id();
    drop(
        store
            .create(NewObject::new(payload, [LIMIT]))
            .await
            .expect("there is room"),
    );
    assert_eq!(store.usage().used(), ByteCount(0));
    let missing = store.get(payload).await.expect_err("it was aborted");
    assert!(matches!(missing, StoreError::NotFound { .. }), "{missing}");
    put(store, payload, &[5]).await.expect("the key is free");
}

/// Deleting takes objects away once, and drafts too.
pub async fn deleted_objects_are_gone(store: &dyn Store) {
    let payload = new_id();
    drop(put(store, payload, &[1000]).await.expect("there is room"));
    store.delete(payload, None).await.expect("it is there");
    for error in [
        store.get(payload).await.map(drop).expect_err("it is gone"),
        store.delete(payload, None).await.expect_err("it is gone"),
    ] {
        assert!(matches!(error, StoreError::NotFound { .. }), "{error}");
    }
    assert_eq!(store.usage().used(), ByteCount(0));

    let draft = store
        .create(NewObject::new(payload, [ByteCount(10)]))
        .await
        .expect("the key is free");
    store.delete(payload, None).await.expect("a draft can be deleted");
    let again = put(store, payload, &[7]).await.expect("the key is free again");
    let late = draft.seal().await.expect_err("it was deleted");
    assert!(matches!(late, StoreError::NotFound { .. }), "{late}");
    check(&*store.get(payload).await.expect("the second writer's"), payload, &[7]);
    drop(again);
    holds(store, &[7]);
}

/// A reader keeps its bytes after a delete; they count until it lets go.
pub async fn readers_keep_what_they_read(store: &dyn Store) {
    let payload = new_id();
    let object = put(store, payload, &[5000]).await.expect("there is room");
    store.delete(payload, None).await.expect("it is there");
    assert_eq!(store.usage().draining.objects, 1);
    holds(store, &[5000]);
    let other = new_id();
    put(store, other, &[5000]).await.expect("there is room");
    check(&*object, payload, &[5000]);
    drop(object);
    holds(store, &[5000]);
}

/// Too much is refused: for ever where it can never fit, else with who holds the space.
pub async fn a_full_store_says_what_holds_the_space(store: &dyn Store) {
    let payload = new_id();
    let large = NewObject::new(payload, [ByteCount(LIMIT.0 / 2), ByteCount(LIMIT.0 / 2 + 1)]);
    let error = store.create(large).await.expect_err("larger than the store");
    assert!(matches!(error, StoreError::TooLarge { .. }), "{error}");
    let endless = NewObject::new(payload, [ByteCount(u64::MAX), ByteCount(u64::MAX)]);
    assert!(store.create(endless).await.is_err(), "sizes were added without a check");

    put(store, payload, &[LIMIT.0 / 2]).await.expect("there is room");
    let error = store
        .create(NewObject::new(new_id(), [ByteCount(LIMIT.0 / 2 + 1)]))
        .await
        .expect_err("one byte too many");
    assert_eq!(
        (error.class(), error.reason()),
        (ErrorClass::Exhausted, "credit.store_bytes")
    );
    let StoreError::Exhausted { usage, .. } = &error else {
        panic!("{error}")
    };
    assert_eq!(usage.largest[0].payload, payload);
    assert!(error.to_string().contains(&payload.to_string()), "{error}");
    put(store, new_id(), &[LIMIT.0 / 2]).await.expect("the rest fits");
}

/// A writer that may wait gets room as soon as there is some, and not the room of another.
pub async fn a_writer_waits_for_room<S: Store>(store: &Arc<S>) {
    let payload = new_id();
    put(&**store, payload, &[LIMIT.0]).await.expect("there is room");
    let waiting = tokio::spawn({
        let store = Arc::clone(store);
        async move {
            let mut object = NewObject::new(new_id(), [ByteCount(10)]);
            // As long as it takes; no clock reaches that far.
            object.wait = Duration::MAX;
            store.create(object).await.map(drop)
        }
    });
    let mut hasty = NewObject::new(new_id(), [ByteCount(10)]);
    hasty.wait = Duration::from_millis(20);
    let error = store.create(hasty).await.expect_err("nobody made room");
    assert!(matches!(error, StoreError::Exhausted { .. }), "{error}");
    assert!(!waiting.is_finished(), "it got room that there is not");
    store.delete(payload, None).await.expect("it is there");
    waiting.await.expect("no panic").expect("there is room now");
}

fn destinations(parts: &[u64]) -> Vec<Arc<Target>> {
    let target = |len: &u64| Arc::new(Target::allocate(*len).expect("memory"));
    parts.iter().map(target).collect()
}

/// Bytes are copied into destinations of the caller, all of them; what does not fit is refused.
pub async fn fetched_bytes_are_exact(store: &dyn Store) {
    let payload = new_id();
    let parts = [1, 0, 4097, 300_000];
    let early = store.fetch(payload, &destinations(&parts)).await;
    assert!(matches!(early, Err(StoreError::NotFound { .. })), "{early:?}");
    let draft = store.create(NewObject::new(payload, parts.map(ByteCount))).await;
    let early = store.fetch(payload, &destinations(&parts)).await;
    assert!(matches!(early, Err(StoreError::NotSealed { .. })), "{early:?}");
    drop(draft);

    put(store, payload, &parts).await.expect("there is room");
    for _ in 0..2 {
        let targets = destinations(&parts);
        store.fetch(payload, &targets).await.expect("it is sealed");
        for (part, (target, len)) in targets.iter().zip(parts).enumerate() {
            let bytes = target.as_slice().expect("it was filled");
            assert!(bytes == pattern(payload, part, len), "part {part} came back changed");
        }
        let again = store.fetch(payload, &targets).await.expect_err("they are full");
        assert!(matches!(again, StoreError::Target { part: 0, .. }), "{again}");
    }
    let few = store
        .fetch(payload, &destinations(&parts[1..]))
        .await
        .expect_err("three");
    let expected = StoreError::Destinations {
        payload,
        parts: 4,
        destinations: 3,
    };
    assert_eq!(
        (few.to_string(), few.class()),
        (expected.to_string(), ErrorClass::Invalid)
    );
    let targets = destinations(&[1, 0, 4096, 300_000]);
    let short = store.fetch(payload, &targets).await.expect_err("a byte too short");
    assert!(matches!(short, StoreError::Target { part: 2, .. }), "{short}");
    assert!(targets[0].as_slice().is_err(), "written although another does not fit");
}

/// Reserved room goes to nobody else, and to the object that brings it; too large a reservation fails in time.
pub async fn reserved_room_is_kept(store: &dyn Store) {
    let none = store.reserve(ByteCount(LIMIT.0 + 1), Duration::MAX).await;
    let none = none.expect_err("larger than the store");
    assert_eq!(
        (none.class(), none.reason()),
        (ErrorClass::Exhausted, "credit.store_bytes")
    );
    let reservation = store.reserve(LIMIT, Duration::ZERO).await.expect("it is empty");
    assert_eq!((reservation.nbytes(), store.usage().used()), (LIMIT, LIMIT));
    let error = put(store, new_id(), &[1]).await.expect_err("all is reserved");
    assert!(error.to_string().contains("reserved"), "{error}");
    drop(reservation);
    put(store, new_id(), &[1]).await.expect("it was given back");

    let reservation = store.reserve(ByteCount(LIMIT.0 / 2), Duration::ZERO).await;
    let (kept, payload) = (reservation.expect("there is room"), new_id());
    let wait = Duration::from_millis(20);
    let late = store.reserve(LIMIT, wait).await.expect_err("somebody holds half of it");
    assert!(matches!(late, StoreError::Unreserved { .. }), "{late}");
    let mut object = NewObject::new(payload, [ByteCount(5000)]);
    object.reservation = Some(kept);
    drop(store.create(object).await.expect("room was reserved"));
    assert_eq!(
        store.usage().reserved,
        Share::default(),
        "what was not needed is still kept"
    );

    let small = store
        .reserve(ByteCount(1), Duration::ZERO)
        .await
        .expect("there is room");
    let mut object = NewObject::new(payload, [ByteCount(LIMIT.0 / 2)]);
    object.reservation = Some(small);
    drop(store.create(object).await.expect("there is room for the rest"));
    assert_eq!(store.usage().drafts, Share::default());
}

fn cached(millis: u64) -> Retention {
    Retention::Cached {
        cost: Duration::from_millis(millis),
    }
}

/// Cached objects go when room is needed, the cheap ones first; soft-pinned ones when nothing else is left to go; held
/// ones never.
pub async fn cached_objects_make_room_and_held_ones_do_not(store: &dyn Store) {
    let eighth = [LIMIT.0 / 8];
    let held = put_kept(store, Retention::Held, &eighth).await.expect("there is room");
    let soft = put_kept(store, Retention::SoftPinned, &eighth)
        .await
        .expect("there is room");
    let cheap = put_kept(store, cached(1), &eighth).await.expect("there is room");
    let dear = put_kept(store, cached(1000), &eighth).await.expect("there is room");
    let rest = put_kept(store, Retention::Held, &[LIMIT.0 / 2])
        .await
        .expect("there is room");

    for (gone, left) in [(cheap, vec![dear, soft]), (dear, vec![soft]), (soft, vec![])] {
        put_kept(store, Retention::Held, &eighth)
            .await
            .expect("something can go");
        let missing = store.get(gone).await.expect_err("it was to go first");
        assert!(matches!(missing, StoreError::NotFound { .. }), "{missing}");
        for payload in left.into_iter().chain([held, rest]) {
            assert!(store.get(payload).await.is_ok(), "another one went");
        }
    }
    let full = put_kept(store, cached(1), &[1])
        .await
        .expect_err("all that is left is held");
    assert!(matches!(full, StoreError::Exhausted { .. }), "{full}");
    check(&*store.get(held).await.expect("it is held"), held, &eighth);
}

/// A reader keeps a cached object in the store. What could not make enough room stays, too.
pub async fn what_is_read_is_not_evicted(store: &dyn Store) {
    let half = [LIMIT.0 / 2];
    let first = put_kept(store, cached(1), &half).await.expect("there is room");
    let second = put_kept(store, cached(1000), &half).await.expect("there is room");
    let reader = store.get(first).await.expect("it is there");
    put_kept(store, Retention::Held, &half)
        .await
        .expect("the other one can go");
    check(&*reader, first, &half);
    assert!(store.get(first).await.is_ok(), "it was read, and went");
    let gone = store.get(second).await.expect_err("it was not read");
    assert!(matches!(gone, StoreError::NotFound { .. }), "{gone}");
    let full = put_kept(store, cached(1), &[1]).await.expect_err("somebody reads it");
    assert!(matches!(full, StoreError::Exhausted { .. }), "{full}");
    drop(reader);
    put_kept(store, Retention::Held, &[LIMIT.0 / 2 + 1])
        .await
        .expect_err("half of it is held");
    assert!(store.get(first).await.is_ok(), "it went in vain");
    put_kept(store, Retention::Held, &[1])
        .await
        .expect("nobody reads it now");
}

/// An object is gone when its time is up, however often it is read, and whoever reads it keeps its bytes.
pub async fn deadlines_are_fixed(store: &dyn Store) {
    const LIFE: Duration = Duration::from_millis(100);
    let (payload, keeps) = (new_id(), new_id());
    put(store, keeps, &[1]).await.expect("there is room");
    let mut object = NewObject::new(payload, [ByteCount(5000)]);
    object.expires = Some(LIFE);
    let before = Instant::now();
    let reader = put_object(store, object, &[5000]).await.expect("there is room");
    loop {
        match store.get(payload).await {
            Ok(object) => check(&*object, payload, &[5000]),
            Err(StoreError::NotFound { .. }) => break,
            Err(other) => panic!("{other}"),
        }
        assert!(
            before.elapsed() < LIFE + Duration::from_secs(20),
            "it outlived its time"
        );
        tokio::task::yield_now().await;
    }
    assert!(before.elapsed() >= LIFE, "it went before its time");
    check(&*reader, payload, &[5000]);
    drop(reader);
    holds(store, &[1]);
    put(store, payload, &[5]).await.expect("the key is free");
    assert!(store.get(keeps).await.is_ok());
}

/// Nothing is evicted while something is there that has outlived its time.
pub async fn what_is_over_goes_first(store: &dyn Store) {
    let half = [LIMIT.0 / 2];
    let cached = put_kept(store, cached(1), &half).await.expect("there is room");
    for _ in 0..8 {
        let mut object = NewObject::new(new_id(), half.map(ByteCount));
        object.expires = Some(Duration::ZERO);
        drop(put_object(store, object, &half).await.expect("the one before is over"));
    }
    check(&*store.get(cached).await.expect("there was no need"), cached, &half);
}

/// Who is not granted writes and deletes nothing. `store` is fresh and has the gate `gate`, which is closed.
pub async fn tokens_are_checked(store: &dyn Store, gate: &TokenGate) {
    let token = |attempt| Token {
        epoch: Epoch(1),
        job: JobId(Uuid::from_u128(1)),
        attempt: Attempt(attempt),
    };
    let object = |token| NewObject {
        token,
        ..NewObject::new(PayloadId(Uuid::from_u128(2)), [ByteCount(10)])
    };
    let refused = |result: Result<(), StoreError>, class| {
        let error = result.expect_err("it was let in");
        assert!(matches!(error, StoreError::Fenced { .. }), "{error}");
        assert_eq!(error.class(), class, "{error}");
    };
    refused(store.create(object(None)).await.map(drop), ErrorClass::Unauthenticated);
    refused(store.create(object(Some(token(1)))).await.map(drop), ErrorClass::Fenced);

    gate.grant(token(1));
    let draft = store.create(object(Some(token(1)))).await.expect("it is granted");
    gate.revoke(token(1));
    refused(draft.seal().await.map(drop), ErrorClass::Fenced);
    assert_eq!(store.usage().used(), ByteCount(0), "a fenced draft left something");

    gate.grant(token(2));
    let draft = store.create(object(Some(token(2)))).await.expect("it is granted");
    let payload = draft.seal().await.expect("it is granted").payload();
    refused(store.delete(payload, Some(token(1))).await, ErrorClass::Fenced);
    let foreign = Token {
        job: JobId(Uuid::from_u128(9)),
        ..token(1)
    };
    gate.grant(foreign);
    refused(store.delete(payload, Some(foreign)).await, ErrorClass::Fenced);
    assert!(store.get(payload).await.is_ok(), "a refused delete took it away");
    store.delete(payload, Some(token(2))).await.expect("it is its own");
}
