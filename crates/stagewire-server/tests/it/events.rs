//! The event stream: order, ids, coming back, the end.

use bytes::Bytes;
use futures::StreamExt;
use futures::stream::BoxStream;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use crate::site::{Api, Site, answer};
use crate::stages::Workers;

/// One event of a stream.
#[derive(Debug, Clone)]
struct Event {
    id: Option<String>,
    data: Value,
}

impl Event {
    fn kind(&self) -> &str {
        self.data["type"].as_str().unwrap()
    }
}

/// A stream that is being read.
struct Reader {
    stream: BoxStream<'static, reqwest::Result<Bytes>>,
    text: String,
}

impl Reader {
    async fn open(api: &Api, job: &str, after: Option<&str>) -> Self {
        let mut request = api.request(Method::GET, &format!("/v1/jobs/{job}/events"));
        if let Some(after) = after {
            request = request.header("last-event-id", after);
        }
        let response = request.send().await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        Self {
            stream: response.bytes_stream().boxed(),
            text: String::new(),
        }
    }

    /// The next events, until the stream ends or there are `limit`.
    async fn take(&mut self, limit: usize) -> Vec<Event> {
        let mut events = Vec::new();
        while events.len() < limit {
            if let Some((event, rest)) = self.text.split_once("\n\n") {
                let field = |name: &str| event.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
                if let Some(data) = field("data:") {
                    events.push(Event {
                        id: field("id:").map(str::to_owned),
                        data: serde_json::from_str(data).unwrap(),
                    });
                }
                self.text = rest.to_owned();
            } else if let Some(part) = self.stream.next().await {
                self.text.push_str(std::str::from_utf8(&part.unwrap()).unwrap());
            } else {
                break;
            }
        }
        events
    }
}

/// Reads events until the stream ends, or there are `limit`.
async fn read(api: &Api, job: &str, after: Option<&str>, limit: usize) -> Vec<Event> {
    Reader::open(api, job, after).await.take(limit).await
}

fn kinds(events: &[Event]) -> Vec<String> {
    let levels = ["progress", "position"];
    let named = events.iter().filter(|event| !levels.contains(&event.kind()));
    named
        .map(|event| format!("{} {}", event.data["stage"].as_str().unwrap_or("-"), event.kind()))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn events_come_in_order_and_the_stream_ends_with_the_job() {
    let site = Site::new();
    let api = site.start().await;
    let job = api.submit("a red cat").await;
    let run_dir = site.run_dir();
    let (events, workers) = tokio::join!(read(&api, &job, None, usize::MAX), Workers::attach(&run_dir));
    let kinds = kinds(&events);
    let of = |stage: &str| -> Vec<&str> {
        kinds
            .iter()
            .filter_map(|kind| kind.strip_prefix(stage))
            .map(str::trim)
            .collect()
    };
    assert_eq!(kinds.first().map(String::as_str), Some("- submitted"));
    assert_eq!(kinds.last().map(String::as_str), Some("- succeeded"));
    assert_eq!(
        of("encode"),
        ["queued", "offered", "running", "published", "stage_done"]
    );
    assert_eq!(
        of("decode"),
        ["queued", "offered", "running", "chunk", "chunk", "chunk", "stage_done"]
    );
    let seqs: Vec<u64> = events
        .iter()
        .filter(|event| event.id.is_some())
        .map(|event| event.data["seq"].as_u64().unwrap())
        .collect();
    assert_eq!(
        seqs,
        (1..=seqs.len() as u64).collect::<Vec<_>>(),
        "every note once, in order"
    );
    let times: Vec<u64> = events
        .iter()
        .map(|event| event.data["at_ns"].as_u64().unwrap())
        .collect();
    assert!(times.is_sorted());
    let running = events.iter().find(|event| event.kind() == "running").unwrap();
    assert_eq!(running.data["worker"], "encode-0");
    workers.close().await;
    api.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_comes_back_gets_the_rest_also_from_the_next_server() {
    let site = Site::new();
    let api = site.start().await;
    let job = api.submit("hold").await;
    let first = read(&api, &job, None, 2).await;
    let last = first.last().unwrap().id.clone().unwrap();
    let workers = Workers::attach(&site.run_dir()).await;
    api.until_stage(&job, "denoise", "running").await;
    let rest = read(&api, &job, Some(&last), 2).await;
    assert_eq!(
        rest[0].data["seq"].as_u64().unwrap(),
        first.last().unwrap().data["seq"].as_u64().unwrap() + 1
    );
    api.stop().await;

    let api = site.start().await;
    let again = read(&api, &job, None, 4).await;
    let shown = |events: &[Event]| events.iter().map(|event| event.data.clone()).collect::<Vec<_>>();
    assert_eq!(shown(&again[..2]), shown(&first), "the history is the same");
    assert_eq!(shown(&again[2..]), shown(&rest));
    let (status, _) = answer(api.request(Method::POST, &format!("/v1/jobs/{job}/cancel"))).await;
    assert_eq!(status, StatusCode::ACCEPTED);
    let all = read(&api, &job, None, usize::MAX).await;
    let kinds = kinds(&all);
    // Where the worker was back before the cancel, its attempt is taken back in between.
    let end: Vec<&str> = kinds
        .iter()
        .map(String::as_str)
        .filter(|kind| kind.starts_with('-'))
        .collect();
    assert_eq!(end, ["- submitted", "- cancelling", "- cancelled"]);
    assert_eq!(kinds.last().map(String::as_str), Some("- cancelled"));
    let end = all.iter().rev().find_map(|event| event.id.clone()).unwrap();
    assert!(end.starts_with("2."), "{end} is of the second epoch");
    assert!(
        read(&api, &job, Some(&end), usize::MAX).await.is_empty(),
        "nothing comes after the end"
    );

    let request = api
        .request(Method::GET, &format!("/v1/jobs/{job}/events"))
        .header("last-event-id", "soon");
    let (status, error) = answer(request).await;
    assert_eq!(
        (status, error["error"]["reason"].as_str()),
        (StatusCode::BAD_REQUEST, Some("http.last_event_id"))
    );
    workers.close().await;
    api.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn progress_is_seen_while_a_stage_runs() {
    let site = Site::new();
    let api = site.start().await;
    let workers = Workers::attach(&site.run_dir()).await;
    let mut seen = false;
    // Progress is a level: a fast stage may be done before anybody looks.
    for n in 0..50 {
        let job = api.submit(&format!("cat {n}")).await;
        let events = read(&api, &job, None, usize::MAX).await;
        let progress = events.iter().find(|event| event.kind() == "progress");
        if let Some(progress) = progress {
            assert_eq!(
                (progress.data["stage"].as_str(), &progress.id),
                (Some("denoise"), &None)
            );
            assert_eq!(progress.data["progress"]["unit"], "step");
            seen = true;
            break;
        }
    }
    assert!(seen, "no progress in 50 jobs");
    workers.close().await;
    api.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_hears_where_he_stands_as_he_moves() {
    let site = Site::new();
    let api = site.start().await;
    let mut before = Vec::new();
    for _ in 0..3 {
        before.push(api.submit("a red cat").await);
    }
    let job = api.submit("a dog").await;
    let (_, shown) = api.get(&format!("/v1/jobs/{job}")).await;
    assert_eq!(
        shown["stages"][0]["position"],
        json!({"rank": 4, "ahead": 3, "others": 0}),
        "{shown}"
    );
    let ranks = |events: &[Event]| -> Vec<u64> {
        let positions = events.iter().filter(|event| event.kind() == "position");
        positions
            .map(|event| event.data["position"]["rank"].as_u64().unwrap())
            .collect()
    };
    let mut reader = Reader::open(&api, &job, None).await;
    let mut events = reader.take(3).await;
    for other in &before {
        let (status, _) = api.post(&format!("/v1/jobs/{other}/cancel"), &json!({})).await;
        assert_eq!(status, StatusCode::ACCEPTED);
    }
    while ranks(&events).last() != Some(&1) {
        events.extend(reader.take(1).await);
    }
    assert_eq!(ranks(&events).first(), Some(&4), "{events:?}");
    assert!(ranks(&events).len() <= 3, "not one for each that goes: {events:?}");
    let mut positions = events.iter().filter(|event| event.kind() == "position");
    assert!(positions.clone().all(|event| event.id.is_none()));
    assert!(positions.all(|event| event.data["seq"] == 2), "that of the note before");
    api.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_does_not_wait_hears_of_no_position() {
    let site = Site::new();
    let api = site.start().await;
    let workers = Workers::attach(&site.run_dir()).await;
    let job = api.submit("a red cat").await;
    let events = read(&api, &job, None, usize::MAX).await;
    assert_eq!(events.last().unwrap().kind(), "succeeded");
    assert!(events.iter().all(|event| event.kind() != "position"), "{events:?}");
    workers.close().await;
    api.stop().await;
}
