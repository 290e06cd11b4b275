use std::time::Duration;

use stagewire_api::v1::server_message::Message as FromServer;
use stagewire_api::v1::worker_message::Message as ToServer;
use stagewire_api::{AttachError, PROTOCOL, RunDir, SessionEvent, SessionOptions, WorkerSession, v1};
use stagewire_core::{Attempt, Classify, Epoch, ErrorClass, Failure, ProcessRef, Progress, StageName, Token};
use tempfile::TempDir;
use tokio::sync::mpsc;

use crate::fake::{self, Fake, LINGER, PATIENCE};

struct World {
    _folder: TempDir,
    run_dir: RunDir,
}

impl World {
    fn new() -> Self {
        let folder = TempDir::new().expect("a folder");
        let run_dir = RunDir::locate(Some(&folder.path().join("run")));
        Self {
            _folder: folder,
            run_dir,
        }
    }

    fn options(&self) -> SessionOptions {
        SessionOptions {
            run_dir: self.run_dir.clone(),
            incarnation: "0190163d-8694-739b-aea5-966c26f8ad90".parse().expect("an id"),
            process: ProcessRef { pid: 7, started: 9 },
            pipeline: "test".to_owned(),
            stage: StageName::new("decode").expect("a name"),
            name: "decode-0".to_owned(),
            slots: 2,
            max_batch: 1,
            member: None,
            numa: None,
            rail: None,
            attach_within: Duration::from_millis(200),
        }
    }
}

fn token(attempt: u32) -> Token {
    let job = "0190163d-8694-739b-aea5-966c26f8ad92".parse().expect("an id");
    Token {
        epoch: Epoch(1),
        job,
        attempt: Attempt(attempt),
    }
}

async fn next(events: &mut mpsc::UnboundedReceiver<SessionEvent>) -> SessionEvent {
    tokio::time::timeout(PATIENCE, events.recv())
        .await
        .expect("an event in time")
        .expect("the session lives")
}

macro_rules! expect {
    ($value:expr, $pattern:pat => $result:expr) => {
        match $value {
            $pattern => $result,
            other => panic!("expected {}, got {other:?}", stringify!($pattern)),
        }
    };
}

#[tokio::test]
async fn hello_says_who_attaches_and_grants_are_renewed_with_progress() {
    let world = World::new();
    let mut server = Fake::start(&world.run_dir, 1).await;
    let (session, mut events) = WorkerSession::attach(world.options()).await.expect("attached");
    let mut stream = server.attached().await;
    assert_eq!(
        (stream.hello.protocol, stream.hello.slots, stream.hello.pid),
        (PROTOCOL, 2, 7)
    );
    expect!(next(&mut events).await, SessionEvent::Attached { epoch: 1, .. } => ());

    session.accept(token(1));
    expect!(stream.said().await, ToServer::Accept(accepted) => assert_eq!(Token::try_from(accepted), Ok(token(1))));
    stream.send(FromServer::Grant(token(1).into())).await;
    expect!(next(&mut events).await, SessionEvent::Grant(granted) => assert_eq!(granted, token(1)));

    session.progress(
        token(1),
        Progress {
            done: 3,
            total: 4,
            unit: "step".to_owned(),
        },
    );
    loop {
        let renew = expect!(stream.next().await, ToServer::Renew(renew) => renew);
        let Some(attempt) = renew.attempts.first().filter(|attempt| attempt.sequence == 1) else {
            continue;
        };
        assert_eq!(
            attempt
                .progress
                .as_ref()
                .map(|progress| (progress.done, progress.total)),
            Some((3, 4))
        );
        break;
    }
}

#[tokio::test]
async fn what_the_server_did_not_answer_is_said_again_to_its_successor() {
    let world = World::new();
    let mut server = Fake::start(&world.run_dir, 1).await;
    let (session, mut events) = WorkerSession::attach(world.options()).await.expect("attached");
    let mut stream = server.attached().await;
    expect!(next(&mut events).await, SessionEvent::Attached { .. } => ());
    for attempt in [1, 2] {
        stream.send(FromServer::Grant(token(attempt).into())).await;
        expect!(next(&mut events).await, SessionEvent::Grant(_) => ());
    }
    let payload = v1::Payload {
        id: vec![5; 16],
        nbytes: 10,
        chunks: 1,
        ..Default::default()
    };
    session.published(token(1), payload);
    session.completed(token(1), None, Vec::new());
    session.completed(token(2), None, Vec::new());
    for _ in 0..3 {
        stream.said().await;
    }
    stream.send(FromServer::Accepted(token(2).into())).await;
    expect!(next(&mut events).await, SessionEvent::Accepted(_) => ());

    drop((server, stream));
    expect!(next(&mut events).await, SessionEvent::Away => ());
    let mut server = Fake::start(&world.run_dir, 2).await;
    let mut stream = server.attached().await;
    expect!(next(&mut events).await, SessionEvent::Attached { epoch: 2, .. } => ());
    let (running, holding) = stream.hello.carried().expect("ids");
    assert_eq!(running, [token(1)], "the answered attempt is over");
    assert_eq!(holding.len(), 1, "the published payload is still held");
    expect!(stream.said().await, ToServer::Published(_) => ());
    expect!(stream.said().await, ToServer::Completed(_) => ());

    stream.send(FromServer::Release(vec![5; 16])).await;
    expect!(next(&mut events).await, SessionEvent::Release(_) => ());
}

#[tokio::test]
async fn a_worker_without_a_server_ends_after_the_linger_time() {
    let world = World::new();
    let server = Fake::start(&world.run_dir, 1).await;
    let (session, mut events) = WorkerSession::attach(world.options()).await.expect("attached");
    expect!(next(&mut events).await, SessionEvent::Attached { .. } => ());
    drop(server);
    expect!(next(&mut events).await, SessionEvent::Away => ());
    let away = std::time::Instant::now();
    let error = expect!(next(&mut events).await, SessionEvent::Over(error) => error);
    assert!(
        away.elapsed() < LINGER + Duration::from_secs(2),
        "over after {:?}",
        away.elapsed()
    );
    assert_eq!(error.class(), ErrorClass::Unavailable);
    drop(session);
}

#[tokio::test]
async fn the_stream_ends_when_the_last_handle_goes() {
    let world = World::new();
    let mut server = Fake::start(&world.run_dir, 1).await;
    let (session, mut events) = WorkerSession::attach(world.options()).await.expect("attached");
    let stream = server.attached().await;
    expect!(next(&mut events).await, SessionEvent::Attached { .. } => ());
    drop(session.clone());
    session.decline(token(1), Failure::new(ErrorClass::Exhausted, "credit.slots", "full"));
    drop(session);
    let mut events_end = events;
    while tokio::time::timeout(PATIENCE, events_end.recv())
        .await
        .expect("in time")
        .is_some()
    {}
    drop(stream);
}

#[tokio::test]
async fn failures_to_attach_say_why() {
    let world = World::new();
    let error = WorkerSession::attach(world.options())
        .await
        .expect_err("no run directory");
    assert_eq!(
        (error.class(), error.reason()),
        (ErrorClass::Unavailable, "server.none"),
        "{error}"
    );

    world.run_dir.create().expect("a run directory");
    world.run_dir.write_private("worker.token", b"x").expect("written");
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    fake::announce(&world.run_dir, listener.local_addr().expect("bound"), 1);
    drop(listener);
    let error = WorkerSession::attach(world.options())
        .await
        .expect_err("nobody listens");
    assert_eq!(error.reason(), "server.unreachable", "{error}");

    let _server = Fake::start(&world.run_dir, 1).await;
    world.run_dir.write_private("worker.token", b"wrong").expect("written");
    let error = WorkerSession::attach(world.options()).await.expect_err("wrong token");
    assert!(
        matches!(&error, AttachError::Refused { message, .. } if message == "wrong worker token"),
        "{error}"
    );
    assert_eq!(error.class(), ErrorClass::Unauthenticated);
}

#[test]
fn a_run_directory_open_to_others_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let world = World::new();
    world.run_dir.create().expect("made");
    std::fs::set_permissions(world.run_dir.path(), std::fs::Permissions::from_mode(0o755)).expect("changed");
    let error = world.run_dir.check().expect_err("too open");
    assert!(error.to_string().contains("chmod 700"), "{error}");
}
