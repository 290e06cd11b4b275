//! A number that prefill uses again at once.

use stagewire_connector::kv::{
    CacheMemory, ChunkSpec, Phase, Receiver, ReceiverOptions, RoomId, RoomSpec, Sender, SenderOptions,
};
use stagewire_core::DType;
use stagewire_kv::{Component, Geometry};

use super::pages::Pages;
use super::{in_time, sides, until};
use crate::{PATIENCE, World, rounds};

/// Both ranks of prefill begin a later life while decode still reads the one before: the old room fails at decode, whichever
/// rank is first, and the new one waits for the rank that is late. Its bytes are those of its own life.
#[tokio::test(flavor = "multi_thread")]
async fn lives_are_never_mixed() {
    let component = Component::mha("full", 1, 2, [2, 2], DType::U8);
    let engine = |tp| sides::engine(&Geometry::new(tp, 2, vec![component.clone()]));
    let world = World::new().await;
    let prefill = world.another("prefill").await;
    let source: Vec<[Pages; 2]> = (0..2).map(|_| [(); 2].map(|()| Pages::new(&[0; 8 * 4]))).collect();
    let mut senders = Vec::new();
    for (rank, pages) in (0..).zip(&source) {
        let cache = CacheMemory::one_each(pages.each_ref().map(Pages::memory));
        let sender = Sender::new(&prefill, engine(2), rank, cache, SenderOptions::default());
        senders.push(sender.expect("a sender"));
    }
    let handles: Vec<_> = senders.iter().map(Sender::handle).collect();
    let pages = [(); 2].map(|()| Pages::new(&[0; 8 * 8]));
    let cache = CacheMemory::one_each(pages.each_ref().map(Pages::target));
    let receiver = Receiver::new(&world.connector, engine(1), 0, cache, ReceiverOptions::default());
    let receiver = receiver.expect("a receiver");
    for round in 1..=rounds(200) {
        let id = |life| RoomId::of_life(7, life);
        let open = |rank: usize, life| senders[rank].room(id(life), 2, PATIENCE).expect("a room");
        let want = |life| {
            let spec = RoomSpec::new(id(life), handles.clone(), 2).pages("full", [3]);
            receiver.room(spec).expect("its page is free")
        };
        let (old, new) = (2 * round, 2 * round + 1);
        let (first, second) = if round % 2 == 0 { (0, 1) } else { (1, 0) };
        let sent = [open(0, old), open(1, old)];
        let room = want(old);
        until(|| sent.iter().all(|sent| sent.phase() == Phase::Waiting)).await;
        sent[second]
            .send(ChunkSpec::new(0..2).pages("full", [5]).last())
            .expect("all");
        let early = open(first, new);
        let failure = in_time(room.finished()).await.expect_err("it has begun anew");
        assert_eq!(failure.reason, "kv.superseded", "{failure}");
        in_time(room.released()).await;
        let room = want(new);
        until(|| early.phase() == Phase::Waiting).await;
        assert_eq!(room.phase(), Phase::Bootstrapping, "the other rank is late");
        for sent in &sent {
            in_time(sent.released()).await;
        }
        let mut anew = [None, None];
        anew[first] = Some(early);
        anew[second] = Some(open(second, new));
        let byte = |rank: usize, kv: usize| (new as u8) << 2 ^ (rank as u8) << 1 ^ kv as u8;
        for (rank, (buffers, sent)) in source.iter().zip(&anew).enumerate() {
            for (kv, buffer) in buffers.iter().enumerate() {
                buffer.write(0, &[byte(rank, kv); 8 * 4]);
            }
            let sent = sent.as_ref().expect("it is open");
            sent.send(ChunkSpec::new(0..2).pages("full", [1]).last()).expect("all");
        }
        in_time(room.finished()).await.expect("it comes");
        in_time(room.released()).await;
        for sent in anew.iter().flatten() {
            in_time(sent.finished()).await.expect("it went");
            in_time(sent.released()).await;
        }
        for (kv, buffer) in pages.iter().enumerate() {
            let token = [0, 1].map(|rank| [byte(rank, kv); 2]).concat();
            assert_eq!(buffer.part(3 * 8, 8), token.repeat(2), "round {round}");
        }
    }
}
