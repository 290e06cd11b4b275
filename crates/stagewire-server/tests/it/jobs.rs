//! Jobs from submission to result, with real workers.

use reqwest::{Method, StatusCode};
use serde_json::json;

use crate::site::{Site, answer, until};
use crate::stages::{Workers, video};

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_becomes_a_video() {
    let site = Site::new();
    let api = site.start().await;
    let workers = Workers::attach(&site.run_dir()).await;
    let job = api.submit("a red cat").await;
    let shown = api.until(&job, &["succeeded", "failed"]).await;
    assert_eq!(shown["state"], "succeeded", "{shown}");
    assert_eq!(shown["params"], json!({"prompt": "a red cat", "steps": 4}));

    let (status, result) = api.get(&format!("/v1/jobs/{job}/result")).await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(result["info"], json!({"frames": 6}));
    let file = &result["artefacts"][0];
    assert_eq!(
        (file["name"].as_str(), file["nbytes"].as_u64()),
        (Some("video.mp4"), Some(1200))
    );
    let response = api
        .request(Method::GET, file["url"].as_str().unwrap())
        .send()
        .await
        .unwrap();
    assert_eq!(response.headers()["content-type"], "video/mp4");
    assert_eq!(response.headers()["x-content-type-options"], "nosniff");
    assert_eq!(response.bytes().await.unwrap(), video("a red cat", 4));
    let page = &result["artefacts"][1];
    let response = api
        .request(Method::GET, page["url"].as_str().unwrap())
        .send()
        .await
        .unwrap();
    assert_eq!(response.headers()["content-security-policy"], "sandbox");
    assert_eq!(
        response.headers()["content-disposition"],
        "attachment; filename*=UTF-8''..%2Fnote.html"
    );

    // Everything is let go of.
    until("payloads to be released", || async {
        (workers.live() == 0).then_some(())
    })
    .await;
    let (_, stats) = api.get("/v1/stats").await;
    assert_eq!(
        (&stats["live_payloads"], &stats["transfer"]["pins"]),
        (&json!(0), &json!(0)),
        "{stats}"
    );
    workers.close().await;
    api.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_jobs_at_once_all_end_and_leave_nothing() {
    let site = Site::new();
    let api = site.start().await;
    let workers = Workers::with_slots(&site.run_dir(), 2).await;
    let mut jobs = Vec::new();
    for n in 0..30 {
        jobs.push((api.submit(&format!("cat {n}")).await, format!("cat {n}")));
    }
    for (job, prompt) in &jobs {
        let shown = api.until(job, &["succeeded", "failed"]).await;
        assert_eq!(shown["state"], "succeeded", "{shown}");
        let (_, result) = api.get(&format!("/v1/jobs/{job}/result")).await;
        let url = result["artefacts"][0]["url"].as_str().unwrap().to_owned();
        let bytes = api
            .request(Method::GET, &url)
            .send()
            .await
            .unwrap()
            .bytes()
            .await
            .unwrap();
        assert_eq!(bytes, video(prompt, 4));
    }
    until("payloads to be released", || async {
        (workers.live() == 0).then_some(())
    })
    .await;
    let (_, list) = api.get("/v1/jobs?state=succeeded&limit=20").await;
    assert_eq!(list["jobs"].as_array().unwrap().len(), 20);
    let next = list["next"].as_str().unwrap();
    let (_, rest) = api.get(&format!("/v1/jobs?limit=20&before={next}")).await;
    assert_eq!(
        (rest["jobs"].as_array().unwrap().len(), &rest["next"]),
        (10, &json!(null))
    );
    workers.close().await;
    api.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_workers_exception_reaches_the_client_and_the_worker_lives_on() {
    let site = Site::new();
    let api = site.start().await;
    let workers = Workers::attach(&site.run_dir()).await;
    let job = api.submit("refuse").await;
    let shown = api.until(&job, &["succeeded", "failed"]).await;
    assert_eq!(shown["state"], "failed");
    assert_eq!(shown["failure"]["message"], "ValueError: <b>this prompt is refused</b>");
    let (status, result) = api.get(&format!("/v1/jobs/{job}/result")).await;
    assert_eq!(
        (status, &result["error"]["reason"]),
        (StatusCode::CONFLICT, &json!("stage.raised"))
    );
    let page = api
        .request(Method::GET, &format!("/v1/jobs/{job}/timeline.html"))
        .send()
        .await
        .unwrap();
    let page = page.text().await.unwrap();
    assert!(page.contains("&lt;b&gt;this prompt is refused&lt;/b&gt;") && !page.contains("<b>this prompt"));

    let job = api.submit("fine").await;
    assert_eq!(api.until(&job, &["succeeded", "failed"]).await["state"], "succeeded");
    workers.close().await;
    api.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_running_job_is_cancelled_at_its_next_step() {
    let site = Site::new();
    let api = site.start().await;
    let workers = Workers::attach(&site.run_dir()).await;
    let job = api.submit("hold").await;
    api.until_stage(&job, "denoise", "running").await;

    let (status, error) = api.get(&format!("/v1/jobs/{job}/result")).await;
    assert_eq!(
        (status, &error["error"]["reason"]),
        (StatusCode::CONFLICT, &json!("job.not_ended"))
    );
    let (status, _) = answer(api.request(Method::POST, &format!("/v1/jobs/{job}/cancel"))).await;
    assert_eq!(status, StatusCode::ACCEPTED);
    api.until(&job, &["cancelled"]).await;
    let (status, _) = answer(api.request(Method::POST, &format!("/v1/jobs/{job}/cancel"))).await;
    assert_eq!(status, StatusCode::ACCEPTED, "cancelling twice is no error");
    let (status, error) = api.get(&format!("/v1/jobs/{job}/result")).await;
    assert_eq!(
        (status, &error["error"]["class"]),
        (StatusCode::CONFLICT, &json!("cancelled"))
    );
    until("payloads to be released", || async {
        (workers.live() == 0).then_some(())
    })
    .await;

    // The slot is free again.
    let job = api.submit("next").await;
    api.until(&job, &["succeeded"]).await;
    let (status, error) = answer(api.request(Method::POST, &format!("/v1/jobs/{job}/cancel"))).await;
    assert_eq!(
        (status, &error["error"]["reason"]),
        (StatusCode::CONFLICT, &json!("job.ended"))
    );
    workers.close().await;
    api.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_timeline_shows_stages_and_chunks() {
    let site = Site::new();
    let api = site.start().await;
    let workers = Workers::attach(&site.run_dir()).await;
    let job = api.submit("<script>alert(1)</script>").await;
    api.until(&job, &["succeeded"]).await;
    let (_, timeline) = api.get(&format!("/v1/jobs/{job}/timeline")).await;
    let stages = timeline["stages"].as_array().unwrap();
    assert!(
        stages.iter().all(|stage| stage["attempts"][0]["end"] == "done"),
        "{timeline}"
    );
    let chunks = timeline["handovers"].as_array().unwrap();
    let received: Vec<_> = chunks
        .iter()
        .map(|chunk| (chunk["from"].as_str().unwrap(), chunk["chunk"].as_u64().unwrap()))
        .collect();
    assert_eq!(
        received,
        [("encode", 0), ("denoise", 0), ("denoise", 1), ("denoise", 2)]
    );
    assert_eq!(chunks[1]["nbytes"], 400);

    let page = api
        .request(Method::GET, &format!("/v1/jobs/{job}/timeline.html"))
        .send()
        .await
        .unwrap();
    assert!(
        page.headers()["content-security-policy"]
            .to_str()
            .unwrap()
            .starts_with("default-src 'none'")
    );
    let page = page.text().await.unwrap();
    assert!(page.contains("&lt;script&gt;alert(1)&lt;/script&gt;") && !page.contains("<script"));
    workers.close().await;
    api.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_has_a_class_and_a_queue_deadline_and_says_so() {
    let site = Site::new();
    let api = site.start().await;
    let post = |body: serde_json::Value| answer(api.request(Method::POST, "/v1/jobs").json(&body));
    let params = || json!({"prompt": "a red cat"});
    let (status, plain) = post(json!({"params": params()})).await;
    assert_eq!((status, &plain["class"]), (StatusCode::CREATED, &json!("standard")));
    assert!(plain.get("queue_deadline_ns").is_none(), "{plain}");
    let (_, batch) = post(json!({"params": params(), "class": "batch", "queue_deadline_s": 3600})).await;
    let waiting = &batch["waiting"][0];
    assert_eq!((&batch["class"], &waiting["class"]), (&json!("batch"), &json!("batch")));
    let due = batch["queue_deadline_ns"].as_u64().unwrap() - batch["submitted_ns"].as_u64().unwrap();
    assert_eq!(due, 3_600_000_000_000);
    assert!(
        (3_500_000_000_000..=due).contains(&waiting["dropped_in_ns"].as_u64().unwrap()),
        "{waiting}"
    );

    let error = |answer: serde_json::Value| {
        let part = |name: &str| answer["error"][name].as_str().unwrap_or_default().to_owned();
        (part("class"), part("reason"), part("message"))
    };
    let (status, refused) = post(json!({"params": params(), "class": "gold"})).await;
    let (class, reason, message) = error(refused);
    assert_eq!(
        (status, class.as_str(), reason.as_str()),
        (StatusCode::BAD_REQUEST, "invalid", "class.unknown")
    );
    assert_eq!(
        message,
        "there is no class \"gold\"; this pipeline has interactive, standard, batch"
    );
    for (wrong, shown) in [
        (json!(-1), "is -1;"),
        (json!("soon"), "is \"soon\";"),
        (json!(0), "of 0ns"),
    ] {
        let (status, refused) = post(json!({"params": params(), "queue_deadline_s": wrong})).await;
        let (class, reason, message) = error(refused);
        assert_eq!(
            (status, class.as_str(), reason.as_str()),
            (StatusCode::BAD_REQUEST, "invalid", "job.deadline")
        );
        assert!(message.contains(shown), "{message}");
    }
    let (status, _) = post(json!({"params": params(), "class": 5})).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);

    let (_, soon) = post(json!({"params": params(), "queue_deadline_s": 0.05})).await;
    let soon = soon["id"].as_str().unwrap();
    let dropped = api.until(soon, &["failed"]).await;
    assert_eq!(dropped["failure"]["reason"], "job.queue_deadline");
    let metrics = api
        .request(Method::GET, "/metrics")
        .send()
        .await
        .unwrap()
        .text()
        .await
        .unwrap();
    assert!(
        metrics.contains("stagewire_sched_jobs_total{event=\"dropped\"} 1"),
        "{metrics}"
    );
    let (_, pipeline) = api.get("/v1/pipeline").await;
    assert_eq!(
        pipeline["classes"][0],
        json!({"name": "interactive", "weight": 8, "queue_deadline_s": null})
    );

    // What was agreed outlives the server.
    let batch = batch["id"].as_str().unwrap().to_owned();
    api.stop().await;
    let api = site.start().await;
    let (_, shown) = api.get(&format!("/v1/jobs/{batch}")).await;
    assert_eq!(
        (&shown["class"], &shown["state"]),
        (&json!("batch"), &json!("active")),
        "{shown}"
    );
    api.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_stands_for_class_and_deadline_too() {
    let site = Site::new();
    let api = site.start().await;
    let post = |class: &str| {
        let body = json!({"params": {"prompt": "a red cat"}, "class": class});
        let request = api.request(Method::POST, "/v1/jobs").header("Idempotency-Key", "cat");
        answer(request.json(&body))
    };
    let (_, first) = post("batch").await;
    let (status, again) = post("batch").await;
    assert_eq!((status, &again["id"]), (StatusCode::OK, &first["id"]));
    let (status, other) = post("interactive").await;
    assert_eq!(
        (status, &other["error"]["reason"]),
        (StatusCode::CONFLICT, &json!("job.key_conflict"))
    );
    api.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_skips_what_its_parameters_say_also_after_a_restart() {
    let mut site = Site::new();
    let param = |name: &str, rest: &str| format!("[pipeline.params.{name}]\n{rest}\n");
    let given =
        param("embeds", "type = \"string\"\ndefault = \"\"") + &param("nothing", "type = \"boolean\"\ndefault = false");
    site.config = site
        .config
        .replacen("[[stage]]", &format!("{given}[[stage]]"), 1)
        .replace("name = \"encode\"\n", "name = \"encode\"\nskip-if = \"embeds\"\n")
        .replace("name = \"decode\"\n", "name = \"decode\"\nskip-if = \"nothing\"\n");
    let api = site.start().await;
    let body = json!({"params": {"prompt": "x", "embeds": "as if"}});
    let (status, job) = api.post("/v1/jobs", &body).await;
    assert_eq!(status, StatusCode::CREATED, "{job}");
    let states = |job: &serde_json::Value| -> Vec<String> {
        let stages = job["stages"].as_array().unwrap().iter();
        stages
            .map(|stage| stage["state"].as_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(states(&job), ["skipped", "queued", "blocked"]);
    let (_, plain) = api.post("/v1/jobs", &json!({"params": {"prompt": "x"}})).await;
    assert_eq!(states(&plain), ["queued", "blocked", "blocked"]);

    let (status, refused) = api
        .post("/v1/jobs", &json!({"params": {"prompt": "x", "nothing": true}}))
        .await;
    assert_eq!(status, StatusCode::BAD_REQUEST, "{refused}");
    assert_eq!(refused["error"]["reason"], "job.nothing_to_do", "{refused}");
    api.stop().await;

    let api = site.start().await;
    let (_, job) = api.get(&format!("/v1/jobs/{}", job["id"].as_str().unwrap())).await;
    assert_eq!(states(&job), ["skipped", "queued", "blocked"]);
    api.stop().await;
}
