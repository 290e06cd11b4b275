//! Many payloads, ended in every way: nothing may add up.

use std::sync::Arc;
use std::time::Duration;

use stagewire_connector::{
    Connector, ConsumeError, ConsumeOptions, Consumer, Mode, Owner, Publication, PublishSpec, PutError,
};
use stagewire_core::{ByteCount, Classify, DType, EntryValue, ErrorClass, Failure, Handle, Lease};
use stagewire_transfer::Target;

use crate::bundle::{Bundle, CONSUMED, spec};
use crate::second::{Answer, Ask, Second};
use crate::{PATIENCE, World, all_gone, rounds};

/// The same numbers in every run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (mixed ^ (mixed >> 31)) % sides
    }

    fn one_in(&mut self, sides: u64) -> bool {
        self.below(sides) == 0
    }

    fn micros(&mut self, most: u64) -> Duration {
        Duration::from_micros(self.below(most))
    }

    /// One or two tensors of any kind, cut in any way, in either kind of memory.
    fn bundle(&mut self) -> Bundle {
        let dtypes: Vec<_> = DType::all().collect();
        let chunks = 1 + self.below(8);
        let mut tensor = || {
            let dtype = dtypes[self.below(dtypes.len() as u64) as usize];
            let shape = [1 + self.below(3), chunks + self.below(9), 1 + self.below(400)];
            EntryValue::Tensor(spec(dtype, &shape))
        };
        let entries = vec![tensor(), tensor()];
        Bundle {
            arena: self.one_in(2),
            seed: self.below(u64::MAX),
            ..Bundle::many(entries).cut(1, chunks as u32)
        }
    }

    fn options(&mut self, handle: &Handle) -> ConsumeOptions {
        let mut options = ConsumeOptions::within(PATIENCE);
        match self.below(3) {
            0 => {}
            1 => options.private = true,
            _ => {
                let tensors = handle.manifest.tensors();
                let targets = tensors.map(|tensor| Target::allocate(tensor.nbytes().0).map(Arc::new));
                options.destinations = Some(targets.collect::<Result<_, _>>().expect("memory"));
            }
        }
        options
    }
}

/// How each cycle ended.
#[derive(Debug, Default)]
struct Ends {
    consumed: u64,
    left: u64,
    timed_out: u64,
    failed: u64,
    lost: u64,
    cancelled: u64,
    stored: u64,
    refused: u64,
    kills: u64,
}

impl Ends {
    /// What has not happened at all.
    fn never(&self) -> Vec<&'static str> {
        let Self {
            consumed,
            left,
            timed_out,
            failed,
            lost,
            cancelled,
            stored,
            refused,
            kills,
        } = *self;
        let counts = [
            ("consumed", consumed),
            ("left", left),
            ("timed out", timed_out),
            ("failed", failed),
            ("lost", lost),
            ("stored", stored),
            // Which of them is up to who is faster.
            ("cancelled or refused", cancelled + refused),
            ("kills", kills),
        ];
        counts
            .into_iter()
            .filter(|(_, count)| *count == 0)
            .map(|(name, _)| name)
            .collect()
    }
}

/// This process, and three that are killed at random: one that produces, one that consumes, and a store.
struct Soak {
    world: World,
    producer: Second,
    consumer: Second,
    store: Second,
    dice: Dice,
    ends: Ends,
}

/// What a store may keep: some of the payloads at a time, so that others wait for room in vain.
const STORE: ByteCount = ByteCount(1 << 17);

async fn store(world: &World) -> Second {
    let mut store = world.second().await;
    let (limit, closed) = (STORE, false);
    let served = store.ask(Ask::ServeStore { limit, closed }).await;
    assert!(matches!(served, Answer::Peer(_)), "{served:?}");
    store
}

impl Soak {
    async fn new() -> Self {
        let world = World::new().await;
        let (producer, consumer, store) = (world.second().await, world.second().await, store(&world).await);
        Self {
            world,
            producer,
            consumer,
            store,
            dice: Dice(7),
            ends: Ends::default(),
        }
    }

    fn connector(&self) -> &Arc<Connector> {
        &self.world.connector
    }

    async fn kill_producer(&mut self) {
        let dead = std::mem::replace(&mut self.producer, self.world.second().await);
        dead.kill().await;
        self.ends.kills += 1;
    }

    async fn kill_consumer(&mut self) {
        let dead = std::mem::replace(&mut self.consumer, self.world.second().await);
        dead.kill().await;
        self.ends.kills += 1;
    }

    async fn kill_store(&mut self) {
        // The next one serves the run directory once the first is dead.
        let next = self.world.second().await;
        std::mem::replace(&mut self.store, next).kill().await;
        let (limit, closed) = (STORE, false);
        self.store.ask(Ask::ServeStore { limit, closed }).await;
        self.ends.kills += 1;
    }

    /// Another process produces, this one consumes; either may give up in the middle, and the producer may die there.
    async fn consume_here(&mut self) {
        let bundle = self.dice.bundle();
        let owner = [Owner::Orchestrator, CONSUMED, Owner::Lease(Lease::Pinned)][self.dice.below(3) as usize];
        let handle = self.producer.open(&bundle, owner).await;
        let chunks = handle.manifest.chunks();
        let options = self.dice.options(&handle);
        let mut consumer = self.connector().consume(handle.clone(), options).expect("a consumer");
        let ready = if self.dice.one_in(2) {
            chunks
        } else {
            self.dice.below(u64::from(chunks)) as u32
        };
        for chunk in 0..ready {
            self.producer.ready(&handle, chunk).await;
        }
        let read = if self.dice.one_in(2) {
            ready
        } else {
            self.dice.below(u64::from(ready) + 1) as u32
        };
        for _ in 0..read {
            let chunk = consumer.next().await.expect("alive").expect("ready");
            bundle.check(&chunk.tensors, Some(chunk.index));
        }
        match self.dice.below(6) {
            // The first time in any case.
            _ if self.dice.one_in(60) || self.ends.lost == 0 => {
                // In the middle of whatever goes on by then.
                let reading = tokio::spawn(read_on(consumer, bundle));
                tokio::time::sleep(self.dice.micros(400)).await;
                self.kill_producer().await;
                let read = tokio::time::timeout(PATIENCE, reading).await.expect("it is stuck");
                read.expect("no wrong byte");
                self.ends.lost += 1;
                return;
            }
            0 => {
                let failure = Failure::new(ErrorClass::Internal, "test.failure", "on purpose");
                let payload = handle.payload;
                self.producer.done(Ask::Fail { payload, failure }).await;
                if ready < chunks {
                    read_on(consumer, bundle).await;
                    self.ends.failed += 1;
                }
            }
            1 => {
                // Nothing comes: its time is over, at whatever point it is.
                let patience = self.dice.micros(700);
                while let Ok(Ok(Some(_))) = tokio::time::timeout(patience, consumer.next()).await {}
                self.ends.timed_out += 1;
            }
            2 if ready < chunks => {
                // Released under a consumer that waits.
                let reading = tokio::spawn(read_on(consumer, bundle));
                let payload = handle.payload;
                self.producer.done(Ask::Release { payload }).await;
                let read = tokio::time::timeout(PATIENCE, reading).await.expect("it is stuck");
                read.expect("no wrong byte");
                self.ends.left += 1;
            }
            _ if ready == chunks => {
                while let Some(chunk) = consumer.next().await.expect("alive") {
                    bundle.check(&chunk.tensors, Some(chunk.index));
                }
                self.ends.consumed += 1;
            }
            _ => self.ends.left += 1,
        }
        let payload = handle.payload;
        self.producer.done(Ask::Release { payload }).await;
    }

    fn publish(&mut self, bundle: &Bundle, mode: Mode, peer: Option<stagewire_core::Peer>) -> Publication {
        // However slow the machine is, some arrive.
        let within = self.dice.micros(30_000);
        let store_within = if self.ends.stored == 0 { PATIENCE } else { within };
        let spec = PublishSpec {
            mode,
            consumer: peer,
            store_within,
            ..PublishSpec::new("request", bundle.manifest(), CONSUMED)
        };
        let memory = bundle.memory(self.connector().host().arena());
        self.connector().publish(spec, memory).expect("there is a store")
    }

    /// This process produces, another one consumes, and may die; what it leaves goes to the store.
    async fn consume_there(&mut self) {
        let bundle = self.dice.bundle();
        let peer = self.consumer.peer().await;
        let mode = [Mode::P2p, Mode::Auto][self.dice.below(2) as usize];
        let publication = self.publish(&bundle, mode, Some(peer));
        let handle = publication.handle().clone();
        let all = self.dice.one_in(2);
        let chunks = match all {
            // The last call ends it.
            true => handle.manifest.chunks() + 1,
            false => self.dice.below(u64::from(handle.manifest.chunks()) + 1) as u32,
        };
        let bytes = handle.to_bytes();
        if self.dice.one_in(60) {
            self.consumer.tell(&Ask::Consume { handle: bytes, chunks }).await;
            tokio::time::sleep(self.dice.micros(600)).await;
            self.kill_consumer().await;
            self.ends.lost += 1;
        } else {
            self.consumer.done(Ask::Consume { handle: bytes, chunks }).await;
            self.consumer.done(Ask::DropConsumers).await;
            if all {
                let released = tokio::time::timeout(PATIENCE, publication.released()).await;
                released.expect("its consumer has said so");
                self.ends.consumed += 1;
            } else {
                self.ends.left += 1;
            }
        }
        self.end(&publication).await;
    }

    /// To the store, with little time, given up at any moment; the store may die.
    async fn store_and_consume(&mut self) {
        let mate = self.dice.one_in(3).then(|| {
            let bundle = self.dice.bundle();
            self.publish(&bundle, Mode::Store, None)
        });
        let bundle = self.dice.bundle();
        let publication = self.publish(&bundle, Mode::Store, None);
        self.follow(&publication, bundle).await;
        if let Some(mate) = mate {
            self.end(&mate).await;
        }
    }

    async fn follow(&mut self, publication: &Publication, bundle: Bundle) {
        if self.dice.one_in(100) {
            tokio::time::sleep(self.dice.micros(2000)).await;
            self.kill_store().await;
        } else if self.dice.one_in(3) {
            tokio::time::sleep(self.dice.micros(1500)).await;
            if publication.cancel() {
                let error = publication.settled().await.expect_err("given up");
                assert!(matches!(&*error, PutError::Cancelled { .. }), "{error}");
                self.ends.cancelled += 1;
                return;
            }
        }
        let settled = tokio::time::timeout(PATIENCE, publication.settled()).await;
        match settled.expect("it is stuck") {
            Ok(_) => {
                self.ends.stored += 1;
                let options = self.dice.options(publication.handle());
                let consumer = self.connector().consume(publication.handle().clone(), options);
                read_on(consumer.expect("a consumer"), bundle).await;
            }
            Err(error) => {
                let class = error.class();
                use ErrorClass::{Deadline, Exhausted, Invalid, Unavailable};
                // No room in time, or never; or the store has died.
                let known = [Exhausted, Invalid, Deadline, Unavailable];
                assert!(known.contains(&class), "{error}");
                self.ends.refused += 1;
            }
        }
        self.end(publication).await;
    }

    /// Ends a payload of this process wherever it is by now.
    async fn end(&self, publication: &Publication) {
        let ended = async {
            // Where its consumer was lost, it may be on its way to the store.
            let _ = self.connector().release_handle(publication.handle()).await;
            publication.released().await;
            publication.unread().await;
            let _ = self.connector().release_handle(publication.handle()).await;
        };
        tokio::time::timeout(PATIENCE, ended).await.expect("it does not end");
    }
}

/// Reads until the end, or until there is no more to read for a reason that can be; every byte is checked.
async fn read_on(mut consumer: Consumer, bundle: Bundle) {
    loop {
        match consumer.next().await {
            Ok(Some(chunk)) => bundle.check(&chunk.tensors, Some(chunk.index)),
            Ok(None) => return,
            Err(ConsumeError::PeerLost { .. } | ConsumeError::Failed { .. } | ConsumeError::Gone { .. }) => return,
            Err(error) => panic!("{error}"),
        }
    }
}

/// 10,000 cycles in full.
#[expect(clippy::print_stderr, reason = "a soak says what it did")]
#[tokio::test(flavor = "multi_thread")]
async fn payloads_that_end_in_every_way_leave_nothing() {
    let mut soak = Soak::new().await;
    let begin = std::time::Instant::now();
    let cycles = rounds(10_000);
    for _ in 0..cycles {
        match soak.dice.below(3) {
            0 => soak.consume_here().await,
            1 => soak.consume_there().await,
            _ => soak.store_and_consume().await,
        }
    }
    soak.consumer.done(Ask::DropConsumers).await;
    for process in [&mut soak.producer, &mut soak.consumer, &mut soak.store] {
        process.all_gone().await;
    }
    all_gone(soak.connector()).await;
    eprintln!("{cycles} cycles in {:?}: {:?}", begin.elapsed(), soak.ends);
    assert_eq!(soak.ends.never(), [""; 0], "{:?}", soak.ends);
    let stats = soak.connector().stats();
    assert!(
        stats.links <= 4,
        "{} connections to three processes and this one",
        stats.links
    );
    let ended = stats.released + stats.consumed + stats.moved + stats.expired + stats.failed;
    assert_eq!(stats.published, ended, "each payload has ended in one way: {stats:?}");
}

/// 1,000 rounds in full: each of the requests under way gets its own bytes.
#[expect(clippy::print_stderr, reason = "a soak says what it did")]
#[tokio::test(flavor = "multi_thread")]
async fn payloads_of_many_requests_at_once_keep_apart() {
    let world = World::new().await;
    let mut second = world.second().await;
    let keeper = world.another("store").await;
    let limit = ByteCount(32 << 20);
    let gate = Arc::new(stagewire_store::TokenGate::open());
    let kept = stagewire_store::HostStore::new(keeper.host(), limit, gate);
    let _service = stagewire_connector::StoreService::serve(&keeper, kept);
    let begin = std::time::Instant::now();
    let mut dice = Dice(11);
    let mut reading = tokio::task::JoinSet::new();
    let rounds = rounds(1000);
    for _ in 0..rounds {
        let mut handles = Vec::new();
        for _ in 0..2 {
            let bundle = dice.bundle();
            handles.push((second.publish(&bundle, CONSUMED).await, bundle));
            let bundle = dice.bundle();
            let mode = [Mode::P2p, Mode::Store][dice.below(2) as usize];
            let spec = PublishSpec {
                mode,
                ..PublishSpec::new("request", bundle.manifest(), CONSUMED)
            };
            let memory = bundle.memory(world.connector.host().arena());
            let publication = world.connector.publish(spec, memory).expect("room");
            handles.push((publication.handle().clone(), bundle));
        }
        for (handle, bundle) in handles {
            let options = dice.options(&handle);
            let mut consumer = world.connector.consume(handle, options).expect("a consumer");
            reading.spawn(async move {
                while let Some(chunk) = consumer.next().await.expect("alive") {
                    bundle.check(&chunk.tensors, Some(chunk.index));
                }
            });
        }
        // Others of the rounds before are still under way.
        while reading.len() > 16 {
            reading.join_next().await.expect("some").expect("its own bytes");
        }
    }
    while let Some(read) = reading.join_next().await {
        read.expect("its own bytes");
    }
    second.all_gone().await;
    all_gone(&world.connector).await;
    all_gone(&keeper).await;
    eprintln!("{rounds} rounds of 4 requests in {:?}", begin.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn producers_killed_at_random_points_never_give_wrong_bytes() {
    let world = World::new().await;
    for round in 0..rounds(200) {
        let mut second = world.second().await;
        let bundle = Bundle::one(&[64, 4096]).cut(0, 64).seeded(round);
        let bundle = if round % 2 == 0 { bundle } else { bundle.borrowed() };
        let handle = second.publish(&bundle, Owner::Orchestrator).await;
        let options = ConsumeOptions {
            private: true,
            ..ConsumeOptions::within(PATIENCE)
        };
        let mut consumer = world.connector.consume(handle, options).expect("a consumer");
        let first = consumer.next().await.expect("alive").expect("a chunk");
        bundle.check(&first.tensors, Some(0));
        let reader = tokio::spawn(async move {
            loop {
                match consumer.next().await {
                    Ok(Some(chunk)) => bundle.check(&chunk.tensors, Some(chunk.index)),
                    Ok(None) => return true,
                    Err(ConsumeError::PeerLost { .. }) => return false,
                    Err(error) => panic!("{error}"),
                }
            }
        });
        tokio::time::sleep(Duration::from_micros(round % 10 * 300)).await;
        second.kill().await;
        tokio::time::timeout(PATIENCE, reader)
            .await
            .expect("it ends")
            .expect("no wrong byte");
    }
    all_gone(&world.connector).await;
}
