//! Drains that lose nothing, a pause that outlives the server, and what the pools show of both.

use std::sync::Arc;

use serde_json::{Value, json};

use crate::site::{Api, PATIENCE, Site, until};
use crate::stages::Workers;

fn stage<'a>(shown: &'a Value, name: &str) -> &'a Value {
    let stages = shown["stages"].as_array().unwrap();
    stages.iter().find(|stage| stage["name"] == name).unwrap()
}

async fn pool(api: &Api, name: &str) -> Value {
    let (status, pools) = api.get("/v1/pools").await;
    assert_eq!(status, 200);
    stage(&pools, name).clone()
}

async fn cancel(api: &Api, job: &str) {
    let (status, _) = api.post(&format!("/v1/jobs/{job}/cancel"), &json!({})).await;
    assert_eq!(status, 202);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drained_worker_takes_nothing_with_it() {
    let site = Site::new();
    let api = site.start().await;
    let workers = Workers::attach(&site.run_dir()).await;
    let first = api.submit("hold").await;
    api.until_stage(&first, "denoise", "running").await;
    let second = api.submit("a red cat").await;
    let encoded = api.until_stage(&second, "encode", "done").await;
    let holds = pool(&api, "encode").await;
    // The conditions of both: those of the first may be needed again.
    assert_eq!(
        (&holds["payloads"], &holds["workers"][0]["payloads"]),
        (&json!(2), &json!(2)),
        "{holds}"
    );

    let (status, drained) = api.post("/v1/pipeline/drain", &json!({"worker": "encode-0"})).await;
    assert_eq!(status, 202);
    assert_eq!(drained["workers"][0]["name"], "encode-0");
    assert_eq!(
        (&drained["workers"][0]["stage"], &drained["workers"][0]["state"]),
        (&json!("encode"), &json!("draining"))
    );
    let encoder = Arc::clone(workers.worker("encode"));
    tokio::time::timeout(PATIENCE, encoder.leave(PATIENCE)).await.unwrap();
    let left = pool(&api, "encode").await;
    assert_eq!(left["payloads"], 2, "the store has them: {left}");

    let third = api.submit("a blue cat").await;
    let waits = until("the third job to wait", || async {
        let (_, shown) = api.get(&format!("/v1/jobs/{third}")).await;
        (shown["waiting"][0]["cause"] == "no_worker").then(|| shown["waiting"][0].clone())
    });
    waits.await;
    cancel(&api, &third).await;
    cancel(&api, &first).await;
    let shown = api.until(&second, &["succeeded", "failed"]).await;
    assert_eq!(shown["state"], "succeeded", "{shown}");
    assert_eq!(stage(&shown, "encode"), &encoded, "it ran again");
    until("the store to be empty", || async {
        let (_, stats) = api.get("/v1/stats").await;
        (stats["store"]["bytes"] == 0 && stats["live_payloads"] == 0).then_some(())
    })
    .await;
    workers.close().await;
    api.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_runs_at_the_deadline_of_a_pool_runs_again_elsewhere() {
    let site = Site::new();
    let api = site.start().await;
    let mut workers = Workers::attach(&site.run_dir()).await;
    let job = api.submit("hold").await;
    let before = api.until_stage(&job, "denoise", "running").await;
    let body = json!({"stage": "denoise", "deadline_s": 0.2});
    let (status, drained) = api.post("/v1/pipeline/drain", &body).await;
    assert_eq!(status, 202);
    let fenced_in = drained["workers"][0]["fenced_in_s"].as_f64();
    assert!(fenced_in.is_none_or(|seconds| seconds <= 0.2), "{drained}");
    workers.add(&site.run_dir(), "denoise", "denoise-1", 1).await;
    let after = until("another worker to run it", || async {
        let (_, shown) = api.get(&format!("/v1/jobs/{job}")).await;
        let run = stage(&shown, "denoise");
        (run["worker"] == "denoise-1" && run["state"] == "running").then(|| (run.clone(), shown["losses"].clone()))
    });
    let (run, losses) = after.await;
    assert!(run["attempt"].as_u64() > before["attempt"].as_u64(), "{run}");
    assert_eq!(run["failures"], 0);
    let counted = ["killed_workers", "expired", "lost_inputs"].map(|loss| losses[loss].as_u64());
    assert_eq!(counted, [Some(0); 3], "{losses}");
    cancel(&api, &job).await;
    api.until(&job, &["cancelled"]).await;
    workers.close().await;
    api.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_outlives_the_server() {
    let site = Site::new();
    let api = site.start().await;
    let (status, answer) = api.post("/v1/pipeline/pause", &json!({})).await;
    assert_eq!((status.as_u16(), answer), (200, json!({"paused": true})));
    let job = api.submit("a red cat").await;
    api.stop().await;
    let api = site.start().await;
    let workers = Workers::attach(&site.run_dir()).await;
    let (_, shown) = api.get("/v1/pipeline").await;
    assert_eq!((&shown["ready"], &shown["paused"]), (&json!(true), &json!(true)));
    let (_, shown) = api.get(&format!("/v1/jobs/{job}")).await;
    assert_eq!(shown["waiting"][0]["cause"], "paused", "{shown}");
    let waiting = pool(&api, "encode").await;
    assert_eq!(
        (&waiting["waiting"], &waiting["slots"]["free"]),
        (&json!(1), &json!(1)),
        "{waiting}"
    );
    let (_, answer) = api.post("/v1/pipeline/resume", &json!({})).await;
    assert_eq!(answer, json!({"paused": false}));
    let shown = api.until(&job, &["succeeded", "failed"]).await;
    assert_eq!(shown["state"], "succeeded", "{shown}");
    workers.close().await;
    api.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_that_makes_no_sense_is_refused() {
    let site = Site::new();
    let api = site.start().await;
    let workers = Workers::attach(&site.run_dir()).await;
    let cases = [
        (json!({"worker": "decode-1"}), 404, "worker.not_found"),
        (json!({"stage": "decoder"}), 404, "stage.unknown"),
        (json!({"stage": "De Code"}), 400, "http.body"),
        (json!({}), 400, "http.body"),
        (json!({"worker": "decode-0", "stage": "decode"}), 400, "http.body"),
        (json!({"worker": 7}), 400, "http.body"),
        (json!({"worker": "decode-0", "deadline_s": -1}), 400, "http.body"),
        (json!({"worker": "decode-0", "deadline_s": 1e300}), 400, "http.body"),
        (json!({"worker": "decode-0", "deadline_s": "60"}), 400, "http.body"),
        (json!({"worker": "decode-0", "deadline": 60}), 400, "http.body"),
        (json!(["decode-0"]), 400, "http.body"),
    ];
    for (body, status, reason) in cases {
        let (found, answer) = api.post("/v1/pipeline/drain", &body).await;
        assert_eq!(
            (found.as_u16(), &answer["error"]["reason"]),
            (status, &json!(reason)),
            "{body}"
        );
    }
    let (_, pipeline) = api.get("/v1/pipeline").await;
    let workers_shown = pipeline["workers"].as_array().unwrap();
    assert!(
        workers_shown.iter().all(|worker| worker["state"] == "ready"),
        "{pipeline}"
    );
    workers.close().await;
    api.stop().await;
}

/// Nobody decodes at first: what is resident stays under the credits at every look, it is denoise that waits, and everything
/// ends once somebody decodes.
#[tokio::test(flavor = "multi_thread")]
async fn denoise_waits_for_bytes_where_nobody_decodes() {
    const CREDITS: u64 = 4096;
    let mut site = Site::new();
    site.config = site
        .config
        .replace("store-bytes = \"16MiB\"", "store-bytes = \"4KiB\"")
        .replace("name = \"encode\"", "name = \"encode\"\nmax-payload = \"16B\"")
        .replace("kind = \"admission\"", "kind = \"admission\"\nmax-payload = \"1200B\"");
    let api = site.start().await;
    let mut workers = Workers::none();
    workers.add(&site.run_dir(), "encode", "encode-0", 2).await;
    workers.add(&site.run_dir(), "denoise", "denoise-0", 4).await;
    let mut jobs = Vec::new();
    for _ in 0..8 {
        jobs.push(api.submit("a red cat").await);
    }
    let look = || async {
        let (_, pools) = api.get("/v1/pools").await;
        let bytes = |name: &str| pools["bytes"][name].as_u64().unwrap();
        assert!(bytes("held") + bytes("reserved") <= CREDITS, "{pools}");
        assert_eq!(
            (bytes("over"), bytes("free") + bytes("reserved") + bytes("held")),
            (0, CREDITS)
        );
        pools
    };
    until("denoise to wait for bytes", || async {
        look().await;
        let mut causes = Vec::new();
        for job in &jobs {
            let (_, shown) = api.get(&format!("/v1/jobs/{job}")).await;
            causes.extend(
                shown["waiting"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|waits| waits["cause"].clone()),
            );
        }
        let (_, stats) = api.get("/v1/stats").await;
        let made = stage(&stats, "denoise")["payloads"] == 3;
        (made && causes.contains(&json!("bytes"))).then_some(())
    })
    .await;
    workers.add(&site.run_dir(), "decode", "decode-0", 1).await;
    for job in &jobs {
        until("the job to end", || async {
            look().await;
            let (_, shown) = api.get(&format!("/v1/jobs/{job}")).await;
            (shown["state"] == "succeeded").then_some(())
        })
        .await;
    }
    workers.close().await;
    api.stop().await;
}
