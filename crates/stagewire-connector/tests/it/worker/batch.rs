//! What is offered together runs together.

use super::*;

async fn batching(places: u32) -> Deployment {
    Deployment::with(|options| options.max_batch = places).await
}

impl Deployment {
    async fn offers(&mut self, attempts: &[u32]) {
        for attempt in attempts {
            let offer = FromServer::Offer(offer(*attempt, vec![], whole()));
            self.stream.send(offer).await;
            assert!(matches!(self.stream.said().await, ToServer::Accept(_)));
        }
    }

    async fn grants(&self, attempts: &[u32]) {
        for attempt in attempts {
            self.stream.send(FromServer::Grant(token(*attempt).into())).await;
        }
    }

    async fn batch(&self) -> Vec<Task> {
        let batch = tokio::time::timeout(PATIENCE, self.worker.next_batch()).await;
        batch.expect("in time").expect("the worker goes on")
    }

    /// The attempts of the next batch, which then fail.
    async fn next(&mut self) -> Vec<u32> {
        let batch = self.batch().await;
        let attempts: Vec<u32> = batch.iter().map(|task| task.token().attempt.0).collect();
        drop(batch);
        for attempt in &attempts {
            self.stream.failed(token(*attempt)).await;
        }
        attempts
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_is_what_was_offered_at_once() {
    let mut deployment = batching(3).await;
    assert_eq!(
        (deployment.stream.hello.slots, deployment.stream.hello.max_batch),
        (1, 3)
    );
    deployment.offers(&[1, 2, 3]).await;
    deployment.grants(&[1, 2, 3]).await;
    assert_eq!(deployment.next().await, [1, 2, 3]);
    // What was taken back, or accepted too late, is not waited for.
    deployment.offers(&[4, 5, 6]).await;
    deployment.grants(&[4]).await;
    deployment.stream.cancel(token(5)).await;
    deployment.stream.stopped(token(5)).await;
    deployment.stream.refuse(token(6)).await;
    assert_eq!(deployment.next().await, [4]);
    deployment.all_gone().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_can_be_taken_one_by_one() {
    let mut deployment = batching(3).await;
    deployment.offers(&[1, 2, 3]).await;
    deployment.grants(&[1, 2, 3]).await;
    let first = next_task(&deployment.worker).await.expect("it was granted");
    assert_eq!(first.token(), token(1));
    assert_eq!(deployment.next().await, [2, 3]);
    drop(first);
    deployment.stream.failed(token(1)).await;
    deployment.all_gone().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_offer_that_was_accepted_too_late_frees_its_slot() {
    let mut deployment = Deployment::new(1).await;
    deployment.offers(&[1]).await;
    deployment.stream.refuse(token(1)).await;
    let task = deployment.task(offer(2, vec![], whole())).await;
    assert_eq!(task.token(), token(2));
    drop(task);
    deployment.stream.failed(token(2)).await;
    deployment.all_gone().await;
}
