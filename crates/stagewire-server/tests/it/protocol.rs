//! The workers' stream, spoken by hand.

use std::collections::BTreeMap;
use std::time::Duration;

use stagewire_api::v1::orchestrator_client::OrchestratorClient;
use stagewire_api::v1::server_message::Message as FromServer;
use stagewire_api::v1::worker_message::Message as ToServer;
use stagewire_api::{PROTOCOL, RunDir, host_id, v1};
use stagewire_sched::Limits;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Status, Streaming};
use uuid::Uuid;

use crate::site::{Api, PATIENCE, Site, until};

fn hello() -> v1::Hello {
    v1::Hello {
        protocol: PROTOCOL,
        incarnation: Uuid::new_v4().as_bytes().to_vec(),
        pipeline: "toy".to_owned(),
        stage: "encode".to_owned(),
        name: "by-hand".to_owned(),
        slots: 1,
        ..v1::Hello::default()
    }
}

/// Makes a hello that does not fit.
type Change = fn(&mut v1::Hello);

struct Stream {
    sender: mpsc::Sender<v1::WorkerMessage>,
    receiver: Streaming<v1::ServerMessage>,
}

impl Stream {
    async fn open(api: &Api, token: &str, first: ToServer) -> Result<Self, Status> {
        let (sender, outgoing) = mpsc::channel(64);
        sender.send(v1::WorkerMessage { message: Some(first) }).await.unwrap();
        let mut request = Request::new(ReceiverStream::new(outgoing));
        request
            .metadata_mut()
            .insert("authorization", format!("Bearer {token}").parse().unwrap());
        let mut client = OrchestratorClient::connect(api.url.clone()).await.unwrap();
        let receiver = client.attach(request).await?.into_inner();
        Ok(Self { sender, receiver })
    }

    async fn attach(api: &Api, site: &Site, hello: v1::Hello) -> Result<(Self, v1::Welcome), Status> {
        let mut stream = Self::open(api, &token(site), ToServer::Hello(hello)).await?;
        match stream.next().await? {
            Some(FromServer::Welcome(welcome)) => Ok((stream, welcome)),
            other => panic!("instead of a welcome: {other:?}"),
        }
    }

    async fn next(&mut self) -> Result<Option<FromServer>, Status> {
        let next = tokio::time::timeout(PATIENCE, self.receiver.message())
            .await
            .expect("a message in time");
        Ok(next?.and_then(|message| message.message))
    }

    async fn say(&self, message: ToServer) {
        self.sender
            .send(v1::WorkerMessage { message: Some(message) })
            .await
            .unwrap();
    }

    async fn offer(&mut self) -> v1::Offer {
        match self.next().await.unwrap() {
            Some(FromServer::Offer(offer)) => offer,
            other => panic!("instead of an offer: {other:?}"),
        }
    }
}

fn token(site: &Site) -> String {
    RunDir::locate(Some(&site.run_dir())).worker_token().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_that_do_not_fit_are_told_why() {
    let site = Site::new();
    let api = site.start().await;
    let error = Stream::open(&api, "wrong", ToServer::Hello(hello()))
        .await
        .err()
        .unwrap();
    assert_eq!(error.code(), Code::Unauthenticated);
    assert!(error.message().contains("worker.token"), "{error}");

    let cases: [(Change, Code, &str); 6] = [
        (
            |hello| hello.protocol = 9,
            Code::FailedPrecondition,
            "the worker speaks protocol 9, the server 1",
        ),
        (
            |hello| hello.pipeline = "wan".to_owned(),
            Code::FailedPrecondition,
            "the worker serves pipeline \"wan\", the server \"toy\"",
        ),
        (
            |hello| hello.stage = "encoder".to_owned(),
            Code::InvalidArgument,
            "did you mean \"encode\"?",
        ),
        (
            |hello| hello.stage = "../x".to_owned(),
            Code::InvalidArgument,
            "is not a stage name",
        ),
        (|hello| hello.slots = 0, Code::InvalidArgument, "advertises 0 slots"),
        (
            |hello| hello.incarnation = vec![1],
            Code::InvalidArgument,
            "an id has 16",
        ),
    ];
    for (change, code, message) in cases {
        let mut hello = hello();
        change(&mut hello);
        let error = Stream::attach(&api, &site, hello).await.err().unwrap();
        assert_eq!(error.code(), code, "{error}");
        assert!(error.message().contains(message), "{error}");
    }
    let error = Stream::open(&api, &token(&site), ToServer::Renew(v1::Renew::default()))
        .await
        .err()
        .unwrap();
    assert!(error.message().contains("must be a hello"), "{error}");
    let (_, stats) = api.get("/v1/stats").await;
    assert_eq!(stats["streams"], 0);
    api.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_by_hand() {
    let site = Site::new();
    let api = site.start().await;
    let (mut stream, welcome) = Stream::attach(&api, &site, hello()).await.unwrap();
    assert_eq!((welcome.epoch, welcome.linger_ms), (1, 60_000));
    assert!(!welcome.store.is_empty());
    let job = api.submit("a").await;
    let offer = stream.offer().await;
    assert_eq!(
        (offer.stage.as_str(), offer.params.as_str()),
        ("encode", r#"{"prompt":"a","steps":4}"#)
    );
    let token = offer.token.unwrap();
    stream.say(ToServer::Accept(token.clone())).await;
    assert_eq!(stream.next().await.unwrap(), Some(FromServer::Grant(token.clone())));
    api.until_stage(&job, "encode", "running").await;

    // Somebody else's attempt, and one that never was.
    let mut stale = token.clone();
    stale.attempt += 7;
    stream
        .say(ToServer::Completed(v1::Completed {
            token: Some(stale.clone()),
            ..v1::Completed::default()
        }))
        .await;
    match stream.next().await.unwrap() {
        Some(FromServer::Refused(refused)) => {
            assert_eq!(refused.token, Some(stale));
            assert_eq!(refused.failure.unwrap().class, "fenced");
        }
        other => panic!("instead of a refusal: {other:?}"),
    }
    stream
        .say(ToServer::Failed(v1::Failed {
            token: Some(token.clone()),
            failure: Some(v1::Failure {
                class: "invalid".to_owned(),
                reason: "stage.raised".to_owned(),
                message: "no".to_owned(),
                ..v1::Failure::default()
            }),
            ..v1::Failed::default()
        }))
        .await;
    assert_eq!(stream.next().await.unwrap(), Some(FromServer::Accepted(token)));
    let shown = api.until(&job, &["failed"]).await;
    assert_eq!(shown["failure"]["message"], "no");
    api.stop().await;
    assert!(
        matches!(stream.next().await, Ok(None) | Err(_)),
        "the stream ends with the server"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_is_none_ends_the_stream_and_harms_nobody() {
    let site = Site::new();
    let api = site.start().await;
    let (mut stream, _) = Stream::attach(&api, &site, hello()).await.unwrap();
    stream.say(ToServer::Published(v1::Published::default())).await;
    assert!(matches!(stream.next().await, Ok(None) | Err(_)));
    assert_eq!(api.get("/healthz").await.0, 200);
    api.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_death_of_a_process_is_noticed_at_once_though_its_stream_is_up() {
    let site = Site::new();
    let api = site.start().await;
    let mut child = std::process::Command::new("cat")
        .stdin(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
    let started = stat
        .rsplit_once(')')
        .unwrap()
        .1
        .split_ascii_whitespace()
        .nth(19)
        .unwrap()
        .parse()
        .unwrap();
    let mut of_child = hello();
    (of_child.pid, of_child.started, of_child.host) = (child.id(), started, host_id());
    let (mut stream, _) = Stream::attach(&api, &site, of_child).await.unwrap();
    let job = api.submit("a").await;
    let token = stream.offer().await.token.unwrap();
    stream.say(ToServer::Accept(token)).await;
    api.until_stage(&job, "encode", "running").await;

    let begin = std::time::Instant::now();
    child.kill().unwrap();
    child.wait().unwrap();
    let run = until("the attempt to be queued again", || async {
        let (_, shown) = api.get(&format!("/v1/jobs/{job}")).await;
        Some(shown["stages"][0].clone()).filter(|run| run["state"] == "queued")
    })
    .await;
    assert!(
        begin.elapsed() < std::time::Duration::from_secs(1),
        "{:?}",
        begin.elapsed()
    );
    assert_eq!(run["failures"], 0, "a loss is no failure");
    let (_, pipeline) = api.get("/v1/pipeline").await;
    assert_eq!(pipeline["workers"], serde_json::json!([]));
    let (_, stats) = api.get("/v1/stats").await;
    assert_eq!(stats["streams"], 0, "a stream that nobody speaks on is kept");
    api.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_hangs_up_while_it_attaches_is_away() {
    let site = Site::new();
    let api = site.start().await;
    for micros in (0..4000).step_by(50) {
        let attaching = Stream::attach(&api, &site, hello());
        let _ = tokio::time::timeout(std::time::Duration::from_micros(micros), attaching).await;
    }
    until("every worker to be away", || async {
        let (_, pipeline) = api.get("/v1/pipeline").await;
        let (_, stats) = api.get("/v1/stats").await;
        let mut workers = pipeline["workers"].as_array()?.iter();
        (stats["streams"] == 0 && workers.all(|worker| worker["state"] == "away")).then_some(())
    })
    .await;
    api.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_whose_stream_broke_comes_back_to_its_attempt() {
    let site = Site::new();
    let api = site.start().await;
    let me = hello();
    let (mut stream, _) = Stream::attach(&api, &site, me.clone()).await.unwrap();
    let job = api.submit("a").await;
    let token = stream.offer().await.token.unwrap();
    stream.say(ToServer::Accept(token.clone())).await;
    api.until_stage(&job, "encode", "running").await;
    drop(stream);
    until("the worker to be away", || async {
        let (_, pipeline) = api.get("/v1/pipeline").await;
        (pipeline["workers"][0]["state"] == "away").then_some(())
    })
    .await;
    let back = v1::Hello {
        running: vec![token.clone()],
        ..me.clone()
    };
    let (mut stream, _) = Stream::attach(&api, &site, back.clone()).await.unwrap();
    api.until_stage(&job, "encode", "running").await;

    // A second stream of the same worker takes the place of the first.
    let (second, _) = Stream::attach(&api, &site, back).await.unwrap();
    assert_eq!(
        stream.next().await.err().map(|status| status.code()),
        Some(Code::Aborted)
    );
    drop(stream);
    second
        .say(ToServer::Failed(v1::Failed {
            token: Some(token),
            ..v1::Failed::default()
        }))
        .await;
    api.until(&job, &["failed"]).await;
    let (_, pipeline) = api.get("/v1/pipeline").await;
    assert_eq!(
        pipeline["workers"][0]["state"], "ready",
        "the end of the first stream is not the worker's"
    );
    api.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_falls_silent_is_away() {
    let site = Site::new();
    let grant = Duration::from_millis(250);
    let limits = Limits {
        grant,
        ..Limits::default()
    };
    let api = site.start_with(limits).await;
    let [silent, idle] = ["silent", "idle"].map(|name| v1::Hello {
        name: name.to_owned(),
        ..hello()
    });
    let (mut silent, welcome) = Stream::attach(&api, &site, silent).await.unwrap();
    let (idle, _) = Stream::attach(&api, &site, idle).await.unwrap();
    let mut renewals = tokio::time::interval(Duration::from_millis(welcome.renew_interval_ms));
    let renewing = async {
        loop {
            renewals.tick().await;
            idle.say(ToServer::Renew(v1::Renew::default())).await;
        }
    };
    let away = until("the silent one to be away", || async {
        let (_, pipeline) = api.get("/v1/pipeline").await;
        let workers = pipeline["workers"].as_array()?.iter();
        let states: BTreeMap<_, _> = workers
            .map(|worker| (worker["name"].as_str().unwrap().to_owned(), worker["state"].clone()))
            .collect();
        (states["silent"] == "away").then_some(states)
    });
    let states = tokio::select! {
        states = away => states,
        () = renewing => unreachable!("it renews for ever"),
    };
    assert_eq!(states["idle"], "ready", "an empty renewal is a sign of life");
    assert!(matches!(silent.next().await, Ok(None) | Err(_)), "it can attach again");
    api.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_payload_that_cannot_be_fails_its_attempt() {
    let site = Site::new();
    let api = site.start().await;
    let (mut stream, _) = Stream::attach(&api, &site, hello()).await.unwrap();
    for (nbytes, chunks) in [(u64::MAX, 1), (1, 0), (1, u32::MAX)] {
        let job = api.submit("a").await;
        let token = stream.offer().await.token.unwrap();
        stream.say(ToServer::Accept(token.clone())).await;
        assert_eq!(stream.next().await.unwrap(), Some(FromServer::Grant(token.clone())));
        let payload = v1::Payload {
            id: Uuid::new_v4().as_bytes().to_vec(),
            nbytes,
            chunks,
            ..v1::Payload::default()
        };
        stream
            .say(ToServer::Published(v1::Published {
                token: Some(token.clone()),
                payload: Some(payload),
            }))
            .await;
        match stream.next().await.unwrap() {
            Some(FromServer::Refused(refused)) => assert_eq!(refused.token, Some(token.clone())),
            other => panic!("instead of a refusal: {other:?}"),
        }
        assert_eq!(stream.next().await.unwrap(), Some(FromServer::Accepted(token)));
        let shown = api.until(&job, &["failed"]).await;
        assert_eq!(shown["failure"]["reason"], "protocol.malformed");
    }
    assert_eq!(api.get("/v1/stats").await.1["live_payload_bytes"], 0);
    api.stop().await;
}

/// A worker says it again to the next server, whose store may have lost it with the memory of the one before.
#[tokio::test(flavor = "multi_thread")]
async fn what_the_store_does_not_have_is_made_again() {
    let site = Site::stored();
    let api = site.start().await;
    let (mut stream, _) = Stream::attach(&api, &site, hello()).await.unwrap();
    let job = api.submit("a").await;
    for attempt in 1..=2 {
        let token = stream.offer().await.token.unwrap();
        assert_eq!(token.attempt, attempt);
        stream.say(ToServer::Accept(token.clone())).await;
        assert_eq!(stream.next().await.unwrap(), Some(FromServer::Grant(token.clone())));
        let payload = v1::Payload {
            id: Uuid::new_v4().as_bytes().to_vec(),
            nbytes: 1,
            chunks: 1,
            stored: true,
            ..v1::Payload::default()
        };
        let published = v1::Published {
            token: Some(token.clone()),
            payload: Some(payload),
        };
        stream.say(ToServer::Published(published)).await;
        match stream.next().await.unwrap() {
            Some(FromServer::Cancel(cancel)) => {
                assert_eq!(cancel.token, Some(token.clone()));
                assert_eq!(cancel.failure.unwrap().reason, "payload.void");
            }
            other => panic!("instead of its end: {other:?}"),
        }
        stream.say(ToServer::Stopped(token)).await;
    }
    assert_eq!(api.get("/v1/stats").await.1["live_payloads"], 0);
    let (_, shown) = api.get(&format!("/v1/jobs/{job}")).await;
    assert_ne!(shown["state"], "failed", "{shown}");
    api.stop().await;
}
