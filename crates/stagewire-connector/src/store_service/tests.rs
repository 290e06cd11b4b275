use stagewire_core::{DType, Entry, EntryValue, Manifest, PayloadKind, StageName, TensorSpec};
use stagewire_store::TokenGate;
use stagewire_transfer::Borrowed;

use super::*;
use crate::{ConnectorOptions, PublishSpec};

/// A put whose answer was lost comes again, and finds the payload there. Who has another capability does not.
#[tokio::test]
async fn a_repeated_put_proves_its_right() {
    let dir = tempfile::tempdir().expect("a directory");
    let start = async |role: &str| {
        let options = ConnectorOptions::new(dir.path().join("run"), StageName::new(role).expect("a name"));
        Connector::start(options).await.expect("a connector")
    };
    let (producer, keeper) = (start("denoise").await, start("store").await);
    let store = HostStore::new(keeper.host(), ByteCount(1 << 20), Arc::new(TokenGate::open()));
    let service = StoreService::serve(&keeper, store);
    let entry = |len| Entry {
        name: "x".to_owned(),
        value: EntryValue::Tensor(TensorSpec::new(DType::U8, [len]).expect("small")),
    };
    let manifest = |len| Manifest::new(PayloadKind::Latent, vec![entry(len)]).expect("one name");
    let spec = PublishSpec::new("r", manifest(4), Lease::Pinned);
    let memory = Borrowed::from(vec![1; 4]).into();
    let publication = producer.publish(spec, vec![memory]).expect("room");
    let first = publication.handle().clone();
    let stored = producer.store(&first, None, Duration::from_secs(5)).await;
    let stored = stored.expect("there is room");

    let right = Capability::from_random([7; 16]);
    let again = |capability: Capability, manifest: Manifest| {
        let request = PutRequest {
            handle: Handle {
                capability: right,
                manifest,
                ..first.clone()
            },
            capability,
            token: None,
            owner: Owner::Lease(Lease::Pinned),
            expires: None,
            wait: Duration::ZERO,
            reservation: None,
        };
        service.put(request)
    };
    let found = again(first.capability, manifest(4)).await;
    assert_eq!(found.expect("it is there"), stored);
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
    assert_eq!(keeper.live(), [first.payload]);
}
