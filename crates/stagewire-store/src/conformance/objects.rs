use std::sync::Arc;

use stagewire_core::{ByteCount, Classify, ErrorClass};

use super::{LIMIT, check, counts, destinations, holds, new_id, pattern, put};
use crate::{NewObject, Store, StoreError};

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
    counts(store, 0, ids.len() as u64);
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
    counts(store, 1, 0);
    draft.seal().await.expect("it is sealed once");
    assert!(store.get(payload).await.is_ok());
    counts(store, 0, 1);
}

/// Of many writers of one key one gets it; the others are told, and told whether it is sealed.
pub async fn put_if_absent_is_truthful(store: &Arc<dyn Store>) {
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
    holds(store, &[]);
    let missing = store.get(payload).await.expect_err("it was aborted");
    assert!(matches!(missing, StoreError::NotFound { .. }), "{missing}");
    put(store, payload, &[5]).await.expect("the key is free");
}

/// Deleting takes objects away, once.
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
    holds(store, &[]);
    put(store, payload, &[7]).await.expect("the key is free");
    check(&*store.get(payload).await.expect("it is there again"), payload, &[7]);
}

/// A draft can be deleted: its writer is told when it seals.
pub async fn deleted_drafts_are_gone(store: &dyn Store) {
    let payload = new_id();
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
    if store.abilities().bound {
        assert_eq!(store.usage().draining.objects, 1);
    }
    holds(store, &[5000]);
    let other = new_id();
    put(store, other, &[5000]).await.expect("there is room");
    check(&*object, payload, &[5000]);
    drop(object);
    holds(store, &[5000]);
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
