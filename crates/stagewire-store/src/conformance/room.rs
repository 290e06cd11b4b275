use std::sync::Arc;
use std::time::{Duration, Instant};

use stagewire_core::{ByteCount, Classify, ErrorClass};

use super::{LIMIT, cached, check, holds, new_id, put, put_kept, put_object};
use crate::{NewObject, Retention, Share, Store, StoreError};

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
pub async fn a_writer_waits_for_room(store: &Arc<dyn Store>) {
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

    // All that the first object leaves.
    let rest = ByteCount(LIMIT.0 - 4096);
    let kept = store.reserve(rest, Duration::ZERO).await.expect("there is room");
    for attempt in 0..2 {
        let mut object = NewObject::new(payload, [rest]);
        object.reservation = Some(kept.clone());
        drop(store.create(object).await.expect("room was reserved"));
        let error = put(store, new_id(), &[1]).await.expect_err("all is reserved again");
        assert!(matches!(error, StoreError::Exhausted { .. }), "{attempt}: {error}");
    }
    drop(kept);

    let small = store
        .reserve(ByteCount(1), Duration::ZERO)
        .await
        .expect("there is room");
    let mut object = NewObject::new(payload, [ByteCount(LIMIT.0 / 2)]);
    object.reservation = Some(small);
    drop(store.create(object).await.expect("there is room for the rest"));
    assert_eq!(store.usage().drafts, Share::default());
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
