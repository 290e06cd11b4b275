use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};

use stagewire_core::{
    Attempt, DType, Entry, EntryValue, Epoch, JobId, Lease, Manifest, PayloadKind, StageName, TensorSpec,
};
use stagewire_store::{HostStore, TokenGate};
use stagewire_transfer::Borrowed;
use tokio::io::AsyncWriteExt;
use uuid::Uuid;

use super::*;
use crate::outbox::tests::Counted;
use crate::release::release_elsewhere;
use crate::{Connector, ConnectorOptions, PublishSpec, StoreService};

const PATIENCE: Duration = Duration::from_secs(20);

async fn start(dir: &tempfile::TempDir, role: &str) -> Arc<Connector> {
    let options = ConnectorOptions::new(dir.path().join("run"), StageName::new(role).expect("a name"));
    Connector::start(options).await.expect("a connector")
}

fn token(job: u128, attempt: u32) -> Token {
    Token {
        epoch: Epoch(1),
        job: JobId(Uuid::from_u128(job)),
        attempt: Attempt(attempt),
    }
}

fn spec(owner: Owner) -> PublishSpec {
    let entry = Entry {
        name: "x".to_owned(),
        value: EntryValue::Tensor(TensorSpec::new(DType::U8, [4]).expect("small")),
    };
    let manifest = Manifest::new(PayloadKind::Latent, vec![entry]).expect("one name");
    PublishSpec::new("r", manifest, owner)
}

fn class(released: Result<(), Refusal>) -> ErrorClass {
    match released {
        Err(Refusal::Fenced(failure)) => failure.class,
        other => panic!("{other:?}"),
    }
}

/// The attempt that made it may end it, as long as it may act, and no other.
#[tokio::test(flavor = "multi_thread")]
async fn an_orchestrators_payload_ends_by_a_token_or_by_its_holder() {
    let dir = tempfile::tempdir().expect("a directory");
    let (producer, keeper) = (start(&dir, "denoise").await, start(&dir, "store").await);
    let store = HostStore::new(keeper.host(), ByteCount(1 << 20), Arc::new(TokenGate::closed()));
    let service = StoreService::serve(&keeper, store);
    let gate = service.store().gate();
    let (mine, stale, foreign) = (token(1, 1), token(1, 2), token(2, 1));
    gate.grant(mine);
    gate.grant(foreign);
    let stored = async |owner| {
        let memory = Borrowed::from(vec![7; 4]).into();
        let publication = producer.publish(spec(owner), vec![memory]).expect("room");
        let live = Arc::clone(publication.live());
        let stored = producer.store(publication.handle(), Some(mine), PATIENCE).await;
        (stored.expect("there is room"), live)
    };
    let (
        Handle {
            payload, capability, ..
        },
        _,
    ) = stored(Owner::Orchestrator).await;
    let release = |token| keeper.shared().holder().release(payload, capability, token);
    assert_eq!(class(release(None)), ErrorClass::Unauthenticated);
    assert_eq!(class(release(Some(stale))), ErrorClass::Fenced);
    assert_eq!(class(release(Some(foreign))), ErrorClass::Fenced);
    let forged = Capability::from_random([9; 16]);
    let forged = keeper.shared().holder().release(payload, forged, Some(mine));
    assert!(matches!(forged, Err(Refusal::Denied)), "{forged:?}");
    assert_eq!(keeper.live(), [payload]);
    release(Some(mine)).expect("its own attempt");

    // A producer tells a store that it is not to keep what it put there: with the token of that put.
    let (handle, live) = stored(Owner::Orchestrator).await;
    let here = Live::new(Handle::clone(live.handle()), Owner::Orchestrator, Arc::new(Nothing));
    let publication = producer.shared().hold(here, None);
    let again = Arc::clone(publication.expect("it has moved").live());
    release_elsewhere(producer.shared(), &again)
        .await
        .expect("nobody was asked");
    let right = Capability::from_random([3; 16]);
    let there = Arc::new(keeper.peer().clone());
    again.asked().add(right, &there, None);
    release_elsewhere(producer.shared(), &again)
        .await
        .expect_err("without a token");
    assert_eq!(keeper.live(), [handle.payload]);
    again.asked().add(right, &there, live.asked().token());
    release_elsewhere(producer.shared(), &again)
        .await
        .expect("its own attempt");
    assert!(keeper.live().is_empty());

    let (handle, _) = stored(Owner::Orchestrator).await;
    let shared = producer.shared();
    let denied = crate::release::release(shared, &handle, None).await;
    assert_eq!(
        denied.expect_err("without a token").class(),
        ErrorClass::Unauthenticated
    );
    crate::release::release(shared, &handle, Some(mine))
        .await
        .expect("its own attempt");
    assert!(keeper.live().is_empty());

    // With a lease, who has the handle has the right.
    let (handle, _) = stored(Owner::Lease(Lease::Pinned)).await;
    producer.release_handle(&handle).await.expect("it is pinned until then");
    assert!(keeper.live().is_empty());
}

/// Memory of nobody.
#[derive(Debug)]
struct Nothing;

impl crate::live::Keep for Nothing {}

/// A store whose room comes at a time that the test chooses.
#[derive(Debug, Default)]
struct Slow {
    /// Passed once somebody is being given room, and once more before it has it.
    giving: Option<Barrier>,
    kept: Arc<()>,
}

#[async_trait]
impl PutHandler for Slow {
    async fn put(&self, _: PutRequest) -> Result<Taken, Failure> {
        Err(orchestrators(PayloadId(Uuid::nil())))
    }

    fn may_end(&self, _: PayloadId, _: Option<Token>) -> Result<(), Failure> {
        Ok(())
    }

    async fn reserve(&self, nbytes: ByteCount, _: Duration) -> Result<Reservation, Failure> {
        if let Some(giving) = &self.giving {
            giving.wait();
            giving.wait();
        }
        Ok(Reservation::new(nbytes, Arc::clone(&self.kept)))
    }
}

/// A session, what it reads from, the other end of its socket, and how often it wrote.
fn session(puts: Arc<Slow>) -> (Session, Reader, UnixStream, Arc<AtomicUsize>) {
    let (ours, theirs) = UnixStream::pair().expect("a pair");
    let (read, socket) = ours.into_split();
    let writes = Arc::new(AtomicUsize::new(0));
    let counted = Counted {
        socket,
        writes: Arc::clone(&writes),
    };
    let (reader, writer) = wire::framed(read, counted);
    let me = Me {
        incarnation: stagewire_core::Incarnation(Uuid::nil()),
        process: stagewire_core::ProcessRef { pid: 1, started: 1 },
        uid: 0,
    };
    let holder = Holder {
        me,
        table: Arc::default(),
        puts: OnceLock::from(puts as Arc<dyn PutHandler>),
        kv: Arc::default(),
    };
    (Session::new(Arc::new(holder), writer), reader, theirs, writes)
}

/// Room belongs to who asked for it, and to nobody once that one has left: before it came, just then, and afterwards.
#[tokio::test(flavor = "multi_thread")]
async fn room_that_nobody_waits_for_is_given_back() {
    let reserve = Request::Reserve {
        id: 1,
        nbytes: 4096,
        wait_ms: 0,
    };
    let slow = Arc::new(Slow {
        giving: Some(Barrier::new(2)),
        ..Slow::default()
    });
    let kept = Arc::clone(&slow.kept);
    let (mut session, _reader, _theirs, _writes) = session(Arc::clone(&slow));
    session.request(reserve.clone()).await;
    let giving = slow.giving.as_ref().expect("it waits");
    giving.wait();
    // The room is as good as given when who asked for it leaves.
    session.request(Request::Leave { id: 1 }).await;
    giving.wait();
    let given_back = async {
        // The test, the store, and nobody else.
        while Arc::strong_count(&kept) > 2 || session.asked.values().any(|task| !task.is_finished()) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    tokio::time::timeout(PATIENCE, given_back).await.expect("in time");
    assert_eq!(
        Arc::strong_count(&kept),
        2,
        "somebody keeps room for a put that never comes"
    );
    assert!(lock(&session.reserved).is_empty());
}

/// Requests that come together are answered with one write; none waits for what has come in part only.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_asked_together_is_answered_together() {
    let (mut session, mut reader, theirs, writes) = session(Arc::default());
    let run = tokio::spawn(async move { session.run(&mut reader).await.map_err(|error| error.to_string()) });
    let (answers, mut requests) = theirs.into_split();
    let mut answers = tokio_util::codec::FramedRead::new(answers, wire::codec());
    let release = |id| {
        let request = Request::Release {
            id,
            payload: PayloadId(Uuid::nil()),
            capability: Capability::from_random([7; 16]),
            token: None,
        };
        wire::frame(&request).expect("it is short")
    };
    let begun = release(10);
    let (part, rest) = begun.split_at(7);
    let together: Vec<u8> = (0..10).flat_map(release).chain(part.iter().copied()).collect();
    requests.write_all(&together).await.expect("it reads");
    for id in 0..=10 {
        let answer = tokio::time::timeout(PATIENCE, answers.next()).await.expect("in time");
        let answer = wire::decode::<Reply>(&answer.expect("more").expect("a frame"));
        assert_eq!(answer.expect("as it was sent").id(), id);
        if id == 9 {
            assert_eq!(writes.load(Ordering::SeqCst), 1);
            requests.write_all(rest).await.expect("it reads");
        }
    }
    assert_eq!(writes.load(Ordering::SeqCst), 2);
    // What was asked before something that is no request is answered nevertheless.
    let wrong: Vec<u8> = release(11).iter().copied().chain([0, 0, 0, 1, 0xFF]).collect();
    requests.write_all(&wrong).await.expect("it reads");
    let answer = tokio::time::timeout(PATIENCE, answers.next()).await.expect("in time");
    let answer = wire::decode::<Reply>(&answer.expect("more").expect("a frame"));
    assert_eq!(answer.expect("as it was sent").id(), 11);
    run.await.expect("no panic").expect_err("that is no request");
}
