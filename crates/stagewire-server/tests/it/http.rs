//! What the API takes, and what it says where it does not.

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use crate::site::{Site, answer};

#[tokio::test(flavor = "multi_thread")]
async fn wrong_submissions_are_told_what_is_wrong() {
    let site = Site::new();
    let api = site.start().await;
    let cases = [
        (
            json!({"params": {"promt": "x"}}),
            "job.params",
            "promt is not a parameter of this pipeline; did you mean \"prompt\"?",
        ),
        (
            json!({"params": {}}),
            "job.params",
            "prompt is missing; it must be a string",
        ),
        (json!({}), "job.params", "prompt is missing"),
        (
            json!({"params": {"prompt": 7}}),
            "job.params",
            "prompt must be a string; got the number 7",
        ),
        (
            json!({"params": {"prompt": "x", "steps": 0}}),
            "job.params",
            "steps must be at least 1; got 0",
        ),
        (
            json!({"params": {"prompt": "x", "steps": 2.5}}),
            "job.params",
            "steps must be an integer",
        ),
        (
            json!({"prompt": "x"}),
            "http.body",
            "parameters stand inside \"params\"",
        ),
        (json!({"parms": {}}), "http.body", "did you mean \"params\"?"),
        (json!({"params": []}), "http.body", "\"params\" must be a JSON object"),
        (json!([]), "http.body", "the body must be a JSON object"),
    ];
    for (body, reason, message) in cases {
        let (status, answer) = api.post("/v1/jobs", &body).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{body}: {answer}");
        assert_eq!(answer["error"]["class"], "invalid");
        assert_eq!(answer["error"]["reason"], reason, "{body}");
        let shown = answer["error"]["message"].as_str().unwrap();
        assert!(shown.contains(message), "{body}: {shown}");
    }
    let (status, error) = api
        .post("/v1/jobs", &json!({"pipeline": "wan", "params": {"prompt": "x"}}))
        .await;
    assert_eq!(
        (status, &error["error"]["reason"]),
        (StatusCode::NOT_FOUND, &json!("pipeline.unknown"))
    );
    let request = api
        .request(Method::POST, "/v1/jobs")
        .header("content-type", "application/json")
        .body("{\"params\"");
    let (status, error) = answer(request).await;
    assert_eq!(
        (status, &error["error"]["reason"]),
        (StatusCode::BAD_REQUEST, &json!("http.body"))
    );
    let (_, list) = api.get("/v1/jobs").await;
    assert_eq!(list["jobs"], json!([]), "nothing was accepted");
    api.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_prompt_works_and_a_huge_one_is_told_the_limit() {
    let site = Site::new();
    let api = site.start().await;
    let prompt = "x".repeat(64 << 10);
    let job = api.submit(&prompt).await;
    let (_, shown) = api.get(&format!("/v1/jobs/{job}")).await;
    assert_eq!(shown["params"]["prompt"].as_str().map(str::len), Some(64 << 10));

    let huge = json!({"params": {"prompt": "x".repeat(64 << 20)}});
    let (status, error) = api.post("/v1/jobs", &huge).await;
    assert_eq!(status, StatusCode::PAYLOAD_TOO_LARGE);
    let message = error["error"]["message"].as_str().unwrap();
    assert_eq!(
        message,
        "the body is 64.0 MiB; this server takes at most 1.0 MiB (\"max-body\" in [server])"
    );
    assert_eq!(error["error"]["details"]["limit_bytes"], "1048576");

    // The same without a length.
    let parts = (0..64).map(|_| Ok::<_, std::io::Error>(vec![b' '; 64 << 10]));
    let body = reqwest::Body::wrap_stream(futures::stream::iter(parts));
    let request = api
        .request(Method::POST, "/v1/jobs")
        .header("content-type", "application/json")
        .body(body);
    let (status, error) = answer(request).await;
    assert_eq!(
        (status, &error["error"]["reason"]),
        (StatusCode::PAYLOAD_TOO_LARGE, &json!("http.body_too_large"))
    );
    api.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_key_means_the_same_job() {
    let site = Site::new();
    let api = site.start().await;
    let submit = |key: &str, prompt: &str| {
        let body = json!({"params": {"prompt": prompt}});
        answer(
            api.request(Method::POST, "/v1/jobs")
                .header("idempotency-key", key)
                .json(&body),
        )
    };
    let (status, first) = submit("k1", "a").await;
    assert_eq!(status, StatusCode::CREATED);
    let (status, again) = submit("k1", "a").await;
    assert_eq!((status, &again["id"]), (StatusCode::OK, &first["id"]));
    let (status, error) = submit("k1", "b").await;
    assert_eq!(
        (status, &error["error"]["reason"]),
        (StatusCode::CONFLICT, &json!("job.key_conflict"))
    );
    let (status, other) = submit("k2", "a").await;
    assert_eq!(status, StatusCode::CREATED);
    assert_ne!(other["id"], first["id"]);
    let (status, _) = submit(&"k".repeat(256), "a").await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    api.stop().await;

    // The key lives as long as the job, so beyond a restart.
    let api = site.start().await;
    let body = json!({"params": {"prompt": "a"}});
    let (status, again) = answer(
        api.request(Method::POST, "/v1/jobs")
            .header("idempotency-key", "k1")
            .json(&body),
    )
    .await;
    assert_eq!((status, &again["id"]), (StatusCode::OK, &first["id"]));
    api.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_from_elsewhere_are_refused() {
    let site = Site::new();
    let api = site.start().await;
    let ask =
        |name: &'static str, value: &'static str| answer(api.request(Method::GET, "/v1/jobs").header(name, value));
    let (status, error) = ask("host", "evil.example").await;
    assert_eq!(
        (status, &error["error"]["reason"]),
        (StatusCode::FORBIDDEN, &json!("http.host"))
    );
    assert_eq!(ask("host", "localhost:1234").await.0, StatusCode::OK);
    let body = "{\"params\":{\"prompt\":\"x\"}}";
    let post = |name: &'static str, value: &'static str, kind: &'static str| {
        let request = api.request(Method::POST, "/v1/jobs").header(name, value);
        answer(request.header("content-type", kind).body(body))
    };
    let (status, error) = post("origin", "https://evil.example", "application/json").await;
    assert_eq!(
        (status, &error["error"]["reason"]),
        (StatusCode::FORBIDDEN, &json!("http.origin"))
    );
    let (status, error) = post("x-none", "", "text/plain").await;
    assert_eq!(
        (status, &error["error"]["reason"]),
        (StatusCode::UNSUPPORTED_MEDIA_TYPE, &json!("http.content_type"))
    );
    assert_eq!(
        post("origin", "http://localhost:3000", "application/json; charset=utf-8")
            .await
            .0,
        StatusCode::CREATED
    );
    api.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_with_a_token_asks_for_it() {
    use std::os::unix::fs::PermissionsExt;
    let site = Site::with("token-file = \"api.token\"\nlisten = \"0.0.0.0:0\"\n");
    let path = site.dir.path().join("api.token");
    std::fs::write(&path, "0123456789abcdef\n").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    let mut api = site.start().await;
    api.http.url = api.http.url.replace("0.0.0.0", "127.0.0.1");
    let ask = |token: &str| answer(api.request(Method::GET, "/v1/jobs").bearer_auth(token));
    let (status, error) = api.get("/v1/jobs").await;
    assert_eq!(
        (status, &error["error"]["class"]),
        (StatusCode::UNAUTHORIZED, &json!("unauthenticated"))
    );
    assert_eq!(ask("0123456789abcdeF").await.0, StatusCode::UNAUTHORIZED);
    assert_eq!(ask("0123456789abcdef").await.0, StatusCode::OK);
    assert_eq!(api.get("/metrics").await.0, StatusCode::UNAUTHORIZED);
    assert_eq!(api.get("/healthz").await.0, StatusCode::OK);
    api.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_things_are_not_found() {
    let site = Site::new();
    let api = site.start().await;
    let job = "018f0000-0000-7000-8000-000000000000";
    let paths = [
        "/v1/jobs/{}",
        "/v1/jobs/{}/result",
        "/v1/jobs/{}/events",
        "/v1/jobs/{}/timeline.html",
        "/v1/jobs/{}/artefacts/x",
    ];
    for path in paths {
        for id in [job, "nonsense", "%2e%2e%2f"] {
            let (status, error) = api.get(&path.replace("{}", id)).await;
            assert_eq!(
                (status, &error["error"]["reason"]),
                (StatusCode::NOT_FOUND, &json!("job.unknown")),
                "{path} {id}"
            );
        }
    }
    assert_eq!(
        api.post(&format!("/v1/jobs/{job}/cancel"), &json!({})).await.0,
        StatusCode::NOT_FOUND
    );
    let (status, error) = api.get("/v1/job").await;
    assert_eq!(
        (status, &error["error"]["reason"]),
        (StatusCode::NOT_FOUND, &json!("http.path"))
    );
    let (status, error) = answer(api.request(Method::DELETE, "/v1/jobs")).await;
    assert_eq!(
        (status, &error["error"]["reason"]),
        (StatusCode::METHOD_NOT_ALLOWED, &json!("http.method"))
    );
    let (status, error) = api.get("/v1/jobs?state=done").await;
    assert_eq!(status, StatusCode::BAD_REQUEST, "{error}");
    api.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_says_so() {
    let site = Site::with("max-queued = 2\n");
    let api = site.start().await;
    let (_, first) = api.post("/v1/jobs", &json!({"params": {"prompt": "a"}})).await;
    api.submit("b").await;
    let request = api
        .request(Method::POST, "/v1/jobs")
        .json(&json!({"params": {"prompt": "c"}}));
    let response = request.send().await.unwrap();
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    // No job has ended yet.
    assert_eq!(response.headers()["retry-after"], "5");
    let error: Value = response.json().await.unwrap();
    assert_eq!(error["error"]["reason"], "queue.full");
    assert_eq!(error["error"]["details"]["retry_after_s"], "5");

    let id = first["id"].as_str().unwrap();
    api.post(&format!("/v1/jobs/{id}/cancel"), &json!({})).await;
    api.until(id, &["cancelled"]).await;
    let ended = std::time::Instant::now();
    api.submit("c").await;
    let request = api
        .request(Method::POST, "/v1/jobs")
        .json(&json!({"params": {"prompt": "d"}}));
    let response = request.send().await.unwrap();
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    let told: u64 = response.headers()["retry-after"].to_str().unwrap().parse().unwrap();
    // One has ended, just now; under load that may be seconds ago.
    assert!((1..=ended.elapsed().as_secs() + 2).contains(&told), "{told} s");
    api.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiting_job_says_why_and_readiness_what_is_missing() {
    let site = Site::new();
    let api = site.start().await;
    let (status, ready) = api.get("/readyz").await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(ready["stages_without_worker"], json!(["encode", "denoise", "decode"]));
    let job = api.submit("a").await;
    let (_, shown) = api.get(&format!("/v1/jobs/{job}")).await;
    assert_eq!(shown["waiting"][0]["cause"], "no_worker", "{shown}");
    assert_eq!(shown["waiting"][1]["message"], "waits for the output of encode");

    let workers = crate::stages::Workers::attach(&site.run_dir()).await;
    assert_eq!(api.get("/readyz").await.0, StatusCode::OK);
    api.until(&job, &["succeeded"]).await;
    let (_, pipeline) = api.get("/v1/pipeline").await;
    assert_eq!(pipeline["stages"][1]["kind"], "admission");
    assert_eq!(pipeline["workers"][1]["name"], "denoise-0", "{pipeline}");
    assert_eq!(
        pipeline["edges"][1],
        json!({"from": "denoise", "to": "decode", "mode": "p2p", "handover": "stream", "chunks": 3, "chunk_dim": 2})
    );
    assert_eq!(pipeline["params"]["steps"]["max"], 100);

    let metrics = api
        .request(Method::GET, "/metrics")
        .send()
        .await
        .unwrap()
        .text()
        .await
        .unwrap();
    for line in [
        "stagewire_sched_jobs_count{state=\"succeeded\"} 1",
        "stagewire_sched_jobs_total{event=\"submitted\"} 1",
        "stagewire_sched_attempts_total{event=\"completed\"} 3",
        "stagewire_sched_slots_count{stage=\"decode\",use=\"free\"} 1",
        "stagewire_http_requests_total{method=\"POST\",route=\"/v1/jobs\",status=\"201\"} 1",
        "stagewire_journal_commit_seconds_count",
        "stagewire_job_duration_seconds_count{state=\"succeeded\"} 1",
        "# EOF",
    ] {
        assert!(metrics.contains(line), "{line} is not in\n{metrics}");
    }
    workers.close().await;
    api.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_query_that_is_wrong_is_told_so_in_our_words() {
    let site = Site::new();
    let api = site.start().await;
    let job = api.submit("a").await;
    let events = format!("/v1/jobs/{job}/events?afer=1.1");
    let cases = [
        (
            "/v1/jobs?limit=many",
            "\"limit\" is \"many\"; it must be a number of 1 to 1000",
        ),
        ("/v1/jobs?limit=1&limit=2", "query parameter \"limit\" is given twice"),
        (
            "/v1/jobs?sate=failed",
            "there is no query parameter \"sate\"; did you mean \"state\"? The route takes: state, limit, before",
        ),
        (
            "/v1/jobs?state=fail",
            "there is no state \"fail\"; did you mean \"failed\"? The states are: active, cancelling, succeeded, failed, \
             cancelled",
        ),
        (
            &events,
            "there is no query parameter \"afer\"; did you mean \"after\"? The route takes: after",
        ),
    ];
    for (path, message) in cases {
        let (status, error) = api.get(path).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{path}");
        assert_eq!(error["error"]["reason"], "http.query", "{path}");
        assert_eq!(error["error"]["message"], message, "{path}");
    }
    api.stop().await;
}
