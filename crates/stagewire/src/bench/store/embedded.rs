use std::hint::black_box;
use std::path::Path;
use std::slice;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use stagewire_core::{ByteCount, Incarnation, PayloadId};
use stagewire_store::{HostStore, NewObject, Store, TokenGate};
use stagewire_transfer::probe::{Probe, Room, Rows, Way};
use stagewire_transfer::{Borrowed, Host, HostOptions, Memory, Target};
use uuid::Uuid;

use super::{Act, CAPACITY};
use crate::bench::paint::paint;

/// The host store in this process.
pub(super) struct Embedded {
    host: Arc<Host>,
    store: HostStore,
    probe: Probe,
    objects: Objects,
    /// Objects that are there to be read.
    kept: Vec<PayloadId>,
}

/// Memory of a writer and a reader: what is written, and where it is read to.
#[derive(Default)]
pub(super) struct Objects {
    painted: Vec<Arc<Vec<u8>>>,
    rooms: Vec<Room>,
}

impl Objects {
    pub(super) fn new(size: u64, count: usize) -> anyhow::Result<Self> {
        let size = usize::try_from(size)?;
        let mut whole = vec![0; size * count];
        paint(&mut whole, 0);
        let rooms = (0..count).map(|_| Room::new(size).context("there is not enough memory"));
        Ok(Self {
            painted: whole.chunks(size).map(|bytes| Arc::new(bytes.to_vec())).collect(),
            rooms: rooms.collect::<Result<_, _>>()?,
        })
    }

    pub(super) fn memory(&self) -> Vec<Memory> {
        let memory = |bytes: &Arc<Vec<u8>>| Borrowed::from(Arc::clone(bytes)).into();
        self.painted.iter().map(memory).collect()
    }

    pub(super) fn targets(&mut self) -> anyhow::Result<Vec<Arc<Target>>> {
        let target = |room: &mut Room| room.target().map(Arc::new).context("in use");
        self.rooms.iter_mut().map(target).collect()
    }

    /// Proves that every byte was read, and forgets them.
    pub(super) fn check(&mut self) -> anyhow::Result<()> {
        for (painted, room) in self.painted.iter().zip(&mut self.rooms) {
            let found = room.bytes().context("in use")?;
            ensure!(found == painted.as_slice(), "other bytes were read");
            found.fill(0);
        }
        Ok(())
    }
}

impl Embedded {
    pub(super) async fn start(dir: &Path) -> anyhow::Result<Self> {
        let capacity = ByteCount(CAPACITY);
        let host = Host::start(HostOptions {
            dir: dir.to_owned(),
            incarnation: Incarnation(Uuid::new_v4()),
            arena_limit: HostStore::arena_limit(capacity),
        });
        let host = host.await?;
        let store = HostStore::new(&host, capacity, Arc::new(TokenGate::open()));
        let mut embedded = Self {
            host,
            store,
            probe: Probe::start()?,
            objects: Objects::default(),
            kept: Vec::new(),
        };
        embedded.warm().await?;
        Ok(embedded)
    }

    /// Touches every page, so that no object is the first in its pages.
    async fn warm(&mut self) -> anyhow::Result<()> {
        let payload = PayloadId(Uuid::new_v4());
        let mut draft = self
            .store
            .create(NewObject::new(payload, [ByteCount(CAPACITY)]))
            .await?;
        draft.bytes_mut(0)?.fill(1);
        Ok(())
    }

    /// Writes objects to be read, and proves that they come back.
    pub(super) async fn hold(&mut self, size: u64, count: usize) -> anyhow::Result<()> {
        for payload in std::mem::take(&mut self.kept) {
            self.store.delete(payload, None).await?;
        }
        self.objects = Objects::default();
        self.objects = Objects::new(size, count)?;
        self.kept = self.put().await?.0;
        self.get().await?;
        self.objects.check()
    }

    pub(super) async fn once(&mut self, act: Act) -> anyhow::Result<Duration> {
        match act {
            Act::Put => {
                let (written, took) = self.put().await?;
                for payload in written {
                    self.store.delete(payload, None).await?;
                }
                Ok(took)
            }
            Act::Get => self.get().await,
            Act::Map => {
                let begin = Instant::now();
                let object = self.store.get(self.kept[0]).await?;
                black_box(object.part(0).context("no part")?.as_ptr());
                Ok(begin.elapsed())
            }
        }
    }

    /// A copy of the first object's bytes, of which nobody keeps books: what the memory gives.
    pub(super) fn bare(&mut self, way: Way) -> anyhow::Result<Duration> {
        let Objects { painted, rooms } = &mut self.objects;
        let (from, to) = painted.first().zip(rooms.first_mut()).context("nothing is held")?;
        let to = to.bytes().context("in use")?;
        let begin = Instant::now();
        self.probe.copy(way, from, to, Rows::whole(from.len()));
        Ok(begin.elapsed())
    }

    async fn put(&self) -> anyhow::Result<(Vec<PayloadId>, Duration)> {
        let sources = self.objects.memory();
        let payloads: Vec<_> = sources.iter().map(|_| PayloadId(Uuid::new_v4())).collect();
        let begin = Instant::now();
        for (payload, source) in payloads.iter().zip(&sources) {
            let object = NewObject::new(*payload, [ByteCount(source.len())]);
            let mut draft = self.store.create(object).await?;
            draft.target(0)?.fill(source).await?;
            draft.seal().await?;
        }
        Ok((payloads, begin.elapsed()))
    }

    async fn get(&mut self) -> anyhow::Result<Duration> {
        let targets = self.objects.targets()?;
        let begin = Instant::now();
        for (payload, target) in self.kept.iter().zip(&targets) {
            self.store.fetch(*payload, slice::from_ref(target)).await?;
        }
        Ok(begin.elapsed())
    }

    pub(super) async fn end(self) {
        drop(self.store);
        self.host.shutdown().await;
    }
}
