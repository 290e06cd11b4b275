//! Inputs of jobs: what is kept, for how long, and what is refused.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::TcpStream;

use reqwest::{Body, Method, StatusCode};
use serde_json::{Value, json};
use stagewire_connector::worker::{Worker, WorkerOptions};

use crate::child::ChildServer;
use crate::site::{Api, Http, PATIENCE, Site, answer, until};
use crate::stages::{Workers, stage};

fn site(server: &str) -> Site {
    let mut site = Site::with(server);
    let image = "[pipeline.params.image]\ntype = \"input\"\ndefault = \"\"\n\n[[stage]]";
    site.config = site.config.replacen("[[stage]]", image, 1);
    site
}

/// Files in the folder of inputs; names of media types left out.
fn files(site: &Site) -> BTreeSet<String> {
    let files = std::fs::read_dir(site.dir.path().join("data/inputs")).unwrap();
    let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
    names.filter(|name| !name.ends_with(".type")).collect()
}

async fn send(http: &Http, body: impl Into<Body>) -> (StatusCode, Value) {
    let request = http.request(Method::POST, "/v1/inputs");
    answer(request.header("content-type", "image/png").body(body)).await
}

/// Sends, and returns the name.
async fn sent(http: &Http, bytes: impl Into<Body>) -> String {
    let (status, input) = send(http, bytes).await;
    assert_eq!(status, StatusCode::CREATED, "{input}");
    input["name"].as_str().unwrap().to_owned()
}

async fn submit(http: &Http, prompt: &str, image: &str) -> (StatusCode, Value) {
    let params = json!({"prompt": prompt, "image": image});
    http.post("/v1/jobs", &json!({"params": params})).await
}

async fn status(http: &Http, name: &str) -> StatusCode {
    http.get(&format!("/v1/inputs/{name}")).await.0
}

fn reason(error: &Value) -> &str {
    error["error"]["reason"].as_str().unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_input_is_kept_under_its_digest_and_stages_read_it() {
    let site = site("");
    let api = site.start().await;
    let (status, input) = send(&api, "a red cat").await;
    assert_eq!(status, StatusCode::CREATED);
    let name = format!("blake3:{}", blake3::hash(b"a red cat").to_hex());
    let url = format!("/v1/inputs/{name}");
    assert_eq!(
        input,
        json!({"name": name, "nbytes": 9, "media_type": "image/png", "url": url})
    );
    assert_eq!(send(&api, "a red cat").await, (StatusCode::OK, input));

    let got = api.request(Method::GET, &url).send().await.unwrap();
    let headers = got.headers().clone();
    assert_eq!(headers["content-type"], "image/png");
    assert_eq!(headers["x-content-type-options"], "nosniff");
    assert_eq!(got.bytes().await.unwrap(), "a red cat");
    let head = api.request(Method::HEAD, &url).send().await.unwrap();
    assert_eq!(
        (head.status(), &head.headers()["content-length"]),
        (StatusCode::OK, &"9".parse().unwrap())
    );

    let workers = Workers::attach(&site.run_dir()).await;
    for image in [name.as_str(), ""] {
        let (status, job) = submit(&api, "a red cat", image).await;
        assert_eq!(status, StatusCode::CREATED, "{job}");
        assert_eq!(job["params"]["image"], image);
        api.until(job["id"].as_str().unwrap(), &["succeeded"]).await;
    }
    let (_, job) = submit(&api, "a dog", &name).await;
    let job = api.until(job["id"].as_str().unwrap(), &["failed"]).await;
    assert_eq!(job["failure"]["message"], "the picture is 9 bytes of something else");
    let (_, stats) = api.get("/v1/stats").await;
    assert_eq!(
        stats["inputs"],
        json!({"count": 1, "bytes": 64 << 10, "limit_bytes": 4_u64 << 30})
    );
    workers.close().await;
    api.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_input_is_refused_with_its_name() {
    let site = site("");
    let api = site.start().await;
    let unknown = format!("blake3:{}", "0".repeat(64));
    let (status, error) = submit(&api, "x", &unknown).await;
    assert_eq!((status, reason(&error)), (StatusCode::NOT_FOUND, "input.unknown"));
    assert_eq!(error["error"]["details"], json!({"param": "image", "input": unknown}));
    for wrong in ["cat.png", "../../etc/passwd", "blake3:0", &unknown.to_uppercase()] {
        let (status, error) = submit(&api, "x", wrong).await;
        assert_eq!(
            (status, reason(&error)),
            (StatusCode::BAD_REQUEST, "job.params"),
            "{wrong}"
        );
    }
    std::fs::write(site.dir.path().join("data/secret"), "secret").unwrap();
    for wrong in [
        "%2e%2e%2fsecret",
        "..%2fsecret",
        "blake3:..%2fsecret",
        "%2fetc%2fpasswd",
        "x%00",
        &unknown,
        &"0".repeat(64),
    ] {
        let (status, error) = api.get(&format!("/v1/inputs/{wrong}")).await;
        assert_eq!(
            (status, reason(&error)),
            (StatusCode::NOT_FOUND, "input.unknown"),
            "{wrong}"
        );
    }
    for wrong in [
        "multipart/form-data; boundary=x",
        "application/x-www-form-urlencoded",
        "nonsense",
    ] {
        let request = api.request(Method::POST, "/v1/inputs").header("content-type", wrong);
        let (status, error) = answer(request.body("x")).await;
        assert_eq!(
            (status, reason(&error)),
            (StatusCode::UNSUPPORTED_MEDIA_TYPE, "http.content_type"),
            "{wrong}"
        );
    }
    let request = api
        .request(Method::POST, "/v1/inputs")
        .header("origin", "https://evil.example");
    assert_eq!(answer(request.body("x")).await.0, StatusCode::FORBIDDEN);
    let (_, plain) = answer(api.request(Method::POST, "/v1/inputs").body(vec![7_u8])).await;
    assert_eq!(plain["media_type"], "application/octet-stream");
    assert_eq!(files(&site).len(), 1, "nothing was kept of what was refused");
    api.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_is_too_large_leaves_nothing() {
    let site = site("max-input = \"1MiB\"\n");
    let api = site.start().await;
    let streamed = || {
        let parts = (0..32).map(|_| Ok::<_, std::io::Error>(vec![7_u8; 64 << 10]));
        Body::wrap_stream(futures::stream::iter(parts))
    };
    for body in [Body::from(vec![7_u8; 2 << 20]), streamed()] {
        let (status, error) = send(&api, body).await;
        assert_eq!(
            (status, reason(&error)),
            (StatusCode::PAYLOAD_TOO_LARGE, "input.too_large")
        );
        assert_eq!(error["error"]["details"]["limit_bytes"], "1048576");
    }
    assert_eq!(files(&site), BTreeSet::new());
    sent(&api, vec![7_u8; 1 << 20]).await;
    api.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_oldest_goes_that_no_job_refers_to() {
    let site = site("input-bytes = \"256KiB\"\n");
    let api = site.start().await;
    let picture = |n: u8| vec![n; 64 << 10];
    let mut names = Vec::new();
    for n in 0..3 {
        names.push(sent(&api, picture(n)).await);
    }
    // The first is needed, the second was used again.
    let (_, job) = submit(&api, "x", &names[0]).await;
    assert_eq!(send(&api, picture(1)).await.0, StatusCode::OK);
    names.push(sent(&api, picture(3)).await);
    let fifth = sent(&api, picture(4)).await;
    let mut there = Vec::new();
    for name in names.iter().chain([&fifth]) {
        there.push(status(&api, name).await == StatusCode::OK);
    }
    assert_eq!(there, [true, true, false, true, true]);

    for name in [&names[1], &names[3], &fifth] {
        assert_eq!(submit(&api, "x", name).await.0, StatusCode::CREATED);
    }
    let (status, error) = send(&api, picture(5)).await;
    assert_eq!(
        (status, reason(&error)),
        (StatusCode::INSUFFICIENT_STORAGE, "input.room")
    );
    assert_eq!(error["error"]["details"]["limit_bytes"], "262144");
    assert_eq!(
        error["error"]["details"]["retry_after_s"], "5",
        "when a job is expected to end"
    );
    assert_eq!(files(&site).len(), 4);
    let id = job["id"].as_str().unwrap();
    api.post(&format!("/v1/jobs/{id}/cancel"), &json!({})).await;
    api.until(id, &["cancelled"]).await;
    sent(&api, picture(5)).await;
    assert_eq!(self::status(&api, &names[0]).await, StatusCode::NOT_FOUND);
    api.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repeated_submission_finds_its_job_also_when_the_input_is_gone() {
    let site = site("input-bytes = \"64KiB\"\n");
    let mut api = site.start().await;
    let name = sent(&api, "the first").await;
    let body = |prompt: &str| json!({"params": {"prompt": prompt, "image": name}});
    let submit = async |http: &Http, key: Option<&str>, body: Value| {
        let mut request = http.request(Method::POST, "/v1/jobs").json(&body);
        if let Some(key) = key {
            request = request.header("idempotency-key", key);
        }
        answer(request).await
    };
    let (status, job) = submit(&api, Some("k"), body("x")).await;
    assert_eq!(status, StatusCode::CREATED, "{job}");
    let id = job["id"].as_str().unwrap();
    api.post(&format!("/v1/jobs/{id}/cancel"), &json!({})).await;
    api.until(id, &["cancelled"]).await;
    sent(&api, "another").await;
    assert_eq!(self::status(&api, &name).await, StatusCode::NOT_FOUND);
    for _life in 0..2 {
        let (status, again) = submit(&api, Some("k"), body("x")).await;
        assert_eq!((status, &again["id"]), (StatusCode::OK, &job["id"]), "{again}");
        let (status, other) = submit(&api, Some("k"), body("y")).await;
        assert_eq!((status, reason(&other)), (StatusCode::CONFLICT, "job.key_conflict"));
        for key in [None, Some("other")] {
            let (status, new) = submit(&api, key, body("x")).await;
            assert_eq!((status, reason(&new)), (StatusCode::NOT_FOUND, "input.unknown"));
        }
        api.stop().await;
        api = site.start().await;
    }
    api.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_are_told_where_inputs_are_wherever_the_server_was_started() {
    let site = site("");
    let mut options = site.options();
    let here = std::env::current_dir().unwrap();
    let root: std::path::PathBuf = here.components().skip(1).map(|_| "..").collect();
    let data = site.dir.path().join("data");
    options.data_dir = Some(root.join(data.strip_prefix("/").unwrap()));
    let api = Api::of(options).await;
    let name = sent(&api, "a red cat").await;
    submit(&api, "a red cat", &name).await;
    let options = WorkerOptions::new(site.run_dir(), stage("encode"));
    let worker = Worker::attach(options).await.unwrap();
    let task = worker.next_task().await.unwrap();
    let told = task.files()[0].path.clone().unwrap();
    assert!(told.is_absolute(), "{told:?}");
    assert_eq!(std::fs::read(told).unwrap(), b"a red cat");
    worker.close().await;
    api.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_one_goes_and_one_that_a_job_needs_stays() {
    let site = site("input-idle = \"50ms\"\n");
    let mut api = site.start().await;
    // Under load it may go before the job comes.
    let (needed, job) = until("a job with an input", || async {
        let (_, input) = send(&api, "needed").await;
        let name = input["name"].as_str()?.to_owned();
        let (status, job) = submit(&api, "x", &name).await;
        (status == StatusCode::CREATED).then(|| (name, job["id"].as_str().unwrap().to_owned()))
    })
    .await;
    for life in 0..2 {
        let idle = send(&api, format!("idle in life {life}")).await.1;
        let idle = idle["name"].as_str().unwrap();
        gone(&api, idle).await;
        assert_eq!(status(&api, &needed).await, StatusCode::OK);
        api.stop().await;
        api = site.start().await;
    }
    api.post(&format!("/v1/jobs/{job}/cancel"), &json!({})).await;
    gone(&api, &needed).await;
    assert_eq!(files(&site), BTreeSet::new());
    api.stop().await;
}

async fn gone(http: &Http, name: &str) {
    until("an input to go", || async {
        (status(http, name).await == StatusCode::NOT_FOUND).then_some(())
    })
    .await;
}

/// Begins to send an input of 1,000 bytes, and stops after some of them.
fn begin(http: &Http) -> TcpStream {
    let address = http.url.strip_prefix("http://").unwrap();
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let head = format!("POST /v1/inputs HTTP/1.1\r\nHost: {address}\r\nContent-Length: 1000\r\n\r\nhalf");
    stream.write_all(head.as_bytes()).unwrap();
    stream
}

async fn until_files(site: &Site, what: &str, count: usize) {
    until(what, || async { (files(site).len() == count).then_some(()) }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_breaks_off_leaves_nothing_and_too_many_at_once_wait() {
    let site = site("input-bytes = \"1MiB\"\n");
    let api = site.start().await;
    let mut streams: Vec<_> = (0..16).map(|_| begin(&api)).collect();
    until_files(&site, "16 uploads to have begun", 16).await;
    let request = api.request(Method::POST, "/v1/inputs").body("one more");
    let response = request.send().await.unwrap();
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(response.headers().contains_key("retry-after"));
    assert_eq!(reason(&response.json().await.unwrap()), "input.busy");

    let mut last = streams.pop().unwrap();
    drop(streams);
    until_files(&site, "those that broke off to be gone", 1).await;
    last.write_all(&[b'x'; 996]).unwrap();
    let mut answer = [0; 12];
    last.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"HTTP/1.1 201");
    // All their room is free again.
    sent(&api, vec![7_u8; (1 << 20) - (64 << 10)]).await;
    api.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acknowledged_inputs_survive_kill_9_and_half_ones_leave_nothing() {
    let site = site("");
    let mut server = ChildServer::start(&site).await;
    let mut names = Vec::new();
    for life in 0..5 {
        let _half = begin(&server.http);
        names.push(sent(&server.http, format!("picture {life}")).await);
        until_files(&site, "half an input", names.len() + 1).await;
        server.kill();
        server = ChildServer::start(&site).await;
        assert_eq!(files(&site).len(), names.len());
    }
    let workers = Workers::attach(&site.run_dir()).await;
    for (life, name) in names.iter().enumerate() {
        let (status, job) = submit(&server.http, &format!("picture {life}"), name).await;
        assert_eq!(status, StatusCode::CREATED, "{job}");
        server.http.until(job["id"].as_str().unwrap(), &["succeeded"]).await;
    }
    workers.close().await;
}
