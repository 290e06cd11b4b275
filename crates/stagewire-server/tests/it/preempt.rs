//! Attempts that yield, over a real server, store and workers.

use serde_json::{Value, json};

use crate::site::{Api, Site, until};
use crate::stages::Workers;

fn site() -> Site {
    let mut site = Site::new();
    site.config = site
        .config
        .replace("kind = \"admission\"", "kind = \"admission\"\ncheckpoint = true");
    site
}

async fn submit(api: &Api, prompt: &str, class: &str) -> String {
    let body = json!({"params": {"prompt": prompt}, "class": class});
    let (status, job) = api.post("/v1/jobs", &body).await;
    assert_eq!(status, 201, "{job}");
    job["id"].as_str().unwrap().to_owned()
}

fn denoise(shown: &Value) -> &Value {
    let stages = shown["stages"].as_array().unwrap();
    stages.iter().find(|stage| stage["name"] == "denoise").unwrap()
}

/// Waits until the job stands still after its first step.
async fn one_step(api: &Api, job: &str) {
    until("its first step", || async {
        let (_, shown) = api.get(&format!("/v1/jobs/{job}")).await;
        (denoise(&shown)["progress"]["done"] == 1).then_some(())
    })
    .await;
}

/// How the attempts at the stage ended.
fn ends(shown: &Value) -> Vec<&str> {
    let attempts = shown["attempts"].as_array().unwrap().iter();
    let denoise = attempts.filter(|attempt| attempt["stage"] == "denoise");
    denoise.map(|attempt| attempt["end"].as_str().unwrap()).collect()
}

async fn nothing_is_left(api: &Api) {
    until("the store to be empty", || async {
        let (_, stats) = api.get("/v1/stats").await;
        (stats["store"]["bytes"] == 0 && stats["live_payloads"] == 0).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interactive_job_gets_the_worker_of_a_batch_job_which_goes_on_from_its_step() {
    let site = site();
    let api = site.start().await;
    let workers = Workers::attach(&site.run_dir()).await;
    let batch = submit(&api, "yield", "batch").await;
    one_step(&api, &batch).await;
    let wanted = submit(&api, "a red cat", "interactive").await;
    let shown = api.until(&wanted, &["succeeded", "failed"]).await;
    assert_eq!(shown["state"], "succeeded", "{shown}");
    let shown = api.until(&batch, &["succeeded", "failed"]).await;
    assert_eq!(shown["state"], "succeeded", "{shown}");
    assert_eq!(ends(&shown), ["yielded", "completed"], "{shown}");
    assert_eq!(denoise(&shown)["preemptions"], 1);
    let why = &shown["attempts"][1]["failure"];
    assert_eq!(why["reason"], "attempt.preempted", "{shown}");
    assert_eq!(why["details"]["by"], wanted.as_str());
    let metrics = api.request(reqwest::Method::GET, "/metrics").send().await.unwrap();
    let metrics = metrics.text().await.unwrap();
    for line in [
        "stagewire_sched_attempts_total{event=\"preempted\"} 1",
        "stagewire_sched_attempts_total{event=\"resumed\"} 1",
        "stagewire_sched_checkpoints_total 1",
        "stagewire_sched_steps_saved_total 1",
    ] {
        assert!(metrics.contains(line), "{line} is missing in {metrics}");
    }
    nothing_is_left(&api).await;
    workers.close().await;
    api.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_drained_worker_runs_goes_on_elsewhere_from_its_step() {
    let site = site();
    let api = site.start().await;
    let mut workers = Workers::attach(&site.run_dir()).await;
    let job = submit(&api, "yield", "batch").await;
    one_step(&api, &job).await;
    let (status, _) = api.post("/v1/pipeline/drain", &json!({"worker": "denoise-0"})).await;
    assert_eq!(status, 202);
    let waits = until("it to have yielded", || async {
        let (_, shown) = api.get(&format!("/v1/jobs/{job}")).await;
        (denoise(&shown)["state"] == "queued").then_some(shown)
    });
    let shown = waits.await;
    assert_eq!(denoise(&shown)["checkpoint"]["done"], 1, "{shown}");
    let waiting = &shown["waiting"][0];
    let message = waiting["message"].as_str().unwrap();
    assert!(
        message.ends_with("; it has yielded and goes on from step 1 of 4"),
        "{message}"
    );
    assert_eq!(waiting["resumes"]["done"], 1);
    workers.add(&site.run_dir(), "denoise", "denoise-1", 1).await;
    let shown = api.until(&job, &["succeeded", "failed"]).await;
    assert_eq!(shown["state"], "succeeded", "{shown}");
    assert_eq!(ends(&shown), ["yielded", "completed"]);
    nothing_is_left(&api).await;
    workers.close().await;
    api.stop().await;
}
