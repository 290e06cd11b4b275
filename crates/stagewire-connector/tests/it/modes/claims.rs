//! Consumers that are at a payload when it is to move to the store.

use super::*;

async fn until(what: &str, is_so: impl Fn() -> bool) {
    let wait = async {
        while !is_so() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    assert!(tokio::time::timeout(PATIENCE, wait).await.is_ok(), "{what}");
}

/// The room that was kept for it is not lost with a first try.
#[tokio::test(flavor = "multi_thread")]
async fn room_is_kept_while_another_consumer_is_in_the_way() {
    let world = World::new().await;
    let producer = &world.connector;
    let mut store = store(&world, 8 << 12).await;
    let mut lost = world.second().await;
    let direct = Publish {
        consumer: Some(lost.peer().await),
        ..Publish::new(Mode::Auto)
    };
    let direct = direct.by(producer, &latent()).expect("its consumer lives");
    direct.settled().await.expect("there is room in case");
    let options = ConsumeOptions::within(PATIENCE);
    let consumer = producer.consume(direct.handle().clone(), options);
    let mut consumer = consumer.expect("a consumer");
    consumer.next().await.expect("alive").expect("ready");
    // Takes whatever room comes free.
    let greedy = Publish::new(Mode::Store)
        .by(producer, &latent().seeded(2))
        .expect("there is a store");

    lost.kill().await;
    until("nobody wanted it for the store", || producer.stats().claims_refused > 0).await;
    drop(consumer);
    until("it has lost its room", || direct.mode() == TransferMode::Store).await;
    assert!(greedy.outcome().is_none(), "there was room for two");
    let mode = fetch(producer, &latent(), direct.handle()).await;
    assert_eq!(mode.expect("the store has it"), TransferMode::Store);
    greedy.settled().await.expect("there is room now");
    let mode = fetch(producer, &latent().seeded(2), greedy.handle()).await;
    assert_eq!(mode.expect("the store has it"), TransferMode::Store);
    store.all_gone().await;
    all_gone(producer).await;
}

/// However long a consumer takes before it dies, the store has its time afterwards.
#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_that_took_its_time_leaves_some_to_the_store() {
    let world = World::new().await;
    let producer = &world.connector;
    // Too large to go along with the put.
    let bundle = Bundle::one(&[8, 100_000]).cut(0, 8);
    for bundle in [bundle.clone(), bundle.borrowed()] {
        let mut store = store(&world, 8 << 20).await;
        let within = Duration::from_millis(300);
        let spec = PublishSpec {
            mode: Mode::Store,
            store_within: within,
            ..PublishSpec::new("request", bundle.manifest(), Lease::DeleteOnConsume)
        };
        let publication = producer.open(spec, bundle.memory(producer.host().arena()));
        let publication = publication.expect("there is a store");
        let consume = || {
            let options = ConsumeOptions::within(PATIENCE);
            producer
                .consume(publication.handle().clone(), options)
                .expect("a consumer")
        };
        publication.ready(0).expect("it is open");
        let mut decoder = consume();
        decoder.next().await.expect("alive").expect("ready");
        for index in 1..8 {
            publication.ready(index).expect("it is open");
        }
        tokio::time::sleep(within + Duration::from_millis(100)).await;
        assert!(publication.outcome().is_none(), "somebody decodes it");
        drop(decoder);
        publication.settled().await.expect("the store had no time");
        let mut successor = consume();
        for index in 0..8 {
            let chunk = successor.next().await.expect("the store has it").expect("all of it");
            assert_eq!(chunk.handover.mode, TransferMode::Store);
            bundle.check(&chunk.tensors, Some(index));
        }
        assert!(successor.next().await.expect("the end").is_none());
        drop(successor);
        store.all_gone().await;
        all_gone(producer).await;
        store.kill().await;
    }
}
