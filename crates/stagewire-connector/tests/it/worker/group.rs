//! A rank above 0 of a group: it runs along and hands nothing over.

use stagewire_core::Member;

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_rank_runs_along_until_rank_0_has_completed() {
    let member = Member {
        group: stage("g"),
        rank: 1,
        world: 2,
    };
    let mut deployment = Deployment::with(|options| options.member = Some(member.clone())).await;
    let hello = deployment.stream.hello.member();
    assert_eq!(hello.expect("an allowed name").as_ref(), Some(&member));
    let mut offered = offer(1, vec![], v1::Output::default());
    offered.member = Some(member.clone().into());
    let task = deployment.task(offered).await;
    assert_eq!(task.member(), Some(&member));
    let following = tokio::spawn(async move { task.follow().await.map_err(|error| error.to_string()) });
    let completed = deployment.stream.completed(token(1)).await;
    assert_eq!(completed.result, None);
    assert_eq!(deployment.worker.busy(), 1, "not answered yet");
    deployment.stream.accept(token(1)).await;
    let followed = tokio::time::timeout(PATIENCE, following).await.expect("in time");
    assert_eq!(followed.expect("no panic"), Ok(()));
    deployment.all_gone().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rank_that_waits_for_rank_0_ends_with_it() {
    let mut deployment = Deployment::new(1).await;
    let task = deployment.task(offer(1, vec![], v1::Output::default())).await;
    let following = tokio::spawn(async move { task.follow().await.map_err(|error| error.reason()) });
    deployment.stream.completed(token(1)).await;
    // Rank 0 failed.
    deployment.stream.cancel(token(1)).await;
    deployment.stream.stopped(token(1)).await;
    let followed = tokio::time::timeout(PATIENCE, following).await.expect("in time");
    assert_eq!(followed.expect("no panic"), Err("attempt.cancelled"));
    deployment.all_gone().await;
}
