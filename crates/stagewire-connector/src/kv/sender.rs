//! One rank of a prefill engine.

mod gather;
mod known;
pub(super) mod room;
pub(super) mod rooms;
#[cfg(test)]
mod tests;

use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use stagewire_core::{Capability, Classify, Failure};
use stagewire_kv::{Engine, handshake};
use stagewire_transfer::{Memory, Region, RegisterOptions, Transport};
use tokio::time::MissedTickBehavior;

use super::cache::{self, Buffers};
use super::failure;
use super::outgoing::{Attempt, Destination, Outgoing, restarted, superseded};
use super::protocol::{Answer, Body, ReceiverId, Seen, Welcome};
use super::{CacheMemory, Heartbeat, KvError, RoomId, SenderHandle, chunk};
use crate::Connector;
use crate::connector::Shared;

pub use room::SenderRoom;
pub(super) use room::shown;

use gather::Scratch;
use known::Receivers;
use room::Cell;
use rooms::{Found, Rooms};

/// How long a question about a room is kept when there is nothing new to say.
const HOLD: Duration = Duration::from_secs(10);
/// How long a receiver whose connection has ended may take to make another.
const AWAY: Duration = Duration::from_millis(250);

/// How a [`Sender`] is.
#[derive(Debug, Clone)]
pub struct SenderOptions {
    /// How it notices that a receiver is silent.
    pub heartbeat: Heartbeat,
    /// How long readers of a room that has failed are waited for; then its pages are free, and what they have read counts
    /// for nothing.
    pub cut_off: Duration,
    /// What moves the bytes; `None` takes the first transport of the connector that takes the memory where it is.
    pub transport: Option<Arc<dyn Transport>>,
}

impl Default for SenderOptions {
    /// Five seconds to let go.
    fn default() -> Self {
        Self {
            heartbeat: Heartbeat::default(),
            cut_off: Duration::from_secs(5),
            transport: None,
        }
    }
}

/// One rank of a prefill engine, whose cache decode may read. Dropping it, or closing its connector, fails its rooms; it
/// answers until their pages are released.
#[derive(Debug)]
pub struct Sender {
    inner: Arc<Inner>,
    handle: SenderHandle,
}

/// What a sender and its rooms have in common.
#[derive(Debug)]
pub(crate) struct Inner {
    id: u64,
    right: Capability,
    rank: u32,
    engine: Engine,
    options: SenderOptions,
    welcome: Welcome,
    /// Registered until the sender is dropped.
    _regions: Vec<Region>,
    memories: Vec<Memory>,
    scratch: Scratch,
    rooms: Mutex<Rooms>,
    receivers: Receivers,
    /// How many rooms were ever opened.
    generations: AtomicU64,
    shared: Arc<Shared>,
}

impl Sender {
    /// Registers the cache of one rank, and lets whoever has the handle read the pages that it announces.
    ///
    /// `rank` counts tensor-parallel ranks first, then pipeline stages; offsets of data-parallel replicas do not matter.
    ///
    /// # Errors
    /// [`KvError`].
    pub fn new(
        connector: &Connector,
        engine: Engine,
        rank: u32,
        cache: CacheMemory<Memory>,
        options: SenderOptions,
    ) -> Result<Self, KvError> {
        let shared = Arc::clone(connector.shared());
        if shared.is_closed() {
            return Err(KvError::Closed);
        }
        let (lens, memories, places) = cache::parts(cache);
        let rank = within(&engine, rank);
        Buffers::new(&engine, rank, &lens, &places)?;
        let register = |memory: Memory| {
            let transport = match &options.transport {
                Some(transport) => transport.as_ref(),
                None => shared.carrier_of(&memory),
            };
            transport.register(memory, RegisterOptions::default())
        };
        let regions: Result<Vec<Region>, _> = memories.iter().cloned().map(register).collect();
        let regions = regions.map_err(|error| KvError::Register(Box::new(error)))?;
        let index = |memory: usize| u32::try_from(memory).expect("as many memories as buffers, or fewer");
        let welcome = Welcome {
            interval_ms: u64::try_from(options.heartbeat.interval.as_millis()).unwrap_or(u64::MAX),
            regions: regions.iter().map(Region::reference).collect(),
            places: places
                .iter()
                .map(|place| (index(place.memory), place.offset, place.nbytes))
                .collect(),
        };
        let mut peer = shared.peer().clone();
        if let Some(transport) = &options.transport
            && peer.transports.iter().all(|known| known.transport != transport.name())
        {
            peer.transports.push(transport.address());
        }
        let desk = &shared.holder().kv;
        let (id, right) = (desk.next_id(), Capability::from_random(rand::random()));
        let handle = SenderHandle {
            peer,
            sender: id,
            right,
            rank,
            engine: engine.to_bytes(),
        };
        let inner = Arc::new(Inner {
            id,
            right,
            rank,
            engine,
            options,
            welcome,
            _regions: regions,
            memories,
            scratch: Scratch::default(),
            rooms: Mutex::default(),
            receivers: Receivers::default(),
            generations: AtomicU64::new(0),
            shared,
        });
        inner.shared.holder().kv.enter(id, &inner);
        inner.watch_receivers();
        Ok(Self { inner, handle })
    }

    /// What a receiver needs to read from it.
    pub fn handle(&self) -> SenderHandle {
        self.handle.clone()
    }

    /// The rank, without the offset of data-parallel replicas.
    pub fn rank(&self) -> u32 {
        self.inner.rank
    }

    /// The engine it is a rank of.
    pub fn engine(&self) -> &Engine {
        &self.inner.engine
    }

    /// Opens a room for a prompt of `seq_len` tokens, without the one that prefill samples. It fails where not every reader
    /// has everything within `deadline`. Rooms of earlier lives of the number fail, and who still asks for one is told.
    ///
    /// # Errors
    /// [`KvError::RoomOpen`] while this very room has not ended, [`KvError::Superseded`] where a later life of it has begun,
    /// [`KvError::Tokens`] where the sequence is too long, [`KvError::Closed`].
    pub fn room(&self, room: impl Into<RoomId>, seq_len: u64, deadline: Duration) -> Result<SenderRoom, KvError> {
        let id = room.into();
        chunk::check_len(id.number, &self.inner.engine, seq_len)?;
        let generation = self.inner.generations.fetch_add(1, Ordering::Relaxed) + 1;
        let outgoing = Outgoing::new(id.number, generation, seq_len);
        let cell = self.inner.rooms().open(id, outgoing)?;
        let keeping = room::keep(
            Arc::downgrade(&self.inner),
            self.inner.rank,
            Arc::clone(&cell),
            deadline,
        );
        self.inner.shared.runtime().spawn(keeping);
        Ok(SenderRoom::new(Arc::clone(&self.inner), cell))
    }

    /// Rooms that are open, or whose pages are still read.
    pub fn live_rooms(&self) -> usize {
        self.inner.rooms().live()
    }

    /// Receivers that are known.
    pub fn receivers(&self) -> usize {
        self.inner.receivers.len()
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        let cells = self.inner.close();
        if cells.iter().all(|cell| cell.is_released()) {
            return self.inner.shared.holder().kv.leave(self.inner.id);
        }
        let inner = Arc::clone(&self.inner);
        self.inner.shared.runtime().spawn(async move {
            // Readers let go, or are cut off.
            for cell in cells {
                cell.released().await;
            }
            inner.shared.holder().kv.leave(inner.id);
        });
    }
}

/// A rank without the offset of data-parallel replicas.
pub(super) fn within(engine: &Engine, rank: u32) -> u32 {
    let geometry = engine.geometry();
    rank % geometry.tp_size.saturating_mul(geometry.pp_size)
}

/// A rank of decode, for people.
fn shown_receiver(rank: u32, receiver: ReceiverId) -> String {
    format!("rank {rank} of decode (receiver {receiver})")
}

impl Inner {
    /// Fails the rooms, and opens no more. Returns those whose pages may still be read.
    fn close(&self) -> Vec<Arc<Cell>> {
        let cells = self.rooms().close();
        let failure = failure::closed(format_args!("rank {} of prefill", self.rank));
        for cell in &cells {
            let failure = failure::in_room(cell.number(), failure.clone());
            cell.change(|room| room.fail(failure));
        }
        cells
    }

    pub(super) fn right(&self) -> Capability {
        self.right
    }

    fn rooms(&self) -> MutexGuard<'_, Rooms> {
        self.rooms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers a receiver, over one of its connections.
    pub(super) async fn answer(self: &Arc<Self>, receiver: ReceiverId, visit: u64, body: Body) -> Answer {
        let greets = matches!(body, Body::Hello { .. });
        if !greets && !self.receivers.heard(receiver, visit) {
            return Answer::Stranger;
        }
        match body {
            Body::Hello { rank, engine } => self.greet(receiver, visit, rank, &engine),
            Body::Beat => Answer::Beat,
            Body::Bye => {
                if let Some(rank) = self.receivers.forget(receiver) {
                    self.lose(receiver, &failure::closed(shown_receiver(rank, receiver)));
                }
                Answer::Left
            }
            Body::Room { room, attempt, seen } => self.tell(receiver, room, attempt, seen).await,
            Body::Confirm {
                room,
                attempt,
                generation,
            } => self.confirm(room, (receiver, attempt), generation),
            Body::Gather {
                room,
                attempt,
                region,
                records,
            } => {
                let gathering = Arc::clone(self).gather(room, (receiver, attempt), region as usize, records);
                // In a task of its own: who asks may go away, and the copy goes on until its end.
                let gathered = self.shared.runtime().spawn(gathering).await;
                gathered.unwrap_or(Answer::NoScratch)
            }
            Body::Free { attempt, id, .. } => {
                self.scratch.free((receiver, attempt), id);
                Answer::Freed
            }
            Body::Leave {
                room,
                attempt,
                failure,
                told,
            } => {
                self.leave(room, (receiver, attempt), failure, told);
                Answer::Left
            }
        }
    }

    /// Refuses an engine that does not fit, whatever room it wants.
    fn greet(&self, receiver: ReceiverId, visit: u64, rank: u32, engine: &[u8]) -> Answer {
        if self.rooms().is_closed() && !self.receivers.heard(receiver, visit) {
            return Answer::Gone;
        }
        let theirs = match Engine::from_bytes(engine) {
            Ok(theirs) => theirs,
            Err(error) => return Answer::Refused(error.to_failure()),
        };
        let pair = match handshake(&self.engine, &theirs) {
            Ok(pair) => pair,
            Err(error) => return Answer::Refused(error.to_failure()),
        };
        let readers = pair.routes().into_iter().filter(|route| route.0 == self.rank);
        let destination = Destination {
            engine: engine.into(),
            readers: Arc::new(readers.map(|route| route.1).collect()),
        };
        let rank = within(&theirs, rank);
        self.receivers.greet(receiver, visit, rank, destination);
        Answer::Welcome(self.welcome.clone())
    }

    async fn tell(&self, receiver: ReceiverId, room: RoomId, attempt: u64, seen: Option<Seen>) -> Answer {
        let until = tokio::time::Instant::now() + HOLD;
        let waiting = Arc::clone(self.rooms().waiting(room));
        loop {
            let mut opened = pin!(waiting.notified());
            opened.as_mut().enable();
            let (rank, destination) = match self.receivers.reader(receiver, attempt) {
                known::Reader::Unknown => return Answer::Stranger,
                known::Reader::Left(_) => return Answer::Left,
                known::Reader::Reads { rank, destination } => (rank, destination),
            };
            let attempt = (receiver, attempt);
            let found = match (self.rooms().find(room, attempt), seen) {
                (Found::Superseded(newest), _) => return Answer::Refused(superseded(room, newest)),
                (Found::Room(cell), Some(_)) if cell.is_read_by(attempt) => Some(cell),
                // The room that it has seen is forgotten; one that was opened since is another attempt's.
                (_, Some(Seen { generation, .. })) => return Answer::Refused(restarted(room.number, generation, 0)),
                (Found::Room(cell), None) => Some(cell),
                (Found::NotYet, None) => None,
            };
            let Some(cell) = found.filter(|cell| cell.bind(rank, attempt, &destination)) else {
                if self.rooms().is_closed() {
                    return Answer::Gone;
                }
                if tokio::time::timeout_at(until, opened).await.is_err() {
                    return Answer::Room(None);
                }
                continue;
            };
            // It may have let go since it was looked up, and must not be waited for then.
            if let known::Reader::Left(failure) = self.receivers.reader(receiver, attempt.1) {
                cell.change(|room| room.leave(attempt, Failure::clone(&failure)));
                return Answer::Left;
            }
            let mut states = cell.subscribe();
            let news = states.wait_for(|room| room.is_news(seen));
            // Once its time is over, that there is nothing.
            let _ = tokio::time::timeout_at(until, news).await;
            let news = states.borrow().news(seen);
            return Answer::Room(Some(news));
        }
    }

    /// Also who has given up before it had asked for the room was to read it: that room must not wait for it.
    fn leave(&self, room: RoomId, attempt: Attempt, failure: Failure, told: bool) {
        let reader = self.receivers.reader(attempt.0, attempt.1);
        self.receivers.leaves(attempt.0, attempt.1, failure.clone());
        self.scratch.free_of(attempt);
        let found = self.rooms().find(room, attempt);
        let Found::Room(cell) = found else { return };
        if let known::Reader::Reads { rank, destination } = reader
            && !told
        {
            cell.bind(rank, attempt, &destination);
        }
        cell.change(|room| room.leave(attempt, failure));
    }

    fn confirm(&self, room: RoomId, attempt: Attempt, generation: u64) -> Answer {
        self.scratch.free_of(attempt);
        let cell = self.rooms().read_by(room, attempt);
        let confirmed = match cell {
            Some(cell) => cell.change(|room| room.confirm(attempt, generation)),
            None => Err(restarted(room.number, generation, 0)),
        };
        confirmed.map_or_else(Answer::Refused, |()| Answer::Confirmed)
    }

    /// The connection of a receiver has ended. Unless it makes another at once, it is gone.
    pub(super) fn hangs_up(self: &Arc<Self>, receiver: ReceiverId, visit: u64) {
        if self.receivers.hangs_up(receiver, visit) {
            let inner = Arc::downgrade(self);
            self.shared.runtime().spawn(async move {
                tokio::time::sleep(AWAY).await;
                if let Some(inner) = inner.upgrade()
                    && let Some(rank) = inner.receivers.forget_away(receiver)
                {
                    let peer = shown_receiver(rank, receiver);
                    inner.lose(receiver, &failure::lost(peer, "its connection has ended"));
                }
            });
        }
    }

    fn lose(&self, receiver: ReceiverId, failure: &Failure) {
        self.scratch.forget(receiver);
        let cells = self.rooms().cells();
        for cell in cells {
            cell.change(|room| room.lose(receiver, failure));
        }
    }

    /// Notices receivers that say nothing any more, for as long as the sender is there, and the end of the connector.
    fn watch_receivers(self: &Arc<Self>) {
        let (inner, heartbeat) = (Arc::downgrade(self), self.options.heartbeat);
        let mut closing = self.shared.closing();
        self.shared.runtime().spawn(async move {
            let mut ticks = tokio::time::interval(heartbeat.part());
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                let closes = tokio::select! {
                    _ = ticks.tick() => false,
                    _ = closing.wait_for(|closed| *closed) => true,
                };
                let Some(inner) = inner.upgrade() else { return };
                if closes {
                    inner.close();
                    return;
                }
                inner.scratch.trim();
                for (receiver, rank) in inner.receivers.forget_silent(&heartbeat) {
                    let peer = shown_receiver(rank, receiver);
                    inner.lose(receiver, &failure::silent(peer, heartbeat.limit(), None));
                }
            }
        });
    }

    fn ended(&self, cell: &Arc<Cell>) {
        self.rooms().end(cell);
    }
}
