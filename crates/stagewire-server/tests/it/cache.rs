//! What a stage makes once for all jobs that would make the same.

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use crate::child::ChildServer;
use crate::leave::nothing_stays_behind;
use crate::site::{Http, Site, until};
use crate::stages::{Workers, video};

/// What the encoder makes depends on the prompt alone.
fn site() -> Site {
    let mut site = Site::stored();
    let cached = "name = \"encode\"\ncache = [\"prompt\"]\ncache-version = \"1\"\n";
    site.config = site.config.replace("name = \"encode\"\n", cached);
    site.keeps = true;
    site
}

/// The state of the encoder, of a job that has ended well with the right bytes.
async fn encoded(http: &Http, prompt: &str, steps: u64) -> String {
    let body = json!({"params": {"prompt": prompt, "steps": steps}});
    let (status, job) = http.post("/v1/jobs", &body).await;
    assert_eq!(status, StatusCode::CREATED, "{job}");
    let id = job["id"].as_str().unwrap();
    let shown = http.until(id, &["succeeded", "failed"]).await;
    assert_eq!(shown["state"], "succeeded", "{shown}");
    let (_, result) = http.get(&format!("/v1/jobs/{id}/result")).await;
    let url = result["artefacts"][0]["url"].as_str().unwrap();
    let got = http.request(Method::GET, url).send().await.unwrap();
    assert_eq!(got.bytes().await.unwrap(), video(prompt, steps));
    if shown["stages"][0]["state"] == "cached" {
        let (_, timeline) = http.get(&format!("/v1/jobs/{id}/timeline")).await;
        assert!(timeline["stages"][0]["cached_ns"].is_u64(), "{timeline}");
        let events = http.request(Method::GET, &format!("/v1/jobs/{id}/events")).send().await;
        let events = events.unwrap().text().await.unwrap();
        assert!(events.contains("\"type\":\"cached\""), "{events}");
    }
    shown["stages"][0]["state"].as_str().unwrap().to_owned()
}

async fn stats(http: &Http) -> Value {
    http.get("/v1/stats").await.1
}

#[tokio::test(flavor = "multi_thread")]
async fn one_encoding_serves_all_jobs_with_its_prompt_also_after_kill_9() {
    let site = site();
    let server = ChildServer::start(&site).await;
    let workers = Workers::attach(&site.run_dir()).await;
    assert_eq!(encoded(&server.http, "a red cat", 3).await, "done");
    assert_eq!(encoded(&server.http, "a red cat", 5).await, "cached");
    assert_eq!(encoded(&server.http, "a dog", 3).await, "done");
    let shown = stats(&server.http).await;
    assert_eq!(
        (&shown["cache"]["payloads"], &shown["live_payloads"]),
        (&json!(2), &json!(0)),
        "{shown}"
    );
    server.kill();

    let server = ChildServer::start(&site).await;
    assert_eq!(encoded(&server.http, "a red cat", 7).await, "cached");
    nothing_stays_behind(&site, server, workers).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_comes_while_it_is_made_waits_for_it() {
    let site = site();
    let api = site.start().await;
    let mut workers = Workers::none();
    let first = api.submit("a red cat").await;
    let others = [api.submit("a red cat").await, api.submit("a red cat").await];
    for stage in ["encode", "denoise", "decode"] {
        workers.add(&site.run_dir(), stage, stage, 2).await;
    }
    for job in [&first, &others[0], &others[1]] {
        let shown = api.until(job, &["succeeded", "failed"]).await;
        assert_eq!(shown["state"], "succeeded", "{shown}");
    }
    let (_, metrics) = api.get("/metrics").await;
    let metrics = metrics.as_str().unwrap();
    let count = |line: &str| metrics.lines().any(|found| found == line);
    assert!(count("stagewire_sched_stages_total{event=\"cached\"} 2"), "{metrics}");
    assert!(count("stagewire_sched_cache_total{event=\"kept\"} 1"), "{metrics}");
    workers.close().await;
    api.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_cached_makes_room_for_what_jobs_need() {
    let mut site = site();
    // Four prompts of 64 KiB fill what is kept for nobody in particular.
    site.config = site.config.replace("store-bytes = \"16MiB\"", "store-bytes = \"1MiB\"");
    let api = site.start().await;
    let workers = Workers::attach(&site.run_dir()).await;
    for number in 0..12 {
        let prompt = format!("{number:2}{}", "x".repeat((64 << 10) - 2));
        assert_eq!(encoded(&api, &prompt, 3).await, "done");
        let shown = stats(&api).await;
        assert!(shown["cache"]["idle_bytes"].as_u64().unwrap() <= 256 << 10, "{shown}");
    }
    until("what was dropped to leave the store", || async {
        let shown = stats(&api).await;
        (shown["store"]["payloads"] == shown["cache"]["payloads"]).then_some(())
    })
    .await;
    workers.close().await;
    api.stop().await;
}
