//! What a room waits for, and what it does not.

use std::path::Path;

use stagewire_core::{DType, StageName};
use stagewire_kv::{Component, Engine, Geometry};
use stagewire_transfer::{Borrowed, Memory, Target};

use super::super::super::{CacheMemory, ChunkSpec, Sender, SenderOptions};
use super::super::{Receiver, ReceiverOptions};
use super::*;
use crate::{Connector, ConnectorOptions};

const PATIENCE: Duration = Duration::from_secs(20);

#[tokio::test]
async fn only_pulls_that_have_not_ended_well_are_waited_for() {
    let pulls = Pulls::default();
    for _ in 0..3 {
        pulls.count(async { Ok::<_, ()>(()) }).await.expect("it ends well");
    }
    assert!(pulls.all_ended_well());
    let mut dropped = Box::pin(pulls.count(std::future::pending::<Result<(), ()>>()));
    assert!(futures::poll!(&mut dropped).is_pending());
    assert!(!pulls.all_ended_well());
    drop(dropped);
    assert!(!pulls.all_ended_well(), "its copies may go on");
    let pulls = Pulls::default();
    pulls.count(async { Err::<(), _>(()) }).await.expect_err("it fails");
    assert!(!pulls.all_ended_well(), "another copy of it may go on");
}

async fn start(run_dir: &Path, name: &str) -> Arc<Connector> {
    let options = ConnectorOptions::new(run_dir, StageName::new(name).expect("a name"));
    Connector::start(options).await.expect("it starts")
}

/// Pages of four tokens, two heads of eight bytes.
fn engine(tp: u32) -> Engine {
    let full = Component::mha("full", 1, 2, [8, 8], DType::U8);
    Engine::new(Geometry::new(tp, 4, vec![full])).expect("sizes")
}

async fn in_time<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, what).await.expect("in time")
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_sender_has_confirmed_outlives_it() {
    let dir = tempfile::tempdir().expect("a folder");
    let run_dir = dir.path().join("run");
    let prefill = [start(&run_dir, "first").await, start(&run_dir, "second").await];
    let senders: Vec<Sender> = (0..)
        .zip(&prefill)
        .map(|(rank, connector)| {
            let memory = [1, 2].map(|byte| Memory::from(Borrowed::from(vec![byte; 10 * 4 * 8])));
            let cache = CacheMemory::one_each(memory);
            Sender::new(connector, engine(2), rank, cache, SenderOptions::default()).expect("it fits")
        })
        .collect();
    let decode = start(&run_dir, "decode").await;
    let targets = [(); 2].map(|()| Target::allocate(10 * 4 * 16).expect("memory"));
    let cache = CacheMemory::one_each(targets);
    let receiver = Receiver::new(&decode, engine(1), 0, cache, ReceiverOptions::default()).expect("it fits");

    let open = |sender: &Sender| sender.room(7, 4, PATIENCE * 2).expect("a room");
    let sent: Vec<_> = senders.iter().map(open).collect();
    let handles: Vec<_> = senders.iter().map(Sender::handle).collect();
    let room = receiver
        .room(RoomSpec::new(7, handles, 4).pages("full", [1]))
        .expect("free");
    let whole = || ChunkSpec::new(0..4).pages("full", [3]).last();
    sent[0].send(whole()).expect("all of it");
    let mut states = room.running.state.subscribe();
    let confirmed = in_time(states.wait_for(|state| state.step(0) == Step::Over)).await;
    assert!(
        !confirmed.expect("it is held").phase().is_terminal(),
        "the second has sent nothing"
    );
    in_time(prefill[0].close()).await;
    in_time(room.running.sources[&0].trouble()).await;
    assert!(!room.phase().is_terminal());
    sent[1].send(whole()).expect("all of it");
    in_time(room.finished()).await.expect("all of it is here");
    in_time(sent[1].finished()).await.expect("it went");
}
