//! What a sender answers to questions that come late, or from whom it does not know.

use std::pin::pin;
use std::time::Instant;

use stagewire_core::{DType, ErrorClass, StageName};
use stagewire_kv::{Component, Geometry};
use stagewire_transfer::Borrowed;
use tempfile::TempDir;
use uuid::Uuid;

use super::super::Phase;
use super::super::protocol::News;
use super::*;
use crate::ConnectorOptions;

const PATIENCE: Duration = Duration::from_secs(20);
const RECEIVER: ReceiverId = Uuid::from_u128(1);
const VISIT: u64 = 3;

struct Prefill {
    sender: Sender,
    _connector: Arc<Connector>,
    _dir: TempDir,
}

impl Prefill {
    async fn start() -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let run_dir = dir.path().join("run");
        let options = ConnectorOptions::new(&run_dir, StageName::new("prefill").expect("a name"));
        let connector = Connector::start(options).await.expect("it starts");
        let memory = [1, 2].map(|byte| Memory::from(Borrowed::from(vec![byte; 10 * 4 * 16])));
        let options = SenderOptions {
            // Receivers here give no signs of life.
            heartbeat: Heartbeat {
                interval: Duration::from_secs(60),
                misses: 2,
            },
            cut_off: Duration::ZERO,
            ..SenderOptions::default()
        };
        let sender = Sender::new(&connector, engine(8), 0, CacheMemory::one_each(memory), options);
        Self {
            sender: sender.expect("it fits"),
            _connector: connector,
            _dir: dir,
        }
    }

    async fn ask(&self, body: Body) -> Answer {
        self.sender.inner.answer(RECEIVER, VISIT, body).await
    }

    async fn greet(&self) {
        let answer = self.ask(hello(8)).await;
        assert!(matches!(answer, Answer::Welcome(_)), "{answer:?}");
    }

    async fn room(&self, attempt: u64, seen: Option<Seen>) -> News {
        match self.ask(question(attempt, seen)).await {
            Answer::Room(Some(news)) => news,
            other => panic!("{other:?}"),
        }
    }

    fn open(&self, room: u64) -> SenderRoom {
        self.sender.room(room, 4, PATIENCE).expect("a room")
    }
}

fn engine(dim: u32) -> Engine {
    let full = Component::mha("full", 1, 2, [dim, dim], DType::U8);
    Engine::new(Geometry::new(1, 4, vec![full])).expect("sizes")
}

fn hello(dim: u32) -> Body {
    Body::Hello {
        rank: 0,
        engine: engine(dim).to_bytes(),
    }
}

fn question(attempt: u64, seen: Option<Seen>) -> Body {
    Body::Room {
        room: 7.into(),
        attempt,
        seen,
    }
}

fn leaves(attempt: u64) -> Body {
    Body::Leave {
        room: 7.into(),
        attempt,
        failure: aborted(),
        told: true,
    }
}

fn aborted() -> Failure {
    Failure::new(ErrorClass::Cancelled, "kv.aborted", "no more")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_question_touches_no_room_that_was_opened_since() {
    let prefill = Prefill::start().await;
    prefill.greet().await;
    let old = prefill.open(7);
    let seen = prefill.room(0, None).await.seen;
    old.abort(aborted());
    // So many end after it that it is forgotten.
    let begin = Instant::now();
    while prefill.sender.inner.rooms().read_by(7.into(), (RECEIVER, 0)).is_some() {
        assert!(begin.elapsed() < PATIENCE, "it is remembered for ever");
        for other in 0..100 {
            drop(prefill.sender.room(1000 + other, 4, PATIENCE));
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let new = prefill.open(7);
    let answer = prefill.ask(question(0, Some(seen))).await;
    assert!(
        matches!(&answer, Answer::Refused(failure) if failure.reason == "kv.room_restarted"),
        "{answer:?}"
    );
    assert_eq!(prefill.ask(leaves(0)).await, Answer::Left);
    assert_eq!(new.phase(), Phase::Bootstrapping, "nobody reads it yet");
    let state = prefill.room(1, None).await;
    assert_eq!((state.failure, new.phase()), (None, Phase::Waiting));
    assert!(state.seen.generation > seen.generation);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_room_is_told_to_one_attempt_of_a_rank_and_the_next_waits_for_the_next_room() {
    let prefill = Prefill::start().await;
    prefill.greet().await;
    prefill.open(7).abort(aborted());
    for _ in 0..2 {
        assert_eq!(
            prefill.room(0, None).await.failure,
            Some(aborted()),
            "also when it asks twice"
        );
    }
    let mut next = pin!(prefill.ask(question(1, None)));
    assert!(futures::poll!(&mut next).is_pending());
    let new = prefill.open(7);
    let answer = tokio::time::timeout(PATIENCE, next).await.expect("it is opened");
    assert!(
        matches!(&answer, Answer::Room(Some(state)) if state.failure.is_none()),
        "{answer:?}"
    );
    assert_eq!(new.phase(), Phase::Waiting);
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_are_told_to_greet_and_are_not_remembered() {
    let prefill = Prefill::start().await;
    let room = prefill.open(7);
    let confirm = Body::Confirm {
        room: 7.into(),
        attempt: 0,
        generation: 1,
    };
    for body in [Body::Beat, question(0, None), confirm, leaves(0), Body::Bye] {
        assert_eq!(prefill.ask(body).await, Answer::Stranger);
    }
    let answer = prefill.ask(hello(16)).await;
    assert!(matches!(answer, Answer::Refused(_)), "another model: {answer:?}");
    assert_eq!(prefill.sender.receivers(), 0);
    // Who says goodbye is one again, and lets go of what it read.
    prefill.greet().await;
    prefill.room(0, None).await;
    assert_eq!(prefill.sender.receivers(), 1);
    assert_eq!(prefill.ask(Body::Bye).await, Answer::Left);
    assert_eq!(prefill.ask(Body::Beat).await, Answer::Stranger);
    assert_eq!(prefill.sender.receivers(), 0);
    let failure = room.finished().await.expect_err("its reader is gone");
    assert_eq!(failure.reason, "kv.closed");
}

#[tokio::test(flavor = "multi_thread")]
async fn who_comes_too_late_for_a_life_is_told_and_who_comes_too_early_waits() {
    let prefill = Prefill::start().await;
    prefill.greet().await;
    let room = |life| RoomId::of_life(7, life);
    let ask = async |life, attempt, seen| {
        let room = room(life);
        prefill.ask(Body::Room { room, attempt, seen }).await
    };
    let first = prefill.sender.room(room(1), 4, PATIENCE).expect("a room");
    let Answer::Room(Some(read)) = ask(1, 0, None).await else {
        panic!("it is open");
    };
    let mut early = pin!(ask(2, 1, None));
    assert!(futures::poll!(&mut early).is_pending());
    let second = prefill.sender.room(room(2), 4, PATIENCE).expect("a later life");
    let answer = tokio::time::timeout(PATIENCE, early).await.expect("it is opened");
    assert!(matches!(answer, Answer::Room(Some(news)) if news.failure.is_none()));
    // Whoever read the old one hears so, and who had not asked yet as well.
    let failure = first.finished().await.expect_err("it has begun anew");
    assert_eq!(failure.reason, "kv.superseded");
    let Answer::Room(Some(told)) = ask(1, 0, Some(read.seen)).await else {
        panic!("it is remembered");
    };
    assert_eq!(told.failure, Some(failure));
    let answer = ask(1, 2, None).await;
    assert!(
        matches!(&answer, Answer::Refused(failure) if failure.reason == "kv.superseded"),
        "{answer:?}"
    );
    // What the old readers say does not touch the new room.
    for attempt in [0, 2] {
        let leave = Body::Leave {
            room: room(1),
            attempt,
            failure: aborted(),
            told: false,
        };
        assert_eq!(prefill.ask(leave).await, Answer::Left);
    }
    assert_eq!(second.phase(), Phase::Waiting);
    let refused = prefill.sender.room(room(1), 4, PATIENCE).expect_err("it is over");
    assert_eq!(refused.reason(), "kv.superseded", "{refused}");
    let refused = prefill.sender.room(room(2), 4, PATIENCE).expect_err("it is open");
    assert_eq!(refused.reason(), "kv.room_open", "{refused}");
}
