//! The worker runtime against an orchestrator that does what the test says.

mod batch;
mod group;

use std::sync::Arc;
use std::time::Duration;

use stagewire_api::v1::server_message::Message as FromServer;
use stagewire_api::v1::worker_message::Message as ToServer;
use stagewire_api::{RunDir, v1};
use stagewire_connector::worker::{Output, Task, TaskError, Worker, WorkerOptions};
use stagewire_connector::{ConsumeError, ConsumeOptions, Owner, StoreService};
use stagewire_core::{
    Attempt, ByteCount, Classify, DType, Epoch, ErrorClass, Failure, Handle, JobId, PayloadKind, Progress, StageName,
    Token, TransferMode,
};
use stagewire_store::{HostStore, TokenGate};
use stagewire_transfer::Borrowed;
use uuid::Uuid;

use crate::bundle::{Bundle, spec};
use crate::fake::{Attached, Fake};
use crate::second::Ask;
use crate::{PATIENCE, World, all_gone};

/// The orchestrator with this world's connector, one worker, and their stream.
struct Deployment {
    world: World,
    fake: Fake,
    worker: Arc<Worker>,
    stream: Attached,
}

impl Deployment {
    async fn new(slots: u32) -> Self {
        Self::with(|options| options.slots = slots).await
    }

    async fn with(change: impl FnOnce(&mut WorkerOptions)) -> Self {
        let world = World::new().await;
        let mut fake = Fake::start(&run_dir(&world), Some(world.connector.peer().clone())).await;
        let mut options = WorkerOptions::new(world.run_dir(), stage("denoise"));
        change(&mut options);
        options.arena_limit = ByteCount(16 << 20);
        let worker = Worker::attach(options).await.expect("a server is there");
        let stream = fake.attached().await;
        Self {
            world,
            fake,
            worker,
            stream,
        }
    }

    async fn task(&mut self, offer: v1::Offer) -> Task {
        self.stream.grant(offer).await;
        next_task(&self.worker).await.expect("it was granted")
    }

    async fn fetch(&self, handle: Handle) -> Vec<u8> {
        let mut consumer = self
            .world
            .connector
            .consume(handle, ConsumeOptions::within(PATIENCE))
            .expect("a consumer");
        consumer.fetch_all().await.expect("it is there").tensors[0].to_vec()
    }

    async fn all_gone(&self) {
        all_gone(self.worker.connector()).await;
        all_gone(&self.world.connector).await;
        assert_eq!(self.worker.busy(), 0, "slots in use");
    }
}

async fn next_task(worker: &Worker) -> Option<Task> {
    tokio::time::timeout(PATIENCE, worker.next_task())
        .await
        .expect("a task, or none, in time")
}

fn run_dir(world: &World) -> RunDir {
    RunDir::locate(Some(&world.run_dir()))
}

fn stage(name: &str) -> StageName {
    StageName::new(name).expect("a name")
}

fn token(attempt: u32) -> Token {
    Token {
        epoch: Epoch(1),
        job: JobId(Uuid::from_u128(1)),
        attempt: Attempt(attempt),
    }
}

fn offer(attempt: u32, inputs: Vec<(&str, &Handle)>, output: v1::Output) -> v1::Offer {
    let input = |(stage, handle): (&str, &Handle)| v1::Input {
        stage: stage.to_owned(),
        payload: Some(v1::Payload {
            id: handle.payload.0.as_bytes().to_vec(),
            handle: handle.to_bytes(),
            nbytes: handle.manifest.nbytes().0,
            chunks: handle.manifest.chunks(),
            stored: handle.mode == TransferMode::Store,
        }),
    };
    v1::Offer {
        token: Some(token(attempt).into()),
        stage: "denoise".to_owned(),
        params: r#"{"steps":4}"#.to_owned(),
        inputs: inputs.into_iter().map(input).collect(),
        output: Some(output),
        answer_within_ms: 1000,
        files: Vec::new(),
        member: None,
    }
}

fn whole() -> v1::Output {
    v1::Output {
        publish: true,
        ..v1::Output::default()
    }
}

fn output(bytes: Vec<u8>) -> Output {
    let spec = spec(DType::U8, &[bytes.len() as u64]);
    Output::tensor(PayloadKind::Latent, "latents", spec, Borrowed::from(bytes))
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_reads_publishes_and_ends() {
    let mut deployment = Deployment::new(1).await;
    let hello = &deployment.stream.hello;
    assert_eq!(
        (hello.stage.as_str(), hello.slots, hello.pid),
        ("denoise", 1, std::process::id())
    );
    assert_eq!(
        hello.incarnation().expect("16 bytes"),
        deployment.worker.connector().peer().incarnation
    );
    let mut encoder = deployment.world.second().await;
    let bundle = Bundle::one(&[2, 6]).cut(1, 3);
    let input = encoder.publish(&bundle, Owner::Orchestrator).await;

    let task = deployment.task(offer(1, vec![("encode", &input)], whole())).await;
    assert_eq!(
        (task.token(), task.params(), task.inputs().len()),
        (token(1), r#"{"steps":4}"#, 1)
    );
    let mut consumer = task.consume(None, ConsumeOptions::default()).expect("one input");
    while let Some(chunk) = consumer.next().await.expect("alive") {
        bundle.check(&chunk.tensors, Some(chunk.index));
    }
    drop(consumer);
    task.progress(Progress {
        done: 1,
        total: 4,
        unit: "step".to_owned(),
    })
    .expect("it may go on");
    let reported = loop {
        match deployment.stream.next().await {
            ToServer::Renew(renew) => match renew.attempts.into_iter().find(|attempt| attempt.sequence == 1) {
                Some(attempt) => break attempt,
                None => continue,
            },
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(reported.progress.map(|progress| progress.total), Some(4));

    let completing = tokio::spawn(async move {
        task.complete(output(vec![5; 100]))
            .await
            .map_err(|error| error.to_string())
    });
    let (payload, handle) = deployment.stream.published(token(1)).await;
    assert_eq!((payload.nbytes, payload.chunks, payload.stored), (100, 1, false));
    let completed = deployment.stream.completed(token(1)).await;
    assert!(completed.result.is_none(), "a result of a stage that is not the last");
    let handovers: Vec<_> = completed
        .handovers
        .iter()
        .map(|handover| (handover.chunk, handover.nbytes, handover.from.as_str()))
        .collect();
    assert_eq!(handovers, [(0, 16, "denoise"), (1, 16, "denoise"), (2, 16, "denoise")]);
    assert_eq!(deployment.fetch(handle.clone()).await, [5; 100]);
    assert!(!completing.is_finished(), "the server has not answered");
    deployment.stream.accept(token(1)).await;
    completing.await.expect("no panic").expect("accepted");
    assert_eq!(
        deployment.worker.connector().live(),
        [handle.payload],
        "kept until it is released"
    );
    deployment.stream.release(handle.payload).await;
    deployment.all_gone().await;
    encoder.done(Ask::Release { payload: input.payload }).await;
    encoder.all_gone().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_is_announced_with_its_first_chunk() {
    let mut deployment = Deployment::new(1).await;
    let plan = v1::Output {
        publish: true,
        stored: false,
        chunks: 4,
        chunk_dim: 0,
    };
    let task = deployment.task(offer(1, vec![], plan)).await;
    assert!(matches!(task.ready(0), Err(TaskError::NotOpen { .. })));
    task.open(output((0..8).collect())).expect("it can be cut in 4");
    assert!(matches!(
        task.open(output(vec![0; 8])),
        Err(TaskError::AlreadyOpen { .. })
    ));
    task.ready(1).expect("there is such a chunk");
    task.ready(0).expect("there is such a chunk");
    let (_, handle) = deployment.stream.published(token(1)).await;
    let mut consumer = deployment
        .world
        .connector
        .consume(handle.clone(), ConsumeOptions::within(PATIENCE))
        .expect("a consumer");
    for index in 0..2_u8 {
        let chunk = consumer.next().await.expect("alive").expect("ready");
        assert_eq!(chunk.tensors[0].to_vec(), [2 * index, 2 * index + 1]);
    }
    task.ready(2).expect("there is such a chunk");
    task.ready(3).expect("there is such a chunk");
    let finishing = tokio::spawn(async move { task.finish().await.map_err(|error| error.to_string()) });
    deployment.stream.completed(token(1)).await;
    deployment.stream.accept(token(1)).await;
    finishing.await.expect("no panic").expect("accepted");
    assert_eq!(consumer.next().await.expect("alive").expect("ready").index, 2);
    drop(consumer);
    deployment.stream.release(handle.payload).await;
    deployment.all_gone().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failing_stream_tells_its_consumer_and_the_server() {
    let mut deployment = Deployment::new(1).await;
    let plan = v1::Output {
        publish: true,
        stored: false,
        chunks: 4,
        chunk_dim: 0,
    };
    let task = deployment.task(offer(1, vec![], plan)).await;
    task.open(output(vec![1; 8])).expect("it can be cut in 4");
    task.ready(0).expect("there is such a chunk");
    let (_, handle) = deployment.stream.published(token(1)).await;
    let mut consumer = deployment
        .world
        .connector
        .consume(handle.clone(), ConsumeOptions::within(PATIENCE))
        .expect("a consumer");
    consumer.next().await.expect("alive").expect("ready");
    task.fail(Failure::new(
        ErrorClass::Internal,
        "stage.exception",
        "ValueError: no such scheduler",
    ));
    let (failure, lost) = deployment.stream.failed(token(1)).await;
    assert_eq!(
        (failure.reason.as_str(), lost.as_slice()),
        ("stage.exception", [].as_slice())
    );
    let error = consumer.next().await.expect_err("it failed");
    assert!(error.to_string().contains("no such scheduler"), "{error}");
    assert!(matches!(
        task.finish().await,
        Err(TaskError::NotOpen { .. } | TaskError::Ended { .. })
    ));
    drop((task, consumer));
    deployment.stream.release(handle.payload).await;
    deployment.all_gone().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_output_goes_through_the_store_where_the_plan_says_so() {
    let mut deployment = Deployment::new(1).await;
    let connector = Arc::clone(&deployment.world.connector);
    let gate = Arc::new(TokenGate::closed());
    let store = HostStore::new(connector.host(), ByteCount(1 << 20), Arc::clone(&gate));
    let service = StoreService::serve(&connector, store);
    let plan = v1::Output {
        publish: true,
        stored: true,
        chunks: 2,
        chunk_dim: 0,
    };

    // The gate does not know the attempt yet.
    let task = deployment.task(offer(1, vec![], plan)).await;
    let error = task
        .complete(output(vec![3; 10]))
        .await
        .expect_err("not granted at the store");
    assert_eq!(
        (error.class(), error.to_failure().reason.as_str()),
        (ErrorClass::Fenced, "token.stale")
    );
    task.fail(error.to_failure());
    deployment.stream.failed(token(1)).await;
    deployment.stream.accept(token(1)).await;
    drop(task);

    gate.grant(token(2));
    let task = deployment.task(offer(2, vec![], plan)).await;
    let completing = tokio::spawn(async move {
        task.complete(output(vec![4; 10]))
            .await
            .map_err(|error| error.to_string())
    });
    let (payload, handle) = deployment.stream.published(token(2)).await;
    assert!(payload.stored && handle.mode == TransferMode::Store);
    assert_eq!(
        (handle.holder.incarnation, payload.chunks),
        (connector.peer().incarnation, 2)
    );
    deployment.stream.completed(token(2)).await;
    deployment.stream.accept(token(2)).await;
    completing.await.expect("no panic").expect("accepted");
    all_gone(deployment.worker.connector()).await;
    assert_eq!(deployment.fetch(handle.clone()).await, [4; 10]);
    assert_eq!(service.store().written_by(token(2)), [handle.payload]);
    connector.release(handle.payload);
    deployment.all_gone().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_output_whose_store_dies_goes_to_the_next_one() {
    let mut deployment = Deployment::new(1).await;
    let connector = Arc::clone(&deployment.world.connector);
    let store = HostStore::new(connector.host(), ByteCount(1 << 20), Arc::new(TokenGate::open()));
    let _service = StoreService::serve(&connector, store);

    // A store that dies as soon as somebody asks it.
    let dying = World::new().await;
    let peer = dying.connector.peer().clone();
    dying.connector.close().await;
    let listener = tokio::net::UnixListener::bind(&peer.socket).expect("the closed connector left its name free");

    let plan = v1::Output {
        publish: true,
        stored: true,
        ..Default::default()
    };
    let task = deployment.task(offer(1, vec![], plan)).await;
    deployment.worker.connector().set_store(Some(peer));
    let completing = tokio::spawn(async move {
        task.complete(output(vec![4; 10]))
            .await
            .map_err(|error| error.to_string())
    });
    drop(listener.accept().await.expect("the put begins"));
    drop(listener);
    deployment.worker.connector().set_store(Some(connector.peer().clone()));
    let (payload, handle) = deployment.stream.published(token(1)).await;
    assert!(payload.stored && handle.holder.incarnation == connector.peer().incarnation);
    deployment.stream.completed(token(1)).await;
    deployment.stream.accept(token(1)).await;
    completing.await.expect("no panic").expect("accepted");
    connector.release(handle.payload);
    deployment.all_gone().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_output_whose_store_hangs_up_goes_there_again() {
    let mut deployment = Deployment::new(1).await;
    let connector = Arc::clone(&deployment.world.connector);
    let store = HostStore::new(connector.host(), ByteCount(1 << 20), Arc::new(TokenGate::open()));
    let _service = StoreService::serve(&connector, store);
    let (mut peer, real) = (connector.peer().clone(), connector.peer().socket.clone());
    peer.socket = format!("{real}.between");
    let between = tokio::net::UnixListener::bind(&peer.socket).expect("a free name");
    let plan = v1::Output {
        publish: true,
        stored: true,
        ..Default::default()
    };
    let task = deployment.task(offer(1, vec![], plan)).await;
    deployment.worker.connector().set_store(Some(peer));
    let completing = tokio::spawn(async move {
        task.complete(output(vec![4; 10]))
            .await
            .map_err(|error| error.to_string())
    });
    drop(between.accept().await.expect("the put begins"));
    let (mut worker, _) = tokio::time::timeout(PATIENCE, between.accept())
        .await
        .expect("the worker asks again")
        .expect("accepted");
    let mut store = tokio::net::UnixStream::connect(&real).await.expect("the store lives");
    let carried = tokio::spawn(async move { tokio::io::copy_bidirectional(&mut worker, &mut store).await });
    let (payload, handle) = deployment.stream.published(token(1)).await;
    assert!(payload.stored);
    deployment.stream.completed(token(1)).await;
    deployment.stream.accept(token(1)).await;
    completing.await.expect("no panic").expect("accepted");
    carried.abort();
    connector.release(handle.payload);
    deployment.all_gone().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_ends_with_its_worker() {
    let mut deployment = Deployment::new(1).await;
    let task = deployment.task(offer(1, vec![], whole())).await;
    let completing = tokio::spawn(async move { task.complete(output(vec![4; 10])).await });
    deployment.stream.published(token(1)).await;
    deployment.stream.completed(token(1)).await;
    let Deployment { worker, world, .. } = deployment;
    drop(worker);
    let ended = tokio::time::timeout(PATIENCE, completing).await;
    let error = ended.expect("it does not wait for ever").expect("no panic");
    assert_eq!(error.expect_err("nobody answered").to_failure().reason, "worker.closed");
    drop(world);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_stage_sends_a_result() {
    let mut deployment = Deployment::new(1).await;
    let task = deployment.task(offer(1, vec![], v1::Output::default())).await;
    let completing = tokio::spawn(async move {
        task.complete(output(vec![9; 50]))
            .await
            .map_err(|error| error.to_string())
    });
    let result = deployment.stream.completed(token(1)).await.result.expect("a result");
    let handle = Handle::from_bytes(&result.handle).expect("a handle");
    assert_eq!(deployment.fetch(handle.clone()).await, [9; 50]);
    deployment.stream.accept(token(1)).await;
    completing.await.expect("no panic").expect("accepted");
    deployment.stream.release(handle.payload).await;
    deployment.all_gone().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_result_is_released_though_nobody_waits_for_the_answer() {
    let mut deployment = Deployment::new(1).await;
    let failure = Failure::new(ErrorClass::Fenced, "token.stale", "the attempt was superseded");
    for (attempt, refused) in [(1, None), (2, Some(failure.into()))] {
        let task = deployment.task(offer(attempt, vec![], v1::Output::default())).await;
        let completing = tokio::spawn(async move { task.complete(output(vec![9; 50])).await });
        deployment.stream.completed(token(attempt)).await;
        completing.abort();
        completing.await.expect_err("it was given up");
        assert_eq!(deployment.worker.connector().live().len(), 1, "the server may read it");
        match refused {
            None => deployment.stream.accept(token(attempt)).await,
            failure => {
                let token = Some(token(attempt).into());
                let refused = v1::Refused { token, failure };
                deployment.stream.send(FromServer::Refused(refused)).await;
                deployment.stream.stopped(self::token(attempt)).await;
            }
        }
        deployment.all_gone().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn slots_bound_what_is_accepted() {
    let mut deployment = Deployment::new(2).await;
    let tasks = [
        deployment.task(offer(1, vec![], whole())).await,
        deployment.task(offer(2, vec![], whole())).await,
    ];
    deployment
        .stream
        .send(FromServer::Offer(offer(3, vec![], whole())))
        .await;
    match deployment.stream.said().await {
        ToServer::Decline(v1::Decline {
            failure: Some(failure), ..
        }) => assert_eq!(failure.reason, "credit.slots"),
        other => panic!("{other:?}"),
    }
    // A dropped task is a failed one, and frees its slot.
    let [first, second] = tasks;
    drop(first);
    assert_eq!(deployment.stream.failed(token(1)).await.0.reason, "stage.no_output");
    let third = deployment.task(offer(4, vec![], whole())).await;
    // An offer that is taken back before it was granted frees its slot too.
    second.fail(Failure::new(ErrorClass::Internal, "stage.exception", "on purpose"));
    deployment.stream.failed(token(2)).await;
    deployment
        .stream
        .send(FromServer::Offer(offer(5, vec![], whole())))
        .await;
    assert!(matches!(deployment.stream.said().await, ToServer::Accept(_)));
    deployment.stream.cancel(token(5)).await;
    deployment.stream.stopped(token(5)).await;
    assert_eq!(deployment.worker.busy(), 1);
    drop((second, third));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_attempt_stops_waiting_and_says_so() {
    let mut deployment = Deployment::new(1).await;
    let mut encoder = deployment.world.second().await;
    let input = encoder.open(&Bundle::one(&[10]), Owner::Orchestrator).await;
    let task = deployment.task(offer(1, vec![("encode", &input)], whole())).await;
    task.check().expect("it may go on");
    let mut consumer = task
        .consume(Some(&stage("encode")), ConsumeOptions::default())
        .expect("an input");
    let waiting = tokio::spawn(async move { consumer.next().await.map(drop) });
    deployment.stream.cancel(token(1)).await;
    let error = tokio::time::timeout(PATIENCE, waiting)
        .await
        .expect("it ends")
        .expect("no panic")
        .expect_err("cancelled");
    assert!(matches!(error, ConsumeError::Stopped { .. }), "{error}");
    let cancelled = task.progress(Progress::default()).expect_err("it must stop");
    assert_eq!(cancelled.reason.reason, "job.cancelled");
    assert!(matches!(
        task.complete(output(vec![1])).await,
        Err(TaskError::Cancelled(_))
    ));
    // Whatever the stage function makes of it, the attempt has stopped.
    task.fail(error.to_failure());
    deployment.stream.stopped(token(1)).await;
    drop(task);
    // An attempt that this worker never heard of has stopped as well.
    deployment.stream.cancel(token(77)).await;
    deployment.stream.stopped(token(77)).await;
    deployment.all_gone().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_input_is_named() {
    let mut deployment = Deployment::new(1).await;
    let mut encoder = deployment.world.second().await;
    let input = encoder.open(&Bundle::one(&[10]), Owner::Orchestrator).await;
    let task = deployment.task(offer(1, vec![("encode", &input)], whole())).await;
    let mut consumer = task.consume(None, ConsumeOptions::default()).expect("an input");
    encoder.kill().await;
    let error = consumer.next().await.expect_err("its holder is dead");
    task.fail(Failure::new(
        ErrorClass::Internal,
        "stage.exception",
        format!("RuntimeError: {error}"),
    ));
    let (_, lost) = deployment.stream.failed(token(1)).await;
    assert_eq!(lost, input.payload.0.as_bytes());
}

#[tokio::test(flavor = "multi_thread")]
async fn inputs_are_told_apart() {
    let mut deployment = Deployment::new(1).await;
    let mut encoder = deployment.world.second().await;
    let (text, image) = (Bundle::one(&[4]).seeded(1), Bundle::one(&[4]).seeded(2));
    let handles = [
        encoder.publish(&text, Owner::Orchestrator).await,
        encoder.publish(&image, Owner::Orchestrator).await,
    ];
    let task = deployment
        .task(offer(1, vec![("text", &handles[0]), ("image", &handles[1])], whole()))
        .await;
    for (name, bundle) in [("image", image), ("text", text)] {
        let mut consumer = task
            .consume(Some(&stage(name)), ConsumeOptions::default())
            .expect("an input");
        bundle.check(&consumer.fetch_all().await.expect("alive").tensors, None);
    }
    assert!(matches!(
        task.consume(None, ConsumeOptions::default()),
        Err(TaskError::WhichInput { .. })
    ));
    let error = task
        .consume(Some(&stage("audio")), ConsumeOptions::default())
        .expect_err("no such input");
    assert!(error.to_string().contains("text, image"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_output_is_refused_and_the_attempt_goes_on() {
    let mut deployment = Deployment::new(1).await;
    let plan = v1::Output {
        publish: true,
        stored: false,
        chunks: 8,
        chunk_dim: 0,
    };
    let task = deployment.task(offer(1, vec![], plan)).await;
    let error = task.complete(output(vec![])).await.expect_err("nothing to cut");
    assert_eq!(error.class(), ErrorClass::Invalid);
    assert!(
        error.to_failure().message.contains("it has 0 elements"),
        "{}",
        error.to_failure().message
    );
    let completing = tokio::spawn(async move {
        task.complete(output(vec![1; 8]))
            .await
            .map_err(|error| error.to_string())
    });
    deployment.stream.published(token(1)).await;
    deployment.stream.completed(token(1)).await;
    // A superseded attempt: its completion is refused, and its output goes.
    let failure = Failure::new(ErrorClass::Fenced, "token.stale", "the attempt was superseded");
    let refused = v1::Refused {
        token: Some(token(1).into()),
        failure: Some(failure.into()),
    };
    deployment.stream.send(FromServer::Refused(refused)).await;
    let error = completing.await.expect("no panic").expect_err("refused");
    assert!(error.contains("superseded"), "{error}");
    deployment.stream.stopped(token(1)).await;
    deployment.all_gone().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_runs_and_what_is_held_outlives_the_server() {
    let mut deployment = Deployment::new(2).await;
    let task = deployment.task(offer(1, vec![], whole())).await;
    let completing = tokio::spawn(async move {
        task.complete(output(vec![6; 10]))
            .await
            .map_err(|error| error.to_string())
    });
    let (_, handle) = deployment.stream.published(token(1)).await;
    deployment.stream.completed(token(1)).await;
    deployment.stream.accept(token(1)).await;
    completing.await.expect("no panic").expect("accepted");
    let running = deployment.task(offer(2, vec![], whole())).await;

    let run_dir = run_dir(&deployment.world);
    drop((deployment.fake, deployment.stream));
    let completing = tokio::spawn(async move {
        running
            .complete(output(vec![7; 10]))
            .await
            .map_err(|error| error.to_string())
    });
    let mut fake = Fake::start(&run_dir, None).await;
    let mut stream = fake.attached().await;
    let (tokens, holding) = stream.hello.carried().expect("ids");
    assert_eq!(tokens, [token(2)]);
    assert!(holding.contains(&handle.payload));
    let (_, second) = stream.published(token(2)).await;
    stream.completed(token(2)).await;
    stream.accept(token(2)).await;
    completing.await.expect("no panic").expect("accepted by the new server");
    for payload in [handle.payload, second.payload] {
        stream.release(payload).await;
    }
    all_gone(deployment.worker.connector()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_without_a_server_ends() {
    let mut deployment = Deployment::new(2).await;
    let done = deployment.task(offer(1, vec![], whole())).await;
    let completing = tokio::spawn(async move {
        done.complete(output(vec![6; 10]))
            .await
            .map_err(|error| error.to_string())
    });
    deployment.stream.published(token(1)).await;
    deployment.stream.completed(token(1)).await;
    deployment.stream.accept(token(1)).await;
    completing.await.expect("no panic").expect("accepted");
    let task = deployment.task(offer(2, vec![], whole())).await;
    drop((deployment.fake, deployment.stream));
    let reason = tokio::time::timeout(PATIENCE, task.stop().stopped())
        .await
        .expect("it gives up");
    assert_eq!(reason.class, ErrorClass::Unavailable);
    assert!(next_task(&deployment.worker).await.is_none());
    assert_eq!(
        deployment.worker.over().map(|failure| failure.class),
        Some(ErrorClass::Unavailable)
    );
    drop(task);
    assert_eq!(deployment.worker.connector().live().len(), 1);
    // Nobody is left who could release it.
    tokio::time::timeout(Duration::from_secs(5), deployment.worker.leave(PATIENCE))
        .await
        .expect("it leaves at once");
    all_gone(deployment.worker.connector()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drained_worker_finishes_waits_for_its_payloads_and_leaves() {
    let mut deployment = Deployment::new(2).await;
    let task = deployment.task(offer(1, vec![], whole())).await;
    deployment
        .stream
        .send(FromServer::Drain(v1::Drain {
            deadline_ms: Some(10_000),
        }))
        .await;
    deployment
        .stream
        .send(FromServer::Offer(offer(2, vec![], whole())))
        .await;
    match deployment.stream.said().await {
        ToServer::Decline(v1::Decline {
            failure: Some(failure), ..
        }) => assert_eq!(failure.reason, "worker.draining"),
        other => panic!("{other:?}"),
    }
    let completing = tokio::spawn(async move {
        task.complete(output(vec![1; 10]))
            .await
            .map_err(|error| error.to_string())
    });
    let (_, handle) = deployment.stream.published(token(1)).await;
    deployment.stream.completed(token(1)).await;
    deployment.stream.accept(token(1)).await;
    completing.await.expect("no panic").expect("accepted");
    assert!(next_task(&deployment.worker).await.is_none());
    assert_eq!(
        deployment.worker.over().map(|failure| failure.reason),
        Some("worker.drained".to_owned())
    );

    let worker = Arc::clone(&deployment.worker);
    let leaving = tokio::spawn(async move { worker.leave(PATIENCE).await });
    // There is no store that could take it.
    assert_eq!(deployment.fetch(handle.clone()).await, [1; 10], "still held");
    assert!(!leaving.is_finished());
    deployment.stream.release(handle.payload).await;
    tokio::time::timeout(Duration::from_secs(5), leaving)
        .await
        .expect("it leaves")
        .expect("no panic");
}

/// An attempt whose output the worker holds, and that is done.
async fn held(deployment: &mut Deployment, attempt: u32) -> Handle {
    let task = deployment.task(offer(attempt, vec![], whole())).await;
    let completing = tokio::spawn(async move { task.complete(output(vec![7; 10])).await.is_ok() });
    let (_, handle) = deployment.stream.published(token(attempt)).await;
    deployment.stream.completed(token(attempt)).await;
    deployment.stream.accept(token(attempt)).await;
    assert!(completing.await.expect("no panic"));
    handle
}

fn is_drain(said: &ToServer) -> bool {
    matches!(said, ToServer::Drain(_))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_leaves_has_the_store_take_what_it_holds() {
    let mut deployment = Deployment::new(1).await;
    let gate = Arc::new(TokenGate::closed());
    let connector = Arc::clone(&deployment.world.connector);
    let store = HostStore::new(connector.host(), ByteCount(1 << 20), Arc::clone(&gate));
    let service = StoreService::serve(&connector, store);
    let handle = held(&mut deployment, 1).await;
    let leaver = Arc::clone(&deployment.worker);
    let leaving = tokio::spawn(async move { leaver.leave(PATIENCE).await });
    assert!(is_drain(&deployment.stream.said().await), "it says that it leaves");

    // The server that knows of it dies; the next one is told as well, and its store is asked only once it knows.
    let Deployment {
        world,
        fake,
        worker,
        stream,
    } = deployment;
    drop((fake, stream));
    let mut fake = Fake::start(&run_dir(&world), Some(connector.peer().clone())).await;
    let mut stream = fake.attached().await;
    assert_eq!(stream.hello.holding, [handle.payload.0.as_bytes().to_vec()]);
    assert!(is_drain(&stream.said().await));
    gate.grant(token(1));
    stream.send(FromServer::Drain(v1::Drain { deadline_ms: None })).await;
    let (payload, moved) = stream.published(token(1)).await;
    assert!(payload.stored && moved.mode == TransferMode::Store);
    assert_eq!(moved.payload, handle.payload);
    assert!(!leaving.is_finished(), "nobody has said that this is known");
    stream.release(handle.payload).await;
    tokio::time::timeout(PATIENCE, leaving)
        .await
        .expect("it leaves")
        .expect("no panic");
    all_gone(worker.connector()).await;
    let consumer = connector.consume(moved, ConsumeOptions::within(PATIENCE));
    let fetched = consumer.expect("a consumer").fetch_all().await;
    assert_eq!(fetched.expect("the store has it").tensors[0].to_vec(), [7; 10]);
    drop(service);
}

#[tokio::test(flavor = "multi_thread")]
async fn leaving_is_bounded_where_nobody_takes_anything() {
    let mut deployment = Deployment::new(1).await;
    let _handle = held(&mut deployment, 1).await;
    let begin = std::time::Instant::now();
    deployment.worker.leave(Duration::from_millis(300)).await;
    assert!(begin.elapsed() >= Duration::from_millis(300));
    all_gone(deployment.worker.connector()).await;
}
