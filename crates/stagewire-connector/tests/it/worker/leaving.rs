//! Workers that end or leave, and servers that end before them.

use std::pin::pin;
use std::time::{Duration, Instant};

use stagewire_connector::StoreService;
use stagewire_store::{HostStore, TokenGate};

use super::*;

/// How long who leaves waits for an answer.
const LAST_WORDS: Duration = Duration::from_secs(1);

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
    let begin = Instant::now();
    deployment.worker.leave(Duration::from_millis(300)).await;
    assert!(begin.elapsed() >= Duration::from_millis(300));
    all_gone(deployment.worker.connector()).await;
}

/// How long a worker takes to leave whose attempt has yielded, where the server says so to that.
async fn leaving_after_a_yield(answer: Option<FromServer>) -> Duration {
    let mut deployment = Deployment::new(1).await;
    let saving = v1::Offer {
        checkpoints: true,
        ..offer(1, vec![], whole())
    };
    let task = deployment.task(saving).await;
    task.yield_with(None, Progress::default()).await.expect("it may");
    deployment.stream.yielded(token(1)).await;
    deployment.worker.drain();
    assert!(next_task(&deployment.worker).await.is_none());
    // From here on, nothing but the answer wakes who leaves.
    let begin = Instant::now();
    let mut leaving = pin!(deployment.worker.leave(PATIENCE));
    assert!(futures::poll!(&mut leaving).is_pending(), "nobody has answered");
    if let Some(answer) = answer {
        deployment.stream.send(answer).await;
    }
    tokio::time::timeout(PATIENCE, leaving).await.expect("it leaves");
    begin.elapsed()
}

#[tokio::test(flavor = "multi_thread")]
async fn who_leaves_waits_until_the_server_has_answered_a_yield() {
    let failure = Failure::new(ErrorClass::Fenced, "token.stale", "the attempt was superseded");
    let accepted = FromServer::Accepted(token(1).into());
    let refused = FromServer::Refused(v1::Refused {
        token: Some(token(1).into()),
        failure: Some(failure.into()),
    });
    let unheard = leaving_after_a_yield(None).await;
    assert!(unheard >= LAST_WORDS, "left after {unheard:?} without an answer");
    for answer in [accepted, refused] {
        // A busy machine may hold up one of them.
        let mut took = Vec::new();
        while took.len() < 5 && took.iter().all(|time| *time >= LAST_WORDS) {
            took.push(leaving_after_a_yield(Some(answer.clone())).await);
        }
        let heard = took.last().is_some_and(|time| *time < LAST_WORDS);
        assert!(heard, "the answer {answer:?} woke nobody: {took:?}");
    }
}
