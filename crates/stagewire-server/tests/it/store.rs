//! Payloads through the host store.

use reqwest::Method;

use crate::site::{Api, Site, until};
use crate::stages::{Workers, video};

async fn until_empty(api: &Api) {
    until("the store to be empty", || async {
        let (_, stats) = api.get("/v1/stats").await;
        (stats["store"]["bytes"] == 0 && stats["store"]["payloads"] == 0).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_video_through_the_store() {
    let site = Site::stored();
    let api = site.start().await;
    let workers = Workers::attach(&site.run_dir()).await;
    let job = api.submit("a red cat").await;
    let shown = api.until(&job, &["succeeded", "failed"]).await;
    assert_eq!(shown["state"], "succeeded", "{shown}");
    let (_, result) = api.get(&format!("/v1/jobs/{job}/result")).await;
    let url = result["artefacts"][0]["url"].as_str().unwrap();
    let bytes = api
        .request(Method::GET, url)
        .send()
        .await
        .unwrap()
        .bytes()
        .await
        .unwrap();
    assert_eq!(bytes, video("a red cat", 4));
    let (_, timeline) = api.get(&format!("/v1/jobs/{job}/timeline")).await;
    let handovers = timeline["handovers"].as_array().unwrap();
    assert!(handovers.iter().all(|chunk| chunk["mode"] == "store"), "{timeline}");
    until_empty(&api).await;
    assert_eq!(workers.live(), 0);
    workers.close().await;
    api.stop().await;
}

/// It had no time to: its attempt was done.
#[tokio::test(flavor = "multi_thread")]
async fn what_an_attempt_has_put_and_not_said_goes_with_it() {
    for site in [Site::new(), Site::stored()] {
        let api = site.start().await;
        let workers = Workers::attach(&site.run_dir()).await;
        let job = api.submit("unsaid").await;
        let shown = api.until(&job, &["succeeded", "failed"]).await;
        assert_eq!(shown["state"], "succeeded", "{shown}");
        until_empty(&api).await;
        workers.close().await;
        api.stop().await;
    }
}
