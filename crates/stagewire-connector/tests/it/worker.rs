//! The worker runtime against an orchestrator that does what the test says.

mod batch;
mod checkpoint;
mod group;
mod leaving;
mod output;

use std::sync::Arc;

use stagewire_api::v1::server_message::Message as FromServer;
use stagewire_api::v1::worker_message::Message as ToServer;
use stagewire_api::{RunDir, v1};
use stagewire_connector::worker::{Output, Task, TaskError, Worker, WorkerOptions};
use stagewire_connector::{ConsumeError, ConsumeOptions, Owner};
use stagewire_core::{
    Attempt, ByteCount, Classify, DType, Epoch, ErrorClass, Failure, Handle, JobId, PayloadKind, Progress, StageName,
    Token, TransferMode,
};
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
        checkpoints: false,
        checkpoint: None,
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
        max_nbytes: 0,
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
        max_nbytes: 0,
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
