//! Servers that are killed: what they acknowledged is done all the same.

use reqwest::Method;

use crate::child::ChildServer;
use crate::site::{Site, until};
use crate::stages::{Workers, video};

/// Kills a server after so many acknowledged jobs, in each of several lives.
async fn killed_after(site: Site, acknowledged: &[usize], slots: u32) {
    let mut server = ChildServer::start(&site).await;
    let workers = Workers::with_slots(&site.run_dir(), slots).await;
    let mut jobs = Vec::new();
    for (life, count) in acknowledged.iter().enumerate() {
        assert_eq!(server.epoch, life as u64 + 1);
        for n in 0..*count {
            let prompt = format!("cat {n} of life {life}");
            jobs.push((server.http.submit(&prompt).await, prompt));
        }
        server.kill();
        server = ChildServer::start(&site).await;
    }
    for (job, prompt) in &jobs {
        let shown = server.http.until(job, &["succeeded", "failed"]).await;
        assert_eq!(shown["state"], "succeeded", "{shown}");
        let (_, result) = server.http.get(&format!("/v1/jobs/{job}/result")).await;
        let url = result["artefacts"][0]["url"].as_str().unwrap().to_owned();
        let bytes = server
            .http
            .request(Method::GET, &url)
            .send()
            .await
            .unwrap()
            .bytes()
            .await
            .unwrap();
        assert_eq!(bytes, video(prompt, 4));
    }
    let (_, list) = server.http.get("/v1/jobs").await;
    assert_eq!(
        list["jobs"].as_array().unwrap().len(),
        jobs.len(),
        "no job was lost or made twice"
    );
    until("payloads to be released", || async {
        (workers.live() == 0).then_some(())
    })
    .await;
    workers.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acknowledged_jobs_survive_kill_9() {
    killed_after(Site::new(), &[1, 2, 3, 5, 8], 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn so_they_do_with_several_at_once() {
    killed_after(Site::new(), &[6, 1, 6], 3).await;
}

/// Without a keeper what the store held dies with the server; its stages run again.
#[tokio::test(flavor = "multi_thread")]
async fn so_they_do_where_their_payloads_were_in_the_server() {
    killed_after(Site::stored(), &[3, 2, 4], 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn so_they_do_where_their_payloads_outlive_the_server() {
    let mut site = Site::stored();
    site.keeps = true;
    killed_after(site, &[3, 2, 4], 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_running_attempt_goes_on_under_the_next_server() {
    let site = Site::new();
    let server = ChildServer::start(&site).await;
    let workers = Workers::attach(&site.run_dir()).await;
    let job = server.http.submit("yield").await;
    // What was granted is not yet told: a worker that has not heard gives its slot back when the server is gone.
    let before = until("the worker to be at it", || async {
        let run = server.http.until_stage(&job, "denoise", "running").await;
        (run["progress"]["done"] == 1).then_some(run)
    })
    .await;
    server.kill();
    let server = ChildServer::start(&site).await;
    assert_eq!(workers.worker("denoise").busy(), 1);
    until("the worker to be back", || async {
        let (_, pipeline) = server.http.get("/v1/pipeline").await;
        let workers = pipeline["workers"].as_array()?;
        let ready = workers
            .iter()
            .any(|worker| worker["stage"] == "denoise" && worker["state"] == "ready");
        ready.then_some(())
    })
    .await;
    let after = server.http.until_stage(&job, "denoise", "running").await;
    assert_eq!(after["attempt"], before["attempt"], "it was not started again");
    let (status, _) = server
        .http
        .post(&format!("/v1/jobs/{job}/cancel"), &serde_json::json!({}))
        .await;
    assert_eq!(status, 202);
    server.http.until(&job, &["cancelled"]).await;
    workers.close().await;
}
