//! Outputs: through the store, as a result, and refused.

use stagewire_connector::StoreService;
use stagewire_store::{HostStore, TokenGate};

use super::*;

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
        max_nbytes: 0,
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
async fn a_wrong_output_is_refused_and_the_attempt_goes_on() {
    let mut deployment = Deployment::new(1).await;
    let plan = v1::Output {
        publish: true,
        stored: false,
        chunks: 8,
        chunk_dim: 0,
        max_nbytes: 0,
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
