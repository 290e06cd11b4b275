//! Stores that may have taken a payload, and could not say so.

use futures::{SinkExt, StreamExt};
use stagewire_core::{
    ByteCount, DType, Entry, EntryValue, Incarnation, Lease, Manifest, PayloadId, PayloadKind, StageName, TensorSpec,
};
use stagewire_store::{HostStore, TokenGate};
use stagewire_transfer::Borrowed;
use tokio::net::{UnixListener, UnixStream};
use tokio_util::task::AbortOnDropHandle;
use uuid::Uuid;

use super::*;
use crate::serve::PutRequest;
use crate::wire::{self, Greeting, PutBytes, Refusal, Reply, Request};
use crate::{Connector, ConnectorOptions, ConsumeOptions, Mode, Owner, Publication, PublishSpec, StoreService};

const PATIENCE: Duration = Duration::from_secs(20);

/// What becomes of a put.
#[derive(Debug, Clone)]
enum Then {
    /// The connection ends: the store may have the payload.
    End,
    /// No answer comes.
    Silence,
    /// Its answer is no answer.
    Babble,
    /// Of two puts, the first is refused once the second has come, and the connection ends.
    RefuseOne,
    /// This store takes the payload, and the connection ends before it has said so.
    Take(Arc<Connector>),
}

/// A store that speaks the protocol, and notes what it is asked.
struct Fake {
    peer: Peer,
    puts: watch::Receiver<u32>,
    released: watch::Receiver<Vec<PayloadId>>,
    _serving: AbortOnDropHandle<()>,
}

struct World {
    dir: tempfile::TempDir,
    producer: Arc<Connector>,
}

impl World {
    async fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let producer = start(&dir, "denoise").await;
        Self { dir, producer }
    }

    /// A store that the producer is told of.
    fn fake(&self, incarnation: Incarnation, then: Then) -> Fake {
        let path = self.dir.path().join(format!("{}.ctl", incarnation.0.simple()));
        let listener = UnixListener::bind(&path).expect("a socket");
        let peer = Peer {
            incarnation,
            socket: path.to_string_lossy().into_owned(),
            ..self.producer.peer().clone()
        };
        let (asked, puts) = watch::channel(0);
        let (ended, released) = watch::channel(Vec::new());
        let serving = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.expect("a connection");
                tokio::spawn(serve(stream, then.clone(), asked.clone(), ended.clone()));
            }
        });
        self.producer.set_store(Some(peer.clone()));
        Fake {
            peer,
            puts,
            released,
            _serving: AbortOnDropHandle::new(serving),
        }
    }

    /// Publishes 4 bytes that are not to be kept here, or not for long.
    fn publish(&self, consumer: Option<Peer>, within: Duration) -> Publication {
        let spec = PublishSpec {
            mode: consumer.as_ref().map_or(Mode::Store, |_| Mode::Auto),
            consumer,
            store_within: within,
            ..PublishSpec::new("r", manifest(), Lease::Pinned)
        };
        let memory = Borrowed::from(vec![7; 4]).into();
        self.producer.publish(spec, vec![memory]).expect("there is a store")
    }

    /// Publishes 4 bytes that stay here.
    fn publish_here(&self) -> Publication {
        let spec = PublishSpec::new("r", manifest(), Lease::Pinned);
        let memory = Borrowed::from(vec![7; 4]).into();
        self.producer.publish(spec, vec![memory]).expect("room")
    }

    async fn store(&self) -> (Arc<Connector>, Arc<StoreService>) {
        let keeper = start(&self.dir, "store").await;
        let store = HostStore::new(keeper.host(), ByteCount(1 << 20), Arc::new(TokenGate::open()));
        let service = StoreService::serve(&keeper, store);
        (keeper, service)
    }
}

fn manifest() -> Manifest {
    let entry = Entry {
        name: "x".to_owned(),
        value: EntryValue::Tensor(TensorSpec::new(DType::U8, [4]).expect("small")),
    };
    Manifest::new(PayloadKind::Latent, vec![entry]).expect("one name")
}

async fn start(dir: &tempfile::TempDir, role: &str) -> Arc<Connector> {
    let options = ConnectorOptions::new(dir.path().join("run"), StageName::new(role).expect("a name"));
    Connector::start(options).await.expect("a connector")
}

async fn serve(stream: UnixStream, then: Then, puts: watch::Sender<u32>, released: watch::Sender<Vec<PayloadId>>) {
    let (read, write) = stream.into_split();
    let (mut reader, mut writer) = wire::framed(read, write);
    if let Some(Ok(_hello)) = reader.next().await {
        let _ = writer.send(wire::encode(&Greeting::Welcome)).await;
    }
    let mut before = None;
    while let Some(Ok(frame)) = reader.next().await {
        let reply = match wire::decode(&frame).expect("a request") {
            Request::Put {
                id,
                handle,
                right,
                owner,
                ..
            } => {
                puts.send_modify(|puts| *puts += 1);
                match &then {
                    Then::Silence => continue,
                    Then::End => return,
                    Then::Babble => Reply::Stored {
                        id,
                        handle: vec![1, 2, 3],
                        undo: None,
                    },
                    Then::RefuseOne => {
                        let Some(id) = before.replace(id) else { continue };
                        let refusal = Refusal::NoStore;
                        let _ = writer.send(wire::encode(&Reply::Refused { id, refusal })).await;
                        return;
                    }
                    Then::Take(store) => return take(store, &handle, right, owner).await,
                }
            }
            Request::Reserve { id, .. } => Reply::Reserved { id },
            Request::Release { id, payload, .. } => {
                released.send_modify(|released| released.push(payload));
                Reply::Finished { id }
            }
            _ => continue,
        };
        let _ = writer.send(wire::encode(&reply)).await;
    }
}

async fn take(store: &Connector, handle: &[u8], right: stagewire_core::Capability, owner: Owner) {
    let handle = Handle::from_bytes(handle).expect("a handle");
    let request = PutRequest {
        capability: handle.capability,
        handle: Handle {
            capability: right,
            ..handle
        },
        bytes: PutBytes::Consumed,
        token: None,
        owner,
        expires: None,
        wait: PATIENCE,
        reservation: None,
    };
    let puts = store.shared().holder().puts.get().expect("it keeps a store");
    puts.put(request).await.expect("there is room");
}

impl Fake {
    async fn asked(&mut self) {
        let asked = self.puts.wait_for(|puts| *puts > 0);
        tokio::time::timeout(PATIENCE, asked)
            .await
            .expect("in time")
            .expect("it lives");
    }

    async fn told(&mut self, payload: PayloadId) {
        let told = self.released.wait_for(|released| released.contains(&payload));
        let told = tokio::time::timeout(PATIENCE, told).await;
        told.expect("the store is not told that it is not to keep it")
            .expect("it lives");
    }
}

fn someone() -> Incarnation {
    Incarnation(Uuid::new_v4())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_is_not_to_keep_what_stays_or_ends_here() {
    let world = World::new().await;
    let mut fake = world.fake(someone(), Then::End);
    let within = Duration::from_millis(100);
    let failed = world.publish(None, within);
    failed.settled().await.expect_err("no answer");
    fake.told(failed.handle().payload).await;
    assert!(world.producer.live().is_empty());

    let consumer = start(&world.dir, "decode").await;
    let stays = world.publish(Some(consumer.peer().clone()), within);
    stays.settled().await.expect("it stays until its consumer is lost");
    consumer.close().await;
    fake.told(stays.handle().payload).await;
    assert_eq!(
        (world.producer.live(), stays.mode()),
        (vec![stays.handle().payload], TransferMode::P2p)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn one_store_keeps_it() {
    let world = World::new().await;
    let mut fake = world.fake(someone(), Then::End);
    let publication = world.publish(None, PATIENCE);
    fake.asked().await;
    let (keeper, _service) = world.store().await;
    world.producer.set_store(None);
    let stored = publication.settled().await.expect("there is room");
    assert_eq!(stored.holder, *keeper.peer());
    fake.told(stored.payload).await;
    world.producer.close().await;
    assert_eq!(
        keeper.live(),
        [stored.payload],
        "the one that keeps it was told to end it"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn closing_waits_until_a_store_knows_what_was_given_up() {
    for cancels in [true, false] {
        let world = World::new().await;
        let mut fake = world.fake(someone(), Then::Silence);
        let publication = world.publish(None, PATIENCE);
        fake.asked().await;
        if cancels {
            assert!(publication.cancel());
        }
        world.producer.close().await;
        assert_eq!(
            *fake.released.borrow(),
            [publication.handle().payload],
            "cancelled: {cancels}"
        );
        publication.settled().await.expect_err("it was given up");
        assert_eq!(world.producer.stats().links, 0);
    }
}

/// What the store has taken is in the store, also where its answer was lost: nothing is read from the producer any more.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_leads_to_the_store() {
    let world = World::new().await;
    let (keeper, _service) = world.store().await;
    let fake = world.fake(keeper.peer().incarnation, Then::Take(Arc::clone(&keeper)));
    let publication = world.publish(None, PATIENCE);
    let mut stored = publication.settled().await.expect("there is room");
    assert_eq!(stored.holder, fake.peer);
    stored.holder = keeper.peer().clone();
    let again = world.producer.store(publication.handle(), None, PATIENCE).await;
    assert_eq!(again.expect("it is there").holder, fake.peer);
    world.producer.close().await;
    let reader = start(&world.dir, "decode").await;
    for private in [false, true] {
        let options = ConsumeOptions {
            private,
            ..ConsumeOptions::within(PATIENCE)
        };
        let mut consumer = reader.consume(stored.clone(), options).expect("a consumer");
        let fetched = consumer.fetch_all().await.expect("the store has it");
        assert_eq!(fetched.tensors[0].to_vec(), [7; 4]);
    }
}

/// The same where the payload is put by its handle.
#[tokio::test(flavor = "multi_thread")]
async fn a_put_that_did_not_end_well_leaves_nothing_in_a_store() {
    let world = World::new().await;
    let publication = world.publish_here();
    let (payload, store) = (publication.handle().payload, || {
        world.producer.store(publication.handle(), None, PATIENCE)
    });
    // The answer does not come, or is none.
    for then in [Then::End, Then::Babble] {
        let mut fake = world.fake(someone(), then.clone());
        let error = store().await.expect_err("it did not say that it has it");
        match then {
            Then::End => assert!(matches!(error, PutError::StoreLost { .. }), "{error}"),
            _ => assert!(matches!(error, PutError::Protocol { .. }), "{error}"),
        }
        assert_eq!(world.producer.live(), [payload]);
        fake.told(payload).await;
    }
    // Nobody waits for the answer any more.
    let mut fake = world.fake(someone(), Then::Silence);
    let mut putting = Box::pin(store());
    assert!(futures::poll!(&mut putting).is_pending());
    tokio::select! {
        answer = &mut putting => panic!("it was silent: {answer:?}"),
        () = fake.asked() => {}
    }
    drop(putting);
    fake.told(payload).await;
    // That one put was refused does not mean that another was.
    let mut fake = world.fake(someone(), Then::RefuseOne);
    let (first, second) = tokio::join!(store(), store());
    let errors = [first, second].map(|put| put.expect_err("it has not said that it has it"));
    let lost = |error: &PutError| matches!(error, PutError::StoreLost { .. });
    assert_eq!(errors.iter().filter(|error| lost(error)).count(), 1, "{errors:?}");
    fake.told(payload).await;
    assert_eq!(world.producer.live(), [payload]);
}
