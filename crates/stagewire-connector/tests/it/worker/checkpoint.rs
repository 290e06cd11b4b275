//! Attempts that save their state, yield, and go on where others have stopped.

use stagewire_connector::StoreService;
use stagewire_connector::worker::{Checkpoint, Saving};
use stagewire_store::{HostStore, TokenGate};

use super::*;

/// An offer of a stage that takes checkpoints.
fn saving(attempt: u32, resume: Option<v1::Checkpoint>) -> v1::Offer {
    v1::Offer {
        checkpoints: true,
        checkpoint: resume,
        ..offer(attempt, vec![], whole())
    }
}

fn state(bytes: Vec<u8>) -> Output {
    let spec = spec(DType::U8, &[bytes.len() as u64]);
    Output::tensor(PayloadKind::Checkpoint, "latents", spec, Borrowed::from(bytes))
}

fn step(done: u64) -> Progress {
    Progress {
        done,
        total: 4,
        unit: "step".to_owned(),
    }
}

/// The store of this world's connector, which the worker knows.
fn serve_store(deployment: &Deployment, gate: &Arc<TokenGate>) -> Arc<StoreService> {
    let connector = &deployment.world.connector;
    StoreService::serve(
        connector,
        HostStore::new(connector.host(), ByteCount(1 << 20), Arc::clone(gate)),
    )
}

fn without_store(deployment: &Deployment) {
    deployment.worker.connector().set_store(None);
}

async fn saved(saving: &Saving) -> Result<(), Arc<TaskError>> {
    tokio::time::timeout(PATIENCE, saving.saved())
        .await
        .expect("it is over in time")
}

async fn completed(deployment: &mut Deployment, task: Task, attempt: u32) -> Handle {
    let completing =
        tokio::spawn(async move { task.complete(output(vec![9])).await.map_err(|error| error.to_string()) });
    let (_, handle) = deployment.stream.published(token(attempt)).await;
    deployment.stream.completed(token(attempt)).await;
    deployment.stream.accept(token(attempt)).await;
    completing.await.expect("no panic").expect("accepted");
    handle
}

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_goes_to_the_store_and_the_next_attempt_goes_on_from_it() {
    let mut deployment = Deployment::new(1).await;
    let gate = Arc::new(TokenGate::closed());
    let service = serve_store(&deployment, &gate);
    let task = deployment.task(saving(1, None)).await;
    assert!(task.takes_checkpoints() && task.resume().is_none());

    // One that cannot be saved is no end: the store does not know the attempt yet.
    let unsaved = task.checkpoint(state(vec![1; 10]), step(1)).await.expect("on its way");
    let error = saved(&unsaved).await.expect_err("not granted at the store");
    let (class, failure) = (error.class(), error.to_failure());
    assert_eq!((class, failure.reason.as_str()), (ErrorClass::Fenced, "token.stale"));
    assert!(failure.message.contains("checkpoint of attempt"), "{}", failure.message);
    all_gone(deployment.worker.connector()).await;

    gate.grant(token(1));
    let saving_it = task.checkpoint(state(vec![2; 10]), step(2)).await.expect("on its way");
    let (told, handle) = deployment.stream.checkpoint(token(1)).await;
    saved(&saving_it).await.expect("told");
    assert!(saving_it.is_over());
    assert_eq!(told.progress, Some(step(2).into()));
    assert!(told.payload.as_ref().is_some_and(|payload| payload.stored) && handle.mode == TransferMode::Store);
    all_gone(deployment.worker.connector()).await;
    task.fail(Failure::new(ErrorClass::Internal, "stage.exception", "out of memory"));
    deployment.stream.failed(token(1)).await;
    deployment.stream.accept(token(1)).await;

    let task = deployment.task(saving(2, Some(told))).await;
    let resume = Checkpoint {
        token: token(1),
        handle: handle.clone(),
        progress: step(2),
    };
    assert_eq!(task.resume(), Some(&resume));
    for _ in 0..2 {
        let mut consumer = task
            .consume_checkpoint(ConsumeOptions::within(PATIENCE))
            .expect("there is one");
        assert_eq!(
            consumer.fetch_all().await.expect("it is there").tensors[0].to_vec(),
            [2; 10]
        );
    }
    let completing =
        tokio::spawn(async move { task.complete(output(vec![9])).await.map_err(|error| error.to_string()) });
    let (_, made) = deployment.stream.published(token(2)).await;
    assert_eq!(
        deployment.stream.completed(token(2)).await.handovers,
        [],
        "it came from no other stage"
    );
    deployment.stream.accept(token(2)).await;
    completing.await.expect("no panic").expect("accepted");
    deployment.stream.release(made.payload).await;
    deployment.world.connector.release(handle.payload);
    assert_eq!(service.store().written_by(token(1)), []);
    deployment.all_gone().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_store_the_worker_holds_checkpoints_until_they_are_released() {
    let mut deployment = Deployment::new(1).await;
    let task = deployment.task(saving(1, None)).await;
    without_store(&deployment);
    let mut held = Vec::new();
    for done in 1..=2_u8 {
        let saving = task.checkpoint(state(vec![done; 10]), step(done.into())).await;
        let (told, handle) = deployment.stream.checkpoint(token(1)).await;
        saved(&saving.expect("on its way")).await.expect("told");
        assert!(told.payload.is_some_and(|payload| !payload.stored));
        assert_eq!(deployment.fetch(handle.clone()).await, [done; 10]);
        held.push(handle.payload);
    }
    assert_eq!(deployment.worker.connector().live(), held);
    // The second is durable.
    deployment.stream.release(held[0]).await;
    let made = completed(&mut deployment, task, 1).await;
    assert!(
        deployment.worker.connector().live().contains(&held[1]),
        "the server has not released it"
    );
    for payload in [held[1], made.payload] {
        deployment.stream.release(payload).await;
    }
    deployment.all_gone().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_that_is_asked_to_yield_hands_over_its_state_and_its_slot() {
    let mut deployment = Deployment::new(1).await;
    let _service = serve_store(&deployment, &Arc::new(TokenGate::open()));
    // One that does not run has nothing to hand over.
    deployment.stream.ask_to_yield(token(77)).await;
    let task = deployment.task(saving(1, None)).await;
    assert!(!task.asked_to_yield().is_stopped());
    deployment.stream.ask_to_yield(token(1)).await;
    let why = tokio::time::timeout(PATIENCE, task.asked_to_yield().stopped()).await;
    assert_eq!(why.expect("it is told").reason, "attempt.preempted");
    task.progress(step(3)).expect("it goes on until its step ends");

    task.yield_with(Some(state(vec![3; 10])), step(3)).await.expect("saved");
    let yielded = deployment.stream.yielded(token(1)).await;
    assert_eq!(yielded.progress, Some(step(3).into()));
    let payload = yielded.payload.expect("its state");
    assert!(payload.stored);
    assert_eq!(deployment.worker.busy(), 0);
    // Whatever the function does after that.
    assert!(matches!(
        task.complete(output(vec![1])).await,
        Err(TaskError::Ended { .. })
    ));
    assert!(matches!(
        task.yield_with(None, step(3)).await,
        Err(TaskError::Ended { .. })
    ));
    assert!(matches!(
        task.checkpoint(state(vec![1]), step(4)).await,
        Err(TaskError::Ended { .. })
    ));
    drop(task);
    let next = deployment.task(saving(2, None)).await;
    deployment.stream.accept(token(1)).await;
    // Without a state: from the last checkpoint, or anew. And nobody has asked.
    next.yield_with(None, step(1)).await.expect("it may");
    assert_eq!(deployment.stream.yielded(token(2)).await.payload, None);
    deployment.stream.accept(token(2)).await;
    let handle = Handle::from_bytes(&payload.handle).expect("a handle");
    assert_eq!(deployment.fetch(handle.clone()).await, [3; 10]);
    deployment.world.connector.release(handle.payload);
    drop(next);
    deployment.all_gone().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_not_saved_is_not_yielded() {
    let mut deployment = Deployment::new(1).await;
    let gate = Arc::new(TokenGate::closed());
    let _service = serve_store(&deployment, &gate);
    let task = deployment.task(saving(1, None)).await;
    let error = task
        .yield_with(Some(state(vec![1; 10])), step(1))
        .await
        .expect_err("not granted at the store");
    assert_eq!(error.to_failure().reason, "token.stale");
    all_gone(deployment.worker.connector()).await;
    task.open(output(vec![1])).expect("an output");
    let error = task
        .yield_with(None, step(1))
        .await
        .expect_err("others may be reading its output");
    assert_eq!(error.reason(), "task.output");
    drop(task);
    deployment.stream.failed(token(1)).await;
}

/// A store that takes connections and never answers. The worker asks it from now on.
fn silent_store(deployment: &Deployment) -> tokio::net::UnixListener {
    let mut peer = deployment.world.connector.peer().clone();
    peer.socket = format!("{}.silent", peer.socket);
    let listener = tokio::net::UnixListener::bind(&peer.socket).expect("a free name");
    deployment.worker.connector().set_store(Some(peer));
    listener
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_that_ends_does_not_wait_for_its_checkpoint() {
    let mut deployment = Deployment::new(1).await;
    let task = deployment.task(saving(1, None)).await;
    let silent = silent_store(&deployment);
    let saving_it = task.checkpoint(state(vec![1; 10]), step(1)).await.expect("on its way");
    let asked = silent.accept().await.expect("the put begins");
    assert!(!saving_it.is_over());
    let made = completed(&mut deployment, task, 1).await;
    let error = saved(&saving_it).await.expect_err("nobody needs it");
    assert!(matches!(*error, TaskError::Ended { .. }), "{error}");
    deployment.stream.release(made.payload).await;
    drop((asked, silent));
    deployment.all_gone().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_attempt_stops_saving() {
    let mut deployment = Deployment::new(1).await;
    let task = Arc::new(deployment.task(saving(1, None)).await);
    let silent = silent_store(&deployment);
    let first = task.checkpoint(state(vec![1; 10]), step(1)).await.expect("on its way");
    let asked = silent.accept().await.expect("the put begins");
    // It waits for the first.
    let waiting = Arc::clone(&task);
    let second = tokio::spawn(async move { waiting.yield_with(Some(state(vec![2; 10])), step(2)).await });
    deployment.stream.cancel(token(1)).await;
    let error = saved(&first).await.expect_err("it must stop");
    assert!(matches!(*error, TaskError::Cancelled(_)), "{error}");
    let error = second.await.expect("no panic").expect_err("it must stop");
    assert!(matches!(error, TaskError::Cancelled(_)), "{error}");
    drop(task);
    deployment.stream.stopped(token(1)).await;
    drop((asked, silent));
    deployment.all_gone().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_server_hears_of_the_newest_checkpoint_and_of_the_yield() {
    let mut deployment = Deployment::new(1).await;
    let task = deployment.task(saving(1, None)).await;
    without_store(&deployment);
    for done in 1..=2_u8 {
        let saving = task.checkpoint(state(vec![done; 10]), step(done.into())).await;
        deployment.stream.checkpoint(token(1)).await;
        saved(&saving.expect("on its way")).await.expect("told");
    }
    let held = deployment.worker.connector().live();
    drop((deployment.fake, deployment.stream));
    task.yield_with(None, step(2)).await.expect("it may");
    let mut fake = Fake::start(&run_dir(&deployment.world), None).await;
    let mut stream = fake.attached().await;
    let (running, holding) = stream.hello.carried().expect("ids");
    assert_eq!((running, holding), (vec![token(1)], held.clone()));
    let (told, handle) = stream.checkpoint(token(1)).await;
    assert_eq!((told.progress, handle.payload), (Some(step(2).into()), held[1]));
    stream.yielded(token(1)).await;
    stream.accept(token(1)).await;
    for payload in held {
        stream.release(payload).await;
    }
    all_gone(deployment.worker.connector()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_checkpoint_is_named() {
    let mut deployment = Deployment::new(1).await;
    let mut other = deployment.world.second().await;
    let handle = other.publish(&Bundle::one(&[10]), Owner::Orchestrator).await;
    let resume = v1::Checkpoint {
        token: Some(token(1).into()),
        payload: offer(1, vec![("denoise", &handle)], whole()).inputs.remove(0).payload,
        progress: Some(step(2).into()),
    };
    let task = deployment.task(saving(2, Some(resume))).await;
    other.kill().await;
    let mut consumer = task
        .consume_checkpoint(ConsumeOptions::default())
        .expect("there is one");
    let error = consumer.next().await.expect_err("its holder is dead");
    task.fail(error.to_failure());
    assert_eq!(deployment.stream.failed(token(2)).await.1, handle.payload.0.as_bytes());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stage_that_takes_none_saves_none() {
    let mut deployment = Deployment::new(1).await;
    let task = deployment.task(offer(1, vec![], whole())).await;
    let error = task
        .checkpoint(state(vec![1]), step(1))
        .await
        .expect_err("it takes none");
    assert_eq!(
        (error.class(), error.reason()),
        (ErrorClass::Invalid, "task.checkpoint")
    );
    assert!(error.to_string().contains("checkpoint = true"), "{error}");
    let error = task.yield_with(None, step(1)).await.expect_err("it takes none");
    assert_eq!(error.reason(), "task.checkpoint");
    let error = task
        .consume_checkpoint(ConsumeOptions::default())
        .expect_err("there is none");
    assert_eq!(error.reason(), "task.checkpoint");
}
