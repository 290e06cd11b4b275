//! Senders that cannot be reached.

use futures::{SinkExt, StreamExt};
use stagewire_core::{DType, StageName};
use stagewire_kv::{Component, Geometry};
use stagewire_transfer::{Borrowed, Memory};
use tokio::net::UnixListener;

use super::super::{Sender, SenderOptions};
use super::*;
use crate::ConnectorOptions;
use crate::wire::{self, Greeting};

#[tokio::test(flavor = "multi_thread")]
async fn a_process_of_another_version_fails_the_room_with_that_reason_and_is_asked_once() {
    let dir = tempfile::tempdir().expect("a folder");
    let run_dir = dir.path().join("run");
    let start = async |name: &str| {
        let options = ConnectorOptions::new(&run_dir, StageName::new(name).expect("a name"));
        Connector::start(options).await.expect("it starts")
    };
    let (prefill, decode) = (start("prefill").await, start("decode").await);
    let full = Component::mha("full", 1, 2, [8, 8], DType::U8);
    let engine = Engine::new(Geometry::new(1, 4, vec![full])).expect("sizes");
    let memory = [1, 2].map(|byte| Memory::from(Borrowed::from(vec![byte; 10 * 4 * 16])));
    let cache = CacheMemory::one_each(memory);
    let sender = Sender::new(&prefill, engine.clone(), 0, cache, SenderOptions::default()).expect("it fits");
    let targets = [(); 2].map(|()| Target::allocate(10 * 4 * 16).expect("memory"));
    let receiver = Receiver::new(
        &decode,
        engine,
        0,
        CacheMemory::one_each(targets),
        ReceiverOptions::default(),
    );
    let receiver = receiver.expect("it fits");

    let mut handle = sender.handle();
    handle.peer.socket = dir.path().join("other").display().to_string();
    let listener = UnixListener::bind(&handle.peer.socket).expect("a socket");
    let asked = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&asked);
    let other = tokio::spawn(async move {
        loop {
            let (read, write) = listener.accept().await.expect("it listens").0.into_split();
            let (mut reader, mut writer) = wire::framed(read, write);
            reader.next().await.expect("a hello").expect("whole");
            counted.fetch_add(1, Ordering::Relaxed);
            let answer = wire::encode(&Greeting::Version(wire::VERSION + 1));
            writer.send(answer).await.expect("it is read");
        }
    });
    let room = receiver.room(RoomSpec::new(7, [handle], 4).pages("full", [1]));
    let failure = room.expect("free").finished().await.expect_err("nobody is there");
    assert_eq!(failure.reason, "peer.version", "{failure}");
    assert!(failure.message.contains("rank 0 of prefill"), "{failure}");
    assert_eq!(asked.load(Ordering::Relaxed), 1);
    other.abort();
}
