//! The other side of rooms in another process: this test binary again, as prefill or as decode.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use stagewire_connector::kv::{Heartbeat, Phase, ReceiverRoom, Sender, SenderHandle, SenderRoom};
use stagewire_connector::{Carrier, Connector, ConnectorOptions};
use stagewire_core::{ByteCount, Classify, ErrorClass, Failure, StageName};

use super::sides::{self, DecodeRank};
use crate::PATIENCE;
use crate::kv_memory::Memory as Oracle;
use crate::process::{self, Process};
use crate::world::World;

const RUN_DIR: &str = "STAGEWIRE_KV_SECOND_RUN_DIR";
const CARRIER: &str = "STAGEWIRE_KV_SECOND_CARRIER";

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Ask {
    /// Every rank of prefill, with this heartbeat in milliseconds and misses.
    Senders { world: u64, heartbeat: (u64, u32) },
    /// Opens a room at every rank of prefill.
    Open { room: u64 },
    /// Announces so many of its chunks.
    Announce { chunks: usize },
    /// Waits until the rooms at prefill have ended and are released.
    Sent,
    /// Every rank of decode.
    Receivers { world: u64, heartbeat: (u64, u32) },
    /// Opens a room at every rank of decode.
    Want { room: u64, handles: Vec<Vec<u8>> },
    /// Bytes that have come so far, at all ranks of decode.
    Come,
    /// Waits until the rooms at decode have ended and are released.
    Received,
    /// Ends the rooms that are open.
    Abort { failure: Failure },
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    Handles(Vec<Vec<u8>>),
    Bytes(u64),
    Done,
    Failed(Failure),
}

/// The second process, as the first has it.
pub(crate) struct Second(Process);

impl Second {
    pub(crate) async fn start(run_dir: &Path, carrier: Carrier) -> Self {
        let env = [(RUN_DIR, run_dir.into()), (CARRIER, carrier.name().into())];
        Self(Process::start(&[], "kv::second::second_process", &env))
    }

    pub(crate) async fn ask(&mut self, ask: &Ask) -> Answer {
        self.0.ask(ask, 2 * PATIENCE).await
    }

    pub(crate) async fn done(&mut self, ask: Ask) {
        match self.ask(&ask).await {
            Answer::Done => {}
            other => panic!("{ask:?}: {other:?}"),
        }
    }

    pub(crate) async fn failed(&mut self, ask: Ask) -> Failure {
        match self.ask(&ask).await {
            Answer::Failed(failure) => failure,
            other => panic!("{ask:?}: {other:?}"),
        }
    }

    pub(crate) async fn senders(&mut self, world: u64, heartbeat: Heartbeat) -> Vec<SenderHandle> {
        let heartbeat = numbers(heartbeat);
        match self.ask(&Ask::Senders { world, heartbeat }).await {
            Answer::Handles(handles) => {
                let handles = handles.iter().map(|bytes| SenderHandle::from_bytes(bytes));
                handles.map(|handle| handle.expect("its own")).collect()
            }
            other => panic!("{other:?}"),
        }
    }

    pub(crate) async fn receivers(&mut self, world: u64, heartbeat: Heartbeat) {
        let heartbeat = numbers(heartbeat);
        self.done(Ask::Receivers { world, heartbeat }).await;
    }

    /// Waits until some bytes have come to its rooms.
    pub(crate) async fn come(&mut self) {
        let begin = tokio::time::Instant::now();
        loop {
            match self.ask(&Ask::Come).await {
                Answer::Bytes(0) => assert!(begin.elapsed() < PATIENCE, "nothing comes"),
                Answer::Bytes(_) => return,
                other => panic!("{other:?}"),
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        self.0.signal(signal);
    }
}

fn numbers(heartbeat: Heartbeat) -> (u64, u32) {
    let interval = u64::try_from(heartbeat.interval.as_millis()).expect("short");
    (interval, heartbeat.misses)
}

struct Served {
    connector: Arc<Connector>,
    arena: bool,
    world: u64,
    senders: Vec<Sender>,
    sent: Vec<SenderRoom>,
    announced: usize,
    receivers: Vec<DecodeRank>,
    rooms: Vec<ReceiverRoom>,
}

#[test]
#[ignore = "the second process of the other tests"]
fn second_process() {
    let Some(run_dir) = std::env::var_os(RUN_DIR) else {
        return;
    };
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let carrier: Carrier = std::env::var(CARRIER).expect("told").parse().expect("a transport");
        let options = ConnectorOptions {
            arena_limit: ByteCount(64 << 20),
            transports: vec![carrier],
            ..ConnectorOptions::new(run_dir, StageName::new("second").expect("a name"))
        };
        let mut served = Served {
            connector: Connector::start(options).await.expect("a connector"),
            arena: carrier == Carrier::Shm,
            world: 0,
            senders: Vec::new(),
            sent: Vec::new(),
            announced: 0,
            receivers: Vec::new(),
            rooms: Vec::new(),
        };
        process::serve(async |ask| served.answer(ask).await.unwrap_or_else(Answer::Failed)).await;
    });
}

impl Served {
    async fn answer(&mut self, ask: Ask) -> Result<Answer, Failure> {
        let heartbeat = |(interval, misses)| Heartbeat {
            interval: Duration::from_millis(interval),
            misses,
        };
        match ask {
            Ask::Senders { world, heartbeat: beat } => {
                self.world = world;
                let world = sides::world(world);
                let oracle = Oracle::new(&world);
                self.senders = sides::senders(&self.connector, &world, &oracle, self.arena, heartbeat(beat));
                let handles = self.senders.iter().map(|sender| sender.handle().to_bytes());
                return Ok(Answer::Handles(handles.collect()));
            }
            Ask::Open { room } => {
                let seq_len = sides::world(self.world).seq_len;
                let rooms = self.senders.iter().map(|sender| sender.room(room, seq_len, PATIENCE));
                self.sent = rooms.collect::<Result<_, _>>().map_err(|error| error.to_failure())?;
                self.announced = 0;
            }
            Ask::Announce { chunks } => {
                let world = sides::world(self.world);
                for two in world.chunks.windows(2).skip(self.announced).take(chunks) {
                    for room in &self.sent {
                        let sent = room.send(sides::chunk(&world, two[0], two[1]));
                        sent.map_err(|error| error.to_failure())?;
                    }
                }
                self.announced += chunks;
            }
            Ask::Sent => {
                let rooms = std::mem::take(&mut self.sent);
                let over = rooms
                    .iter()
                    .map(|room| over(room.finished(), room.released(), || room.phase()));
                join_all(over).await.into_iter().collect::<Result<(), _>>()?;
            }
            Ask::Receivers { world, heartbeat: beat } => {
                self.world = world;
                let world: World = sides::world(world);
                let oracle = Oracle::new(&world);
                self.receivers = sides::receivers(&self.connector, &world, &oracle, heartbeat(beat));
            }
            Ask::Want { room, handles } => {
                let handles: Result<Vec<_>, _> = handles.iter().map(|bytes| SenderHandle::from_bytes(bytes)).collect();
                let handles = handles.map_err(|error| error.to_failure())?;
                let world = sides::world(self.world);
                let wanted = self
                    .receivers
                    .iter()
                    .map(|rank| rank.receiver.room(sides::wants(room, &world, &handles)));
                self.rooms = wanted.collect::<Result<_, _>>().map_err(|error| error.to_failure())?;
            }
            Ask::Come => return Ok(Answer::Bytes(self.rooms.iter().map(ReceiverRoom::nbytes).sum())),
            Ask::Received => {
                let rooms = std::mem::take(&mut self.rooms);
                let over = rooms
                    .iter()
                    .map(|room| over(room.finished(), room.released(), || room.phase()));
                join_all(over).await.into_iter().collect::<Result<(), _>>()?;
            }
            Ask::Abort { failure } => {
                for room in &self.rooms {
                    room.abort(failure.clone());
                }
                for room in &self.sent {
                    room.abort(failure.clone());
                }
            }
        }
        Ok(Answer::Done)
    }
}

/// Waits until a room has ended and is released.
async fn over<T>(
    finished: impl Future<Output = Result<T, Failure>>,
    released: impl Future<Output = ()>,
    phase: impl Fn() -> Phase,
) -> Result<(), Failure> {
    let both = async {
        let ended = finished.await;
        released.await;
        ended.map(drop)
    };
    let stuck = || Failure::new(ErrorClass::Deadline, "test.stuck", format!("{:?}", phase()));
    tokio::time::timeout(PATIENCE, both)
        .await
        .unwrap_or_else(|_| Err(stuck()))
}
