//! Dead letters over HTTP, with real workers and a server that restarts.

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use crate::site::{Api, Site, answer};
use crate::stages::Workers;

async fn act(api: &Api, job: &str, what: &str) -> (StatusCode, Value) {
    answer(api.request(Method::POST, &format!("/v1/dead-letters/{job}/{what}"))).await
}

async fn listed(api: &Api, query: &str) -> (Vec<String>, Value) {
    let (status, page) = api.get(&format!("/v1/dead-letters{query}")).await;
    assert_eq!(status, StatusCode::OK, "{page}");
    let letters = page["dead_letters"].as_array().unwrap();
    let ids = letters.iter().map(|letter| letter["id"].as_str().unwrap().to_owned());
    (ids.collect(), page["next"].clone())
}

/// A job that has failed.
async fn die(api: &Api) -> String {
    let job = api.submit("refuse").await;
    api.until(&job, &["failed"]).await;
    job
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_are_listed_redriven_and_discarded() {
    let site = Site::new();
    let api = site.start().await;
    let workers = Workers::attach(&site.run_dir()).await;
    let [first, second, third] = [die(&api).await, die(&api).await, die(&api).await];
    let good = api.submit("a red cat").await;
    api.until(&good, &["succeeded"]).await;

    let page = listed(&api, "?limit=2").await;
    assert_eq!(page, (vec![third.clone(), second.clone()], json!(second)));
    let page = listed(&api, &format!("?limit=2&before={second}")).await;
    assert_eq!(page, (vec![first.clone()], Value::Null));

    let (status, letter) = api.get(&format!("/v1/dead-letters/{first}")).await;
    assert_eq!(status, StatusCode::OK, "{letter}");
    assert_eq!(
        (&letter["cause"], &letter["params"]),
        (&json!("failed"), &json!({"prompt": "refuse", "steps": 4}))
    );
    let attempts = letter["attempts"].as_array().unwrap();
    assert_eq!(attempts.len(), 1, "{letter}");
    let shown = ["stage", "worker", "end"].map(|member| attempts[0][member].as_str().unwrap());
    assert_eq!(shown, ["encode", "encode-0", "failed"]);
    assert_eq!(attempts[0]["failure"], letter["failure"]);

    // The same again in its next life, under the same id; the log goes on.
    let (status, job) = act(&api, &first, "redrive").await;
    assert_eq!((status, &job["redrives"]), (StatusCode::ACCEPTED, &json!(1)), "{job}");
    let job = api.until(&first, &["failed"]).await;
    assert_eq!(job["attempts"].as_array().unwrap().len(), 2, "{job}");
    assert_eq!(job["dead_letter"], true);
    let events = api
        .request(Method::GET, &format!("/v1/jobs/{first}/events"))
        .send()
        .await;
    let events = events.unwrap().text().await.unwrap();
    assert!(events.contains(r#""type":"redriven""#), "{events}");
    assert_eq!(
        events.matches(r#""type":"failed""#).count(),
        1,
        "the end before is no news: {events}"
    );

    let (status, job) = act(&api, &second, "discard").await;
    assert_eq!((status, &job["state"]), (StatusCode::OK, &json!("failed")), "{job}");
    for what in ["redrive", "discard"] {
        let (status, error) = act(&api, &second, what).await;
        assert_eq!(
            (status, &error["error"]["reason"]),
            (StatusCode::CONFLICT, &json!("job.not_dead")),
            "{error}"
        );
        assert_eq!(act(&api, &good, what).await.0, StatusCode::CONFLICT);
        assert_eq!(act(&api, "no-id", what).await.0, StatusCode::NOT_FOUND);
    }
    assert_eq!(
        api.get(&format!("/v1/dead-letters/{second}")).await.0,
        StatusCode::CONFLICT
    );

    let (_, metrics) = api.get("/metrics").await;
    let metrics = metrics.as_str().unwrap();
    for line in [
        "stagewire_sched_dead_letters_count 2",
        "stagewire_sched_dead_letters_total{event=\"died\"} 4",
        "stagewire_sched_dead_letters_total{event=\"redriven\"} 1",
        "stagewire_sched_dead_letters_total{event=\"discarded\"} 1",
        "stagewire_sched_dead_letters_total{event=\"crowded_out\"} 0",
    ] {
        assert!(
            metrics.lines().any(|known| known == line),
            "{line} is missing in {metrics}"
        );
    }
    workers.close().await;
    api.stop().await;

    let api = site.start().await;
    assert_eq!(
        listed(&api, "").await,
        (vec![third, first.clone()], Value::Null),
        "they survive"
    );
    let (_, job) = api.get(&format!("/v1/jobs/{first}")).await;
    assert_eq!(job["attempts"][1]["worker"], "encode-0", "{job}");
    api.stop().await;
}
