use stagewire_core::{Attempt, ByteCount, Classify, Epoch, ErrorClass, JobId, PayloadId, Token};
use uuid::Uuid;

use crate::{NewObject, Store, StoreError, TokenGate};

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
